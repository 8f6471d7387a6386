"""Every command line of ours that the documentation shows is one that the command takes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from stageloom.edge_agent.cli.app import app as agent
from stageloom.planner.cli.app import _RENAMED
from stageloom.planner.cli.app import app as planner
from stageloom.planner.cli.settings import _HERE, take_options

_ROOT = Path(__file__).parents[2]
_PAGES = sorted([_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md"), *(_ROOT / "examples").rglob("*.md")])
_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
_INLINE = re.compile(r"`([^`]+)`")
_PROGRAMS: dict[str, Any] = {"stageloom": get_command(planner), "stageloom-agent": get_command(agent)}
_NOUN = re.compile(rf"(?:{'|'.join(_PROGRAMS['stageloom'].commands)}) [a-z-]+(?: -|\Z)")
"""A command without its program, as prose has it: `plan create`, `plan create --push`."""


def command_lines(text: str) -> Iterator[list[str]]:
    """Command lines of ours in a page, as words: of fences, of indented lines and in back-ticks."""
    prose = _FENCE.sub("", text)
    lines = [line for block in _FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    inline = [line.replace("\n", " ") for line in _INLINE.findall(_INDENTED.sub("", prose))]
    lines += [f"stageloom {line}" for line in inline if _NOUN.match(line)]
    for line in (*lines, *_INDENTED.findall(prose), *inline):
        bare = line.strip().removeprefix("$ ").split(" #")[0]
        for part in re.split(r"\s(?:\||&&|;)\s|\$\(|\)", bare):
            words = _words(part)
            ours = (at for at, word in enumerate(words) if Path(word).name in _PROGRAMS and "=" not in word)
            start = next((at for at in ours if words[at - 1] != "-u"), None)  # an account has that name, too
            if start is not None and all(word in _BEFORE for word in words[:start]) and words[start + 1 :]:
                yield [Path(words[start]).name, *words[start + 1 :]]


_BEFORE = ("sudo", "until", "do", "ssh", "planner", "shop-7", "-u", "stageloom-planner", "stageloom")


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # prose with an apostrophe
        return []


def fault(words: list[str]) -> str:
    """What is wrong with a command line; empty text for nothing."""
    program, rest = words[0], [word for word in words[1:] if not re.match(r"[<>&]|\d>", word)]
    command = _PROGRAMS[program]
    if program == "stageloom":
        rest = take_options(rest)
    path = program
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return f"{path} has no command {rest[0]!r}" if re.fullmatch(r"[a-z-]+", rest[0]) else ""
        path += f" {rest[0]}"
        command = command.commands[rest.pop(0)]
    if hasattr(command, "commands"):
        return ""
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help"}
    given = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    if unknown := [option for option in given if option not in known]:
        return f"{path} has no option {unknown[0]}"
    needed = [one.opts for one in command.params if one.required and one.param_type_name == "option"]
    lacking = [names[0] for names in needed if not set(names) & set(given)]
    return f"{path} lacks {lacking[0]}" if rest and lacking else ""  # prose names commands without anything


@pytest.mark.promise("pages-name-commands")
@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_command_lines_in_the_documentation_exist(page: Path) -> None:
    faults = {" ".join(words): fault(words) for words in command_lines(page.read_text(encoding="utf-8"))}
    assert not {line: wrong for line, wrong in faults.items() if wrong}


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_pages_install_from_a_checkout_as_no_registry_has_the_package(page: Path) -> None:
    """What adds an extra to an installation needs no registry for Stageloom itself."""
    blocks = "".join(_FENCE.findall(page.read_text(encoding="utf-8")))
    assert not re.findall(r"pip install .*'stageloom\[(?:edge|planner)\S*", blocks)


def test_a_command_line_that_does_not_exist_is_found() -> None:
    (words,) = command_lines("```\n$ sudo stageloom plan create --lane 2 | cat\n```")
    assert fault(words) == "stageloom plan create has no option --lane"
    (words,) = command_lines("see `stageloom plan make X`")
    assert "no command 'make'" in fault(words)
    (words,) = command_lines("see `plan make`")
    assert "no command 'make'" in fault(words)
    (words,) = command_lines("see `stageloom-agent trace --seconds 5`")
    assert fault(words) == "stageloom-agent trace lacks --out"


def test_commands_of_another_account_are_looked_at() -> None:
    (words,) = command_lines("As `sudo -u stageloom /opt/bin/stageloom-agent status --home\n/x` says.")
    assert words == ["stageloom-agent", "status", "--home", "/x"]


def test_the_page_on_planners_elsewhere_lists_the_commands_that_are_about_this_machine() -> None:
    page = (_ROOT / "docs" / "remote.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"about this machine\s\((.*?)\), which refuse `--planner`", page, re.DOTALL)
    assert {*_INLINE.findall(listed)} == {" ".join(words) for words in _HERE if words not in _RENAMED}

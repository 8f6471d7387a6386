"""Every command of docs/operations.md exists, with every option that the page gives it."""

import re
import shlex
from collections.abc import Iterator

import pytest
import typer

from stageloom.edge_agent.cli.app import app as agent_app
from stageloom.planner.cli.app import app as planner_app
from stageloom.planner.cli.settings import GLOBAL_OPTIONS
from tests.architecture.sources import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
COMMANDS = {
    "stageloom": typer.main.get_command(planner_app),
    "stageloom-agent": typer.main.get_command(agent_app),
}


def _lines() -> Iterator[str]:
    """What stands in fences and in back-ticks, without comments."""
    fenced = re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```\n.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    for line in (*"".join(fenced).splitlines(), *re.findall(r"`([^`]+)`", prose)):
        yield line.partition("  #")[0]


def _calls() -> set[tuple[str, ...]]:
    found = set()
    for line in _lines():
        if "alias" in line or "'" in line:
            continue
        words = shlex.split(line.replace("\n", " "))
        for at, word in enumerate(words):
            name = word.removeprefix("/opt/stageloom/bin/")
            if name in COMMANDS and words[at + 1 :] and (at == 0 or name != word):
                found.add((name, *words[at + 1 :]))
    return found


CALLS = sorted(_calls())


def test_the_page_names_the_commands_of_both_sides() -> None:
    named = {(call[0], call[1]) for call in CALLS}
    assert {("stageloom", c) for c in ("planner", "device", "model", "plan", "watch")} <= named
    assert {("stageloom-agent", c) for c in ("install", "join", "status", "uninstall")} <= named


@pytest.mark.promise("operations-page-names-commands")
@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_command_of_the_page_exists_with_its_options(call: tuple[str, ...]) -> None:
    command = COMMANDS[call[0]]
    words = list(call[1:])
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in parameter.opts}
    options |= set(GLOBAL_OPTIONS) if call[0] == "stageloom" else set()
    assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("unit", ["stageloom-agent", "stageloom-planner"])
def test_services_of_the_page_are_those_that_are_installed(unit: str) -> None:
    assert f"systemctl enable --now {unit}" in PAGE
    assert (ROOT / "deploy" / f"{unit}.service").is_file()

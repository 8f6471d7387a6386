"""Every console script and every benchmark answers --help, and says nothing on stderr."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import tomllib
import typer

from stageloom.planner.cli.app import app, execute
from tests.architecture.sources import ROOT, modules, source_of

SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "scripts"
]
BENCHMARKS = [
    m for m in modules("benchmarks") if 'if __name__ == "__main__"' in source_of(m).read_text("utf-8")
]


SHOW = """
import contextlib, io, json, runpy, sys

def said(module):
    out, err, code = io.StringIO(), io.StringIO(), None
    sys.argv = ["", "--help"]
    sys.modules.pop(module, None)  # another benchmark has imported it
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module.removesuffix(".__main__"), run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code
    return [code or 0, err.getvalue(), out.getvalue()]

print(json.dumps({module: said(module) for module in json.loads(sys.argv[1])}))
"""


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_console_script_explains_itself(script: str) -> None:
    module, function = SCRIPTS[script].split(":")
    call = f"import sys; from {module} import {function}; sys.argv[0] = {script!r}; sys.exit({function}())"
    assert f"Usage: {script}" in run("-c", call, "--help")


def test_there_are_two_console_scripts() -> None:
    assert set(SCRIPTS) == {"stageloom", "stageloom-agent"}


@pytest.fixture(scope="module")
def explained() -> dict[str, tuple[int, str, str]]:
    """What every benchmark's --help gives: exit code, stderr, stdout. In one process: imports take time."""
    found: dict[str, tuple[int, str, str]] = json.loads(run("-c", SHOW, json.dumps(BENCHMARKS)))
    return found


@pytest.mark.more
@pytest.mark.parametrize("module", BENCHMARKS)
def test_a_benchmark_explains_itself(module: str, explained: dict[str, tuple[int, str, str]]) -> None:
    code, err, text = explained[module]
    assert (code, err) == (0, "")
    assert text.startswith("usage:")
    assert module.removesuffix(".__main__").split(".")[-1] in text.splitlines()[0]


def test_there_are_benchmarks() -> None:
    assert "benchmarks.zoo.__main__" in BENCHMARKS


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command that does something, by the words that name it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name)


PLANNER_COMMANDS = [" ".join(path) for path in _commands(typer.main.get_command(app))]


@pytest.mark.promise("pages-tables-those-run")
@pytest.mark.parametrize("command", PLANNER_COMMANDS)
def test_a_commands_help_has_an_example_of_it_that_fits_its_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    about, _, options = text.partition("Options:")
    examples = [line.strip() for line in about.splitlines()[1:] if f"stageloom {command}" in line]
    assert examples, f"`stageloom {command} --help` shows no example"
    known = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", options))
    for line in examples:
        used = line.partition(" | ")[0].partition(" # ")[0].partition(" && ")[0]
        assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", used)) <= known, line


def test_the_usage_of_a_push_names_the_devices_and_then_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["plan", "push", "--help"]) == 0
    assert "stageloom plan push [OPTIONS] [DEVICE]... PLAN" in capsys.readouterr().out

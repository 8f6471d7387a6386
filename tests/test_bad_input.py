"""Every case of `bad_input.toml`: its exit code, one line that names cause and remedy, and nothing lost."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tomllib

from stageloom.planner.cli import app as planner_cli
from tests.agent.command import agent_command
from tests.bad_input.situations import DISK_BYTES, Make, run_until_it_answers, situations
from tests.planner.processes import ROOT, environment
from tests.scratch import small_disk

CASES: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "bad_input.toml").read_text(encoding="utf-8")
)["case"]

_PROGRESS = re.compile(r"\d+\.\d s, ")
"""Of work that a slow machine has begun before it finds out."""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """The situations, each made once."""
    with ExitStack() as disks:

        def disk() -> Path:
            return disks.enter_context(small_disk(DISK_BYTES))

        with situations(tmp_path_factory.mktemp("bad_input"), disk) as get:
            yield get


def _command(arguments: list[str], home: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run one command to its end; its exit code and stderr.

    Both command lines run in this process, which is far faster.
    """
    if arguments[0] == "stageloom":
        code = planner_cli.execute(arguments[1:])
        return code, capsys.readouterr().err
    if arguments[0] == "stageloom-agent":
        ended = agent_command(arguments[1:], capsys)
        return ended.returncode, ended.stderr
    assert arguments[0] == "application"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bad_input.application", *arguments[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(home),
        cwd=ROOT,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.promise("tests-bad-input-toml")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_bad_input_ends_in_one_line_and_its_exit_code(
    case: dict[str, Any],
    make: Make,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    situation = make(case.get("setup", "files"))
    words = {"home": str(tmp_path / "home"), "agent_home": str(tmp_path / "agent"), **situation.words}
    home = Path(words["home"])
    for name, value in {**environment(home), **case.get("environment", {})}.items():
        monkeypatch.setenv(name, value)
    arguments = [part.format(**words) for part in case["command"]]
    pattern = case["message"].replace("{home}", re.escape(words["home"]))
    capsys.readouterr()
    if case.get("starts"):
        at = arguments.index("--home")
        code, err = run_until_it_answers(arguments[1:], Path(arguments[at + 1]))
        said = [line for line in err.splitlines() if re.search(pattern, line)]
        assert len(said) == 1, err
    else:
        code, err = _command(arguments, home, capsys)
        last = err.splitlines()[-1] if err else ""
        assert last.startswith("error: ") and "; " in last, err
        assert re.search(pattern, last), err
        said = [line for line in err.splitlines() if not _PROGRESS.match(line)]
        assert case.get("long") or len(said) == 1, err
    assert "Traceback" not in err
    assert code == case["exit"], err
    situation.check_nothing_lost()
    assert not list(tmp_path.rglob("*.new")) and not list(tmp_path.rglob(".i*"))


def test_case_names_are_distinct() -> None:
    names = [case["name"] for case in CASES]
    assert len(set(names)) == len(names)

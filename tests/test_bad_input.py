"""Every case of `bad_input.toml`: its exit code, one line that names cause and remedy, and nothing lost."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib

from planner.cli import app as planner_cli
from tests.bad_input.situations import DISK_BYTES, Make, run_until_it_answers, situations
from tests.planner.processes import ROOT, environment

CASES: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "bad_input.toml").read_text(encoding="utf-8")
)["case"]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """The situations, each made once."""
    mounted: list[Path] = []

    def disk() -> Path:
        # Not below pytest's own folder: were this run killed, a mount there would fail every later one.
        folder = Path(tempfile.mkdtemp(prefix="stageloom-disk-"))
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder)]
        if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
            folder.rmdir()
            pytest.skip("only root may mount a small file system to fill")
        mounted.append(folder)
        return folder

    with situations(tmp_path_factory.mktemp("bad_input"), disk) as get:
        yield get
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def _command(arguments: list[str], home: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run one command to its end; its exit code and stderr.

    `stageloom` runs in this process, which is far faster; an agent's command may replace its process.
    """
    if arguments[0] == "stageloom":
        code = planner_cli.execute(arguments[1:])
        return code, capsys.readouterr().err
    module = {"stageloom-agent": "edge_agent", "application": "tests.bad_input.application"}[arguments[0]]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(home),
        cwd=ROOT,
        check=False,
    )
    return done.returncode, done.stderr


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
    for name, value in environment(home).items():
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
        assert case.get("long") or err.count("\n") == 1, err
    assert "Traceback" not in err
    assert code == case["exit"], err
    situation.check_nothing_lost()
    assert not list(tmp_path.rglob("*.new")) and not list(tmp_path.rglob(".i*"))


def test_case_names_are_distinct() -> None:
    names = [case["name"] for case in CASES]
    assert len(set(names)) == len(names)

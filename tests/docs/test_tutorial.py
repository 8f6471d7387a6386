"""The tutorial, typed in by a machine: every command of its `console run` blocks, in one shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
_BLOCK = re.compile(r"^```(\w+) (run|file=(\S+))\n(.*?)^```", re.MULTILINE | re.DOTALL)


def script_and_files(text: str) -> tuple[str, dict[str, str]]:
    """The commands as one script that stops at the first failure, and the files that a reader saves."""
    commands, files = ["set -em"], {}
    for _, _, name, body in _BLOCK.findall(text):
        if name:
            files[name] = body
        else:
            commands += [line[2:] for line in body.splitlines() if line.startswith("$ ")]
    return "\n".join(commands) + "\n", files


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.promise("tutorial-works")
def test_every_command_of_the_tutorial_works(tmp_path: Path) -> None:
    script, files = script_and_files(_TUTORIAL.read_text(encoding="utf-8"))
    for name, body in files.items():
        (tmp_path / name).write_text(body)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STAGELOOM_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["STAGELOOM_PLANNER_SEARCH"] = "local"
    environment["STAGELOOM_PLANNER_LISTEN"] = "127.0.0.1:0"
    with (tmp_path / "out").open("w") as out:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait(380)
        finally:
            _end_all(shell.pid)
    said = (tmp_path / "out").read_text()
    if "No matching distribution" in said or "Could not find a version" in said:
        pytest.skip("no package registry is reachable")
    logs = "".join((tmp_path / f"{name}.log").read_text()[-2000:] for name in ("planner", "agent"))
    assert code == 0, said[-4000:] + logs
    assert re.search(r"here\t1\.2\tabreast\t\S+\toperator\t(committed|rejected|no_gain)", said), said[-4000:]
    assert "verdict" in said


def _end_all(session: int) -> None:
    """Nothing of the shell's jobs is left running; with job control each has a group of its own."""
    subprocess.run(["pkill", "-KILL", "-s", str(session)], check=False)

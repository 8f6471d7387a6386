"""What a command line does where a planner was killed, and where its reader has gone."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planner.processes import PlannerProcess, environment, ok, stageloom


@pytest.mark.more
def test_a_planner_that_was_killed_leaves_a_socket_that_is_not_waited_for(tmp_path: Path) -> None:
    planner = PlannerProcess(tmp_path / "home")
    planner.stop(signal.SIGKILL)
    assert (planner.home / "api.sock").exists()
    done = stageloom(planner.home, "status")
    assert (done.returncode, "no planner runs on" in done.stderr) == (4, True)
    again = PlannerProcess(tmp_path / "home")
    assert ok(planner.home, "status").startswith("planner")
    assert again.stop() == 0


def test_reading_from_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -c 'from stageloom.planner.cli import main; main()' --help | true",
        shell=True,
        capture_output=True,
        text=True,
        env=environment(tmp_path / "home"),
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)

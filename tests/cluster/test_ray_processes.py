"""Ray's own processes end with the planner that started them."""

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.listening import descendants
from tests.planner.conftest import model_file  # noqa: F401
from tests.planner.processes import PlannerProcess, ok, until

START_S = 90.0

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]


def alive(pids: list[int]) -> list[int]:
    """Those that are there and are not only waiting to be reaped."""
    states = {pid: _state(pid) for pid in pids}
    return [pid for pid, state in states.items() if state not in ("", "Z")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _is_raylet(pid: int) -> bool:
    try:
        return b"raylet" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return False


@pytest.mark.promise("ctrl-c-ends-planner")
def test_ctrl_c_ends_a_planner_and_its_rays_processes(
    tmp_path: Path,
    model_file: Path,  # noqa: F811
) -> None:
    """1. a search starts Ray; 2. Ctrl-C reaches every process of the terminal's group; 3. the planner ends as
    it should, and none of the processes below it is left."""
    planner = PlannerProcess(tmp_path / "home", group=True, search="ray")
    ok(planner.home, "model", "add", str(model_file), "--name", "branches", "--shape", "x=1x8")
    ok(planner.home, "plan", "create", "--model", "branches", "--scheduler", "ios")
    until(lambda: any(map(_is_raylet, descendants(planner.process.pid))), timeout_s=START_S)
    below = descendants(planner.process.pid)
    assert len(below) > 3, "Ray's processes are below the planner's"
    os.killpg(planner.process.pid, signal.SIGINT)
    assert planner.ended() == 0
    until(lambda: not alive(below), timeout_s=30)

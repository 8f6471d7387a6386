"""Ray's own processes: they end with the planner that started them, and a cluster that it joined lives on."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.cluster.ray_pool import RayPool
from tests.cluster.listening import descendants
from tests.cluster.work import add, ancestors
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "sigterm"])
def test_rays_processes_end_with_the_planner(
    tmp_path: Path,
    model_file: Path,  # noqa: F811
    number: signal.Signals,
) -> None:
    """1. a search starts Ray; 2. Ctrl-C reaches every process of the terminal's group, SIGTERM the planner
    alone; 3. the planner ends as it should, and none of the processes below it is left."""
    planner = PlannerProcess(tmp_path / "home", group=True)
    ok(planner.home, "model", "add", str(model_file), "--name", "branches", "--shape", "x=1x8")
    ok(planner.home, "plan", "create", "--model", "branches", "--scheduler", "ios")
    until(lambda: any(map(_is_raylet, descendants(planner.process.pid))), timeout_s=START_S)
    below = descendants(planner.process.pid)
    assert len(below) > 3, "Ray's processes are below the planner's"
    if number is signal.SIGINT:
        os.killpg(planner.process.pid, number)
    else:
        os.kill(planner.process.pid, number)
    assert planner.ended() == 0
    until(lambda: not alive(below), timeout_s=30)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """A Ray cluster of somebody else's on loopback: (its process, its address)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1"]
    command += ["--num-cpus=1", "--include-dashboard=false", f"--object-store-memory={80 << 20}"]
    with (tmp_path / "ray.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--disable-usage-stats"],
            stdout=log,
            stderr=log,
            env={**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
            start_new_session=True,
        )
        started = tmp_path / "ray.log"
        until(lambda: "Ray runtime started" in started.read_text(), timeout_s=START_S)
        yield process.pid, f"127.0.0.1:{port}"
        below = descendants(process.pid)
        process.terminate()
        process.wait(60)
        for pid in alive(below):
            os.kill(pid, signal.SIGKILL)


def test_a_search_runs_on_the_cluster_that_is_named_and_leaves_it_running(cluster: tuple[int, str]) -> None:
    head, address = cluster
    pool = RayPool(1, address=address)
    assert pool.wait(START_S), pool.error
    assert head in pool.submit(ancestors).result(120), "a worker of that cluster, not of one of ours"
    pool.close()
    again = RayPool(1, address=address)
    assert again.wait(START_S), again.error
    assert again.submit(add, 2, 3).result(120) == 5
    again.close()
    assert alive([head])

"""What is served, known and reported while the agent's processes are killed and started again."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageloom import Client
from stageloom.shared.errors import AgentRestarted, UnavailableError
from tests.agent.conftest import eventually
from tests.e2e.fleet import PATIENCE_S, Device, Fleet
from tests.e2e.networks import rows, write_heavy
from tests.planner.processes import until

pytestmark = pytest.mark.more


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.promise("kill-9-link-process")
def test_killed_link_process_starts_offline_on_last_known_good_and_reports_when_it_can(
    device: Device, fleet: Fleet
) -> None:
    """kill -9 of the agent's main process, which holds the link, and no planner when it starts again.

    1. The device commits `whole`; an application has a task in flight.
    2. The main process is killed: the engine process goes with it, and the task is answered.
    3. The planner is killed too.
    4. The agent starts: it serves `whole` from its own disk, and says that it is offline.
    5. The same application's next task is served over a new connection.
    6. The planner starts: the device is online, reports `whole` as committed, no generation was added, and
       all telemetry of both lives is accounted for.
    """
    agent = device.start()
    whole = device.run("whole")
    engine = agent.now().engine.pid
    assert engine is not None
    row = rows(1)[0]
    with Client(agent.socket) as client:
        os.kill(engine, signal.SIGSTOP)
        future = client.submit("alpha", {"input": row})
        agent.until(lambda s: sum(t.open for t in s.tasks) == 1, "the task is in flight")
        agent.kill()
        with pytest.raises(AgentRestarted):
            future.result(60)
        until(lambda: not _alive(engine))  # frozen as it was
        with pytest.raises(UnavailableError):
            client.submit("alpha", {"input": row})
        fleet.end(signal.SIGKILL)

        agent = device.start()
        status = agent.until_ready()
        assert status.plan is not None
        assert status.plan.digest == whole
        assert status.link.state == "connecting"
        assert "output" in client.run("alpha", {"input": row}, timeout_s=60)
    fleet.start()
    seen = device.until_seen(lambda s: s["online"], "it to connect")
    assert (seen["report"]["state"], seen["report"]["active"]) == ("committed", whole)
    assert [entry["generation"] for entry in seen["history"]] == [1]
    device.drain_telemetry()


@pytest.mark.promise("kill-9-link-process")
@pytest.mark.parametrize("state", ["probation", "committed"])
def test_agent_killed_during_or_after_probation_ends_on_a_plan_that_planner_and_device_agree_on(
    device: Device, state: str
) -> None:
    """kill -9 while a plan is on its way.

    1. The device commits `whole`.
    2. `cut` is pushed; the main process is killed as soon as the planner sees the state.
    3. The next life serves, and both sides name the same active plan and the same verdict.
    """
    device.start(probation_s=0.3 if state == "committed" else 3600.0)
    whole = device.run("whole") if state == "committed" else None
    generation = device.push("cut")
    device.until_seen(
        lambda s: s["report"]["generation"] == generation and s["report"]["state"] == state, state
    )
    device.running.kill()
    agent = device.start()
    seen = device.until_seen(lambda s: s["online"] and s["report"]["state"] == "committed", "a verdict")
    status = agent.until_ready()
    assert status.plan is not None
    assert status.plan.digest == seen["report"]["active"] == seen["desired_plan"] != whole


@pytest.fixture(scope="module")
def heavy(shared_fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A plan `heavy` of a network with 36 MiB of weights; yields the artifact's size in bytes."""
    file = write_heavy(tmp_path_factory.mktemp("heavy") / "heavy.onnx", 3)
    if not shared_fleet.runs:
        shared_fleet.start()
    shared_fleet.do("model", "add", str(file), "--name", "heavy")
    shared_fleet.make_plan("heavy", "--model", "heavy")
    yield file.stat().st_size


@pytest.mark.promise("artifact-resumes-where-kill")
def test_artifact_that_was_cut_off_by_a_kill_is_resumed_where_it_stopped(device: Device, heavy: int) -> None:
    """kill -9 in the middle of a transfer.

    1. A plan names an artifact of 36 MiB that the device does not have.
    2. The agent is killed when a part of at least a fifth lies on its disk.
    3. The next life asks for the rest only: it writes fewer bytes than the artifact has by about that part.
    4. The artifact's digest is right, or the plan would not be committed.
    """
    agent = device.start()
    folder = device.home / "artifacts"

    def part_bytes() -> int:
        return sum(path.stat().st_size for path in folder.glob("*.part"))

    device.push("heavy")
    eventually(lambda: part_bytes() > heavy // 5, "a fifth of it has come", PATIENCE_S)
    agent.kill()
    had = part_bytes()
    assert heavy // 5 < had < heavy, "the transfer was over before the kill"

    agent = device.start()
    device.until_seen(lambda s: s["report"]["state"] == "committed", "the plan to be committed")
    written = dict(
        line.split(": ") for line in Path(f"/proc/{agent.process.pid}/io").read_text().splitlines()
    )
    assert heavy - had <= int(written["wchar"]) < heavy - had // 2
    assert not part_bytes()


@pytest.mark.promise("ctrl-c-leaves-nothing")
def test_ctrl_c_ends_the_agent_and_its_engine_and_the_planner_sees_it_go(device: Device) -> None:
    """SIGINT with the planner connected and an application at work.

    1. The device runs `whole`, and an application has completed a task.
    2. The agent gets SIGINT: it exits with 0, without a traceback, its engine process is gone, and so is
       the socket.
    3. The planner sees it offline, with every telemetry row stored or waiting on the device's disk.
    4. Its next life starts on the same plan and hands over the rest.
    """
    agent = device.start()
    whole = device.run("whole")
    engine = agent.now().engine.pid
    assert engine is not None
    with Client(agent.socket) as client:
        assert client.run("alpha", {"input": rows(1)[0]}, timeout_s=60)
        agent.process.send_signal(signal.SIGINT)
        assert agent.process.wait(60) == 0
    assert "Traceback" not in agent.log
    assert not _alive(engine)
    assert not agent.socket.exists()
    until(lambda: not device.seen()["online"])
    status = device.start().until_ready()
    assert status.plan is not None
    assert status.plan.digest == whole
    device.drain_telemetry()


def test_second_agent_on_a_joined_state_directory_is_refused_and_the_first_stays_connected(
    device: Device,
) -> None:
    """Two agents with one identity would take turns at being the device.

    1. The device's agent is connected.
    2. `stageloom-agent run` on the same state directory ends with one line that names the process.
    3. The first one was not disturbed: same process, still online, no engine restart.
    """
    agent = device.start()
    device.run("whole")
    second = subprocess.run(
        [sys.executable, "-m", "stageloom.edge_agent", "run", "--home", str(device.home)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 5
    assert second.stderr.count("\n") == 1
    assert f"another agent (process {agent.process.pid})" in second.stderr
    assert device.seen()["online"]
    assert agent.now().engine.restarts == 0
    assert agent.now().link.state == "connected"

"""The whole agent as real processes: what survives a kill, what is answered, what is refused."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from stageloom import Client
from stageloom.edge_agent.config import ModelFile
from stageloom.edge_agent.link.factory import STATE_NAME
from stageloom.edge_agent.reporting.status import AgentStatus
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import (
    AgentRestarted,
    RefusedError,
    TaskCancelled,
    TaskExpired,
    TaskRefused,
)
from stageloom.shared.messages.control import Origin
from stageloom.shared.plan import QueuePlan, QueueRule
from tests.agent.conftest import eventually
from tests.agent.models import ROW_SHAPE, import_tiny, plan_for, write_state, write_tiny
from tests.agent.process import AgentProcess

RNG = np.random.default_rng(7)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("artifacts")
    return directory


@pytest.fixture(scope="session")
def tiny(library: Path) -> Artifact:
    return import_tiny(library, 0)


@pytest.fixture(scope="session")
def other(library: Path) -> Artifact:
    return import_tiny(library, 1)


@pytest.fixture
def home(tmp_path: Path, library: Path) -> Path:
    """A state directory that holds all artifacts."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "artifacts").mkdir()
    for artifact in library.iterdir():
        if not artifact.suffix:
            os.link(artifact, tmp_path / "home" / "artifacts" / artifact.name)
    return tmp_path / "home"


def _session(artifact: Artifact) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(artifact.onnx_bytes())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"


def _until_engine_is_not(agent: AgentProcess, pid: int) -> None:
    agent.until(lambda status: status.engine.pid != pid, "its end is noticed")


def _balanced(status: AgentStatus) -> bool:
    return all(
        t.submitted == t.completed + t.refused + t.failed + t.cancelled + t.expired + t.open
        for t in status.tasks
    )


@pytest.fixture
def serving(home: Path, tiny: Artifact, other: Artifact) -> Iterator[AgentProcess]:
    write_state(home, good=plan_for({"tiny": tiny, "other": other}, replicas=2))
    with AgentProcess(home) as agent:
        agent.until_ready()
        yield agent


@pytest.mark.promise("offline-start-last-known")
def test_offline_start_serves_last_known_good_with_right_outputs(
    serving: AgentProcess, tiny: Artifact, other: Artifact
) -> None:
    given = RNG.normal(size=(2000, *ROW_SHAPE)).astype(np.float32)
    sessions = {"tiny": _session(tiny), "other": _session(other)}
    with Client(serving.socket) as client:
        for burst in np.split(given, 10):
            names = [("tiny", "other")[i % 2] for i in range(len(burst))]
            futures = [client.submit(name, {"input": row}) for name, row in zip(names, burst, strict=True)]
            for name, row, future in zip(names, burst, futures, strict=True):
                expected = sessions[name].run(None, {"input": row})[0]
                np.testing.assert_allclose(future.result(60)["output"], expected, rtol=1e-4, atol=1e-5)
        shared = client.run(["tiny", "other"], {"input": given[0]}, timeout_s=60)
    for name, session in sessions.items():
        expected = session.run(None, {"input": given[0]})[0]
        np.testing.assert_allclose(shared[name]["output"], expected, rtol=1e-4, atol=1e-5)
    status = serving.now()
    assert _balanced(status)
    assert sum(t.completed for t in status.tasks) == 2001
    assert status.link.state == "not_joined"


@pytest.mark.promise("kill-9-engine-process")
def test_killed_engine_answers_tasks_in_flight_and_serving_resumes(serving: AgentProcess) -> None:
    before = serving.now()
    row = np.ones(ROW_SHAPE, np.float32)
    with Client(serving.socket) as client:
        pid = before.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # so that the tasks are in flight when it dies
        futures = [client.submit("tiny", {"input": row}) for _ in range(50)]
        eventually(lambda: sum(t.open for t in serving.now().tasks) == 50, "all are open")
        os.kill(pid, signal.SIGKILL)
        for future in futures:
            with pytest.raises(AgentRestarted):
                future.result(60)
        after = serving.until_ready()
        assert after.pid == before.pid
        assert after.engine.pid != pid
        assert after.engine.restarts == 1
        assert client.run("tiny", {"input": row}, timeout_s=60)
    assert _balanced(serving.now())


@pytest.mark.promise("kill-9-agent-s")
def test_killed_main_process_takes_the_engine_with_it_and_the_next_start_serves(
    serving: AgentProcess,
) -> None:
    engine = serving.now().engine.pid
    assert engine is not None
    row = np.ones(ROW_SHAPE, np.float32)
    with Client(serving.socket) as client:
        os.kill(engine, signal.SIGSTOP)
        future = client.submit("tiny", {"input": row})
        eventually(lambda: sum(t.open for t in serving.now().tasks) == 1, "the task is in flight")
        os.kill(engine, signal.SIGCONT)
        serving.kill()
        try:
            future.result(60)
        except AgentRestarted:
            pass  # it depends on who was faster; what must not happen is no answer
        eventually(lambda: not _alive(engine), "no engine process is left behind")
        with AgentProcess(serving.home) as again:
            again.until_ready()
            assert client.run("tiny", {"input": row}, timeout_s=60)


@pytest.mark.promise("clean-stop-leaves-nothing")
def test_polite_end_lets_open_tasks_end_and_leaves_nothing_behind(serving: AgentProcess) -> None:
    engine = serving.now().engine.pid
    assert engine is not None
    with Client(serving.socket) as client:
        futures = [client.submit("tiny", {"input": np.ones(ROW_SHAPE, np.float32)}) for _ in range(100)]
        futures[-1].result(60)
        assert serving.stop() == 0
        for future in futures:
            assert future.exception(60) is None or isinstance(future.exception(), RefusedError)
    assert not _alive(engine)
    assert not serving.socket.exists()


@pytest.mark.promise("clean-stop-leaves-nothing")
def test_second_agent_on_the_same_state_is_refused_in_one_line(serving: AgentProcess) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "stageloom.edge_agent", "run", "--home", str(serving.home)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 5
    assert second.stderr.count("\n") == 1
    assert f"another agent (process {serving.process.pid})" in second.stderr
    assert serving.now().ready


def test_expired_cancelled_and_refused_tasks_end_once_and_the_books_balance(
    home: Path, tiny: Artifact
) -> None:
    queue = QueuePlan(rule=QueueRule.PRIORITY, max_tasks=4)
    write_state(home, good=plan_for({"tiny": tiny}, queue=queue, interval_us=3_000_000))
    row = np.ones(ROW_SHAPE, np.float32)
    with AgentProcess(home) as agent, Client(agent.socket_when_ready()) as client:
        client.run("tiny", {"input": row}, timeout_s=60)  # the next launch is seconds away
        expired = client.submit("tiny", {"input": row}, deadline_s=0.01)
        cancelled = client.submit("tiny", {"input": row})
        cancelled.cancel()
        for future, error in ((cancelled, TaskCancelled), (expired, TaskExpired)):
            with pytest.raises(error):
                future.result(60)
        low = [client.submit("tiny", {"input": row}, priority=-i) for i in range(10)]
        high = client.submit("tiny", {"input": row}, priority=100)
        for future in low[3:]:
            with pytest.raises(TaskRefused, match="queue"):
                future.result(60)
        assert high.result(60)
        assert not any(future.done() for future in low[:3])
        for future in low[:3]:
            future.cancel()
            with pytest.raises(TaskCancelled):
                future.result(60)
        final = agent.now()
    assert _balanced(final)
    (totals,) = final.tasks
    assert (totals.submitted, totals.completed, totals.refused) == (14, 2, 7)
    assert (totals.cancelled, totals.expired, totals.failed, totals.open) == (4, 1, 0, 0)


def test_desired_plan_is_verified_staged_watched_and_becomes_last_known_good(
    home: Path, tiny: Artifact, other: Artifact
) -> None:
    good = plan_for({"tiny": tiny})
    wanted = plan_for({"tiny": tiny, "other": other})
    write_state(home, good=good, desired=wanted)
    with AgentProcess(home, probation_s=0.5) as agent:
        agent.until(lambda s: s.link.desired_state == "committed", "committed")
        status = agent.now()
        assert status.plan is not None
        assert status.plan.digest == wanted.ref.digest
        agent.kill()
        with AgentProcess(home) as again:
            status = again.until_ready()
            assert status.plan is not None
            assert status.plan.digest == wanted.ref.digest
            assert status.link.desired_state == "committed"


@pytest.mark.promise("plan-crashes-engine-rolled")
def test_plan_that_crashes_the_engine_is_rolled_back_to_last_known_good(
    home: Path, tiny: Artifact, other: Artifact
) -> None:
    good = plan_for({"tiny": tiny})
    wanted = plan_for({"tiny": tiny, "other": other})
    write_state(home, good=good, desired=wanted)
    with AgentProcess(home, probation_s=3600.0) as agent:
        agent.until(lambda s: s.trial and s.trial.phase == "probation", "it is under probation")
        pid = agent.now().engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSEGV)
        agent.until(lambda s: s.ready and s.plan and s.plan.digest == good.ref.digest, "the good plan runs")
        status = agent.now()
        assert status.link.desired_state == "rolled_back"
        assert "signal 11" in status.link.reason
        assert {one.name for one in (home / "artifacts").iterdir()} == {tiny.digest}, (
            "what it brought is gone"
        )


def test_illegal_plan_is_rejected_with_a_reason_and_the_old_one_keeps_serving(
    home: Path, tiny: Artifact, other: Artifact
) -> None:
    good = plan_for({"tiny": tiny})
    broken = plan_for({"tiny": tiny, "other": other}, executor="no_such_executor")
    write_state(home, good=good, desired=broken)
    with AgentProcess(home) as agent:
        agent.until(lambda s: s.link.desired_state == "rejected", "rejected")
        status = agent.until_ready()
        assert status.plan is not None
        assert status.plan.digest == good.ref.digest
        assert "no_such_executor" in status.link.reason
        assert {one.name for one in (home / "artifacts").iterdir()} == {tiny.digest}, (
            "what it brought is gone"
        )


def test_engine_that_crashes_again_and_again_ends_idle_with_the_link_up(home: Path, tiny: Artifact) -> None:
    write_state(home, good=plan_for({"tiny": tiny}))
    with AgentProcess(home) as agent:
        for _ in range(3):
            pid = agent.until_ready().engine.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            _until_engine_is_not(agent, pid)
        status = agent.until(lambda s: s.engine.up, "an idle engine is up")
        assert not status.ready
        assert status.plan is None
        assert any("plan_condemned" in problem for problem in status.problems)
        with Client(agent.socket) as client, pytest.raises(TaskRefused) as caught:
            client.run("tiny", {"input": np.ones(ROW_SHAPE, np.float32)}, timeout_s=60)
        assert caught.value.code == "not_ready"


@pytest.mark.promise("state-files-survive-cut")
def test_corrupt_cached_state_serves_the_previous_copy_and_says_so(home: Path, tiny: Artifact) -> None:
    good = plan_for({"tiny": tiny})
    write_state(home, good=good)
    write_state(home, good=good)
    (home / STATE_NAME).write_bytes(b"rubbish")
    with AgentProcess(home) as agent:
        status = agent.until_ready()
        assert status.plan is not None
        assert any("corrupt" in problem for problem in status.problems)


@pytest.mark.promise("state-files-survive-cut")
def test_wholly_corrupt_state_starts_empty_and_says_so(home: Path, tiny: Artifact) -> None:
    write_state(home, good=plan_for({"tiny": tiny}))
    write_state(home, good=plan_for({"tiny": tiny}))
    for name in (STATE_NAME, f"{STATE_NAME}.previous"):
        (home / name).write_bytes(b"rubbish")
    with AgentProcess(home) as agent:
        status = agent.until(lambda s: True, "it answers")
        assert not status.ready
        assert any("corrupt" in problem for problem in status.problems)


def test_damaged_artifact_is_removed_and_not_run(home: Path, tiny: Artifact) -> None:
    write_state(home, good=plan_for({"tiny": tiny}))
    path = home / "artifacts" / tiny.digest
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with AgentProcess(home) as agent:
        agent.until(lambda s: any("plan_unusable" in p for p in s.problems), "it is named")
        assert not agent.now().ready
        assert not path.exists()


def test_model_file_is_served_alone(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "net.onnx")
    with AgentProcess(tmp_path / "home", models=(ModelFile(path=str(file), name="net"),)) as agent:
        status = agent.until_ready()
        assert status.plan is not None
        assert status.plan.origin == Origin.LOCAL.value
        assert status.link.state == "alone"
        with Client(agent.socket) as client:
            row = RNG.normal(size=ROW_SHAPE).astype(np.float32)
            expected = onnxruntime.InferenceSession(str(file)).run(None, {"input": row})[0]
            got = client.run("net", {"input": row}, timeout_s=60)["output"]
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


_APPLICATION = """
import sys, time
import numpy as np
from stageloom import Client
with Client(sys.argv[1]) as client:
    held = [client.submit("tiny", {"input": np.ones((1, 3, 8, 8), np.float32)}) for _ in range(20)]
    print("submitted", flush=True)
    time.sleep(600)
"""


def _open_files(pid: int) -> list[str]:
    """What a process has open; what it closes meanwhile may be missing."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return found


def test_killed_application_has_its_tasks_cancelled_and_others_go_on(home: Path, tiny: Artifact) -> None:
    write_state(home, good=plan_for({"tiny": tiny}, interval_us=60_000_000))
    with AgentProcess(home) as agent, Client(agent.socket_when_ready()) as other:
        other.run("tiny", {"input": np.ones(ROW_SHAPE, np.float32)}, timeout_s=60)
        with subprocess.Popen(
            [sys.executable, "-c", _APPLICATION, str(agent.socket)], stdout=subprocess.PIPE, text=True
        ) as application:
            assert application.stdout is not None
            assert application.stdout.readline() == "submitted\n"
            agent.until(lambda s: sum(t.open for t in s.tasks) == 20, "its tasks wait")
            application.kill()
        status = agent.until(lambda s: sum(t.open for t in s.tasks) == 0, "they have ended")
        assert sum(t.cancelled for t in status.tasks) == 20
        assert status.applications == 2  # the other one, and the question itself
        held = [one for one in _open_files(status.pid) if "stageloom-arena" in one]
        assert len(held) == 1, "only the arena of the application that lives is held"

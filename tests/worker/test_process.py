"""The engine as a real process: commands, arenas, crashes. Nothing an agent sends may end it by accident."""

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from stageloom.edge_agent.config import AgentConfig
from stageloom.edge_agent.executor.base import TimingRequest
from stageloom.edge_agent.ingest.messages import TaskEnded, decode_to_application
from stageloom.edge_agent.parts import _worker_config
from stageloom.edge_agent.worker import client, messages
from stageloom.edge_agent.worker.channel import Channel, channel_pair
from stageloom.edge_agent.worker.messages import MAX_MESSAGE_BYTES, TaskDone, WorkerConfig, decode_config
from stageloom.shared.artifact import Artifact
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.errors import SettingError
from stageloom.shared.ids import TaskId
from stageloom.shared.plan import ExecutorOptions, Plan
from stageloom.shared.search.compose import ModelChoice, compose
from tests.executor.installed import installed
from tests.executor.models import artifact_of, difference, random_inputs, reference
from tests.worker.engine import TIMEOUT_S, RealEngine

ARENA = 7
SIZE = 1 << 18
OUTPUT = 1 << 17
IN, OUT = ("image", ARENA, 0), ("logits", ARENA, OUTPUT)


def _memory(size: int = SIZE, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test-arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _plan(model: Artifact, partition: str = "paper", executor: str = "onnx") -> Plan:
    choice = ModelChoice(
        name="net", artifact=model.digest, graph=model.graph, partition=partition, replicas=2
    )
    return compose([choice], lanes=2, executor=ExecutorOptions(name=executor))


def _serve(engine: RealEngine, key: int, plan: Plan, model: Artifact) -> None:
    engine.load(key, plan, model)
    assert engine.wait_for(messages.PlanLoaded).key == key
    engine.send(messages.SwitchPlan(key))
    assert engine.wait_for(messages.PlanActive).key == key


@pytest.fixture(scope="module")
def model() -> Artifact:
    """A small real model."""
    return artifact_of("squeezenet")


@pytest.fixture
def fresh() -> Iterator[RealEngine]:
    """A process of its own, without a plan."""
    engine = RealEngine()
    assert engine.wait_for(messages.Ready).pid == engine.client.pid
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def serving(model: Artifact) -> Iterator[tuple[RealEngine, mmap.mmap]]:
    """A process that serves the model from one arena; tests leave it as they found it."""
    engine = RealEngine()
    engine.wait_for(messages.Ready)
    fd = _memory()
    memory = mmap.mmap(fd, SIZE)
    engine.send(messages.AddArena(ARENA, SIZE), [fd])
    os.close(fd)
    _serve(engine, 1, _plan(model), model)
    yield engine, memory
    assert engine.stop() == 0


def _submit(
    engine: RealEngine,
    task: int,
    models: Sequence[str] = ("net",),
    inputs: Sequence[messages.Place] = (IN,),
    outputs: Sequence[messages.Place] = (OUT,),
    deadline_s: float | None = None,
) -> None:
    """One task in a layout of its own."""
    engine.send(messages.AddLayout(task, tuple(models), tuple(inputs), tuple(outputs)))
    engine.send(messages.RunTask(TaskId(task), task, deadline_s=deadline_s))
    engine.send(messages.DropLayout(task))


def _task(engine: RealEngine, memory: mmap.mmap, model: Artifact, task: int) -> None:
    """Run one task and compare what it wrote."""
    inputs = random_inputs(model.graph, task)
    image = inputs["image"]
    np.frombuffer(memory, np.float32, image.size).reshape(image.shape)[...] = image
    _submit(engine, task)
    done = engine.wait_for(TaskDone)
    assert (done.task, done.outcome, done.reason) == (task, Outcome.COMPLETED, "")
    assert done.plan is not None
    assert done.started_s is not None
    assert done.queued_s <= done.started_s <= done.ended_s
    made = np.frombuffer(memory, np.float32, 1000, OUTPUT).copy()
    assert difference(made, reference(model, inputs, ["logits"])["logits"][0]) < 1e-4


def test_tasks_are_read_and_answered_in_place(serving: tuple[RealEngine, mmap.mmap], model: Artifact) -> None:
    for task in range(3):
        _task(*serving, model, task)


@pytest.mark.promise("tasks-kind-take-turns")
def test_a_layout_serves_many_tasks_and_outlives_a_change_of_plan(model: Artifact) -> None:
    engine = RealEngine()
    fd = _memory()
    memory = mmap.mmap(fd, SIZE)
    engine.send(messages.AddArena(ARENA, SIZE), [fd])
    os.close(fd)
    engine.send(messages.AddLayout(3, ("net",), (IN,), (OUT,)))
    inputs = random_inputs(model.graph, 5)
    image = inputs["image"]
    np.frombuffer(memory, np.float32, image.size).reshape(image.shape)[...] = image
    wanted = reference(model, inputs, ["logits"])["logits"][0]
    for key, partition in ((1, "paper"), (2, "whole")):
        _serve(engine, key, _plan(model, partition), model)
        for task in (10 * key, 10 * key + 1):
            np.frombuffer(memory, np.float32, 1000, OUTPUT)[...] = 0
            engine.send(messages.RunTask(TaskId(task), 3))
            done = engine.wait_for(TaskDone)
            assert (done.task, done.outcome, done.plan) == (task, Outcome.COMPLETED, key)
            assert difference(np.frombuffer(memory, np.float32, 1000, OUTPUT).copy(), wanted) < 1e-4
    engine.send(messages.DropLayout(3))
    engine.send(messages.RunTask(TaskId(30), 3))
    assert engine.wait_for(TaskDone).code == "bad_input"
    engine.stop()


@pytest.mark.parametrize(
    ("models", "inputs", "outputs", "code"),
    [
        (["net"], [("image", 8, 0)], [OUT], "unknown_arena"),
        (["net"], [IN], [("logits", 8, 0)], "unknown_arena"),
        (["net"], [("image", ARENA, SIZE - 4)], [OUT], "bad_input"),
        (["net"], [("image", ARENA, -4)], [OUT], "bad_input"),
        (["net"], [("image", ARENA, 1)], [OUT], "bad_input"),
        (["net"], [("image", ARENA, 1 << 62)], [OUT], "bad_input"),
        (["net"], [IN], [("logits", ARENA, SIZE)], "bad_input"),
        (["net"], [("picture", ARENA, 0)], [OUT], "bad_input"),
        (["net"], [], [], "bad_input"),
        ([], [IN], [OUT], "bad_input"),
        (["net", "net"], [IN], [OUT], "bad_input"),
        (["nothing"], [IN], [OUT], "unknown_model"),
        (["net", "nothing"], [IN], [OUT], "unknown_model"),
    ],
)
def test_a_malformed_submission_is_refused_and_the_next_one_served(
    serving: tuple[RealEngine, mmap.mmap],
    model: Artifact,
    models: list[str],
    inputs: list[messages.Place],
    outputs: list[messages.Place],
    code: str,
) -> None:
    engine, memory = serving
    _submit(engine, 50, models, inputs, outputs)
    done = engine.wait_for(TaskDone)
    assert (done.task, done.outcome, done.code) == (50, Outcome.REFUSED, code)
    assert done.reason
    assert "\n" not in done.reason
    _task(engine, memory, model, 51)


def test_a_command_that_does_not_decode_is_skipped(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    engine, memory = serving
    channel = engine.client._channel
    assert channel is not None
    for garbage in (b"\xc1", b"\x92\x63\x01", b"\x91\x06"):
        channel.send(garbage)
    _task(engine, memory, model, 60)


def test_a_deadline_that_has_passed_is_answered_as_expired(
    serving: tuple[RealEngine, mmap.mmap],
) -> None:
    engine, _ = serving
    _submit(engine, 61, deadline_s=time.monotonic() - 1.0)
    assert engine.wait_for(TaskDone).outcome == Outcome.EXPIRED


def test_plans_that_cannot_be_loaded_leave_the_active_one_serving(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    engine, memory = serving
    other = artifact_of("googlenet")
    broken: dict[int, tuple[bytes, dict[str, str]]] = {
        20: (b"garbage", {}),
        21: (_plan(other).wire, {}),
        22: (_plan(other).wire, {other.digest: str(model.path)}),
        23: (_plan(other).wire, {other.digest: "/nonexistent"}),
        24: (_plan(model, executor="abacus").wire, {model.digest: str(model.path)}),
        1: (_plan(model).wire, {model.digest: str(model.path)}),
    }
    for key, (wire, artifacts) in broken.items():
        engine.send_file(messages.LoadPlan(key, artifacts), wire)
        failed = engine.wait_for(messages.PlanFailed)
        assert failed.key == key
        assert failed.reason
    engine.send(messages.SwitchPlan(99))
    assert engine.wait_for(messages.PlanFailed).key == 99
    _task(engine, memory, model, 62)


def test_a_swap_releases_the_old_plan_and_keeps_serving(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    engine, memory = serving
    _serve(engine, 2, _plan(model, "whole"), model)
    assert engine.wait_for(messages.PlanReleased).key == 1
    _task(engine, memory, model, 63)
    _serve(engine, 1, _plan(model), model)
    assert engine.wait_for(messages.PlanReleased).key == 2


@pytest.mark.promise("plans-different-executors-run")
def test_plans_of_two_executors_are_swapped_and_compared_like_any_two(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    """The null executor answers zeros, so a task shows where it ran."""
    engine, memory = serving
    engine.load(5, _plan(model, executor="null"), model)
    assert engine.wait_for(messages.PlanLoaded).key == 5
    for task, key in enumerate((5, 1, 5), 200):
        engine.send(messages.SwitchPlan(key, keep=True))
        assert engine.wait_for(messages.PlanActive).key == key
        if key == 1:
            _task(engine, memory, model, task)
            continue
        _submit(engine, task)
        assert engine.wait_for(TaskDone).outcome == Outcome.COMPLETED
        assert not np.frombuffer(memory, np.float32, 1000, OUTPUT).any()
    engine.send(messages.SwitchPlan(1))
    assert engine.wait_for(messages.PlanReleased).key == 5
    _task(engine, memory, model, 210)


@pytest.mark.promise("shared-memory-could-kill")
@pytest.mark.parametrize(
    ("seals", "claimed", "cause"),
    [
        (0, SIZE, "can be made shorter"),
        (fcntl.F_SEAL_GROW, SIZE, "can be made shorter"),
        (fcntl.F_SEAL_SHRINK, SIZE + 1, "does not have"),
        (fcntl.F_SEAL_SHRINK, 0, "does not have"),
        (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE, SIZE, "cannot be mapped"),
    ],
)
def test_an_arena_that_could_kill_its_reader_is_refused(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact, seals: int, claimed: int, cause: str
) -> None:
    engine, memory = serving
    fd = _memory(seals=seals)
    engine.send(messages.AddArena(9, claimed), [fd])
    os.close(fd)
    refused = engine.wait_for(messages.ArenaRefused)
    assert refused.arena == 9
    assert cause in refused.reason
    _task(engine, memory, model, 64)


def test_a_pipe_is_no_arena(serving: tuple[RealEngine, mmap.mmap]) -> None:
    engine, _ = serving
    reader, writer = os.pipe()
    engine.send(messages.AddArena(9, SIZE), [reader])
    os.close(reader)
    os.close(writer)
    assert engine.wait_for(messages.ArenaRefused).arena == 9


def test_a_process_that_may_open_no_file_loses_what_needs_one_and_serves_on(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    engine, memory = serving
    assert engine.client.pid is not None
    soft, hard = resource.prlimit(engine.client.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(engine.client.pid, resource.RLIMIT_NOFILE, (3, hard))
    fd = _memory()
    engine.send(messages.AddApplication(11), [fd])
    engine.send(messages.AddArena(11, SIZE), [fd])
    engine.send(messages.StartRecording(11, 1.0), [fd])
    engine.load(11, _plan(model), model)
    os.close(fd)
    assert "without its memory file" in engine.wait_for(messages.ArenaRefused).reason
    assert "without its file" in engine.wait_for(messages.RecordingEnded).reason
    assert engine.wait_for(messages.PlanFailed).key == 11
    resource.prlimit(engine.client.pid, resource.RLIMIT_NOFILE, (soft, hard))
    _task(engine, memory, model, 68)


def test_a_start_that_finds_no_descriptors_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[socket.socket, socket.socket]] = []

    def scarce() -> tuple[socket.socket, socket.socket]:
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(channel_pair())
        return made[0]

    monkeypatch.setattr(client, "channel_pair", scarce)
    engine = RealEngine()
    try:
        assert engine.client.pid is None
        assert {end.fileno() for end in made[0]} == {-1}, "closed"
        monkeypatch.undo()
        assert engine.wait_for(messages.Ready)
    finally:
        engine.stop()


def test_tasks_of_a_dropped_arena_are_refused_from_then_on(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    engine, _ = serving
    fd = _memory()
    engine.send(messages.AddArena(10, SIZE), [fd])
    os.close(fd)
    engine.send(messages.DropArena(10))
    _submit(engine, 65, ["net"], [("image", 10, 0)], [("logits", 10, OUTPUT)])
    assert engine.wait_for(TaskDone).code == "unknown_arena"


def test_operators_are_timed_on_request(serving: tuple[RealEngine, mmap.mmap], model: Artifact) -> None:
    engine, _ = serving
    engine.send(messages.Profile(5, model.digest, str(model.path), timing=TimingRequest(repeats=1)))
    times = engine.wait_for(messages.OperatorTimes)
    assert (times.request, times.reason) == (5, "")
    assert len(times.times) == len(model.graph.operators)
    assert {runs for _, _, runs in times.times} == {1}
    assert engine.wait_for(messages.WholeTime).request == 5
    engine.send(messages.Profile(6, model.digest[::-1], "/nonexistent"))
    assert engine.wait_for(messages.OperatorTimes).reason


@pytest.mark.parametrize("executor", ["onnx", "openvino"])
def test_a_model_is_timed_as_a_whole_before_its_operators_on_the_executor_asked_for(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact, executor: str
) -> None:
    installed(executor).close()
    engine, _ = serving
    engine.send(messages.Profile(5, model.digest, str(model.path), executor, TimingRequest(repeats=1)))
    whole = engine.wait_for(messages.WholeTime)
    assert (whole.request, whole.reason) == (5, "") and whole.runs > 0
    assert whole.time_us is not None and whole.time_us > 0.0
    assert engine.wait_for(messages.OperatorTimes).reason == ""
    engine.send(messages.Profile(6, model.digest, str(model.path), "fastest"))
    whole = engine.wait_for(messages.WholeTime)
    assert whole.time_us is None and "no executor is called 'fastest'" in whole.reason
    assert engine.wait_for(messages.OperatorTimes).reason


def test_tracing_reports_steps_with_their_groups_until_it_ends(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    engine, memory = serving
    engine.send(messages.TraceSteps(True))
    inputs = random_inputs(model.graph, 1)["image"]
    np.frombuffer(memory, np.float32, inputs.size).reshape(inputs.shape)[...] = inputs
    _submit(engine, 66)
    traced = engine.wait_for(messages.StepTraced)
    assert traced.key == 1
    assert traced.groups
    engine.send(messages.TraceSteps(False))
    assert engine.wait_for(TaskDone).task == 66


def test_statistics_name_the_plan_and_count_the_ends(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    engine, memory = serving
    _task(engine, memory, model, 70)
    stats = engine.wait_for(messages.Stats)
    while stats.key != 1 or not any(one.outcomes["completed"] for one in stats.models):
        stats = engine.wait_for(messages.Stats)  # reports of what another test ran may come before
    assert stats.models[0].name == "net"


def test_idle_engine_without_a_plan_reports_that_it_lives(fresh: RealEngine) -> None:
    """An agent that waits for its first plan must not take its engine for dead and kill it."""
    stats = [fresh.wait_for(messages.Stats) for _ in range(2)]
    assert [(one.key, one.models) for one in stats] == [(None, ()), (None, ())]
    assert stats[0].at_s < stats[1].at_s


def _told(application: socket.socket) -> TaskEnded:
    """What an application is told next."""
    application.settimeout(TIMEOUT_S)
    ended = decode_to_application(application.recv(MAX_MESSAGE_BYTES))
    assert isinstance(ended, TaskEnded)
    return ended


def _told_now(application: socket.socket) -> int:
    ended = decode_to_application(application.recv(MAX_MESSAGE_BYTES))
    assert isinstance(ended, TaskEnded)
    return ended.task


@pytest.fixture
def application(fresh: RealEngine, model: Artifact) -> Iterator[socket.socket]:
    """An application's end of its connection; the process has the other one, and serves layout 3 to it."""
    ours, theirs = channel_pair()
    fd = _memory()
    fresh.send(messages.AddArena(ARENA, SIZE), [fd])
    os.close(fd)
    _serve(fresh, 1, _plan(model, executor="null"), model)
    fresh.send(messages.AddApplication(9), [theirs.fileno()])
    fresh.send(messages.AddLayout(3, ("net",), (IN,), (OUT,), application=9))
    theirs.close()
    yield ours
    ours.close()


def _run(engine: RealEngine, task: int) -> None:
    engine.send(messages.RunTask(TaskId(task), 3, owner_task=100 + task, received_at_s=5.0))


@pytest.mark.promise("end-told-before-agent")
def test_an_application_is_told_before_the_agent_hears_of_it(
    fresh: RealEngine, application: socket.socket
) -> None:
    """1. The application is told. 2. The agent was not woken. 3. It reads of the same end when it looks."""
    for task in range(3):
        _run(fresh, task)
    told = [_told(application) for _ in range(3)]
    assert {(end.task, end.outcome, end.received_at_s) for end in told} == {
        (100 + task, "completed", 5.0) for task in range(3)
    }
    assert not [report for report in fresh.reports if isinstance(report, TaskDone)]
    fresh.client.take_ends()
    heard = {report.task: report for report in fresh.reports if isinstance(report, TaskDone)}
    assert len(heard) == 3
    assert all(done.told and done.outcome is Outcome.COMPLETED for done in heard.values())
    assert {done.queued_s for done in heard.values()} == {end.queued_at_s for end in told}


@pytest.mark.promise("end-told-before-agent")
def test_the_agent_hears_of_ends_before_it_hears_that_the_process_is_gone(
    fresh: RealEngine, application: socket.socket
) -> None:
    for task in (1, 2):
        _run(fresh, task)
        assert _told(application).outcome == "completed"
    pid = fresh.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    fresh.wait_for(messages.Exited)
    assert [report.task for report in fresh.reports if isinstance(report, TaskDone)] == [1, 2]


def _fill(engine: RealEngine) -> int:
    """Run tasks until the application's socket takes no more; how many."""
    tasks = 0
    while not any(isinstance(report, messages.PassOn) for report in engine.reports):
        for _ in range(64):
            _run(engine, tasks)
            tasks += 1
        while len([report for report in engine.reports if isinstance(report, TaskDone)]) < tasks:
            engine.loop.turn(0.01)
            engine.client.take_ends()
    return tasks


@pytest.mark.promise("end-told-before-agent")
def test_what_a_full_socket_does_not_take_is_passed_on_by_the_agent(
    fresh: RealEngine, application: socket.socket
) -> None:
    """1. The application reads nothing. 2. Each end is in its socket or is the agent's to pass on, once."""
    tasks = _fill(fresh)
    application.setblocking(False)
    ended = []
    with contextlib.suppress(BlockingIOError):
        while True:
            ended.append(_told_now(application))
    while len(ended) < tasks:  # an end is reported before it is passed on
        passed = fresh.wait_for(messages.PassOn)
        assert passed.application == 9
        packet = decode_to_application(passed.packet)
        ended += [packet.task] if isinstance(packet, TaskEnded) else []
    assert sorted(ended) == list(range(100, 100 + tasks))


@pytest.mark.promise("end-told-before-agent")
def test_what_is_to_be_passed_on_is_not_lost_where_the_agent_ends_the_process(
    fresh: RealEngine, application: socket.socket
) -> None:
    """1. The application reads nothing. 2. The agent has not read what is for it. 3. It ends the process."""
    tasks = _fill(fresh)
    for _ in range(10):
        _run(fresh, tasks)
        tasks += 1
    ends = fresh.client._ends
    assert ends is not None
    while len([report for report in fresh.reports if isinstance(report, TaskDone)]) < tasks:
        assert select.select([ends.fileno()], [], [], TIMEOUT_S)[0]
        fresh.client.take_ends()
    fresh.client.end()
    assert isinstance(fresh.reports[-1], messages.Exited)
    ended = [report.packet for report in fresh.reports if isinstance(report, messages.PassOn)]
    application.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while packet := application.recv(1 << 16):
            ended.append(packet)
    told = [decode_to_application(packet) for packet in ended]
    assert sorted(end.task for end in told if isinstance(end, TaskEnded)) == list(range(100, 100 + tasks))


@pytest.mark.promise("end-told-before-agent")
def test_an_end_that_the_application_does_not_take_is_the_agents_to_tell(
    fresh: RealEngine, application: socket.socket
) -> None:
    fresh.send(messages.DropApplication(9))
    _run(fresh, 1)
    done = fresh.wait_for(TaskDone)
    assert (done.task, done.outcome, done.told) == (1, Outcome.COMPLETED, False)
    assert application.recv(1) == b""  # and the process holds its socket no longer


def test_draining_answers_what_is_queued_and_takes_no_more(fresh: RealEngine, model: Artifact) -> None:
    fd = _memory()
    fresh.send(messages.AddArena(ARENA, SIZE), [fd])
    os.close(fd)
    _serve(fresh, 1, _plan(model), model)
    for task in range(20):
        _submit(fresh, task)
    fresh.send(messages.PauseLaunches())
    _submit(fresh, 20)
    ended: dict[int, Outcome] = {}
    drained = False
    while len(ended) < 21 or not drained:
        fresh.loop.turn(TIMEOUT_S)
        for report in fresh.reports:
            if isinstance(report, TaskDone):
                assert report.task not in ended
                ended[report.task] = report.outcome
            drained |= isinstance(report, messages.Drained)
        fresh.reports.clear()
    assert set(ended.values()) <= {Outcome.COMPLETED, Outcome.REFUSED}
    assert ended[20] is Outcome.REFUSED


def test_a_task_before_any_plan_is_refused(fresh: RealEngine) -> None:
    _submit(fresh, 1, ["net"], [], [])
    assert fresh.wait_for(TaskDone).code == "unknown_model"


def test_a_process_without_a_plan_is_heard_from() -> None:
    engine = RealEngine(WorkerConfig(stats_interval_s=0.05))
    try:
        assert engine.wait_for(messages.Stats).key is None
        assert engine.wait_for(messages.Stats).models == ()
    finally:
        engine.stop()


def test_process_of_an_agent_that_takes_telemetry_rarely_shows_that_it_lives(tmp_path: Path) -> None:
    """Else the agent would kill it for its silence."""
    config = AgentConfig(home=str(tmp_path), stats_interval_s=3600.0, silent_engine_s=0.3, alarms=False)
    engine = RealEngine(_worker_config(config))
    try:
        assert all(engine.wait_for(messages.Stats).sign for _ in range(3))
    finally:
        engine.stop()


@pytest.mark.promise("kill-9-engine-process")
def test_kill_9_is_reported_once_and_then_nothing_more(fresh: RealEngine) -> None:
    pid = fresh.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert fresh.wait_for(messages.Exited).returncode == -signal.SIGKILL
    fresh.reports.clear()
    fresh.loop.turn(0.05)
    assert (fresh.reports, fresh.client.pid) == ([], None)
    assert not fresh.client.send(messages.CancelTask(TaskId(1)))


def test_the_process_ends_when_its_agent_is_gone() -> None:
    ours, theirs = channel_pair()
    fd = theirs.fileno()
    command = [sys.executable, "-m", "stageloom.edge_agent.worker", str(fd), str(os.dup(fd)), "{}"]
    with subprocess.Popen(command, pass_fds=[fd, int(command[4])]) as process:
        theirs.close()
        os.close(int(command[4]))
        Channel(ours).close()
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.promise("run-path-loads-heavy")
def test_before_a_plan_is_loaded_no_backend_is_imported() -> None:
    code = (
        "import sys, stageloom.edge_agent.worker.__main__, stageloom.edge_agent.executor.executors\n"
        "print(sorted({'numpy', 'onnx', 'onnxruntime', 'torch', 'zmq', 'typer'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "text", ["", "{", '{"stats_interval_s": "x"}', '{"stats": 1}', '{"stats_interval_s": 0}']
)
def test_an_unreadable_setting_stops_the_start(text: str) -> None:
    with pytest.raises(SettingError, match="engine's"):
        decode_config(text)


def test_the_default_settings_are_what_an_empty_object_means() -> None:
    assert decode_config("{}") == WorkerConfig()

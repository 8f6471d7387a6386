"""The engine as a real process: commands, arenas, crashes. Nothing an agent sends may end it by accident."""

import fcntl
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import pytest

from stageloom.edge_agent.worker import messages
from stageloom.edge_agent.worker.channel import Channel, ChannelClosed, channel_pair
from stageloom.edge_agent.worker.config import WorkerConfig, decode_config
from stageloom.edge_agent.worker.handle import WorkerHandle
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import SettingError
from stageloom.shared.ids import TaskId
from stageloom.shared.plan import ExecutorOptions, Plan
from stageloom.shared.search.compose import ModelChoice, compose
from tests.executor.models import artifact_of, difference, random_inputs, reference

TIMEOUT_S = 60.0
ARENA = 7
SIZE = 1 << 18
OUTPUT = 1 << 17
IN, OUT = ("image", ARENA, 0), ("logits", ARENA, OUTPUT)

R = TypeVar("R", bound=messages.Report)


_inboxes: "WeakKeyDictionary[WorkerHandle, list[messages.Report]]" = WeakKeyDictionary()


def _await(handle: WorkerHandle, kind: type[R]) -> R:
    """The oldest report of a kind that was not taken yet; others stay."""
    inbox = _inboxes.setdefault(handle, [])
    ends_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends_s:
        for report in inbox:
            if isinstance(report, kind):
                inbox.remove(report)
                return report
        select.select([handle], [], [], 1.0)
        inbox += handle.poll()
    raise AssertionError(f"no {kind.__name__} came, but {inbox}")


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


def _serve(handle: WorkerHandle, key: int, plan: Plan, model: Artifact) -> None:
    handle.load_plan(key, plan.wire, {model.digest: str(model.path)})
    assert _await(handle, messages.PlanLoaded).key == key
    handle.activate(key)
    assert _await(handle, messages.PlanActive).key == key


@pytest.fixture(scope="module")
def model() -> Artifact:
    """A small real model."""
    return artifact_of("squeezenet")


@pytest.fixture
def fresh() -> Iterator[WorkerHandle]:
    """A process of its own, without a plan."""
    handle = WorkerHandle.start()
    assert _await(handle, messages.Ready).pid == handle.pid
    yield handle
    handle.stop()


@pytest.fixture(scope="module")
def serving(model: Artifact) -> Iterator[tuple[WorkerHandle, mmap.mmap]]:
    """A process that serves the model from one arena; tests leave it as they found it."""
    handle = WorkerHandle.start()
    _await(handle, messages.Ready)
    fd = _memory()
    memory = mmap.mmap(fd, SIZE)
    handle.add_arena(ARENA, fd, SIZE)
    os.close(fd)
    _serve(handle, 1, _plan(model), model)
    yield handle, memory
    assert handle.stop() == 0


def _submit(
    handle: WorkerHandle,
    task: int,
    models: Sequence[str] = ("net",),
    inputs: Sequence[messages.Place] = (IN,),
    outputs: Sequence[messages.Place] = (OUT,),
    deadline_s: float | None = None,
) -> None:
    """One task in a layout of its own."""
    handle.declare(task, models, inputs, outputs)
    handle.submit(TaskId(task), task, deadline_s=deadline_s)
    handle.retract(task)


def _task(handle: WorkerHandle, memory: mmap.mmap, model: Artifact, task: int) -> None:
    """Run one task and compare what it wrote."""
    inputs = random_inputs(model.graph, task)
    image = inputs["image"]
    np.frombuffer(memory, np.float32, image.size).reshape(image.shape)[...] = image
    _submit(handle, task)
    done = _await(handle, TaskDone)
    assert (done.task, done.outcome, done.reason) == (task, "completed", "")
    assert done.key is not None
    assert done.started_s is not None
    assert done.queued_s <= done.started_s <= done.ended_s
    made = np.frombuffer(memory, np.float32, 1000, OUTPUT).copy()
    assert difference(made, reference(model, inputs, ["logits"])["logits"][0]) < 1e-4


def test_tasks_are_read_and_answered_in_place(
    serving: tuple[WorkerHandle, mmap.mmap], model: Artifact
) -> None:
    for task in range(3):
        _task(*serving, model, task)


def test_a_layout_serves_many_tasks_and_outlives_a_change_of_plan(model: Artifact) -> None:
    handle = WorkerHandle.start()
    fd = _memory()
    memory = mmap.mmap(fd, SIZE)
    handle.add_arena(ARENA, fd, SIZE)
    os.close(fd)
    handle.declare(3, ["net"], [IN], [OUT])
    inputs = random_inputs(model.graph, 5)
    image = inputs["image"]
    np.frombuffer(memory, np.float32, image.size).reshape(image.shape)[...] = image
    wanted = reference(model, inputs, ["logits"])["logits"][0]
    for key, partition in ((1, "paper"), (2, "whole")):
        _serve(handle, key, _plan(model, partition), model)
        for task in (10 * key, 10 * key + 1):
            np.frombuffer(memory, np.float32, 1000, OUTPUT)[...] = 0
            handle.submit(TaskId(task), 3)
            done = _await(handle, TaskDone)
            assert (done.task, done.outcome, done.key) == (task, "completed", key)
            assert difference(np.frombuffer(memory, np.float32, 1000, OUTPUT).copy(), wanted) < 1e-4
    handle.retract(3)
    handle.submit(TaskId(30), 3)
    assert _await(handle, TaskDone).code == "bad_input"
    handle.stop()


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
    serving: tuple[WorkerHandle, mmap.mmap],
    model: Artifact,
    models: list[str],
    inputs: list[messages.Place],
    outputs: list[messages.Place],
    code: str,
) -> None:
    handle, memory = serving
    _submit(handle, 50, models, inputs, outputs)
    done = _await(handle, TaskDone)
    assert (done.task, done.outcome, done.code) == (50, "refused", code)
    assert done.reason
    assert "\n" not in done.reason
    _task(handle, memory, model, 51)


def test_a_command_that_does_not_decode_is_skipped(
    serving: tuple[WorkerHandle, mmap.mmap], model: Artifact
) -> None:
    handle, memory = serving
    for garbage in (b"\xc1", b"\x92\x63\x01", b"\x91\x06"):
        handle._channel.send(garbage)
    _task(handle, memory, model, 60)


def test_a_deadline_that_has_passed_is_answered_as_expired(
    serving: tuple[WorkerHandle, mmap.mmap],
) -> None:
    handle, _ = serving
    _submit(handle, 61, deadline_s=time.monotonic() - 1.0)
    assert _await(handle, TaskDone).outcome == "expired"


def test_plans_that_cannot_be_loaded_leave_the_active_one_serving(
    serving: tuple[WorkerHandle, mmap.mmap], model: Artifact
) -> None:
    handle, memory = serving
    other = artifact_of("googlenet")
    broken = {
        20: (b"garbage", {}),
        21: (_plan(other).wire, {}),
        22: (_plan(other).wire, {other.digest: str(model.path)}),
        23: (_plan(other).wire, {other.digest: "/nonexistent"}),
        24: (_plan(model, executor="abacus").wire, {model.digest: str(model.path)}),
        1: (_plan(model).wire, {model.digest: str(model.path)}),
    }
    for key, (wire, artifacts) in broken.items():
        handle.load_plan(key, wire, artifacts)
        failed = _await(handle, messages.PlanFailed)
        assert failed.key == key
        assert failed.reason
    handle.activate(99)
    assert _await(handle, messages.PlanFailed).key == 99
    _task(handle, memory, model, 62)


def test_a_swap_releases_the_old_plan_and_keeps_serving(
    serving: tuple[WorkerHandle, mmap.mmap], model: Artifact
) -> None:
    handle, memory = serving
    _serve(handle, 2, _plan(model, "whole"), model)
    assert _await(handle, messages.PlanReleased).key == 1
    _task(handle, memory, model, 63)
    _serve(handle, 1, _plan(model), model)
    assert _await(handle, messages.PlanReleased).key == 2


def test_plans_of_two_executors_are_swapped_and_compared_like_any_two(
    serving: tuple[WorkerHandle, mmap.mmap], model: Artifact
) -> None:
    """The null executor answers zeros, so a task shows where it ran."""
    handle, memory = serving
    handle.load_plan(5, _plan(model, executor="null").wire, {model.digest: str(model.path)})
    assert _await(handle, messages.PlanLoaded).key == 5
    for task, key in enumerate((5, 1, 5), 200):
        handle.activate(key, keep=True)
        assert _await(handle, messages.PlanActive).key == key
        if key == 1:
            _task(handle, memory, model, task)
            continue
        _submit(handle, task)
        assert _await(handle, TaskDone).outcome == "completed"
        assert not np.frombuffer(memory, np.float32, 1000, OUTPUT).any()
    handle.activate(1)
    assert _await(handle, messages.PlanReleased).key == 5
    _task(handle, memory, model, 210)


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
    serving: tuple[WorkerHandle, mmap.mmap], model: Artifact, seals: int, claimed: int, cause: str
) -> None:
    handle, memory = serving
    fd = _memory(seals=seals)
    handle.add_arena(9, fd, claimed)
    os.close(fd)
    refused = _await(handle, messages.ArenaRefused)
    assert refused.arena == 9
    assert cause in refused.reason
    _task(handle, memory, model, 64)


def test_a_pipe_is_no_arena(serving: tuple[WorkerHandle, mmap.mmap]) -> None:
    handle, _ = serving
    reader, writer = os.pipe()
    handle.add_arena(9, reader, SIZE)
    os.close(reader)
    os.close(writer)
    assert _await(handle, messages.ArenaRefused).arena == 9


def test_tasks_of_a_dropped_arena_are_refused_from_then_on(
    serving: tuple[WorkerHandle, mmap.mmap], model: Artifact
) -> None:
    handle, _ = serving
    fd = _memory()
    handle.add_arena(10, fd, SIZE)
    os.close(fd)
    handle.drop_arena(10)
    _submit(handle, 65, ["net"], [("image", 10, 0)], [("logits", 10, OUTPUT)])
    assert _await(handle, TaskDone).code == "unknown_arena"


def test_operators_are_timed_on_request(serving: tuple[WorkerHandle, mmap.mmap], model: Artifact) -> None:
    handle, _ = serving
    handle.profile(messages.Profile(5, model.digest, str(model.path), repeats=1))
    times = _await(handle, messages.OperatorTimes)
    assert (times.request, times.reason) == (5, "")
    assert len(times.times) == len(model.graph.operators)
    assert {runs for _, _, runs in times.times} == {1}
    handle.profile(messages.Profile(6, model.digest[::-1], "/nonexistent"))
    assert _await(handle, messages.OperatorTimes).reason


def test_tracing_reports_steps_with_their_groups_until_it_ends(
    serving: tuple[WorkerHandle, mmap.mmap], model: Artifact
) -> None:
    handle, memory = serving
    handle.trace(True)
    inputs = random_inputs(model.graph, 1)["image"]
    np.frombuffer(memory, np.float32, inputs.size).reshape(inputs.shape)[...] = inputs
    _submit(handle, 66)
    traced = _await(handle, messages.Traced)
    assert traced.key == 1
    assert traced.groups
    handle.trace(False)
    assert _await(handle, TaskDone).task == 66


def test_statistics_name_the_plan_and_count_the_ends(
    serving: tuple[WorkerHandle, mmap.mmap], model: Artifact
) -> None:
    handle, memory = serving
    _task(handle, memory, model, 70)
    stats = _await(handle, messages.Stats)
    while not any(one.outcomes["completed"] for one in stats.models):
        stats = _await(handle, messages.Stats)
    assert stats.key == 1
    assert stats.models[0].name == "net"


def test_idle_engine_without_a_plan_reports_that_it_lives(fresh: WorkerHandle) -> None:
    """An agent that waits for its first plan must not take its engine for dead and kill it."""
    stats = [_await(fresh, messages.Stats) for _ in range(2)]
    assert [(one.key, one.models) for one in stats] == [(None, ()), (None, ())]
    assert stats[0].at_s < stats[1].at_s


def test_draining_answers_what_is_queued_and_takes_no_more(fresh: WorkerHandle, model: Artifact) -> None:
    fd = _memory()
    fresh.add_arena(ARENA, fd, SIZE)
    os.close(fd)
    _serve(fresh, 1, _plan(model), model)
    for task in range(20):
        _submit(fresh, task)
    fresh.drain()
    _submit(fresh, 20)
    ended: dict[int, str] = {}
    drained = False
    while len(ended) < 21 or not drained:
        select.select([fresh], [], [], TIMEOUT_S)
        for report in fresh.poll():
            if isinstance(report, TaskDone):
                assert report.task not in ended
                ended[report.task] = report.outcome
            drained |= isinstance(report, messages.Drained)
    assert set(ended.values()) <= {"completed", "refused"}
    assert ended[20] == "refused"


def test_a_task_before_any_plan_is_refused(fresh: WorkerHandle) -> None:
    _submit(fresh, 1, ["net"], [], [])
    assert _await(fresh, TaskDone).code == "unknown_model"


def test_a_process_without_a_plan_is_heard_from() -> None:
    handle = WorkerHandle.start(WorkerConfig(stats_interval_s=0.05))
    try:
        assert _await(handle, messages.Stats).key is None
        assert _await(handle, messages.Stats).models == ()
    finally:
        handle.stop()


def test_kill_9_is_reported_once_and_then_nothing_more(fresh: WorkerHandle) -> None:
    os.kill(fresh.pid, signal.SIGKILL)
    assert _await(fresh, messages.Exited).returncode == -signal.SIGKILL
    assert fresh.poll() == []
    assert fresh.fileno() == -1
    with pytest.raises(ChannelClosed):
        fresh.cancel(TaskId(1))
    assert fresh.stop() == -signal.SIGKILL


def test_the_process_ends_when_its_agent_is_gone() -> None:
    ours, theirs = channel_pair()
    command = [sys.executable, "-m", "stageloom.edge_agent.worker", str(theirs.fileno()), "{}"]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        Channel(ours).close()
        assert process.wait(TIMEOUT_S) == 0


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

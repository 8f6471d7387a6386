"""Recordings: complete, bounded, answered once, and gone when they are over."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageloom.edge_agent.executor.base import StepResult
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.worker import recorder as subject
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import RecordingEnded, StartRecording
from stageloom.edge_agent.worker.recorder import (
    CLOSING_S,
    Recorder,
    Recording,
    RecordingBatch,
    RecordingFile,
    read_recording,
)
from stageloom.shared.artifact import Artifact
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.plan import Plan
from stageloom.shared.search.compose import ModelChoice, compose
from tests.engine.driver import Driver
from tests.engine.plans import chains
from tests.executor.models import artifact_of, random_inputs

TASKS = 5


def _plan(model: Artifact, partition: str = "paper", scheduler: str = "greedy") -> Plan:
    choice = ModelChoice(name="net", artifact=model.digest, graph=model.graph, partition=partition)
    return compose([choice], scheduler=scheduler)


@pytest.fixture(scope="module")
def model() -> Artifact:
    return artifact_of("squeezenet")


@pytest.fixture
def shell(model: Artifact) -> Iterator[InProcessEngine]:
    with InProcessEngine(NullExecutor()) as shell:
        shell.activate(shell.load(_plan(model), {model.digest: model}))
        yield shell


def _serve(shell: InProcessEngine, model: Artifact, tasks: int = TASKS) -> None:
    """Returns once the engine has carried out all that follows from the tasks' ends."""
    inputs = random_inputs(model.graph, 1)
    ended = threading.Semaphore(0)
    for _ in range(tasks):
        shell.submit("net", inputs, on_end=lambda end: ended.release())
    for _ in range(tasks):
        assert ended.acquire(timeout=60.0)


class _Driver:
    """Remembers who records."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def record(self, recorder: Recorder | None) -> None:
        self.recorder = recorder


class _Prompt(RecordingFile):
    """A file that has everything as soon as it is finished."""

    def finish(self, data: bytes) -> None:
        super().finish(data)
        self.join()


class _Desk:
    """A recording with a driver that is played, and what it reported."""

    def __init__(self, path: Path) -> None:
        self.driver: _Driver | None = _Driver()
        self.reports: list[RecordingEnded] = []
        self.recording = Recording(lambda: self.driver, self.reports.append, _Prompt)
        self.file = os.open(path, os.O_CREAT | os.O_RDWR)
        self.path = path

    def until_quiet(self, now: float) -> None:
        while self.recording.due_s < float("inf"):
            now = max(now, self.recording.due_s)
            self.recording.advance(now)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[_Desk]:
    desk = _Desk(tmp_path / "recording")
    yield desk
    os.close(desk.file)


def test_every_step_launch_and_task_of_the_time_is_recorded(shell: InProcessEngine, model: Artifact) -> None:
    recorder = Recorder()
    before = shell.stats().steps
    shell.record(recorder)
    _serve(shell, model)
    shell.record(None)
    batch = recorder.take()
    assert batch is not None
    steps = shell.stats().steps - before
    assert len(batch.steps) == steps == TASKS * len(model.graph.partition("paper")) + TASKS
    assert sorted(one.step for one in batch.steps) == list(range(before, before + steps))
    assert all(one.groups and one.began_s <= one.ended_s for one in batch.steps)
    assert sum(one.launched for one in batch.queues) == TASKS
    assert [one.outcome for one in batch.tasks] == ["completed"] * TASKS
    assert all(one.queued_s <= (one.began_s or 0.0) <= one.ended_s for one in batch.tasks)
    assert [one.key for one in batch.swaps] == [1]
    assert list(recorder.plans) == [1]
    assert recorder.take() is None


def test_nothing_is_recorded_or_traced_once_it_is_over(shell: InProcessEngine, model: Artifact) -> None:
    recorder = Recorder()
    shell.record(recorder)
    shell.record(None)
    recorder.take()
    _serve(shell, model)
    assert recorder.take() is None
    assert not shell.executor.tracing


def test_a_swap_is_recorded_with_the_plan_that_it_goes_to(shell: InProcessEngine, model: Artifact) -> None:
    recorder = Recorder()
    shell.record(recorder)
    second = shell.load(_plan(model, "whole", "sequential"), {model.digest: model})
    shell.activate(second)
    _serve(shell, model, 1)
    batch = recorder.take()
    assert batch is not None
    assert [one.key for one in batch.swaps] == [1, second]
    assert {one.key for one in batch.steps} == {second}


def test_the_queue_of_a_model_that_the_new_plan_lacks_is_recorded_as_empty() -> None:
    recorder, driver = Recorder(), Driver(chains(1, 1, lanes=1, run_ahead=1))
    for _ in range(3):
        driver.submit("b")
    recorder.note_queues(driver.core, None, 1.0)
    driver.load(1, chains(1))
    driver.activate(1)
    driver.end_all()
    recorder.note_queues(driver.core, None, 2.0)
    batch = recorder.take()
    assert batch is not None
    assert [(one.at_s, one.queued) for one in batch.queues if one.model == "b"] == [(1.0, 1), (2.0, 0)]


@pytest.mark.parametrize("outcome", ["cancelled", "failed"])
def test_a_task_that_ends_in_its_first_step_is_recorded_as_one_that_began(
    model: Artifact, outcome: str
) -> None:
    """And one that ends before any step of it as one that never did."""

    class Disturbed(NullExecutor):
        def wait(self, step: StepId) -> StepResult:
            if outcome == "failed":
                raise RuntimeError("the backend broke")
            engine._driver.cancel(TaskId(1))
            return super().wait(step)

    recorder, inputs = Recorder(), random_inputs(model.graph, 1)
    with InProcessEngine(Disturbed()) as engine:
        engine.activate(engine.load(_plan(model), {model.digest: model}))
        engine.record(recorder)
        assert engine.submit("net", inputs).exception(60.0) is not None
        assert engine.submit("net", inputs, deadline_s=0.0).exception(60.0) is not None
    batch = recorder.take()
    assert batch is not None
    first, second = batch.tasks
    assert (first.outcome, second.outcome, second.began_s) == (outcome, "expired", None)
    assert first.began_s is not None and first.queued_s <= first.began_s <= first.ended_s


@pytest.mark.promise("recording-bounded-answered-once")
def test_what_waits_is_bounded_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MAX_WAITING", 3)
    recorder = Recorder()
    for task in range(5):
        recorder.task(TaskId(task), ("net",), (0.0, None, 1.0), Outcome.CANCELLED)
    batch = recorder.take()
    assert batch is not None
    assert [one.task for one in batch.tasks] == [0, 1, 2]
    assert recorder.dropped == 2


def test_a_recording_ends_by_itself_and_its_file_reads_back(desk: _Desk) -> None:
    desk.recording.order(StartRecording(7, 1.0), desk.file, 10.0)
    assert desk.driver is not None
    recorder = desk.driver.recorder
    assert recorder is not None
    for task in range(3):
        recorder.task(TaskId(task), ("net",), (10.0, 10.1, 10.2), Outcome.COMPLETED)
        desk.recording.advance(10.1 + task / 10)
    assert not desk.reports
    desk.until_quiet(11.0)
    assert desk.reports == [RecordingEnded(7)]
    assert desk.driver.recorder is None
    batch, recorded = read_recording(desk.path.read_bytes())
    assert [one.task for one in batch.tasks] == [0, 1, 2]
    assert (recorded.began_s, recorded.ended_s, recorded.dropped) == (10.0, 11.0, 0)


def test_a_file_is_written_on_any_core_though_a_lane_that_keeps_to_one_took_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = os.sched_getaffinity(0)
    written_on: list[set[int]] = []

    def write(descriptor: int, data: bytes) -> int:
        written_on.append(os.sched_getaffinity(0))
        return len(data)

    def order() -> None:
        os.sched_setaffinity(0, {min(allowed)})
        file = RecordingFile(descriptor)
        file.finish(b"all")
        file.join()

    descriptor = os.open(tmp_path / "recording", os.O_CREAT | os.O_RDWR)
    monkeypatch.setattr(os, "write", write)
    lane = threading.Thread(target=order)
    lane.start()
    lane.join()
    os.close(descriptor)
    assert written_on == [allowed]


def test_a_recording_for_which_there_is_no_thread_does_not_begin_and_keeps_no_file(
    desk: _Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    closed: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        patched.setattr(os, "dup", lambda descriptor: -descriptor)
        patched.setattr(os, "close", closed.append)
        with pytest.raises(OSError, match="can't start new thread; raise the limit of threads"):
            desk.recording.order(StartRecording(1, 1.0), desk.file, 0.0)
    assert closed == [-desk.file]
    assert desk.driver is not None and desk.driver.recorder is None
    desk.recording.order(StartRecording(2, 1.0), desk.file, 0.0)
    desk.until_quiet(1.0)
    assert desk.reports == [RecordingEnded(2)]


def test_only_one_recording_at_a_time(desk: _Desk) -> None:
    desk.recording.order(StartRecording(1, 1.0), desk.file, 0.0)
    desk.recording.order(StartRecording(2, 1.0), desk.file, 0.5)
    assert [(one.number, bool(one.reason)) for one in desk.reports] == [(2, True)]
    desk.until_quiet(1.0)
    desk.recording.order(StartRecording(3, 1.0), desk.file, 2.0)
    desk.until_quiet(3.0)
    assert [(one.number, one.reason) for one in desk.reports[1:]] == [(1, ""), (3, "")]


def test_without_a_plan_nothing_is_recorded_and_the_answer_says_so(desk: _Desk) -> None:
    desk.driver = None
    desk.recording.order(StartRecording(1, 1.0), desk.file, 0.0)
    assert desk.reports == [RecordingEnded(1, "no plan is loaded")]


def test_a_file_that_is_full_costs_entries_and_is_still_complete(
    desk: _Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "MAX_BYTES", 10)
    desk.recording.order(StartRecording(1, 1.0), desk.file, 0.0)
    assert desk.driver is not None and desk.driver.recorder is not None
    for now in (0.2, 0.4):
        desk.driver.recorder.task(TaskId(1), ("net",), (0.0, None, 0.1), Outcome.EXPIRED)
        desk.recording.advance(now)
    desk.until_quiet(1.0)
    batch, recorded = read_recording(desk.path.read_bytes())
    assert (len(batch.tasks), recorded.dropped) == (1, 1)


def test_a_file_that_cannot_be_written_ends_the_recording(desk: _Desk) -> None:
    read_only = os.open(desk.path, os.O_RDONLY)
    desk.recording.order(StartRecording(1, 1.0), read_only, 0.0)
    os.close(read_only)
    desk.until_quiet(1.0)
    assert len(desk.reports) == 1
    assert "cannot be written" in desk.reports[0].reason
    assert desk.driver is not None and desk.driver.recorder is None


@pytest.mark.promise("trace-goes-memory-file")
def test_a_file_that_takes_nothing_ends_the_recording_and_never_holds_the_engine() -> None:
    """A pipe that nobody reads stands for whatever a file's owner can do to who writes it."""
    reader, pipe = os.pipe()
    driver, reports = _Driver(), list[RecordingEnded]()
    recording = Recording(lambda: driver, reports.append)
    recording.order(StartRecording(1, 1.0), pipe, 0.0)
    recorder = driver.recorder
    assert recorder is not None
    for now in range(1, 4):
        for task in range(1000):
            recorder.task(TaskId(task), ("net",), (0.0, None, 0.1), Outcome.EXPIRED)
        recording.advance(now / 4)
    recording.advance(1.0)
    recording.advance(1.0)
    recording.advance(1.0 + CLOSING_S)
    assert [one.number for one in reports] == [1] and "took more than 10 s" in reports[0].reason
    assert driver.recorder is None
    recording.order(StartRecording(2, 1.0), pipe, 20.0)
    assert reports[1] == RecordingEnded(2, "another recording is under way"), "its thread still waits"
    os.close(reader)
    os.close(pipe)


def test_what_a_slow_file_has_not_taken_is_bounded_and_counted(
    desk: _Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "MAX_WAITING_BYTES", -1)
    desk.recording.order(StartRecording(1, 1.0), desk.file, 0.0)
    assert desk.driver is not None and desk.driver.recorder is not None
    desk.driver.recorder.task(TaskId(1), ("net",), (0.0, None, 0.1), Outcome.EXPIRED)
    desk.until_quiet(1.0)
    _, recorded = read_recording(desk.path.read_bytes())
    assert recorded.dropped == 1


@pytest.mark.parametrize("size", [0, 3, 5])
def test_a_recording_that_was_cut_off_is_refused(desk: _Desk, size: int) -> None:
    desk.recording.order(StartRecording(1, 1.0), desk.file, 0.0)
    desk.until_quiet(1.0)
    with pytest.raises(ValueError, match=r"cut off|truncated"):
        read_recording(desk.path.read_bytes()[:size])


def test_a_batch_is_bounded_so_that_writing_never_holds_the_engine_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subject, "_ENTRIES_PER_WRITE", 2)
    recorder = Recorder()
    for task in range(3):
        recorder.task(TaskId(task), ("net",), (0.0, None, 1.0), Outcome.CANCELLED)
    taken: list[RecordingBatch] = []
    while (batch := recorder.take()) is not None:
        taken.append(batch)
    assert [len(one.tasks) for one in taken] == [2, 1]

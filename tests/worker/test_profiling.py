"""Profiles by the engine's own process, beside what it serves."""

import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from stageloom.edge_agent.executor.base import OperatorTime, StepResult, TimingRequest
from stageloom.edge_agent.executor.executors import _WHERE, Executors
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.executor.onnx.split_timing import PartTime
from stageloom.edge_agent.executor.timing import IdleTime
from stageloom.edge_agent.worker import messages, profiling
from stageloom.edge_agent.worker.client import memory_file
from stageloom.edge_agent.worker.messages import WorkerConfig
from stageloom.edge_agent.worker.profiling import Profiler
from stageloom.edge_agent.worker.resources import ArtifactTable
from stageloom.edge_agent.worker.runtime import EngineRuntime
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.engine.stats import QueueSnapshot
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.errors import BackendUnavailable, ExecutorError
from stageloom.shared.ids import Digest, StepId
from stageloom.shared.launch_list import lower
from stageloom.shared.partition import Axis
from stageloom.shared.plan import ExecutorOptions, Plan
from stageloom.shared.search.compose import ModelChoice, compose
from tests.shared.strangers import install
from tests.worker.engine import TIMEOUT_S, RealEngine
from tests.worker.test_process import ARENA, SIZE, _memory, _plan, _serve, _task, model

__all__ = ["model"]  # a fixture


def staged(model: Artifact, executor: str = "onnx") -> Plan:
    """Another plan than the one that serves: parallel stages in several blocks."""
    choice = ModelChoice(name="net", artifact=model.digest, graph=model.graph, partition="base")
    return compose([choice], scheduler="greedy", executor=ExecutorOptions(name=executor))


@pytest.fixture
def serving(model: Artifact) -> Iterator[tuple[RealEngine, mmap.mmap]]:
    engine = RealEngine(WorkerConfig(sample_interval_s=0.02, stats_interval_s=0.2))
    engine.wait_for(messages.Ready)
    fd = _memory()
    memory = mmap.mmap(fd, SIZE)
    engine.send(messages.AddArena(ARENA, SIZE), [fd])
    os.close(fd)
    _serve(engine, 1, _plan(model), model)
    yield engine, memory
    assert engine.stop() == 0


def profile(
    engine: RealEngine, model: Artifact, plan: Plan, number: int, **fields: float
) -> list[messages.StageTimes]:
    engine.send_file(
        messages.ProfileStages(number, {model.digest: str(model.path)}, **fields),  # type: ignore[arg-type]
        plan.wire,
    )
    return answer(engine)


def answer(engine: RealEngine) -> list[messages.StageTimes]:
    parts = [engine.wait_for(messages.StageTimes)]
    while not parts[-1].last:
        parts.append(engine.wait_for(messages.StageTimes))
    return parts


def test_the_stages_of_a_plan_that_does_not_run_are_timed_and_what_runs_serves_on(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    engine, memory = serving
    plan = staged(model)
    bound = bind(plan, {model.digest: model.graph})
    parts = profile(engine, model, plan, 3, repeats=2)
    assert [part.reason for part in parts] == [""] * len(parts)
    assert [part.combined for part in parts] == list(range(len(plan.combined)))
    for part, combined in zip(parts, bound.combined, strict=True):
        items = lower(combined.plan.schedule, combined.graph, combined.full_mask)
        assert [stage for stage, *_ in part.times] == sorted({item.stage for item in items})
        assert all(median > 0 and runs == 2 for _, median, _, runs, _ in part.times)
        assert part.step_us >= max(median for _, median, _, _, _ in part.times)
    _task(engine, memory, model, 1)


@pytest.mark.promise("profiles-give-way-tasks")
def test_tasks_that_come_meanwhile_are_served_and_the_profile_goes_on_in_their_pauses(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    engine, memory = serving
    plan = staged(model)
    engine.send_file(
        messages.ProfileStages(4, {model.digest: str(model.path)}, repeats=200, limit_s=2.0), plan.wire
    )
    for task in range(10, 30):
        _task(engine, memory, model, task)
    parts = answer(engine)
    assert all(runs > 0 for part in parts for *_, runs in part.times)
    assert parts[-1].times, "it got its pauses"


def test_a_plan_that_cannot_be_profiled_is_answered_with_the_reason(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    engine, memory = serving
    engine.send_file(messages.ProfileStages(5, {}), b"garbage")
    (part,) = answer(engine)
    assert part.last and not part.times and "not a plan" in part.reason
    other = staged(model, executor="null")
    parts = profile(engine, model, other, 6, repeats=1)
    assert parts[-1].last, "an executor of its own"
    _task(engine, memory, model, 2)


def test_an_executor_that_refuses_a_plan_is_told_from_time_that_was_up(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    engine, _ = serving
    (part,) = profile(engine, model, staged(model, executor="of nobody"), 8)
    assert "no executor is called" in part.reason and part.refused
    (part,) = profile(engine, model, staged(model), 9, limit_s=0.0)
    assert "time limit" in part.reason and not part.refused


class Refusing(NullExecutor):
    """It has not all of the model's operators."""

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        raise ExecutorError("no such operator")


class Crowded(NullExecutor):
    """Another process has the memory."""

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        raise BackendUnavailable("too little memory is free")


class Broken(NullExecutor):
    """Its steps fail."""

    def wait(self, step: StepId) -> StepResult:
        super().wait(step)
        raise ExecutorError(f"step {step} failed: out of memory")


class Absent(NullExecutor):
    """It finds no device."""

    def __init__(self) -> None:
        raise BackendUnavailable("CUDA finds no usable GPU")


failures = pytest.mark.parametrize(
    ("executor", "reason", "refused"),
    [
        (Refusing, "no such operator", True),
        (Crowded, "too little memory", False),
        (Broken, "out of memory", False),
        (Absent, "no usable GPU", False),
    ],
)


@failures
def test_only_a_load_that_says_that_the_plan_cannot_run_refuses_it(
    model: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    executor: type[NullExecutor],
    reason: str,
    *,
    refused: bool,
) -> None:
    monkeypatch.setitem(_WHERE, "null", (__name__, executor.__name__, ""))
    (part,) = profiled_here(staged(model, "null"), model, Executors())
    assert reason in part.reason and part.refused is refused


@failures
def test_a_failure_that_may_pass_tells_no_time_of_a_model_as_a_whole_and_the_answer_says_why(
    model: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    executor: type[NullExecutor],
    reason: str,
    *,
    refused: bool,
) -> None:
    """Where none is told the planner keeps the time that it has."""
    monkeypatch.setitem(_WHERE, "null", (__name__, executor.__name__, ""))
    *whole, operators = operators_here(model)
    assert [(one.time_us, reason in one.reason) for one in whole] == [(None, True)] * refused
    assert (reason in operators.reason) is not refused


def test_a_model_that_is_not_timed_as_a_whole_for_want_of_time_is_told_with_its_operators(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_WHOLE_SHARE", 0.0)
    (operators,) = operators_here(model)
    assert len(operators.times) == len(model.graph.operators)
    assert "as a whole is not timed: the time limit" in operators.reason
    assert "ask with a larger one" in operators.reason


def test_where_the_device_is_too_busy_to_time_the_whole_model_no_larger_budget_is_asked_for(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    turning_clock(monkeypatch)
    (operators,) = operators_here(model, idle=lambda: False)
    assert "as a whole is not timed: the device was too busy" in operators.reason
    assert "ask when fewer tasks come, or raise profile_wall_s" in operators.reason
    assert "larger" not in operators.reason


def turning_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute goes by with each look at the clock, and no sleep takes time."""
    clock: Any = map((60.0).__mul__, count())
    timed = partial(IdleTime, clock=clock.__next__, sleep=lambda seconds: None)
    monkeypatch.setattr(profiling, "IdleTime", timed)


def operators_here(model: Artifact, idle: Callable[[], bool] = lambda: True) -> list[Any]:
    """What is told of a model's operators, and before it of the whole, by a profiler in this process."""
    reports: list[messages.Report] = []
    profiler = Profiler(reports.append, lambda: None, Executors(), ArtifactTable(), idle, 0)
    profiler._time_operators(messages.Profile(1, model.digest, str(model.path), "null"))
    assert isinstance(reports[-1], messages.OperatorTimes), "the request is answered"
    return reports


def test_it_says_when_it_works_on_a_request_and_when_it_waits_for_a_moment(model: Artifact) -> None:
    """1. It opens the model. 2. A task is served. 3. The work goes on, to its end."""
    reports: list[messages.Report] = []
    answers = iter([False])
    profiler = Profiler(
        reports.append, lambda: None, Executors(), ArtifactTable(), lambda: next(answers, True), 0
    )
    with memory_file(staged(model, "null").wire) as fd:
        order = messages.ProfileStages(5, {model.digest: str(model.path)}, repeats=1)
        profiler.handlers[messages.ProfileStages](order, [fd])
    profiler._work_on(*profiler._jobs.get())
    worked = [report.request for report in reports if isinstance(report, messages.Profiling)]
    assert worked == [5, 0, 5, 0]
    assert isinstance(reports[-2], messages.StageTimes) and reports[-2].last


def test_work_waits_for_a_plan_that_is_loaded_or_compared_and_says_so(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A plan is loaded as the request comes. 2. Work begins. 3. Another one is loaded. 4. It goes on."""
    monkeypatch.setattr(profiling, "_POLL_S", 0.0)
    said: list[object] = []
    answers = iter([True, True, False, True])

    def tries_plan() -> bool:
        tries = next(answers, False)
        said.extend(["a plan"] * tries)
        return tries

    def report(report: messages.Report) -> None:
        said.append(report.request if isinstance(report, messages.Profiling) else type(report))

    profiler = Profiler(
        report, lambda: None, Executors(), ArtifactTable(), lambda: True, 0, tries_plan=tries_plan
    )
    profiler.handlers[messages.Profile](messages.Profile(5, model.digest, str(model.path), "null"), [])
    profiler._work_on(*profiler._jobs.get())
    answer = [messages.WholeTime, messages.OperatorTimes]
    assert said == ["a plan", "a plan", 5, "a plan", 0, 5, *answer, 0]


def test_work_that_asks_for_no_moment_is_said_to_be_worked_on_though_none_was_idle(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task that is served meanwhile makes the request one that waits."""
    turning_clock(monkeypatch)
    reports: list[messages.Report] = []
    answers = iter([True])  # the first moment is for loading
    profiler = Profiler(
        reports.append, lambda: None, Executors(), ArtifactTable(), lambda: next(answers, False), 0
    )
    works: list[tuple[str, int]] = []

    def note(what: str, *, busy: bool = False) -> None:
        works.append((what, profiler._told))
        if busy:
            assert not profiler._idle() and profiler._told == 0

    class Noting(NullExecutor):
        def __init__(self) -> None:
            super().__init__()
            note("make")

        def unload(self, key: PlanKey) -> None:
            note("unload")

        def time_operators(self, *asked: Any) -> tuple[OperatorTime, ...]:
            note("operators", busy=True)
            return super().time_operators(*asked)

        def close(self) -> None:
            note("close", busy=True)

    def parts(*asked: Any) -> tuple[PartTime, ...]:
        note("parts", busy=True)
        return (PartTime(0, Axis.CHANNELS, 1, OperatorTime(1.0, 0.0, 1)),)

    def cores(threads: int) -> None:
        note("hand-over", busy=True)

    monkeypatch.setattr(profiling, "make_executor", lambda name: Noting())
    monkeypatch.setattr(profiling, "timed_parts", parts)
    monkeypatch.setattr(profiling, "core_pair", cores)
    asked = messages.Profile(5, model.digest, str(model.path), "null", TimingRequest(limit_s=1e6), parts=1)
    profiler._work_on(5, lambda: profiler._time_operators(asked))
    kinds = ["make", "unload", "close", "make", "operators", "parts", "hand-over", "close"]
    assert works == [(kind, 5) for kind in kinds]


SLOW = """
from stageloom.edge_agent.executor.null import NullExecutor

class Slow(NullExecutor):
    name = "slow"

    def load(self, key, bound, artifacts):
        super().load(key, bound, artifacts)
        open({gate!r}).read()
"""


def test_a_profile_begins_behind_the_load_that_was_ordered_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Artifact
) -> None:
    """So what ends the process meanwhile is that plan."""
    os.mkfifo(gate := tmp_path / "gate")
    install(tmp_path, "slow", "stageloom.executors", {"slow": "slow:Slow"}, SLOW.format(gate=str(gate)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    engine = RealEngine()
    engine.load(1, _plan(model, executor="slow"), model)
    engine.send(messages.Profile(5, model.digest, str(model.path), "null"))
    engine.send(messages.Unload(9))
    assert engine.wait_for(messages.PlanFailed).key == 9, "the profile was ordered, too"
    gate.write_text("")
    engine.wait_for(messages.OperatorTimes)
    kinds = [type(report) for report in engine.reports]
    assert kinds.index(messages.PlanLoaded) < kinds.index(messages.Profiling)
    assert engine.stop() == 0


def profiled_here(
    plan: Plan,
    model: Artifact,
    executors: Executors,
    driver: EngineRuntime | None = None,
    *,
    memory_bytes: int = 0,
) -> list[messages.StageTimes]:
    """The answer to a request by a profiler in this process."""
    reports: list[messages.Report] = []
    profiler = Profiler(
        reports.append, lambda: driver, executors, ArtifactTable(), lambda: True, memory_bytes
    )
    profiler._time_stages(messages.ProfileStages(1, {model.digest: str(model.path)}, repeats=1), plan.wire)
    return [report for report in reports if isinstance(report, messages.StageTimes)]


def two_executors(model: Artifact) -> Plan:
    """The blocks in turns on two executors, neither of which computes more than the other."""
    choice = ModelChoice(name="net", artifact=model.digest, graph=model.graph, partition="base")
    plan = compose([choice], executor=ExecutorOptions(name="onnx"))
    return replace(
        plan,
        further_executors=(ExecutorOptions(name="other"),),
        combined=tuple(replace(one, executor=at % 2) for at, one in enumerate(plan.combined)),
    )


class Other(OnnxExecutor):
    """Under another name, so that it shares plans with the first."""

    name = "other"


@pytest.mark.parametrize("serving", ["nothing", "onnx", "other", "both"])
def test_a_plan_on_two_executors_is_timed_whatever_serves(
    model: Artifact, monkeypatch: pytest.MonkeyPatch, serving: str
) -> None:
    monkeypatch.setitem(_WHERE, "other", (__name__, "Other", ""))
    plan = two_executors(model)
    executors = Executors()
    driver = EngineRuntime(executors) if serving != "nothing" else None
    if driver is not None:
        served = plan if serving == "both" else staged(model, serving)
        driver.load(PlanKey(0), bind(served, {model.digest: model.graph}), {model.digest: model})
    parts = profiled_here(plan, model, executors, driver)
    assert {part.combined for part in parts} == set(range(len(plan.combined)))
    assert all(part.step_us > 0 and not part.reason for part in parts)
    (driver or executors).close()


def test_a_profile_by_executors_of_its_own_finds_room_beside_those_that_serve(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_WHERE, "other", (__name__, "Other", ""))
    executors = Executors()
    driver = EngineRuntime(executors)
    served, plan = (bind(staged(model, name), {model.digest: model.graph}) for name in ("onnx", "other"))
    driver.load(PlanKey(0), served, {model.digest: model})
    needed_bytes = executors.held_bytes + Executors().stated_bytes(plan)
    (part,) = profiled_here(plan.plan, model, executors, driver, memory_bytes=needed_bytes - 1)
    assert "bytes beside what is loaded" in part.reason and not part.refused
    parts = profiled_here(plan.plan, model, executors, driver, memory_bytes=needed_bytes)
    assert all(part.times for part in parts)
    driver.close()


def test_a_plan_that_does_not_fit_beside_what_runs_is_skipped_with_the_reason(model: Artifact) -> None:
    engine = RealEngine(WorkerConfig(memory_bytes=1 << 16))
    try:
        engine.wait_for(messages.Ready)
        (part,) = profile(engine, model, staged(model), 7)
        assert part.last and not part.times and "bytes" in part.reason
        assert not part.refused, "there may be room another time"
    finally:
        engine.stop()


def test_glances_come_at_an_even_pace_and_show_the_queue(
    serving: tuple[RealEngine, mmap.mmap], model: Artifact
) -> None:
    engine, memory = serving
    _task(engine, memory, model, 40)
    ends_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends_s:
        seen = engine.wait_for(QueueSnapshot)
        if seen.queues[0].arrived:
            break
    assert (seen.key, seen.queues[0].name, seen.queues[0].arrived) == (1, "net", 1)
    assert seen.queues[0].blocks >= 1
    times = [engine.wait_for(QueueSnapshot).at_s for _ in range(10)]
    assert times == sorted(times)

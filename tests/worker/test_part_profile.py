"""Profile requests for parts of operators: what is timed, what a hand-over is, what is told without."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.eop.models import imported, layers
from stageloom.edge_agent.executor.base import StepResult, TimingRequest
from stageloom.edge_agent.executor.executors import Executors
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.executor.timing import IdleTime
from stageloom.edge_agent.worker.messages import OperatorTimes, PartsTimed, Profile, Report, WholeTime
from stageloom.edge_agent.worker.part_profile import (
    HANDOVERS,
    LEAST_HANDOVER_S,
    core_pair,
    handover_plan,
    handover_s,
)
from stageloom.edge_agent.worker.profiling import Profiler, StageSamples, profile_stages
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.engine.steps import PlanKey, ProgramKey
from stageloom.shared.ids import Digest, StepId
from stageloom.shared.importer.splittable import SplitReader
from stageloom.shared.partition import Axis
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.measured_splits import PartSample, part_samples

LAYERS = 8
LIMIT_S = 60.0
TWO_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two resources need two cores")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return imported(layers(LAYERS), tmp_path_factory.mktemp("model") / "dense")


class Table:
    """The artifacts of an engine process that has one."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact

    def use(self, user: object, digest: str, paths: Mapping[str, str]) -> Artifact:
        assert digest == self._artifact.digest
        return self._artifact

    def release(self, user: object) -> None:
        pass


def reports_of(artifact: Artifact, executor: str = "onnx", *, parts: int = 5) -> list[Report]:
    told: list[Report] = []
    table: Any = Table(artifact)
    profiler = Profiler(told.append, lambda: None, Executors(), table, lambda: True, 0)
    timing = TimingRequest(repeats=2, limit_s=LIMIT_S)
    request = Profile(1, artifact.digest, str(Path()), executor, timing, parts=parts)
    profiler.handlers[Profile](request, [])
    _, job = profiler._jobs.get()
    job()
    return told


class Placed(OnnxExecutor):
    """Notes on which cores the calling thread may run."""

    def __init__(self) -> None:
        super().__init__()
        self.made_on: list[set[int]] = []
        self.run_on: list[set[int]] = []

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        self.made_on.append(os.sched_getaffinity(0))
        super().load(key, bound, artifacts)

    def prepare(self, program: ProgramKey) -> None:
        self.made_on.append(os.sched_getaffinity(0))
        super().prepare(program)

    def wait(self, step: StepId) -> StepResult:
        self.run_on.append(os.sched_getaffinity(0))
        return super().wait(step)


def samples(ops: int, *, axis: Axis = Axis.BATCH) -> list[PartSample]:
    """Parts that take a microsecond a row, and longer the later the operator is."""
    return [PartSample(op, axis, rows, (rows + op) * 1e-6) for op in range(ops) for rows in (4, 8, 12, 16)]


@TWO_CORES
def test_parts_of_the_operators_and_a_hand_over_are_told_before_the_operators_end_the_request(
    artifact: Artifact,
) -> None:
    whole, parts, operators = reports_of(artifact)
    assert isinstance(whole, WholeTime) and whole.time_us is not None
    assert isinstance(operators, OperatorTimes) and operators.operators == LAYERS
    assert isinstance(parts, PartsTimed) and parts.reason == ""
    assert parts.handover_us is not None and parts.handover_us >= 1e6 * LEAST_HANDOVER_S
    assert parts.copy_bytes_per_s is not None and parts.copy_bytes_per_s > 1e6
    assert {op for op, *_ in parts.times} == {0}, "layers are alike: the first stands for all"
    reader = SplitReader(artifact)
    axes = [reader.axes(op) for op in range(LAYERS)]
    timed = [PartSample(op, Axis(axis), extent, us / 1e6) for op, axis, extent, us, _, _ in parts.times]
    known = part_samples(axes, [0] * LAYERS, timed)
    assert known.keys() == {(op, one.axis) for op in range(LAYERS) for one in axes[op]}


@TWO_CORES
def test_hand_overs_run_on_the_cores_of_a_resource_and_what_may_serve_later_is_made_anywhere(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of sessions and of the pool keep for good to the cores of whoever makes them."""
    everywhere, made = os.sched_getaffinity(0), list[Placed]()

    def make(name: str) -> Placed:
        made.append(Placed())
        return made[-1]

    monkeypatch.setattr("stageloom.edge_agent.worker.profiling.make_executor", make)
    _, parts, _ = reports_of(artifact)
    assert isinstance(parts, PartsTimed) and parts.handover_us is not None
    cores = core_pair(1)
    assert cores is not None
    assert all(on == everywhere for executor in made for on in executor.made_on)
    assert made[-1].run_on and all(on == set(cores[0]) for on in made[-1].run_on)
    assert os.sched_getaffinity(0) == everywhere


@TWO_CORES
@pytest.mark.parametrize(("parts", "limits"), [(0, 2), (5, 4)])
def test_the_time_of_a_request_is_shared_by_all_that_it_measures(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, parts: int, limits: int
) -> None:
    """The whole model and its operators; with parts these and hand-overs, too."""
    given: list[float] = []

    class Noted(IdleTime):
        def __init__(self, idle: Callable[[], bool], *, own_s: float, wall_s: float) -> None:
            given.append(own_s)
            super().__init__(idle, own_s=own_s, wall_s=wall_s)

    for module in ("worker.profiling", "executor.onnx.timing", "executor.onnx.split_timing"):
        monkeypatch.setattr(f"stageloom.edge_agent.{module}.IdleTime", Noted)
    reports_of(artifact, parts=parts)
    assert len(given) == limits and sum(given) == pytest.approx(LIMIT_S)


def test_without_a_request_for_parts_none_are_timed(artifact: Artifact) -> None:
    assert not any(isinstance(one, PartsTimed) for one in reports_of(artifact, parts=0))


def test_an_executor_that_times_no_parts_says_so_and_its_operators_are_told(artifact: Artifact) -> None:
    *_, parts, operators = reports_of(artifact, "null")
    assert isinstance(parts, PartsTimed) and parts.times == ()
    assert "times no parts" in parts.reason
    assert isinstance(operators, OperatorTimes) and operators.reason == ""


def test_on_one_core_parts_are_told_and_why_there_is_no_hand_over(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert core_pair(1) is None
    _, parts, _ = reports_of(artifact)
    assert isinstance(parts, PartsTimed) and parts.times and parts.handover_us is None
    assert parts.reason == "two resources need 2 cores"


def test_hand_overs_are_what_steps_take_beyond_whole_groups_and_the_longer_halves(artifact: Artifact) -> None:
    """Six splits of the shortest operators, each in the middle; the rest of the model is whole."""
    asked = handover_plan(artifact, samples(LAYERS), ExecutorOptions(), ((0,), (1,)))
    assert asked is not None and asked.splits == HANDOVERS
    splits = asked.plan.models[0].splits
    assert [(one.first, one.axis, one.boundary) for one in splits] == [
        (op, Axis.BATCH, 8) for op in range(HANDOVERS)
    ]
    assert asked.halves_s == pytest.approx(sum(8 + op for op in range(HANDOVERS)) * 1e-6)
    schedule = asked.plan.combined[0].schedule
    assert isinstance(schedule, StageSchedule)
    halves = {number for number, stage in enumerate(schedule.stages) if stage.resources}
    assert len(halves) == HANDOVERS
    found = StageSamples()
    for number in range(len(schedule.stages)):
        found.stage_s[number] += [1.0, 1.0] if number in halves else [5e-6, 5e-6]
    whole_s = 5e-6 * (len(schedule.stages) - HANDOVERS)
    assert handover_s(schedule, found, asked) is None, "no step was measured"
    found.step_s += [whole_s + asked.halves_s + HANDOVERS * 90e-6] * 2
    assert handover_s(schedule, found, asked) == pytest.approx(90e-6)
    found.step_s[:] = [whole_s]
    assert handover_s(schedule, found, asked) == LEAST_HANDOVER_S


def test_there_is_no_plan_of_hand_overs_without_parts_of_two_extents(artifact: Artifact) -> None:
    only_whole = [PartSample(0, Axis.BATCH, 16, 1e-5)]
    assert handover_plan(artifact, only_whole, ExecutorOptions(), ((0,), (1,))) is None


@TWO_CORES
def test_the_stages_of_a_plan_with_resources_are_timed_behind_all_its_lanes(artifact: Artifact) -> None:
    """Such a step is no lane's; it used to fail for want of a resource of its lane."""
    cores = sorted(os.sched_getaffinity(0))
    asked = handover_plan(artifact, samples(LAYERS), ExecutorOptions(), ((cores[0],), (cores[1],)))
    assert asked is not None
    bound, executor = bind(asked.plan, {artifact.digest: artifact.graph}), OnnxExecutor()
    moments = IdleTime(lambda: True, own_s=60.0, wall_s=60.0)
    (found,) = profile_stages(bound, {artifact.digest: artifact}, executor, moments, 2)
    executor.close()
    assert len(found.step_s) == 2
    assert asked.plan.resource_of(99) == asked.plan.lane_resources[0]

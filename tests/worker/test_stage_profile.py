"""Stages timed alone: which steps run, what counts, and when it gives way or up."""

import itertools
from collections.abc import Callable

import pytest
from msgspec import structs

from stageloom.edge_agent.executor.base import StepResult
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.executor.timing import Idleness, IdleTime, time_repeats
from stageloom.edge_agent.worker.profiling import (
    StageSamples,
    joined,
    profile_stages,
    stage_reports,
)
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import StepId
from stageloom.shared.launch_list import lower
from stageloom.shared.plan import ExecutorOptions, Member
from stageloom.shared.schedule import StageSchedule, stage_schedule
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.stage_times import stage_spans
from tests.executor.contract.schedules import bound_of, graph_of, merged, plan_of
from tests.executor.models import artifact_of


def always() -> IdleTime:
    return IdleTime(lambda: True, own_s=60.0, wall_s=60.0)


@pytest.fixture(scope="module")
def model() -> Artifact:
    return artifact_of("squeezenet")


def bound_plan(model: Artifact, executor: str = "onnx") -> BoundPlan:
    choice = ModelChoice(name="net", artifact=model.digest, graph=model.graph, partition="base")
    plan = compose([choice], scheduler="greedy", executor=ExecutorOptions(name=executor))
    return bind(plan, {model.digest: model.graph})


def profiled(
    model: Artifact, bound: BoundPlan, executor: OnnxExecutor | NullExecutor, moments: IdleTime, repeats: int
) -> list[StageSamples]:
    return profile_stages(bound, {model.digest: model}, executor, moments, repeats)


def test_every_stage_of_every_combined_block_has_its_time_and_the_plan_is_freed(model: Artifact) -> None:
    bound, executor = bound_plan(model), OnnxExecutor()
    times = profiled(model, bound, executor, always(), 2)
    for combined, found in zip(bound.combined, times, strict=True):
        items = lower(combined.plan.schedule, combined.graph, combined.full_mask)
        assert len(found.step_s) == 2
        assert {stage: len(taken) for stage, taken in found.stage_s.items()} == {i.stage: 2 for i in items}
        # Stages follow each other behind barriers, so their times add up to no more than the step's.
        assert all(sum(s[run] for s in found.stage_s.values()) <= found.step_s[run] for run in range(2))
        assert min(min(taken) for taken in found.stage_s.values()) > 0
    assert executor.sessions == 0
    executor.close()


def test_a_merge_stage_is_timed_as_the_one_launch_that_it_is(model: Artifact) -> None:
    schedule = merged(graph_of([model], [()], [Member(0, 0, 0)]))
    bound, executor = (
        bound_of(plan_of([model], [()], [[Member(0, 0, 0)]], [schedule]), [model]),
        OnnxExecutor(),
    )
    (found,) = profiled(model, bound, executor, always(), 2)
    merges = {index for index, stage in enumerate(schedule.stages) if stage.merge}
    assert merges and merges <= found.stage_s.keys()
    assert all(len(found.stage_s[stage]) == 2 and min(found.stage_s[stage]) > 0 for stage in merges)
    executor.close()


def test_two_blocks_of_one_replica_in_a_combined_block_run_as_a_pipeline_would(model: Artifact) -> None:
    """The null executor checks that every instance is before the block that a step names."""
    cuts = model.graph.base_cuts[:2]
    groups = [[Member(0, 0, 0), Member(0, 0, 1)], [Member(0, 0, 2)]]
    bound = bound_of(plan_of([model], [cuts], groups), [model])
    executor = NullExecutor()
    times = profiled(model, bound, executor, always(), 3)
    assert [len(one.step_s) for one in times] == [3, 3]
    full = len(lower(bound.combined[0].plan.schedule, bound.combined[0].graph, 0b11))
    assert sum(len(record.items) == full for record in executor.history) >= 4


class Paced(NullExecutor):
    """Steps that took so many seconds, it says."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def wait(self, step: StepId) -> StepResult:
        return structs.replace(super().wait(step), started_s=0.0, ended_s=self.seconds)


@pytest.mark.parametrize(("seconds", "runs"), [(0.1, 9), (0.01, 25), (0.0001, 250)])
def test_short_steps_run_until_they_took_long_enough_together_to_tell(
    model: Artifact, seconds: float, runs: int
) -> None:
    plan = compose(
        [ModelChoice(name="net", artifact=model.digest, graph=model.graph)],
        executor=ExecutorOptions(name="null"),
    )
    bound = bind(plan, {model.digest: model.graph})
    (found,) = profile_stages(bound, {model.digest: model}, Paced(seconds), always(), 9, at_least_s=0.2495)
    assert len(found.step_s) == runs


class Switch:
    """Idle or not, by a script that is read at every question; the last answer stays."""

    def __init__(self, answers: Callable[[int], bool]) -> None:
        self.asked = 0
        self._answers = answers

    def __call__(self) -> bool:
        self.asked += 1
        return self._answers(self.asked)


@pytest.mark.promise("profiles-give-way-tasks")
def test_a_run_during_which_a_task_came_is_not_counted(model: Artifact) -> None:
    bound, executor = bound_plan(model, "null"), NullExecutor()
    ticks = itertools.count()
    switch = Switch(lambda asked: asked % 7 != 0)
    moments = IdleTime(switch, own_s=1e6, wall_s=1e6, clock=lambda: next(ticks) * 1e-6, sleep=lambda _: None)
    disturbed = profiled(model, bound, executor, moments, 2)
    ran = len(executor.history)
    calm = NullExecutor()
    undisturbed = profiled(model, bound, calm, always(), 2)
    assert (
        [len(one.step_s) for one in disturbed]
        == [len(one.step_s) for one in undisturbed]
        == [2] * len(bound.combined)
    )
    assert ran > len(calm.history), "what was disturbed ran again"


class Visited(NullExecutor):
    """Beside some of its steps a task comes on another lane, runs and ends."""

    def __init__(self, number_beside: Callable[[int], bool]) -> None:
        super().__init__()
        self.arrived = 0
        self._number_beside = number_beside

    def wait(self, step: StepId) -> StepResult:
        self.arrived += self._number_beside(len(self.history))
        return super().wait(step)


@pytest.mark.promise("profiles-give-way-tasks")
def test_a_run_is_not_counted_during_which_a_task_came_and_ended(model: Artifact) -> None:
    """Whenever it is asked the device is idle."""
    bound, visited = bound_plan(model, "null"), Visited(lambda step: step % 5 == 0)
    idle = Idleness(lambda: True, lambda: visited.arrived)
    found = profiled(model, bound, visited, IdleTime(idle, own_s=60.0, wall_s=60.0), 2)
    assert [len(one.step_s) for one in found] == [2] * len(bound.combined)
    calm = NullExecutor()
    profiled(model, bound, calm, always(), 2)
    assert len(visited.history) > len(calm.history), "what was disturbed ran again"


def test_an_operator_is_timed_by_the_runs_beside_which_no_task_came() -> None:
    taken_s = iter(range(1, 10))
    arrived = 0

    def lap() -> float:
        nonlocal arrived
        seconds = next(taken_s)
        arrived += seconds <= 2  # one task each, which ends within the run
        return seconds

    moments = IdleTime(Idleness(lambda: True, lambda: arrived), own_s=60.0, wall_s=60.0)
    found = time_repeats(lap, 3, moments)
    assert (found.median_us, found.runs) == (4e6, 3)


def test_it_gives_up_on_a_busy_device_and_when_its_own_time_is_spent_and_says_which(model: Artifact) -> None:
    bound = bound_plan(model, "null")

    def moments(idle: bool) -> IdleTime:
        ticks = itertools.count()
        return IdleTime(
            lambda: idle, own_s=1.0, wall_s=50.0, clock=lambda: next(ticks) * 0.1, sleep=lambda _: None
        )

    busy, spent = moments(False), moments(True)
    executor = NullExecutor()
    assert [one.step_s for one in profiled(model, bound, executor, busy, 2)] == [[] for _ in bound.combined]
    assert "too busy" in busy.reason
    assert not executor.history
    profiled(model, bound, executor, spent, 1000)
    assert "used up" in spent.reason


def test_what_was_measured_is_reported_in_parts_and_only_the_last_one_ends_it() -> None:
    plan = digest_bytes([b"plan"])
    times = [StageSamples([1e-3, 3e-3, 2e-3]), StageSamples(), StageSamples([5e-3])]
    times[0].stage_s[0] = [1e-3] * 3
    times[0].stage_s[4] = [5e-4, 1e-3, 7e-4]
    times[2].stage_s[0] = [4e-3]
    first, last = stage_reports(8, plan, times, "time was up")
    assert (first.combined, first.last) == (0, False)
    assert first.step_us == pytest.approx(2000.0)
    assert [(stage, runs) for stage, _, _, runs, _ in first.times] == [(0, 3), (4, 3)]
    assert first.times[1][1] == pytest.approx(700.0)
    assert (last.combined, last.last, last.reason) == (2, True, "time was up")
    (nothing,) = stage_reports(8, plan, [StageSamples()], "")
    assert nothing.last and nothing.reason and not nothing.times


def test_stage_spans_are_from_the_first_begin_to_the_last_end(model: Artifact) -> None:
    combined = bound_plan(model).combined
    for one in combined:
        items = lower(one.plan.schedule, one.graph, one.full_mask)
        times = [(at, 10.0 * at, 10.0 * at + 5 + at % 3) for at in range(len(items))]
        spans = stage_spans(items, reversed(times))
        assert spans is not None
        for stage in {item.stage for item in items}:
            of_stage = [times[at] for at, item in enumerate(items) if item.stage == stage]
            assert spans[stage] == (min(t[1] for t in of_stage), max(t[2] for t in of_stage))
        assert stage_spans(items, times[1:]) is None, "cut off"
        assert stage_spans(items, [*times, (len(items), 0.0, 1.0)]) is None, "of another mask"


def test_only_the_combined_blocks_that_were_named_are_timed(model: Artifact) -> None:
    bound, executor = bound_plan(model, "null"), NullExecutor()
    wanted = (1, 3)
    found = profile_stages(bound, {model.digest: model}, executor, always(), 2, wanted)
    assert [index for index, block in enumerate(found) if block.step_s] == list(wanted)
    with pytest.raises(ExecutorError, match="no combined block 99"):
        profile_stages(bound, {model.digest: model}, executor, always(), 2, (99,))


def test_blocks_in_turn_find_instances_at_their_borders_so_that_each_runs_once_a_round(
    model: Artifact,
) -> None:
    """A round over B blocks is B steps, not B (B + 1) / 2."""
    bound, executor = bound_plan(model, "null"), NullExecutor()
    profiled(model, bound, executor, always(), 3)
    assert len(executor.history) == 4 * len(bound.combined)


def test_stages_of_one_group_that_run_as_one_are_told_as_one(model: Artifact) -> None:
    """Else the first of them would seem to take what all of them take."""
    member = Member(0, 0, 0)
    graph = graph_of([model], [()], [member])
    in_turn = [[[op]] for op in range(graph.size)]
    bound = bound_of(plan_of([model], [()], [[member]], [stage_schedule(in_turn)]), [model])
    executor = NullExecutor()
    (found,) = profiled(model, bound, executor, always(), 2)
    assert found.stages == {0: graph.size} and list(found.stage_s) == [0]
    (told,) = stage_reports(1, digest_bytes([b"plan"]), [found], "")
    assert [(stage, stages) for stage, _, _, _, stages in told.times] == [(0, graph.size)]


def test_a_stage_of_groups_ends_the_stages_that_run_as_one(model: Artifact) -> None:
    for combined in bound_plan(model).combined:
        schedule = combined.plan.schedule
        assert isinstance(schedule, StageSchedule)
        together = joined(lower(schedule, combined.graph, combined.full_mask), schedule)
        for first, count in together.items():
            assert all(len(stage.groups) == 1 for stage in schedule.stages[first : first + count])
            assert first + count == len(schedule.stages) or len(schedule.stages[first + count].groups) > 1

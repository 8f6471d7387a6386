"""Planned against measured, on graphs whose costs are known exactly: what counts, and what costs become."""

from dataclasses import replace

import pytest

from stageloom.planner.costs.drift import (
    BACK,
    LEAST_STEPS,
    LEAST_TRACES,
    THRESHOLD,
    BlockDrift,
    Drift,
    Renewal,
    drift_of,
    first_steps,
    renewal,
    steps_of,
    traced_stages,
    unsure_blocks,
)
from stageloom.shared.bound import bind
from stageloom.shared.ids import OpId
from stageloom.shared.messages.telemetry import GroupSpan, StepTimings, StepTrace
from stageloom.shared.plan import CombinedBlock, Member
from stageloom.shared.policy.trigger import TriggerConfig
from stageloom.shared.schedule import stage_schedule
from stageloom.shared.search.interference import fit
from tests.replan.test_decide import GRAPHS, LEFT, RIGHT, measured, plan_of

WIDE = bind(plan_of("greedy"), GRAPHS)
KNOWN = measured(WIDE.plan, [1.0, 1.0, 1.0])
"""Every operator takes a second; of the left model's three stages the two branches take one together."""

_S = 1_000_000


def trace(first_s: float, branches_s: float, last_s: float, *, whole: bool = True) -> StepTrace:
    a, b, c = (round(_S * one) for one in (first_s, branches_s, last_s))
    spans = (
        GroupSpan(0, 0, 0, a),
        GroupSpan(1, 0, a, a + b // 2),
        GroupSpan(2, 1, a, a + b),
        GroupSpan(3, 0, a + b, a + b + c),
    )
    return StepTrace(WIDE.plan.digest[:16], 0, 1, 0, a + b + c, spans, whole=whole)


def steps(block: int, count: int, each_s: float, mask: int = 1) -> StepTimings:
    return StepTimings(WIDE.plan.digest[:16], block, mask, count, round(count * each_s * _S), 0)


def test_the_threshold_is_the_one_that_the_device_raises_its_alarm_at() -> None:
    assert TriggerConfig().drift == THRESHOLD > BACK > 1.0


def test_a_stage_is_compared_with_the_same_stage_as_it_was_measured() -> None:
    """Whole steps alone; of what stages took the median."""
    traces = [trace(1.0, 2.0, 1.0)] * LEAST_TRACES + [trace(9.0, 9.0, 9.0), trace(5.0, 5.0, 5.0, whole=False)]
    assert [one.seconds for one in traced_stages(WIDE, 0, traces)] == [1.0, 2.0, 1.0]
    found = drift_of(WIDE, KNOWN, [steps(0, LEAST_STEPS, 4.0)], traces, {})
    assert found.blocks == (BlockDrift(0, LEAST_STEPS, 3.0, 4.0),)
    assert found.ratio == pytest.approx(4.0 / 3.0) and found.beyond()


def test_stages_that_nobody_measured_are_not_compared_with_a_formula() -> None:
    """The other model's were not: its steps are compared with what they took at first, if that is known."""
    now = [steps(1, LEAST_STEPS, 9.0), steps(1, 1000, 0.1, mask=0)]
    assert drift_of(WIDE, KNOWN, now, [], {}).blocks == ()
    assert not drift_of(WIDE, KNOWN, now, [], {}).beyond()
    found = drift_of(WIDE, KNOWN, now, [], {1: 6.0})
    assert found.ratio == pytest.approx(1.5) and found.beyond()


def test_few_steps_few_traces_and_several_lanes_say_nothing() -> None:
    traces = [trace(2.0, 2.0, 2.0)] * LEAST_TRACES
    enough = [steps(0, LEAST_STEPS, 6.0)]
    assert drift_of(WIDE, KNOWN, enough, traces, {}).beyond()
    assert not drift_of(WIDE, KNOWN, [steps(0, LEAST_STEPS - 1, 6.0)], traces, {}).blocks
    assert not drift_of(WIDE, KNOWN, enough, traces[1:], {}).blocks
    lanes = bind(replace(WIDE.plan, lanes=2), GRAPHS)
    assert not drift_of(lanes, KNOWN, enough, traces, {0: 1.0}).blocks


@pytest.mark.parametrize(("ratio", "drifted"), [(1.2, False), (1 / 1.2, False), (1.3, True), (1 / 1.3, True)])
def test_a_device_drifts_either_way(ratio: float, drifted: bool) -> None:
    assert Drift((BlockDrift(0, 100, 1.0, ratio),)).beyond() is drifted


def test_a_block_that_takes_next_to_no_time_does_not_make_a_device_drift() -> None:
    large, small = BlockDrift(0, 100, 1.0, 1.0), BlockDrift(1, 100, 0.01, 0.05)
    assert not Drift((large, small)).beyond()
    assert Drift((large, replace(small, planned_s=0.1, measured_s=0.5))).beyond()


def test_the_first_steps_are_enough_of_them_and_no_more() -> None:
    rows = [steps(0, 10, 1.0), steps(1, LEAST_STEPS, 5.0), steps(0, LEAST_STEPS, 2.0), steps(0, 1000, 9.0)]
    found = first_steps(WIDE, rows)
    assert found[1] == 5.0 and found[0] == pytest.approx((10 * 1.0 + LEAST_STEPS * 2.0) / (10 + LEAST_STEPS))
    assert first_steps(WIDE, rows[:1]) == {}
    assert steps_of(WIDE, [*rows, replace_plan(rows[0])])[0][0] == 1010 + LEAST_STEPS


def replace_plan(row: StepTimings) -> StepTimings:
    return StepTimings("another plan", row.combined_block, row.mask, row.count, row.sum_us, row.max_us)


def test_an_operator_changes_as_its_stage_does_else_as_its_block_else_as_everything() -> None:
    """The branches took twice as long and the ends what they did; the other model 1.5 times."""
    traces = [trace(1.0, 2.0, 1.0)] * LEAST_TRACES
    now = [steps(0, 100, 4.0), steps(1, 100, 1.5 * 3.0)]
    found = drift_of(WIDE, KNOWN, now, traces, {1: 3.0})
    made = renewal(WIDE, KNOWN, found, traces, 77)
    assert [made.factor(LEFT[0], OpId(op)) for op in range(4)] == [1.0, 2.0, 2.0, 1.0]
    assert made.factor(RIGHT[0], OpId(0)) == pytest.approx(1.5)
    assert made.others == found.ratio == made.factor(LEFT[0], OpId(99))
    assert [(one.groups, one.seconds, one.samples) for one in made.stages] == [
        (((0,),), 1.0, LEAST_TRACES),
        (((1,), (2,)), 2.0, LEAST_TRACES),
        (((3,),), 1.0, LEAST_TRACES),
    ]
    assert {one.measured_at_us for one in made.stages} == {77}
    assert made.unseen == (1,), "no trace tells the other model's stages"


@pytest.mark.parametrize(("batches", "count"), [((4, 4), 1), ((4, 1), 0)])
def test_stages_of_members_with_different_batches_are_neither_renewed_nor_asked_for(
    batches: tuple[int, int], count: int
) -> None:
    plan = plan_of()
    models = tuple(replace(one, batch=batch) for one, batch in zip(plan.models, batches, strict=True))
    beside = stage_schedule([[[0, 1, 2, 3], [4, 5, 6]]])
    block = CombinedBlock((Member(0, 0, 0), Member(1, 0, 0)), beside)
    bound = bind(replace(plan, models=models, combined=(block,)), GRAPHS)
    assert bound.combined[0].graph.size == 7
    spans = (GroupSpan(0, 0, 0, _S), GroupSpan(1, 1, 0, _S))
    traces = [StepTrace(bound.plan.digest[:16], 0, 3, 0, _S, spans, whole=True)] * LEAST_TRACES
    made = renewal(bound, KNOWN, Drift((BlockDrift(0, 100, 1.0, 1.5),)), traces, 77)
    assert [one.batch for one in made.stages] == [4] * count
    assert len(unsure_blocks(bound, replace(KNOWN, interference=fit(())))) == count


def test_a_device_is_back_where_its_class_is_only_if_nearer_than_what_it_left_it_for() -> None:
    made = Renewal(factors={}, others=0.5, stages=(), unseen=())
    own = replace(KNOWN, measured_s={key: 2.0 * s for key, s in KNOWN.measured_s.items()})
    assert made.is_back(Drift(), own, KNOWN)
    assert not replace(made, others=0.6).is_back(Drift(), own, KNOWN)
    assert made.is_back(Drift((BlockDrift(0, 50, 1.0, 1.1),)), own, KNOWN)
    assert not made.is_back(Drift((BlockDrift(0, 50, 1.0, 1.2),)), own, KNOWN), "what it runs says more"

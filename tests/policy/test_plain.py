"""The plain re-plan: rates that no arrival outruns, shared by queued work, and nothing else changed."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stageloom.shared.plan import Plan, StepChoice
from stageloom.shared.policy.plain import HEADROOM, TOLERANCE, Load, plain_replan
from stageloom.shared.search.compose import ModelChoice, compose
from tests.search.graphs import CHAIN, model

NAMES = ("a", "b", "c")


def plan_of(intervals_us: Sequence[int] = (0, 0, 0), lanes: int = 1) -> Plan:
    made = [(name, *model(name, CHAIN)) for name in NAMES]
    plan = compose([ModelChoice(name=name, artifact=artifact, graph=graph) for name, artifact, graph in made])
    models = tuple(
        replace(one, launch_interval_us=interval_us)
        for one, interval_us in zip(plan.models, intervals_us, strict=True)
    )
    return replace(plan, models=models, lanes=lanes)


PLAN = plan_of()
intervals = st.tuples(*[st.integers(0, 3_600_000_000)] * 3)
loads = st.tuples(
    *(
        st.builds(
            Load,
            model=st.just(name),
            arrivals_per_s=st.floats(0.0, 1e4),
            service_s=st.one_of(st.just(0.0), st.floats(1e-6, 10.0)),
            queued=st.integers(0, 10_000),
            usual_per_s=st.floats(0.0, 1e4),
        )
        for name in NAMES
    )
)


def with_intervals(intervals_us: Sequence[int], lanes: int = 1) -> Plan:
    models = tuple(
        replace(one, launch_interval_us=interval_us)
        for one, interval_us in zip(PLAN.models, intervals_us, strict=True)
    )
    return replace(PLAN, models=models, lanes=lanes)


def rates_of(plan: Plan) -> list[float]:
    return [1e6 / one.launch_interval_us if one.launch_interval_us else float("inf") for one in plan.models]


def load(name: str, arrivals_per_s: float, service_s: float, queued: int) -> Load:
    return Load(model=name, arrivals_per_s=arrivals_per_s, service_s=service_s, queued=queued)


BURST = (load("a", 10.0, 0.01, 90), load("b", 20.0, 0.005, 60), load("c", 5.0, 0.02, 0))


@pytest.mark.promise("without-planner-device-plans")
@given(intervals, loads, st.integers(1, 4))
def test_no_model_is_launched_more_slowly_than_its_tasks_arrive(
    intervals_us: tuple[int, ...], measured: tuple[Load, ...], lanes: int
) -> None:
    planned = plain_replan(with_intervals(intervals_us, lanes), measured)
    for rate_per_s, one in zip(rates_of(planned), measured, strict=True):
        comes_per_s = max(one.arrivals_per_s, one.usual_per_s)
        assert rate_per_s >= comes_per_s or comes_per_s < 1 / 3600  # a plan's longest interval


@given(intervals, loads, st.integers(1, 4))
def test_planned_again_for_the_same_loads_it_is_the_same_value(
    intervals_us: tuple[int, ...], measured: tuple[Load, ...], lanes: int
) -> None:
    planned = plain_replan(with_intervals(intervals_us, lanes), measured)
    assert plain_replan(planned, measured) is planned


@given(intervals, loads, st.integers(0, 2), st.integers(1, 10_000))
def test_a_longer_queue_is_never_served_more_slowly_and_never_speeds_up_another(
    intervals_us: tuple[int, ...], measured: tuple[Load, ...], which: int, more: int
) -> None:
    """One that has neither a queue nor arrivals keeps its interval, which may be a short one: left out."""
    plan, one = with_intervals(intervals_us), measured[which]
    assume(
        any(each.queued_work_s for each in measured) and one.service_s and (one.queued or one.expected_per_s)
    )
    longer = list(measured)
    longer[which] = replace(measured[which], queued=measured[which].queued + more)
    few, many = plain_replan(plan, measured), plain_replan(plan, longer)
    for at, (before, after) in enumerate(zip(few.models, many.models, strict=True)):
        if at == which:
            assert after.launch_interval_us <= before.launch_interval_us
        else:
            assert after.launch_interval_us >= before.launch_interval_us


@given(intervals, loads)
def test_only_launch_intervals_change_and_they_stay_legal(
    intervals_us: tuple[int, ...], measured: tuple[Load, ...]
) -> None:
    plan = with_intervals(intervals_us)
    planned = plain_replan(plan, measured)
    back = tuple(
        replace(one, launch_interval_us=was) for one, was in zip(planned.models, intervals_us, strict=True)
    )
    assert replace(planned, models=back) == plan
    assert all(0 <= one.launch_interval_us <= 3_600_000_000 for one in planned.models)


def test_queued_work_empties_at_the_same_instant_and_the_capacity_is_used_up() -> None:
    planned = plain_replan(PLAN, BURST)
    a, b, c = rates_of(planned)
    # Work queued: 0.9 s and 0.3 s; arriving work 0.1 + 0.1 + 0.1 of a device: 0.7 is left for 1.2 s.
    drained_s = 1.2 / 0.7
    assert 90 / (a - 10.0) == pytest.approx(drained_s, rel=1e-3)
    assert 60 / (b - 20.0) == pytest.approx(drained_s, rel=1e-3)
    assert c == pytest.approx(5.0 * (1 + HEADROOM), rel=1e-3)
    assert (a * 0.01 + b * 0.005 + 5.0 * 0.02) == pytest.approx(1.0, rel=1e-3)


def test_a_plan_that_goes_by_deadlines_gets_intervals_only_if_it_has_some() -> None:
    ordered = replace(PLAN, step_choice=StepChoice.DEADLINE)
    assert plain_replan(ordered, BURST) is ordered
    spaced = replace(with_intervals((9_000_000, 0, 0)), step_choice=StepChoice.DEADLINE)
    assert plain_replan(spaced, BURST).models == plain_replan(with_intervals((9_000_000, 0, 0)), BURST).models


def test_two_lanes_have_twice_the_capacity() -> None:
    a, b, _ = rates_of(plain_replan(with_intervals((0, 0, 0), lanes=2), BURST))
    assert 90 / (a - 10.0) == pytest.approx(60 / (b - 20.0), rel=1e-3) == pytest.approx(1.2 / 1.7, rel=1e-3)


def test_on_an_overloaded_device_more_queued_work_still_goes_first() -> None:
    over = (load("a", 100.0, 0.01, 100), load("b", 100.0, 0.01, 10), load("c", 0.0, 0.01, 0))
    a, b, c = rates_of(plain_replan(with_intervals((0, 0, 70)), over))
    assert a - 100.0 == pytest.approx(0.1 * 100 / 1.1, rel=0.02)  # a tenth of the device, by work
    assert b - 100.0 == pytest.approx(0.1 * 10 / 1.1, rel=0.05)
    assert c == pytest.approx(1e6 / 70)


def test_without_a_backlog_only_what_falls_behind_is_changed() -> None:
    calm = (load("a", 10.0, 0.01, 0), load("b", 20.0, 0.005, 0), load("c", 0.0, 0.02, 0))
    slow = with_intervals((200_000, 30_000, 999))
    planned = plain_replan(slow, calm)
    assert [one.launch_interval_us for one in planned.models] == [100_000, 30_000, 999]
    assert plain_replan(PLAN, calm) is PLAN


def test_a_change_within_the_tolerance_is_none_unless_the_model_falls_behind() -> None:
    first = plain_replan(PLAN, BURST)
    near = tuple(
        replace(one, launch_interval_us=round(one.launch_interval_us * (1 + 0.8 * TOLERANCE)))
        for one in first.models
    )
    nearly = replace(first, models=near)
    assert plain_replan(nearly, BURST) is nearly
    behind = with_intervals((1_000_000 // 9, 0, 0))  # 9 launches a second for 10 arrivals
    only_behind = (load("a", 10.0, 0.0, 0),)
    assert plain_replan(behind, only_behind).models[0].launch_interval_us == 100_000


def test_a_quiet_moment_leads_to_no_long_interval() -> None:
    """One task in two seconds where 2.52 a second are usual, beside a queue that asks for another plan."""
    quiet = load("a", 0.5, 0.05, 0)
    loads = (replace(quiet, usual_per_s=2.52), load("b", 20.0, 0.005, 60), load("c", 5.0, 0.02, 0))
    paced = plain_replan(PLAN, loads).models[0].launch_interval_us
    assert 0 < paced <= 1e6 / 2.52
    assert plain_replan(PLAN, (quiet, *loads[1:])).models[0].launch_interval_us > 1e6, "nothing is usual yet"


def test_models_that_nothing_is_known_of_keep_their_interval() -> None:
    plan = with_intervals((123, 0, 456))
    planned = plain_replan(plan, [load("b", 20.0, 0.005, 60), load("other", 1.0, 1.0, 9)])
    assert [one.launch_interval_us for one in planned.models][::2] == [123, 456]
    assert plain_replan(plan, ()) is plan


@pytest.mark.parametrize(
    "wrong",
    [
        {"queued": -1},
        {"service_s": float("nan")},
        {"arrivals_per_s": -1.0},
        {"usual_per_s": -1.0},
        {"deadline_s": float("inf")},
    ],
)
def test_numbers_that_are_no_load_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no load"):
        replace(BURST[0], **wrong)  # type: ignore[arg-type]

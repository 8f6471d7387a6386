"""From telemetry to arrivals and windows, and what predictions are compared by."""

import pickle

import pytest

from stageloom.planner.twin.arrivals import Counted, Periodic
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.replay import (
    active_spans,
    counted_arrivals,
    figures,
    measured_window,
    relative_errors,
)
from stageloom.planner.twin.simulation import PARTS, Simulation, advanced, begun
from stageloom.planner.twin.window import join
from stageloom.shared.errors import InputError
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Origin
from stageloom.shared.messages.telemetry import PlanActivated, QueueSample, Row, RowData, TaskCounters
from tests.engine.plans import chains
from tests.twin.cases import measured

SECOND = 1_000_000


def counters(model: str, submitted: int, interval_us: int = SECOND) -> TaskCounters:
    return TaskCounters(model, interval_us, submitted, submitted, 0, 0, 0, 0)


def test_arrivals_lie_in_the_interval_that_counted_them() -> None:
    rows = [
        Row(11 * SECOND, counters("a", 30)),
        Row(12 * SECOND, counters("a", 5)),
        Row(12 * SECOND, counters("b", 7, 2 * SECOND)),
        Row(13 * SECOND, counters("other", 99)),
    ]
    found = counted_arrivals(rows, ["a", "b"])
    assert found["a"] == Counted(spans=((0.0, 1.0, 30), (1.0, 2.0, 5)), length_s=2.0)
    assert found["b"] == Counted(spans=((0.0, 2.0, 7),), length_s=2.0)
    with pytest.raises(InputError, match="counted no task of this plan's models"):
        counted_arrivals(rows, ["nobody"])


def test_a_plan_is_active_from_its_activation_to_the_next_plans() -> None:
    mine, other = Digest("a" * 64), Digest("b" * 64)
    active = [(1, mine), (4, other), (6, mine), (7, mine)]
    rows = [Row(at, PlanActivated(plan, Origin.PLANNER, 1, at)) for at, plan in active]
    rows += [Row(9, QueueSample("a", 0, 0, 0))]
    assert active_spans(rows, mine) == [(1, 4), (6, 9)]
    assert active_spans(rows, other) == [(4, 6)]
    assert active_spans(rows, Digest("c" * 64)) == []
    assert active_spans([], mine) == []


def test_telemetry_of_a_window_reads_back_as_the_window() -> None:
    """What a twin's window tells as rows, read as what a device measured, gives the same figures."""
    bound = chains(2, 1)
    twin = Twin(
        measured(bound, {"a": 0.004, "b": 0.006}),
        {"a": Periodic(rate_per_s=20.0), "b": Periodic(rate_per_s=40.0, offset_s=0.01)},
    )
    twin.deploy(bound)
    windows = [twin.run(1.0) for _ in range(4)]
    rows: list[Row] = []
    for second, window in enumerate(windows, 1):
        rows += [Row(second * SECOND, data) for data in window.rows()]
    read = measured_window(rows, bound.plan, SECOND, 4 * SECOND)  # the first interval began before it
    assert read is not None
    whole = join(windows[1:])
    assert read.seconds == pytest.approx(3.0)
    assert [model.ended for model in read.models] == [model.ended for model in whole.models]
    assert [(one.combined, one.mask, one.count) for one in read.steps] == [
        (one.combined, one.mask, one.count) for one in whole.steps
    ]
    predicted, found = figures(whole), figures(read)
    assert "utilisation" in predicted and "utilisation" not in found
    errors = relative_errors(predicted, found)
    assert errors["throughput_per_s"] == pytest.approx(0.0)
    assert abs(errors["a.p50_ms"]) < 0.2  # the width of a histogram's bucket
    assert errors["mean_latency_ms"] == pytest.approx(0.0, abs=0.05)


def test_tasks_lost_are_compared_per_second_whatever_the_length_of_either_side() -> None:
    """One in ten is refused, over a minute that was predicted and ten seconds that were measured."""
    bound = chains(1)
    seen = [Row(second * SECOND, TaskCounters("a", SECOND, 50, 45, 5, 0, 0, 0)) for second in range(1, 61)]
    minute, ten = (measured_window(seen, bound.plan, 0, last * SECOND) for last in (60, 10))
    assert minute is not None and ten is not None
    predicted, found = figures(minute), figures(ten)
    assert (predicted["a.lost"], found["a.lost"]) == (300.0, 50.0)
    assert predicted["a.lost_per_s"] == pytest.approx(5.0)
    errors = relative_errors(predicted, found)
    assert errors["a.lost_per_s"] == pytest.approx(0.0) and "a.lost" not in errors


def test_an_interval_that_began_before_the_plan_does_not_count() -> None:
    bound = chains(1)
    rows: list[tuple[int, RowData]] = [(SECOND, counters("a", 9)), (2 * SECOND, counters("a", 4))]
    found = measured_window([Row(*one) for one in rows], bound.plan, SECOND // 2, 2 * SECOND)
    assert found is not None and found.completed == 4 and found.seconds == 1.0
    assert measured_window([Row(*one) for one in rows], bound.plan, 3 * SECOND // 2, 2 * SECOND) is None


def test_a_window_lasts_as_long_as_its_counters_cover_together() -> None:
    """`a` ends a task every 5 s, and a device sends no counters of the seconds between."""
    bound = chains(1)
    rows = [Row(second * SECOND, counters("a", 1)) for second in (5, 10, 15)]
    found = measured_window(rows, bound.plan, 0, 15 * SECOND)
    assert found is not None and (found.completed, found.seconds) == (3, 11.0)
    rows += [Row(second * SECOND, counters("b", 1)) for second in (1, 2, 15)]
    found = measured_window(rows, bound.plan, 0, 15 * SECOND)
    assert found is not None and (found.completed, found.seconds) == (6, 15.0)


@pytest.mark.parametrize(("seconds", "looks"), [(0.5, 50), (3.0, 50), (5.04, 50), (7.0, 70), (60.0, 600)])
def test_a_simulation_in_parts_looks_at_the_queues_at_even_distances(seconds: float, looks: int) -> None:
    """At least once in each part, and as often as a device does where that is more."""
    bound = chains(1)
    load = {"a": Periodic(rate_per_s=10.0)}
    state = begun(Simulation(bound, measured(bound, {"a": 0.004}), load, seconds, 0))
    state = advanced(state, seconds, 1e9)
    assert state.done == PARTS
    seen_s = [glance.at_s for glance in join(pickle.loads(state.windows)).glances]
    assert seen_s == pytest.approx([min(0.1, seconds / PARTS) * (one + 1) for one in range(looks)])


def test_windows_join_to_the_window_over_all_of_them() -> None:
    bound = chains(2, 2)
    load = {"a": Periodic(rate_per_s=60.0), "b": Periodic(rate_per_s=50.0)}
    seconds = {"a": 0.004, "b": 0.005}
    parts, whole = [Twin(measured(bound, seconds), load) for _ in range(2)]
    for twin in (parts, whole):
        twin.deploy(bound)
    joined = join([parts.run(0.5, sample_at_s=[0.2]) for _ in range(4)])
    once = whole.run(2.0, sample_at_s=[0.2, 0.7, 1.2, 1.7])
    for one, other in zip(joined.models, once.models, strict=True):
        assert one.latencies_s == pytest.approx(other.latencies_s)
        assert (one.submitted, one.ended, one.queued) == (other.submitted, other.ended, other.queued)
    assert joined.seconds == pytest.approx(once.seconds)
    assert joined.busy_s == pytest.approx(once.busy_s)
    assert [(one.combined, one.count) for one in joined.steps] == [
        (one.combined, one.count) for one in once.steps
    ]
    assert [glance.queues for glance in joined.glances] == [glance.queues for glance in once.glances]
    assert (joined.open_before, joined.open_after) == (once.open_before, once.open_after)
    with pytest.raises(ValueError, match="no window"):
        join([])

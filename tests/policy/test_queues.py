"""How far queues have diverged: closed forms, invariances, thresholds."""

import math
from itertools import product
from random import Random
from statistics import pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.policy.plain import Load
from stageloom.shared.policy.queues import (
    TOP_THRESHOLD,
    QueueMeasure,
    age_threshold_s,
    deviations,
    values,
    variance,
    variance_threshold_s2,
)

WORK = st.lists(st.floats(0, 1e3), min_size=1, max_size=8)


def test_two_queues_have_a_quarter_of_the_square_of_their_difference() -> None:
    assert variance([0.2, 0.8]) == pytest.approx(0.09)


@pytest.mark.parametrize("depth", [1, 6, 9])
def test_three_bounded_queues_reach_two_ninths_of_their_depth_squared(depth: int) -> None:
    reached = max(variance([float(n) for n in lengths]) for lengths in product(range(depth + 1), repeat=3))
    assert reached == pytest.approx(2 * depth**2 / 9)


def test_the_papers_threshold_needs_queues_of_949_tasks() -> None:
    assert 2 * 948**2 / 9 < TOP_THRESHOLD < 2 * 949**2 / 9


@given(st.floats(0, 1e6))
def test_one_queue_has_no_variance(work: float) -> None:
    assert variance([work]) == 0.0
    assert variance([]) == 0.0


@given(WORK)
def test_it_is_the_population_variance(work: list[float]) -> None:
    assert variance(work) == pytest.approx(pvariance(work), abs=1e-9)


@given(WORK, st.floats(0, 1e3), st.floats(0, 10), st.randoms(use_true_random=False))
def test_a_common_backlog_does_not_count_scale_counts_squared_and_order_not_at_all(
    work: list[float], shift: float, scale: float, rng: Random
) -> None:
    plain = variance(work)
    assert variance([value + shift for value in work]) == pytest.approx(plain, abs=1e-6)
    assert variance([value * scale for value in work]) == pytest.approx(plain * scale**2, abs=1e-6)
    assert variance(rng.sample(work, len(work))) == pytest.approx(plain, abs=1e-9)


@given(WORK)
def test_deviations_add_up_to_nothing(work: list[float]) -> None:
    assert len(deviations(work)) == len(work)
    assert math.fsum(deviations(work)) == pytest.approx(0.0, abs=1e-6)


def test_a_queue_counts_with_its_work_or_with_its_tasks_by_flag() -> None:
    """Ten tasks of 20 ms are as much work as a hundred of 2 ms, but not as many tasks."""
    loads = [
        Load(model="a", arrivals_per_s=1.0, service_s=0.02, queued=10),
        Load(model="b", arrivals_per_s=1.0, service_s=0.002, queued=100),
    ]
    assert variance(values(loads, QueueMeasure.WORK)) == pytest.approx(0.0)
    assert variance(values(loads, QueueMeasure.TASKS)) == pytest.approx(45.0**2)


def test_thresholds_follow_the_tightest_deadline() -> None:
    assert variance_threshold_s2([]) == 0.0625
    assert variance_threshold_s2([2.0, 0.1, 1.0]) == pytest.approx(0.025**2)
    assert age_threshold_s([]) == 0.5
    assert age_threshold_s([2.0, 0.1, 1.0]) == pytest.approx(0.05)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, math.nan])
def test_impossible_deadlines_are_refused(deadline_s: float) -> None:
    with pytest.raises(ValueError, match="no deadline"):
        variance_threshold_s2([deadline_s])


@pytest.mark.parametrize(
    "fields", [{"queued": -1}, {"service_s": math.nan}, {"service_s": -1.0}, {"oldest_age_s": math.inf}]
)
def test_impossible_queues_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no load of a model"):
        Load(**{"model": "a", "arrivals_per_s": 1.0, "queued": 1, "service_s": 1.0, **fields})  # type: ignore[arg-type]

"""Launch intervals: capacity against arrivals, and the guard of a change."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.engine.interval_guard import (
    GuardConfig,
    GuardVerdict,
    IntervalGuard,
    Waiting,
    never_below_arrivals,
)

BEFORE = Waiting(tasks=1000, p99_s=0.1, p99_least_s=0.1, oldest_age_s=0.05)


def since(**fields: float) -> Waiting:
    known: dict[str, float] = {"tasks": 1000, "p99_s": 0.1, "oldest_age_s": 0.05}
    known |= {"p99_least_s": fields.get("p99_s", 0.1)}
    return Waiting(**{**known, **fields})  # type: ignore[arg-type]


@given(st.dictionaries(st.sampled_from("abc"), st.floats(0, 10)), st.floats(0, 1000))
def test_capacity_is_never_set_below_arrivals(intervals_s: dict[str, float], rate_per_s: float) -> None:
    limited = never_below_arrivals(intervals_s, dict.fromkeys("abc", rate_per_s))
    assert limited.keys() == intervals_s.keys()
    for model, interval_s in limited.items():
        assert interval_s <= intervals_s[model]
        assert interval_s * rate_per_s <= 1.0 + 1e-12
        if intervals_s[model] * rate_per_s <= 1.0:
            assert interval_s == pytest.approx(intervals_s[model])


def test_a_model_without_arrivals_keeps_its_interval() -> None:
    assert never_below_arrivals({"a": 3.0, "b": 3.0}, {"a": 0.0}) == {"a": 3.0, "b": 3.0}


@pytest.mark.parametrize(
    ("interval_s", "rate_per_s"), [(math.nan, 1.0), (1.0, math.nan), (-1.0, 1.0), (1.0, math.inf)]
)
def test_impossible_rates_and_intervals_are_refused(interval_s: float, rate_per_s: float) -> None:
    with pytest.raises(ValueError, match="no launch intervals"):
        never_below_arrivals({"a": interval_s}, {"a": rate_per_s})


def test_a_change_that_harms_nobody_is_kept_after_ten_seconds() -> None:
    guard = IntervalGuard(BEFORE, 5.0)
    assert guard.ends_s == 15.0
    assert guard.seen(since(p99_s=0.119, oldest_age_s=0.06), 14.9) is GuardVerdict.OPEN
    assert guard.seen(since(p99_s=0.119, oldest_age_s=0.06), 15.0) is GuardVerdict.KEEP


@pytest.mark.parametrize("worse", [{"p99_s": 0.121}, {"oldest_age_s": 0.1221}])
@pytest.mark.parametrize("at_s", [0.4, 9.9, 10.0])
def test_a_fifth_worse_rolls_back_at_once(worse: dict[str, float], at_s: float) -> None:
    guard = IntervalGuard(BEFORE, 0.0)
    assert guard.seen(since(**worse), at_s) is GuardVerdict.ROLL_BACK
    assert "rose" in guard.reason or "age" in guard.reason


def test_a_p99_that_may_be_chance_rolls_nothing_back() -> None:
    guard = IntervalGuard(BEFORE, 0.0)
    assert guard.seen(since(p99_s=0.2, p99_least_s=0.119), 9.0) is GuardVerdict.OPEN
    assert guard.seen(since(p99_s=0.2, p99_least_s=0.121), 9.0) is GuardVerdict.ROLL_BACK


def test_a_verdict_is_final() -> None:
    rolled_back, kept = IntervalGuard(BEFORE, 0.0), IntervalGuard(BEFORE, 0.0)
    rolled_back.seen(since(p99_s=1.0), 1.0)
    kept.seen(since(), 10.0)
    assert rolled_back.seen(since(), 20.0) is GuardVerdict.ROLL_BACK
    assert kept.seen(since(p99_s=9.0), 11.0) is GuardVerdict.KEEP


@pytest.mark.parametrize(("before", "after"), [(1000, 99), (99, 1000)])
def test_the_slowest_of_a_few_tasks_is_no_99th_percentile(before: int, after: int) -> None:
    guard = IntervalGuard(Waiting(tasks=before, p99_s=0.1, p99_least_s=0.1, oldest_age_s=0.05), 0.0)
    assert guard.seen(since(tasks=after, p99_s=1.0), 9.0) is GuardVerdict.OPEN


@pytest.mark.parametrize(("p99_s", "limit_s"), [(0.0, 0.002), (0.1, 0.122)])
def test_ages_of_a_few_milliseconds_do_not_count_nor_those_below_what_tasks_took(
    p99_s: float, limit_s: float
) -> None:
    guard = IntervalGuard(Waiting(tasks=1000, p99_s=p99_s, p99_least_s=p99_s, oldest_age_s=0.0), 0.0)
    assert guard.seen(since(tasks=10, oldest_age_s=limit_s - 1e-4), 1.0) is GuardVerdict.OPEN
    assert guard.seen(since(tasks=10, oldest_age_s=limit_s + 1e-4), 1.0) is GuardVerdict.ROLL_BACK


def test_a_burst_that_began_before_the_change_is_not_held_against_it() -> None:
    """The oldest task ages by a second a second until the backlog in front of it is gone."""
    strict = IntervalGuard(BEFORE, 0.0)
    assert strict.seen(since(oldest_age_s=1.05), 2.0) is GuardVerdict.ROLL_BACK
    fair = IntervalGuard(BEFORE, 0.0, age_growth=0.5)
    assert fair.seen(since(oldest_age_s=1.05), 2.0) is GuardVerdict.OPEN
    assert fair.seen(since(oldest_age_s=1.4), 2.0) is GuardVerdict.ROLL_BACK


@pytest.mark.promise("proven-plan-but-launch")
def test_a_task_that_came_before_the_change_is_no_witness_until_the_guard_ends() -> None:
    guard = IntervalGuard(BEFORE, 0.0)
    assert guard.seen(since(oldest_age_s=3.0), 2.0) is GuardVerdict.OPEN
    assert guard.seen(since(oldest_age_s=1.8), 2.0) is GuardVerdict.OPEN, "ages are told late"
    assert guard.seen(since(oldest_age_s=11.0), 9.9) is GuardVerdict.OPEN
    assert guard.seen(since(oldest_age_s=11.1), 10.0) is GuardVerdict.ROLL_BACK


def test_shrinking_ages_before_the_change_do_not_tighten_the_guard() -> None:
    guard = IntervalGuard(BEFORE, 0.0, age_growth=-1.0, config=GuardConfig(length_s=1.0))
    assert guard.seen(since(), 1.0) is GuardVerdict.KEEP

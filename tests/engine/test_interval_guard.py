"""Launch intervals: capacity against arrivals, and the guard of a change."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.engine.interval_guard import (
    GuardConfig,
    GuardVerdict,
    IntervalGuard,
    WaitedBefore,
    WaitedSince,
    never_below_arrivals,
)

BEFORE = WaitedBefore(
    p99_s=0.1,
    window_s=3.0,
    oldest_age_s=0.05,
    age_growth=0.0,
    arrivals_per_s=100.0,
    moved=False,
    missed=0.01,
)
SINCE = WaitedSince(
    tasks=1000,
    p99_s=0.1,
    p99_least_s=0.1,
    oldest_age_s=0.05,
    arrivals_per_s=100.0,
    missed=0.01,
    ended=1000,
)
GROWING = replace(BEFORE, age_growth=0.5)


def since(**fields: float) -> WaitedSince:
    fields = {"p99_least_s": fields.get("p99_s", 0.1), **fields}
    return replace(SINCE, **fields)  # type: ignore[arg-type]


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
    assert guard.seen(since(p99_s=0.119, oldest_age_s=0.12), 14.9) is GuardVerdict.OPEN
    assert guard.seen(since(p99_s=0.119, oldest_age_s=0.12), 15.0) is GuardVerdict.KEEP


@pytest.mark.parametrize("worse", [{"p99_s": 0.121}, {"oldest_age_s": 0.1221}, {"missed": 0.16}])
@pytest.mark.parametrize("at_s", [1.5, 9.9, 10.0])
def test_a_fifth_worse_or_a_tenth_of_the_tasks_missed_rolls_back(
    worse: dict[str, float], at_s: float
) -> None:
    guard = IntervalGuard(BEFORE, 0.0)
    assert guard.seen(since(**worse), at_s) is GuardVerdict.ROLL_BACK
    assert any(word in guard.reason for word in ("p99 rose", "oldest task's age", "miss their deadline"))


def test_a_p99_that_may_be_chance_rolls_nothing_back() -> None:
    guard = IntervalGuard(BEFORE, 0.0)
    assert guard.seen(since(p99_s=0.2, p99_least_s=0.119), 9.0) is GuardVerdict.OPEN
    assert guard.seen(since(p99_s=0.2, p99_least_s=0.121), 9.0) is GuardVerdict.ROLL_BACK


def test_an_age_counts_once_it_could_persist() -> None:
    assert IntervalGuard(BEFORE, 0.0).seen(since(oldest_age_s=0.2), 0.99) is GuardVerdict.OPEN
    assert IntervalGuard(BEFORE, 0.0).seen(since(oldest_age_s=0.2), 1.5) is GuardVerdict.ROLL_BACK


@pytest.mark.parametrize(
    ("ended", "missed", "verdict"),
    [
        (1000, 0.11, GuardVerdict.OPEN),  # a tenth more, as allowed
        (99, 1.0, GuardVerdict.OPEN),  # too few
        (100, 0.25, GuardVerdict.OPEN),  # of few
        (100, 0.35, GuardVerdict.ROLL_BACK),
        (1000, 0.16, GuardVerdict.ROLL_BACK),
    ],
)
def test_tasks_missed_count_where_the_share_is_surely_higher(
    ended: int, missed: float, verdict: GuardVerdict
) -> None:
    assert IntervalGuard(BEFORE, 0.0).seen(since(ended=ended, missed=missed), 5.0) is verdict


def test_tasks_missed_are_no_measure_where_more_come_or_none_ended_before() -> None:
    many = since(missed=0.5)
    assert IntervalGuard(BEFORE, 0.0).seen(replace(many, arrivals_per_s=126.0), 5.0) is GuardVerdict.OPEN
    assert IntervalGuard(BEFORE, 0.0).seen(replace(many, arrivals_per_s=124.0), 5.0) is GuardVerdict.ROLL_BACK
    assert IntervalGuard(replace(BEFORE, missed=1.0), 0.0).seen(many, 5.0) is GuardVerdict.OPEN


def test_a_verdict_is_final() -> None:
    rolled_back, kept = IntervalGuard(BEFORE, 0.0), IntervalGuard(BEFORE, 0.0)
    rolled_back.seen(since(p99_s=1.0), 1.0)
    kept.seen(since(), 10.0)
    assert rolled_back.seen(since(), 20.0) is GuardVerdict.ROLL_BACK
    assert kept.seen(since(p99_s=9.0), 11.0) is GuardVerdict.KEEP


def test_the_slowest_of_a_few_tasks_is_no_99th_percentile() -> None:
    assert IntervalGuard(BEFORE, 0.0).seen(since(tasks=99, p99_s=1.0), 9.0) is GuardVerdict.OPEN
    none_before = replace(BEFORE, p99_s=0.0)
    assert IntervalGuard(none_before, 0.0).seen(since(p99_s=1.0), 9.0) is GuardVerdict.OPEN


@pytest.mark.parametrize(("p99_s", "limit_s"), [(0.0, 0.002), (0.1, 0.122)])
def test_ages_of_a_few_milliseconds_do_not_count_nor_those_below_what_tasks_took(
    p99_s: float, limit_s: float
) -> None:
    before = replace(BEFORE, p99_s=p99_s, oldest_age_s=0.0)
    for more_s, verdict in ((-1e-4, GuardVerdict.OPEN), (1e-4, GuardVerdict.ROLL_BACK)):
        guard = IntervalGuard(before, 0.0)
        assert guard.seen(since(tasks=10, oldest_age_s=limit_s + more_s), 2.0) is verdict


def test_a_burst_that_began_before_the_change_is_not_held_against_it() -> None:
    """The oldest task ages by a second a second until the backlog in front of it is gone."""
    strict = IntervalGuard(BEFORE, 0.0)
    assert strict.seen(since(oldest_age_s=1.05), 3.0) is GuardVerdict.ROLL_BACK
    fair = IntervalGuard(GROWING, 0.0)
    assert fair.seen(since(oldest_age_s=1.05, p99_s=1.9), 3.0) is GuardVerdict.OPEN
    assert fair.seen(since(oldest_age_s=1.05, p99_s=2.0), 3.0) is GuardVerdict.ROLL_BACK
    assert IntervalGuard(GROWING, 0.0).seen(since(oldest_age_s=2.0), 4.0) is GuardVerdict.OPEN
    assert IntervalGuard(GROWING, 0.0).seen(since(oldest_age_s=2.6), 4.0) is GuardVerdict.ROLL_BACK


def test_where_other_tasks_come_latencies_of_before_are_no_measure() -> None:
    slow = since(p99_s=1.0)
    assert IntervalGuard(replace(BEFORE, moved=True), 0.0).seen(slow, 5.0) is GuardVerdict.OPEN
    assert IntervalGuard(BEFORE, 0.0).seen(replace(slow, arrivals_per_s=126.0), 5.0) is GuardVerdict.OPEN
    assert IntervalGuard(BEFORE, 0.0).seen(replace(slow, arrivals_per_s=124.0), 5.0) is GuardVerdict.ROLL_BACK


@pytest.mark.promise("proven-plan-but-launch")
def test_a_task_that_came_before_the_change_is_no_witness_until_the_guard_ends() -> None:
    guard = IntervalGuard(BEFORE, 0.0)
    assert guard.seen(since(oldest_age_s=3.0), 2.0) is GuardVerdict.OPEN
    assert guard.seen(since(oldest_age_s=1.8), 3.0) is GuardVerdict.OPEN, "ages are told late, and persist"
    assert guard.seen(since(oldest_age_s=11.0), 9.9) is GuardVerdict.OPEN
    assert guard.seen(since(oldest_age_s=11.1), 10.0) is GuardVerdict.ROLL_BACK


def test_shrinking_ages_before_the_change_do_not_tighten_the_guard() -> None:
    guard = IntervalGuard(replace(BEFORE, age_growth=-1.0), 0.0, config=GuardConfig(length_s=1.0))
    assert guard.seen(since(), 1.0) is GuardVerdict.KEEP

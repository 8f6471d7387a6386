"""Rates of arrivals: over how long, and how far off they are by chance."""

import math
from random import Random
from statistics import fmean, stdev

import pytest

from stageloom.shared.policy.arrivals import Arrivals, Arrived

PACE_S = 0.1


def fed(rate_per_s: float, seconds: float, rng: Random) -> Arrivals:
    """What is known after so many seconds of Poisson arrivals, looked at ten times a second."""
    arrivals, count, next_s = Arrivals(), 0, rng.expovariate(rate_per_s)
    for tick in range(round(seconds / PACE_S) + 1):
        at_s = tick * PACE_S
        while next_s <= at_s:
            count += 1
            next_s += rng.expovariate(rate_per_s)
        arrivals.add(at_s, {"a": count})
    return arrivals


@pytest.mark.parametrize(("rate_per_s", "tasks"), [(0.5, 5.0), (1.0, 10.0), (6.0, 25.0), (40.0, 80.0)])
def test_the_rate_of_late_is_off_by_one_over_the_root_of_its_tasks(rate_per_s: float, tasks: float) -> None:
    """Of ten seconds, of 25 tasks, or of two seconds, whichever comes first, but two seconds at least."""
    rng = Random(7)
    found = [fed(rate_per_s, 15.0, rng).late("a").per_s / rate_per_s for _ in range(800)]
    assert fmean(found) == pytest.approx(1.0, abs=0.05)
    assert stdev(found) == pytest.approx(1.0 / math.sqrt(tasks), rel=0.15)


def test_the_usual_rate_is_that_of_a_minute() -> None:
    rng = Random(7)
    found = [fed(2.5, 70.0, rng).usual("a") for _ in range(300)]
    assert all(one.seconds == pytest.approx(60.0, abs=0.6) for one in found)
    rates = [one.per_s / 2.5 for one in found]
    assert fmean(rates) == pytest.approx(1.0, abs=0.02)
    assert stdev(rates) == pytest.approx(1.0 / math.sqrt(150.0), rel=0.15)


def test_nothing_is_usual_before_five_seconds_were_seen() -> None:
    assert fed(20.0, 4.8, Random(1)).usual("a").per_s == 0.0
    assert fed(20.0, 6.0, Random(1)).usual("a").per_s == pytest.approx(20.0, rel=0.3)


def test_a_quiet_moment_is_not_taken_for_a_low_rate() -> None:
    """Evenly 2.5 a second, then nothing for two seconds: of late 22 in ten seconds, usually 2.4 a second."""
    arrivals = Arrivals()
    for tick in range(700):
        arrivals.add(tick * PACE_S, {"a": min(tick, 680) // 4})
    assert arrivals.late("a").per_s == pytest.approx(2.1, abs=0.1)
    assert arrivals.usual("a").per_s == pytest.approx(2.43, abs=0.05)


def test_a_burst_shows_in_the_rate_of_late_within_two_seconds() -> None:
    arrivals, count = Arrivals(), 0
    for tick in range(320):
        count += 1 if tick < 300 else 10
        arrivals.add(tick * PACE_S, {"a": count})
    assert arrivals.late("a").per_s > 80.0
    assert arrivals.usual("a").per_s < 20.0


def test_a_model_that_a_new_engine_process_serves_later_than_another_counts_anew() -> None:
    """The process before served `a`; the new one serves `b`, and a moment later `a` as well."""
    arrivals = Arrivals()
    for at_s, counts in ((0.0, {"a": 90}), (0.5, {"a": 100}), (1.0, {"a": 0, "b": 0}), (1.5, {"b": 1})):
        arrivals.add(at_s, counts)
    assert arrivals.late("a") == Arrived(0, 0.0)
    for at_s, counts in ((2.0, {"a": 2, "b": 1}), (2.5, {"a": 7, "b": 1})):
        arrivals.add(at_s, counts)
    assert arrivals.late("a").per_s == pytest.approx(10.0)

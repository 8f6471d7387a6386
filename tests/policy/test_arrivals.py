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


@pytest.mark.more
@pytest.mark.parametrize(("rate_per_s", "tasks"), [(0.5, 5.0), (1.0, 10.0), (6.0, 25.0), (40.0, 80.0)])
def test_the_rate_of_late_is_off_by_one_over_the_root_of_its_tasks(rate_per_s: float, tasks: float) -> None:
    """Of ten seconds, of 25 tasks, or of two seconds, whichever comes first, but two seconds at least."""
    rng = Random(7)
    found = [fed(rate_per_s, 15.0, rng).late("a").per_s / rate_per_s for _ in range(400)]
    assert fmean(found) == pytest.approx(1.0, abs=0.05)
    assert stdev(found) == pytest.approx(1.0 / math.sqrt(tasks), rel=0.15)


@pytest.mark.more
def test_the_usual_rate_is_that_of_a_minute() -> None:
    rng = Random(7)
    found = [fed(2.5, 70.0, rng).usual("a") for _ in range(150)]
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


def fed_in_turn(rng: Random, *phases: tuple[float, dict[str, float]]) -> tuple[Arrivals, list[float]]:
    """Phases of seconds and rates by model; what is known at the end, and at each glance the rise told."""
    arrivals, now, told = Arrivals(), 0.0, []
    counts = dict.fromkeys(phases[0][1], 0)
    for seconds, rates in phases:
        for _ in range(round(seconds / PACE_S)):
            now += PACE_S
            for name, per_s in rates.items():
                due = rng.expovariate(1.0)
                while due < per_s * PACE_S:
                    counts[name] += 1
                    due += rng.expovariate(1.0)
            arrivals.add(now, dict(counts))
            told.append(arrivals.rise_s)
    return arrivals, told


QUIET, BUSY = {"a": 1.2, "b": 2.3, "c": 4.6}, {"a": 9.0, "b": 18.0, "c": 35.0}


def test_rates_of_late_are_those_since_a_rise_within_a_second_of_it() -> None:
    """Without it, half of ten seconds of the rarest model would be those before, a fourth of its rate."""
    rng, rates, since = Random(3), [], []
    for _ in range(200):
        arrivals, told = fed_in_turn(rng, (30.0, QUIET), (1.5, BUSY))
        since.append(31.5 - told[-1])
        rates.append([arrivals.late(name).per_s / per_s for name, per_s in BUSY.items()])
    assert sorted(since)[10] >= 0.9 and sorted(since)[-10] <= 2.1
    for model in zip(*rates, strict=True):
        assert fmean(model) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("rates", [QUIET, BUSY, {"a": 0.4}, {"a": 3.0, "b": 200.0}])
def test_the_same_rates_rise_once_in_ten_minutes_at_most(rates: dict[str, float]) -> None:
    _, told = fed_in_turn(Random(5), (1200.0, rates))
    assert len(set(told) - {-math.inf}) <= 2


def test_fewer_tasks_and_a_pause_are_no_rise() -> None:
    for seed in range(20):
        _, told = fed_in_turn(Random(seed), (30.0, BUSY), (3.0, {**BUSY, "c": 0.0}), (30.0, QUIET))
        assert max(told) < 30.0


def test_a_rise_is_forgotten_after_ten_seconds_and_with_the_process_that_counted_it() -> None:
    arrivals, told = fed_in_turn(Random(3), (30.0, QUIET), (9.0, BUSY))
    assert told[-1] == pytest.approx(30.0, abs=1.1)
    arrivals.add(42.0, dict(arrivals.moments[-1].counts))
    assert arrivals.rise_s == -math.inf
    arrivals, _ = fed_in_turn(Random(3), (30.0, QUIET), (2.0, BUSY))
    arrivals.add(32.1, dict.fromkeys(QUIET, 0))
    assert arrivals.rise_s == -math.inf and arrivals.late("a") == Arrived(0, 0.0)


def test_a_model_that_a_new_engine_process_serves_later_than_another_counts_anew() -> None:
    """The process before served `a`; the new one serves `b`, and a moment later `a` as well."""
    arrivals = Arrivals()
    for at_s, counts in ((0.0, {"a": 90}), (0.5, {"a": 100}), (1.0, {"a": 0, "b": 0}), (1.5, {"b": 1})):
        arrivals.add(at_s, counts)
    assert arrivals.late("a") == Arrived(0, 0.0)
    for at_s, counts in ((2.0, {"a": 2, "b": 1}), (2.5, {"a": 7, "b": 1})):
        arrivals.add(at_s, counts)
    assert arrivals.late("a").per_s == pytest.approx(10.0)


def test_a_model_that_was_gone_and_comes_back_counts_anew() -> None:
    arrivals = Arrivals()
    for tick in range(300):
        counts = {"a": tick}
        if not 100 <= tick < 150:
            counts["b"] = 10 * tick if tick < 100 else tick - 150
        arrivals.add(tick * PACE_S, counts)
    assert arrivals.late("b").per_s == pytest.approx(10.0, abs=0.1)
    assert arrivals.usual("b").per_s == pytest.approx(10.0, abs=0.1)

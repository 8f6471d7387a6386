"""Which load regimes recur, from minutes of arrivals."""

from random import Random

import pytest

from stageloom.planner.replan.recurring import (
    APART_US,
    LEAST_MINUTES,
    LIKE,
    MINUTE_US,
    ArrivalMinute,
    RegimeVisit,
    recurring,
    visits,
)
from stageloom.planner.replan.regimes import NEAR

SERVICE_S = {"a": 0.01, "b": 0.02}
NIGHT, DAY = {"a": 60, "b": 30}, {"a": 600, "b": 300}


def minutes(*phases: tuple[dict[str, int], int], from_minute: int = 0) -> list[ArrivalMinute]:
    """Tasks of each minute, for so many minutes each; none at all is no minute."""
    told = [tasks for tasks, count in phases for _ in range(count)]
    return [ArrivalMinute((from_minute + at) * MINUTE_US, tasks) for at, tasks in enumerate(told) if tasks]


def test_a_night_and_a_day_that_come_twice_recur_with_their_rates_the_longest_first() -> None:
    known = visits((), minutes((NIGHT, 20), (DAY, 30), (NIGHT, 20), (DAY, 30)), SERVICE_S)
    assert [one.minutes for one in known] == [20, 30, 20, 30]
    day, night = recurring(known, SERVICE_S)
    assert [(one.model, one.arrivals_per_s) for one in day.rates] == [("a", 10.0), ("b", 5.0)]
    assert [(one.model, one.arrivals_per_s) for one in night.rates] == [("a", 1.0), ("b", 0.5)]
    assert (day.occasions, day.seconds, night.occasions, night.seconds) == (2, 3600.0, 2, 2400.0)


def test_what_came_once_and_what_was_short_does_not_recur() -> None:
    short = (DAY, LEAST_MINUTES - 1)
    known = visits((), minutes((NIGHT, 20), short, (NIGHT, 20), short, (NIGHT, 20)), SERVICE_S)
    assert recurring(known, SERVICE_S) == [], "three nights with bursts between are one occasion"
    assert recurring(visits((), minutes((NIGHT, 20), (DAY, 20)), SERVICE_S), SERVICE_S) == []


def test_a_pause_ends_a_visit_and_a_device_that_was_off_comes_back() -> None:
    off = APART_US // MINUTE_US + 1
    known = visits((), minutes((DAY, 9), ({}, 2), (DAY, 9), ({}, off), (DAY, 5)), SERVICE_S)
    assert [one.minutes for one in known] == [20, 5]
    (day,) = recurring(known, SERVICE_S)
    assert day.occasions == 2
    assert recurring(known, SERVICE_S, since_us=25 * MINUTE_US) == [], "before then is no sign of what comes"


def test_visits_are_the_same_however_often_one_looks() -> None:
    """Also where minutes are told twice."""
    told = minutes((NIGHT, 7), (DAY, 8), (NIGHT, 9), (DAY, 4))
    at_once = visits((), told, SERVICE_S)
    known: tuple[RegimeVisit, ...] = ()
    for at in range(0, len(told), 3):
        known = visits(known, told[max(at - 5, 0) : at + 3], SERVICE_S)
    assert known == at_once


def test_visits_that_differ_by_less_than_the_library_tells_apart_are_one_regime() -> None:
    known = visits((), minutes((DAY, 9), (NIGHT, 20), ({"a": 700, "b": 350}, 9)), SERVICE_S)
    (day,) = recurring(known, SERVICE_S)
    assert day.rates[0].arrivals_per_s == pytest.approx(650 / 60)
    assert pytest.approx(NEAR) == LIKE * LIKE
    known = visits((), minutes((DAY, 9), (NIGHT, 20), ({"a": 800, "b": 400}, 9)), SERVICE_S)
    assert recurring(known, SERVICE_S) == []


def test_a_mix_that_turns_is_another_regime_and_a_model_that_is_gone_counts_for_nothing() -> None:
    turned = {"a": 150, "b": 525}  # as much work as by day
    told = minutes((DAY, 20), (turned, 20), (DAY, 20), (turned, 20))
    assert len(recurring(visits((), told, SERVICE_S), SERVICE_S)) == 2
    assert recurring(visits((), told, SERVICE_S), {"a": 0.01}) == []


@pytest.mark.parametrize("seed", range(5))
def test_chance_alone_makes_no_regimes_of_poisson_arrivals(seed: int) -> None:
    """Some tasks a minute by night, ten times as many by day; whatever recurs is near one of the two."""
    random = Random(seed)

    def poisson(per_minute: float) -> int:
        count, at = 0, random.expovariate(per_minute)
        while at < 1.0:
            count, at = count + 1, at + random.expovariate(per_minute)
        return count

    told = []
    for at in range(8 * 60):
        mean = 12.0 if at // 60 % 2 else 120.0
        tasks = {name: poisson(mean * share) for name, share in (("a", 1.0), ("b", 0.5))}
        told.append(ArrivalMinute(at * MINUTE_US, tasks))
    found = recurring(visits((), told, SERVICE_S), SERVICE_S)
    assert len(found) >= 2
    rates = sorted(one.rates[0].arrivals_per_s for one in found[:2])
    assert rates == [pytest.approx(0.2, rel=0.1), pytest.approx(2.0, rel=0.1)]
    assert sum(one.seconds for one in found[:2]) > 0.9 * 8 * 3600

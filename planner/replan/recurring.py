"""Which load regimes recur on a device, from what arrived minute by minute. Pure.

Minutes in a row whose arrivals are alike, as far as chance lets one tell (`moved`), are a *visit*: a night,
a day, a shift. Visits whose rates lie within `LIKE` of each other are of one regime. One that came on several
occasions comes again, and is worth a search before it does.

`LIKE` is the root of the factor within which the library of regimes answers: so whatever two visits make up a
regime, what is found for its mean answers for both.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from stageloom.planner.replan.regimes import NEAR, RegimeRate, distance
from stageloom.shared.policy.arrivals import Arrived
from stageloom.shared.policy.regime import moved

LIKE: Final = math.sqrt(NEAR)

MINUTE_US: Final = 60_000_000

LEAST_MINUTES: Final = 3
"""A shorter visit is no regime: a search and a trial take as long."""

APART_US: Final = 10 * MINUTE_US
"""Visits of a regime that are less apart are one occasion: a burst lay between them."""

OCCASIONS: Final = 2

MOST_VISITS: Final = 512
"""That are remembered of a device, the newest ones."""

_GAP: Final = 2  # minutes without any task that end no visit: where tasks are few, some minutes have none


@dataclass(frozen=True, slots=True)
class ArrivalMinute:
    """Tasks that came, by model, in the minute from `at_us` on."""

    at_us: int
    tasks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RegimeVisit:
    """Minutes whose arrivals are alike; the last one begins at `last_us`."""

    began_us: int
    last_us: int
    tasks: Mapping[str, int]

    @property
    def minutes(self) -> int:
        return (self.last_us - self.began_us) // MINUTE_US + 1

    def arrived(self, models: Iterable[str]) -> dict[str, Arrived]:
        """Of these models."""
        return {model: Arrived(self.tasks.get(model, 0), 60.0 * self.minutes) for model in models}


@dataclass(frozen=True, slots=True)
class RecurringRegime:
    """Mean rates over all visits, and on how many occasions it came, for how long in all."""

    rates: tuple[RegimeRate, ...]
    occasions: int
    seconds: float


def visits(
    before: Sequence[RegimeVisit], minutes: Iterable[ArrivalMinute], service_s: Mapping[str, float]
) -> tuple[RegimeVisit, ...]:
    """The newest `MOST_VISITS`: those known `before`, oldest first, and what later minutes add to them.

    `service_s`: device time of one task of each of a device's models, the weight of its arrivals. A visit too
    short to be one goes as soon as another begins.
    """
    found = list(before)
    for minute in minutes:
        now = RegimeVisit(minute.at_us, minute.at_us, minute.tasks)
        last = found[-1] if found else None
        if last is not None and minute.at_us <= last.last_us:
            continue  # told before
        if last is not None and _goes_on(last, now, service_s):
            found[-1] = _joined(last, now)
            continue
        if last is not None and last.minutes < LEAST_MINUTES:
            found.pop()
        found.append(now)
    return tuple(found[-MOST_VISITS:])


def recurring(
    known: Sequence[RegimeVisit], service_s: Mapping[str, float], since_us: int = 0
) -> list[RecurringRegime]:
    """Regimes that came on `OCCASIONS` or more since a moment, those that lasted longest in all first."""
    regimes: list[list[RegimeVisit]] = []
    for visit in reversed(known):
        if (
            visit.minutes < LEAST_MINUTES
            or visit.last_us < since_us
            or not visit.tasks.keys() <= service_s.keys()
        ):
            continue
        rates = _rates([visit], service_s)
        near = [(distance(_rates(one, service_s), rates), at) for at, one in enumerate(regimes)]
        far, at = min(near, default=(math.inf, 0))
        if far <= LIKE:
            regimes[at].append(visit)
        else:
            regimes.append([visit])
    found = [
        RecurringRegime(_rates(one, service_s), _occasions(one), 60.0 * sum(visit.minutes for visit in one))
        for one in regimes
    ]
    return sorted(
        (one for one in found if one.occasions >= OCCASIONS), key=lambda one: one.seconds, reverse=True
    )


def _goes_on(last: RegimeVisit, now: RegimeVisit, service_s: Mapping[str, float]) -> bool:
    if now.began_us - last.last_us > (_GAP + 1) * MINUTE_US:
        return False
    models = sorted({*last.tasks, *now.tasks})
    return moved(last.arrived(models), now.arrived(models), service_s) <= LIKE


def _joined(last: RegimeVisit, now: RegimeVisit) -> RegimeVisit:
    models = sorted({*last.tasks, *now.tasks})
    tasks = {model: last.tasks.get(model, 0) + now.tasks.get(model, 0) for model in models}
    return RegimeVisit(last.began_us, now.last_us, tasks)


def _rates(of: Sequence[RegimeVisit], service_s: Mapping[str, float]) -> tuple[RegimeRate, ...]:
    seconds = 60.0 * sum(visit.minutes for visit in of)
    return tuple(
        RegimeRate(model, sum(visit.tasks.get(model, 0) for visit in of) / seconds, taken)
        for model, taken in service_s.items()
    )


def _occasions(newest_first: Sequence[RegimeVisit]) -> int:
    return 1 + sum(later.began_us - earlier.last_us > APART_US for later, earlier in pairwise(newest_first))

"""Which plan a device is known, or expected, to be best with under the arrivals that an alarm shows. Pure.

The library of a device has an entry of every trial that a re-plan led to: the plan that won, candidate or
incumbent, and the arrivals that were usual at the alarm. Loads lie as far apart as in
`stageloom.shared.policy.regime`. What won within a factor of 1.5 of today's arrivals is the answer,
without a search: each of two loads that close would not have raised an alarm beside the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from stageloom.planner.replan.policy import How, Observation, Proposal
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Plan
from stageloom.shared.policy.plain import Load, plain_replan
from stageloom.shared.policy.regime import weights
from stageloom.shared.policy.trigger import Cause

NEAR: Final = 1.5

_LEAST_PER_S: Final = 0.01
"""Rates below count as this one: a task in minutes is as good as none."""

OF_LOAD: Final = (Cause.REGIME.value, Cause.VARIANCE.value, Cause.OLDEST_AGE.value)
"""Causes of which the loads say all: costs are what they were."""


class RegimeRate(Struct, frozen=True, array_like=True):
    """Arrivals of one model, and what a task of it took."""

    model: str
    arrivals_per_s: float
    service_s: float


@dataclass(frozen=True, slots=True)
class KnownRegime:
    """An entry: `lost` is the structure of the plan that the winner was tried against.

    `replaced` is that plan where the winner took its place; None where the winner ran before.
    """

    rates: tuple[RegimeRate, ...]
    winner: Plan
    lost: Digest
    at_us: int
    replaced: Plan | None = None


@dataclass(frozen=True, slots=True)
class ExpectedRegime:
    """A plan that was found ahead, at a moment of the planner's clock.

    `chance`: of a gain over the plan it was compared with; None where it is that plan.
    """

    rates: tuple[RegimeRate, ...]
    plan: Plan
    chance: float | None
    found_us: int


def rates_of(cause: str, loads: Sequence[Load]) -> tuple[RegimeRate, ...]:
    """The arrivals that an alarm stands for: usual ones if they changed for good, else those of late."""
    usual = cause == Cause.REGIME.value
    return tuple(
        RegimeRate(
            load.model,
            load.usual_per_s if usual and load.usual_per_s > 0.0 else load.arrivals_per_s,
            load.service_s,
        )
        for load in loads
    )


def usual_rates(loads: Sequence[Load]) -> tuple[RegimeRate, ...]:
    """The arrivals that a trial meets: the usual ones, as a burst that raises an alarm is over by then.

    Those of late where an agent does not tell the usual ones.
    """
    return rates_of(Cause.REGIME.value, loads)


def distance(before: Sequence[RegimeRate], now: Sequence[RegimeRate]) -> float:
    """By what factor, at least 1, arrivals differ; infinity for other models. What tasks take is now's."""
    known = {one.model: one.arrivals_per_s for one in before}
    if known.keys() != {one.model for one in now}:
        return math.inf
    pairs = [(max(known[one.model], _LEAST_PER_S), max(one.arrivals_per_s, _LEAST_PER_S)) for one in now]
    heavy = weights([one for one, _ in pairs], [two for _, two in pairs], [one.service_s for one in now])
    return math.exp(math.fsum(w * abs(math.log(b / a)) for w, (a, b) in zip(heavy, pairs, strict=True)))


def winner(library: Sequence[KnownRegime], now: Sequence[RegimeRate]) -> Plan | None:
    """What won last under such arrivals; None where nothing is known, or the two nearest contradict that.

    An entry does not contradict if its winner lost to the newer one later. `library` is newest first.
    """
    found = [(distance(one.rates, now), one) for one in library]
    near = [(far, one) for far, one in found if far <= NEAR]
    if not near:
        return None
    best = near[0][1].winner
    agree = {best.structure, *(one.lost for _, one in near if one.winner.structure == best.structure)}
    nearest = sorted(near, key=lambda one: one[0])[:2]
    return best if all(one.winner.structure in agree for _, one in nearest) else None


def known_winner(seen: Observation, library: Sequence[KnownRegime]) -> Proposal | None:
    """The plan that is known to be best, with launch intervals for the loads; None where none is known.

    The incumbent itself where arrivals moved to those that it won under: nothing else need be looked for. If
    queues ask although it runs, another one may be looked for.
    """
    if seen.cause not in OF_LOAD:
        return None
    best = winner(library, rates_of(seen.cause, seen.loads))
    if best is None:
        return None
    if best.structure != seen.incumbent.structure:
        return Proposal(plain_replan(best, seen.loads), How.REGIME)
    if seen.cause == Cause.REGIME.value:
        return Proposal(plain_replan(seen.incumbent, seen.loads), How.REGIME)
    return None


def returning_plan(seen: Observation, library: Sequence[KnownRegime]) -> Proposal | None:
    """The plan that the incumbent took the place of, where the arrivals under which it did are gone.

    It lost under those alone, and ran before they came. `library` is newest first.
    """
    if seen.cause not in OF_LOAD:
        return None
    now = rates_of(seen.cause, seen.loads)
    won = [one for one in library if one.winner.structure == seen.incumbent.structure]
    before = next((one.replaced for one in won if one.replaced is not None), None)
    if before is None:
        return None
    beaten = [distance(one.rates, now) for one in won if one.lost == before.structure]
    if not NEAR < min(beaten) < math.inf:
        return None
    return Proposal(plain_replan(before, seen.loads), How.RETURNING)


def has_won(seen: Observation, library: Sequence[KnownRegime]) -> bool:
    """Whether the plan that runs won a trial under such arrivals as are usual now."""
    now = usual_rates(seen.loads)
    won = (one for one in library if one.winner.structure == seen.incumbent.structure)
    return any(distance(one.rates, now) <= NEAR for one in won)


def losses(seen: Observation, library: Sequence[KnownRegime]) -> dict[Digest, list[KnownRegime]]:
    """By structure what lost to the plan that runs under such arrivals as are usual now, newest first.

    What has won against that plan since is not among them. `library` is newest first.
    """
    now, runs = usual_rates(seen.loads), seen.incumbent.structure
    won: set[Digest] = set()
    lost: dict[Digest, list[KnownRegime]] = {}
    if seen.cause not in OF_LOAD:
        return lost
    for one in library:
        if distance(one.rates, now) > NEAR:
            continue
        if one.lost == runs:
            won.add(one.winner.structure)
        elif one.winner.structure == runs and one.lost not in won:
            lost.setdefault(one.lost, []).append(one)
    return lost


def expected_plan(seen: Observation, known: Sequence[ExpectedRegime]) -> Proposal | None:
    """The plan that was found ahead for arrivals nearest to an alarm's; None where none was for such.

    Nor where it is the incumbent's structure: that has not been tried against anything under this load.
    """
    if seen.cause not in OF_LOAD:
        return None
    now = rates_of(seen.cause, seen.loads)
    found = [(distance(one.rates, now), -one.found_us, at) for at, one in enumerate(known)]
    far, _, at = min(found, default=(math.inf, 0, 0))
    if far > NEAR or known[at].plan.structure == seen.incumbent.structure:
        return None
    return Proposal(plain_replan(known[at].plan, seen.loads), How.EXPECTED)

"""When a search that found nothing to try, or a trial that was lost, is worth the time again. Pure.

Queues may diverge for as long as a load lasts, and every alarm for them would search the same plans at the
same costs. Where planner and device share a machine, that takes the cores away from what is served.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stageloom.planner.replan.policy import Observation
from stageloom.planner.replan.regimes import NEAR, OF_LOAD, RegimeRate, distance
from stageloom.planner.replan.scene import rate_per_s
from stageloom.shared.engine.trial import lasting
from stageloom.shared.ids import Digest
from stageloom.shared.policy.plain import Load

FIRST_WAIT_S: Final = 60.0
"""After one fruitless search; each further one in a row doubles it."""

LONGEST_WAIT_S: Final = 1800.0

TRIED_AGAIN_S: Final = (3600.0, 86_400.0)
"""After one loss to the plan that runs under such arrivals, and at most: each further one doubles it."""


@dataclass(frozen=True, slots=True)
class FruitlessSearch:
    """`structure` is that of the plan that ran, `rates` are the arrivals that plans were judged by."""

    ended_us: int
    structure: Digest
    rates: tuple[RegimeRate, ...]


def judged_rates(loads: Sequence[Load]) -> tuple[RegimeRate, ...]:
    """The arrivals that plans are judged by: two seconds alone are noise where few tasks come."""
    return tuple(RegimeRate(load.model, rate_per_s(load), load.service_s) for load in loads)


def wait_s(fruitless: int, first_s: float = FIRST_WAIT_S, longest_s: float = LONGEST_WAIT_S) -> float:
    """Seconds from the last of so many fruitless searches to the next."""
    if fruitless < 1:
        return 0.0
    return min(first_s * 2.0 ** min(fruitless - 1, 10), longest_s)


def is_tried_again(lost_us: Sequence[int], now_us: int) -> bool:
    """Whether a plan that lost at these moments, newest first, is worth another trial by now."""
    wait_us = 1e6 * wait_s(len(lost_us), *TRIED_AGAIN_S)
    return not lost_us or abs(now_us - lost_us[0]) >= wait_us


def not_again_yet(seen: Observation, earlier: Sequence[FruitlessSearch], now_us: int) -> str:
    """Why nothing is searched for; empty where it is worth it. `earlier` is newest first, at today's costs.

    A drift, another power mode, and what an agent of another version says are searched for always.
    """
    if seen.cause not in OF_LOAD:
        return ""
    now = judged_rates(seen.loads)
    structure = seen.incumbent.structure
    same = [one for one in earlier if one.structure == structure and distance(one.rates, now) <= NEAR]
    ago_s = max(now_us - same[0].ended_us, 0) / 1e6 if same else 0.0
    left_s = wait_s(len(same)) - ago_s
    if left_s <= 0.0:
        return ""
    return (
        f"nothing to try was found for this load {lasting(ago_s)} ago; "
        f"it is looked for again in {lasting(left_s)}"
    )

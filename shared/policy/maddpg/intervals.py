"""From the task launcher's actions to launch intervals (TOP, V-B, figure 9). Pure.

TOP takes an action of [0, 1] as seconds per task. A device that serves hundreds of tasks a second needs
a hundredth of that range, and the rest of it starves queues. Ours: per model

    interval = min (max / min)^u,   min = service time over lanes,   max = 1 / arrivals, less some headroom

so that u = 0 launches as fast as the device could ever serve, u = 1 as fast as tasks arrive, and equal steps
of u change the rate by equal factors. Capacity is never set below measured arrivals: where the device is
slower than the arrivals, min is max. A model without arrivals may wait for a second, TOP's longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stageloom.shared.policy.maddpg.space import IntervalMap
from stageloom.shared.policy.plain import Load

HEADROOM: Final = 0.05
"""Launches above arrivals at least: at exactly the arrivals a queue that is there never empties."""

LONGEST_S: Final = 1.0
SHORTEST_S: Final = 1e-5
"""No device serves a task in less; keeps the ratio finite where nothing was measured."""


@dataclass(frozen=True, slots=True)
class IntervalBounds:
    """Seconds per task."""

    least_s: float
    most_s: float


def interval_bounds(load: Load, lanes: int = 1) -> IntervalBounds:
    """The bounds of one model under a load."""
    most_s = LONGEST_S
    if load.arrivals_per_s > 0.0:
        most_s = min(1.0 / (load.arrivals_per_s * (1.0 + HEADROOM)), LONGEST_S)
    return IntervalBounds(min(max(load.service_s / lanes, SHORTEST_S), most_s), most_s)


def interval_s(action: float, bounds: IntervalBounds, how: IntervalMap = IntervalMap.GEOMETRIC) -> float:
    """Seconds per task."""
    share = min(max(action, 0.0), 1.0)
    if how is IntervalMap.PAPER:
        return share
    return float(bounds.least_s * (bounds.most_s / bounds.least_s) ** share)


def intervals_us(
    actions: Sequence[float],
    loads: Sequence[Load],
    *,
    lanes: int = 1,
    how: IntervalMap = IntervalMap.GEOMETRIC,
) -> tuple[int, ...]:
    """A plan's launch intervals, one per action, rounded towards the faster. [W]"""
    pairs = zip(actions, loads, strict=True)
    return tuple(int(interval_s(action, interval_bounds(load, lanes), how) * 1e6) for action, load in pairs)

"""What a policy's actions mean: combined blocks and launch intervals (TOP, V-B, figures 9 and 10). Pure.

*Combined blocks.* [0, 1] is divided into as many uniform intervals as there are blocks in total; blocks whose
actions fall into one interval form a combined block. Ours, where more than H blocks fall into one (TOP's
*superblock*): they are taken in the order of their actions and split into parts of at most H. The first part
stays, each further one moves to the nearest interval that is still free; there always is one, as there are as
many intervals as blocks. The *executed* action says so by itself: reading it again gives the same blocks.

*Launch intervals.* TOP takes an action of [0, 1] as seconds per task. A device that serves hundreds of tasks
a second needs a hundredth of that range, and the rest of it starves queues. Ours: per model

    interval = min (max / min)^u,   min = service time over lanes,   max = 1 / arrivals, less some headroom

so that u = 0 launches as fast as the device could ever serve, u = 1 as fast as tasks arrive, and equal steps
of u change the rate by equal factors. Capacity is never set below measured arrivals: where the device is
slower than the arrivals, min is max. A model without arrivals may wait for a second, TOP's longest.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from stageloom.shared.plan import Member
from stageloom.shared.policy.maddpg.space import IntervalMap, Space
from stageloom.shared.policy.plain import Load

_BELOW_ONE = 1.0 - 1e-6  # representable in 32 bits


@dataclass(frozen=True, slots=True)
class BlockCombination:
    """What actions stand for."""

    combined: tuple[tuple[Member, ...], ...]  # by interval; members in the plan's order
    executed: tuple[float, ...]  # an action per member that gives the same without a split [bins]
    excess: int  # members that had to leave the combined block they were put in; 0: no superblock


def clipped(action: float) -> float:
    """An action within [0, 1)."""
    return min(max(action, 0.0), _BELOW_ONE)


def bin_of(action: float, bins: int) -> int:
    """The interval that an action falls into."""
    return int(clipped(action) * bins)


def centre(number: int, bins: int) -> float:
    """The middle of an interval."""
    return (number + 0.5) / bins


def combine_blocks(space: Space, actions: Sequence[float]) -> BlockCombination:
    """Combined blocks of at most H members. `actions`: one per member [bins]"""
    found: dict[int, list[int]] = {}
    for at, action in enumerate(actions):
        found.setdefault(bin_of(action, space.bins), []).append(at)
    executed = [clipped(action) for action in actions]
    excess = 0
    for number in sorted(found):
        inside = sorted(found[number], key=lambda at: (executed[at], at))
        parts = [inside[at : at + space.members_max] for at in range(0, len(inside), space.members_max)]
        found[number] = parts[0]
        for part in parts[1:]:
            free = _nearest_free(number, found, space.bins)
            found[free] = part
            excess += len(part)
            for at in part:
                executed[at] = centre(free, space.bins)
    rows = tuple(tuple(space.members[at] for at in sorted(found[number])) for number in sorted(found))
    return BlockCombination(rows, tuple(executed), excess)


def actions_of(space: Space, combined: Sequence[Sequence[Member]]) -> tuple[float, ...]:
    """Actions, one per member, that give these combined blocks: interval centres. [bins]

    Combined blocks get intervals in the order in which their members start out (`Space.bin_of_start`), each
    as near to where its members would be alone as those before it leave room for.

    Raises:
        KeyError: a block that the space does not have.
    """
    place = {member: at for at, member in enumerate(space.members)}
    rows = [[place[member] for member in row] for row in combined]
    homes = [sum(space.bin_of_start[at] for at in row) / len(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda at: (homes[at], rows[at]))
    actions = [0.0] * space.bins
    following = 0
    for rank, at in enumerate(order):
        last = space.bins - (len(order) - rank)  # leaves an interval for each of the others
        number = min(max(round(homes[at]), following), last)
        following = number + 1
        for member in rows[at]:
            actions[member] = centre(number, space.bins)
    return tuple(actions)


def _nearest_free(number: int, taken: Container[int], bins: int) -> int:
    """Of two equally near ones the higher, as later parts hold higher actions."""
    nearest = (number + side * distance for distance in count(1) for side in (1, -1))
    return next(one for one in nearest if 0 <= one < bins and one not in taken)


HEADROOM: Final = 0.05
"""Launches above arrivals at least: at exactly the arrivals a queue that is there never empties."""

LONGEST_S: Final = 1.0
SHORTEST_S: Final = 1e-5
"""No device serves a task in less; keeps the ratio finite where nothing was measured."""


def interval_bounds(load: Load, lanes: int = 1) -> tuple[float, float]:
    """The least and the most seconds per task of one model under a load."""
    most_s = LONGEST_S
    if load.expected_per_s > 0.0:
        most_s = min(1.0 / (load.expected_per_s * (1.0 + HEADROOM)), LONGEST_S)
    return min(max(load.service_s / lanes, SHORTEST_S), most_s), most_s


def interval_s(action: float, bounds: tuple[float, float], how: IntervalMap = IntervalMap.GEOMETRIC) -> float:
    """Seconds per task."""
    share = min(max(action, 0.0), 1.0)
    if how is IntervalMap.PAPER:
        return share
    least_s, most_s = bounds
    return float(least_s * (most_s / least_s) ** share)


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

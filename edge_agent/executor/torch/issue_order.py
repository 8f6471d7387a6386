"""In which order the launches of a program are issued; streams and waits leave that open.

Chen et al. 2023 (Opara), section 2.3 and algorithm 2: the order in which kernels reach the device changes
latency by up to 29 %. A device takes kernels in the order of arrival, so a long group issued first keeps
the others away. Here: breadth-first over the groups, memory- and compute-bound launches by turns, small
demands before large ones, and then the longest way to the end first.

Ours: the paper orders operators whatever their streams; here the schedule has fixed the streams, so that the
order is chosen among the next launches of each item. O(launches * items that are open at once).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stageloom.edge_agent.executor.on_device.happens_before import Ordered


@dataclass(frozen=True, slots=True)
class Nature:
    """What is known of one launch; the defaults say nothing."""

    seconds: float = 1.0
    memory_bound: bool = False
    demand: float = 0.0  # share of a multiprocessor that a thread block takes


def issue_order(items: Sequence[Ordered], natures: Sequence[Sequence[Nature]]) -> list[tuple[int, int]]:
    """(item, launch within it) in issue order; `natures` [num_items][num_launches of the item].

    Launches of one item keep their order, items of one stream too, and a launch comes after all launches
    that its item waits for. After its last launch an item comes once more, with the number of its launches:
    that is where its end is recorded.
    """
    ways = _ways_to_the_end(items, natures)
    followers, missing = _followers(items)
    issued = [0] * len(items)
    opened = [item for item, count in enumerate(missing) if not count]
    order: list[tuple[int, int]] = []
    memory_turn = False  # the compute-bound begin, as in Opara's released code
    while opened:

        def rank(item: int, turn: bool = memory_turn) -> tuple[int, bool, float, float, int]:
            at = issued[item]
            if at == len(natures[item]):  # nothing to launch: let its followers open
                return (-1, False, 0.0, 0.0, item)
            nature = natures[item][at]
            return (at, nature.memory_bound != turn, nature.demand, -ways[item][at], item)

        item = min(opened, key=rank)
        if issued[item] < len(natures[item]):
            memory_turn = not natures[item][issued[item]].memory_bound
            order.append((item, issued[item]))
            issued[item] += 1
        if issued[item] == len(natures[item]):
            order.append((item, issued[item]))
            opened.remove(item)
            for follower in followers[item]:
                missing[follower] -= 1
                if not missing[follower]:
                    opened.append(follower)
    return order


def _followers(items: Sequence[Ordered]) -> tuple[list[list[int]], list[int]]:
    """Per item those that wait for it or come next on its stream, and how many each one misses."""
    followers: list[list[int]] = [[] for _ in items]
    missing = [0] * len(items)
    last: dict[int, int] = {}
    for index, item in enumerate(items):
        direct = set(item.waits)
        if item.stream in last:
            direct.add(last[item.stream])
        for before in direct:
            followers[before].append(index)
        missing[index] = len(direct)
        last[item.stream] = index
    return followers, missing


def _ways_to_the_end(items: Sequence[Ordered], natures: Sequence[Sequence[Nature]]) -> list[list[float]]:
    """Per launch the seconds of the longest chain that begins with it."""
    followers, _ = _followers(items)
    ways: list[list[float]] = [[] for _ in items]
    for index in reversed(range(len(items))):
        way = max((ways[f][0] if ways[f] else 0.0 for f in followers[index]), default=0.0)
        backwards = []
        for nature in reversed(natures[index]):
            way += nature.seconds
            backwards.append(way)
        ways[index] = backwards[::-1] or [way]
    return ways

"""From a schedule's streams to the few that a device should have, and the order in which launches are issued.

torch hands out 32 streams round robin: the 33rd is the first again and orders what should overlap. A lane
gets at most 8, and all lanes together at most 32.

Streams and waits leave the issue order open. Chen et al. 2023 (Opara), section 2.3 and algorithm 2: the order
in which kernels reach the device changes latency by up to 29 %. A device takes kernels in the order of
arrival, so a long group that is issued first keeps the others away. `issue_order` goes breadth-first over the
groups, takes memory- and compute-bound launches by turns, small demands before large ones, and then the
longest way to the end first. The paper orders operators whatever their streams; here the schedule has fixed
the streams, so that the order is chosen among the next launches of each item.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stageloom.edge_agent.executor.cuda.memory_plan import items_before
from stageloom.edge_agent.executor.threads import assign
from stageloom.shared.launch_list import Item, LaunchList

MAX_GROUP_STREAMS = 8
MAX_STREAMS = 32

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Hardware queues that streams are spread over; read from the environment once, when CUDA starts (P4)."""


def streams_per_lane(lanes: int, most: int = MAX_GROUP_STREAMS) -> int:
    """How many streams every lane may use, at least its own, at most `most`."""
    return max(1, min(most, MAX_STREAMS // lanes))


def fold_streams(items: Sequence[Item], limit: int) -> LaunchList:
    """The same items on streams 0..limit-1 at most, in the same order; waits on the own stream are dropped.

    A stream of the schedule takes over a place whose last item has ended, by the list's own order, when the
    stream begins; else a place of its own; and where there is none left, it joins the place with the fewest
    operators still to come. Items are in an order that obeys all waits, so joining two streams cannot make
    two items wait for each other.
    """
    before = items_before(items)
    left = Counter[int]()  # per stream of the schedule its operators still to come
    for item in items:
        left[item.stream] += len(item.ops)
    place: dict[int, int] = {}
    to_come: list[int] = []  # per place the operators still to come of the streams that use it
    last: list[int] = []  # per place its latest item
    folded: list[Item] = []
    for index, item in enumerate(items):
        if item.stream not in place:
            at = _choose(to_come, last, before[index], limit)
            if at == len(last):
                to_come.append(0)
                last.append(-1)
            to_come[at] += left[item.stream]
            place[item.stream] = at
        stream = place[item.stream]
        to_come[stream] -= len(item.ops)
        last[stream] = index
        waits = tuple(wait for wait in item.waits if folded[wait].stream != stream)
        folded.append(replace(item, stream=stream, waits=waits))
    return tuple(folded)


def _choose(to_come: Sequence[int], last: Sequence[int], ended: int, limit: int) -> int:
    for at, (operators, item) in enumerate(zip(to_come, last, strict=True)):
        if not operators and ended >> item & 1:
            return at
    if len(last) < limit:
        return len(last)
    return min(range(limit), key=lambda at: (to_come[at], at))


@dataclass(frozen=True, slots=True)
class Nature:
    """What is known of one launch; the defaults say nothing."""

    seconds: float = 1.0
    memory_bound: bool = False
    demand: float = 0.0  # share of a multiprocessor that a thread block takes


def issue_order(items: Sequence[Item], natures: Sequence[Sequence[Nature]]) -> list[tuple[int, int]]:
    """(item, launch within it) in issue order; `natures` [num_items][num_launches of the item].

    Launches of one item keep their order, items of one stream too, and a launch comes after all launches
    that its item waits for. After its last launch an item comes once more, with the number of its launches:
    that is where its end is recorded. O(launches * items that are open at once).
    """
    ways = _ways_to_the_end(items, natures)
    memory_turn = False  # the compute-bound begin, as in Opara's released code

    def rank(item: int, at: int) -> tuple[float, ...]:
        nature = natures[item][at]
        return (at, nature.memory_bound != memory_turn, nature.demand, -ways[item][at])

    order: list[tuple[int, int]] = []
    for item, at in _in_order(items, [len(own) for own in natures], rank):
        if at < len(natures[item]):
            memory_turn = not natures[item][at].memory_bound
        order.append((item, at))
    return order


def scheduled_order(items: Sequence[Item], places: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """As `issue_order`, but as a schedule lists the launches, as far as its streams are all there.

    `places` [num_items][num_launches of the item] are those in its list. Where streams were joined, items of
    one stream follow each other whole: memory is shared on the strength of that.
    """
    return list(_in_order(items, [len(own) for own in places], lambda item, at: (places[item][at],)))


def _in_order(
    items: Sequence[Item], counts: Sequence[int], rank: Callable[[int, int], tuple[float, ...]]
) -> Iterator[tuple[int, int]]:
    """(item, launch within it) and, after an item's last launch, its end; always the open one of lowest rank.

    `rank` is asked anew before each; among equals the earlier item goes first.
    """
    ordering = assign(items)
    missing = list(ordering.waits)
    issued = [0] * len(items)
    opened = [item for item, count in enumerate(missing) if not count]

    def ranked(item: int) -> tuple[tuple[float, ...], int]:
        ended = issued[item] == counts[item]  # nothing to launch: let its followers open
        return ((-math.inf,) if ended else rank(item, issued[item])), item

    while opened:
        item = min(opened, key=ranked)
        if issued[item] < counts[item]:
            yield item, issued[item]
            issued[item] += 1
        if issued[item] == counts[item]:
            yield item, issued[item]
            opened.remove(item)
            for follower in ordering.frees[item]:
                missing[follower] -= 1
                if not missing[follower]:
                    opened.append(follower)


def _ways_to_the_end(items: Sequence[Item], natures: Sequence[Sequence[Nature]]) -> list[list[float]]:
    """Per launch the seconds of the longest chain that begins with it."""
    followers = assign(items).frees
    ways: list[list[float]] = [[] for _ in items]
    for index in reversed(range(len(items))):
        way = max((ways[f][0] if ways[f] else 0.0 for f in followers[index]), default=0.0)
        backwards = []
        for nature in reversed(natures[index]):
            way += nature.seconds
            backwards.append(way)
        ways[index] = backwards[::-1] or [way]
    return ways

"""From a schedule's streams to the few that a device should have.

torch hands out 32 streams round robin: the 33rd is the first again and orders what should overlap. A lane
gets at most 8, and all lanes together at most 32.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stageloom.edge_agent.executor.on_device.happens_before import items_before
from stageloom.shared.launch_list import Item, LaunchList

MAX_GROUP_STREAMS = 8
MAX_STREAMS = 32

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Hardware queues that streams are spread over; read from the environment once, when CUDA starts (P4)."""


def streams_per_lane(lanes: int) -> int:
    """How many streams every lane may use, at least its own."""
    return max(1, min(MAX_GROUP_STREAMS, MAX_STREAMS // lanes))


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
    places: list[_Place] = []
    folded: list[Item] = []
    for index, item in enumerate(items):
        if item.stream not in place:
            at = _choose(places, left, before[index], limit)
            if at == len(places):
                places.append(_Place())
            places[at].guests.append(item.stream)
            place[item.stream] = at
        stream = place[item.stream]
        left[item.stream] -= len(item.ops)
        places[stream].last = index
        waits = tuple(wait for wait in item.waits if folded[wait].stream != stream)
        folded.append(replace(item, stream=stream, waits=waits))
    return tuple(folded)


@dataclass(slots=True)
class _Place:
    """One of the few streams."""

    guests: list[int] = field(default_factory=list)  # the schedule's streams that use it
    last: int = -1  # its latest item


def _choose(places: Sequence[_Place], left: Counter[int], ended: int, limit: int) -> int:
    to_come = [sum(left[stream] for stream in place.guests) for place in places]
    for at, place in enumerate(places):
        if not to_come[at] and ended >> place.last & 1:
            return at
    if len(places) < limit:
        return len(places)
    return min(range(limit), key=lambda at: (to_come[at], at))

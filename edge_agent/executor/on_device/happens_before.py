"""What must have ended when a launch begins: the only ground on which memory may be used twice.

A launch list orders two launches if a chain of waits and of places on one stream leads from one to the
other. That the first is likely to end earlier is no order: streams run at their own pace.
"""

from collections.abc import Sequence
from typing import Protocol

from stageloom.shared.bitmask import bits


class Ordered(Protocol):
    """What matters of a launch-list item here."""

    @property
    def stream(self) -> int:
        """Its stream; items on one stream run one after another."""

    @property
    def waits(self) -> tuple[int, ...]:
        """Earlier items that must have ended."""


def items_before(items: Sequence[Ordered]) -> tuple[int, ...]:
    """Per item the mask of items that have ended when it begins. [num_items]"""
    last: dict[int, int] = {}  # per stream its latest item
    found: list[int] = []
    for index, item in enumerate(items):
        mask = 0
        direct = item.waits if item.stream not in last else (*item.waits, last[item.stream])
        for before in direct:
            mask |= found[before] | 1 << before
        found.append(mask)
        last[item.stream] = index
    return tuple(found)


def launches_before(items: Sequence[Ordered], counts: Sequence[int]) -> tuple[int, ...]:
    """Per launch the mask of launches that have ended when it begins. [num_launches]

    Item i makes `counts[i]` launches, one after another; they are numbered item by item.
    """
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    whole = [(1 << starts[i + 1]) - (1 << starts[i]) for i in range(len(items))]
    found: list[int] = []
    for index, mask in enumerate(items_before(items)):
        ended = 0
        for before in bits(mask):
            ended |= whole[before]
        for _ in range(counts[index]):
            found.append(ended)
            ended |= 1 << len(found) - 1
    return tuple(found)

"""Whose turn it is where the work of many devices waits for one thread. Pure.

Round robin between owners, first in first out within one: an item waits for at most one item of every other
owner for each of its own owner's that came before it, however many the others have waiting. It is work
conserving: while anything waits there is something to take. Every operation takes constant time. Source:
Nagle, "On packet switches with infinite storage", RFC 970, 1985.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
Item = TypeVar("Item")


class FairQueue(Generic[Owner, Item]):
    """Items by owner. It bounds nothing: whoever puts items in does."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Owner, deque[Item]] = OrderedDict()  # first: whose turn it is

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, owner: Owner, item: Item) -> None:
        """Add an item behind its owner's others; an owner that had none takes its turn after all who have."""
        waiting = self._waiting.get(owner)
        if waiting is None:
            self._waiting[owner] = deque((item,))
        else:
            waiting.append(item)

    def put_newest(self, owner: Owner, item: Item) -> None:
        """Add an item that takes the place of whatever its owner has waiting; the owner keeps its turn."""
        waiting = self._waiting.get(owner)
        if waiting is not None:
            waiting.clear()
        self.put(owner, item)

    def take(self) -> Item:
        """The next item.

        Raises:
            KeyError: nothing waits.
        """
        owner = next(iter(self._waiting), None)
        if owner is None:
            raise KeyError("nothing waits")
        waiting = self._waiting[owner]
        item = waiting.popleft()
        if waiting:
            self._waiting.move_to_end(owner)
        else:
            del self._waiting[owner]
        return item

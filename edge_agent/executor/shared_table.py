"""What several users share: made for the first of them, kept as long as somebody holds it."""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SharedTable(Generic[K, V]):
    """Values by key, with who holds them. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # also while a value is made: two would want twice the memory at once
        self._values: dict[K, V] = {}
        self._holders: dict[K, set[Hashable]] = {}

    def __len__(self) -> int:
        """Values that somebody holds."""
        return len(self._holders)

    def get(self, key: K) -> V | None:
        """The value if it is there."""
        return self._values.get(key)

    def values(self) -> list[V]:
        """All values that are there."""
        with self._lock:
            return list(self._values.values())

    def hold(self, holder: Hashable, key: K, make: Callable[[], V]) -> V:
        """The value, made now if it is not there, for a holder until `release`."""
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
            self._holders.setdefault(key, set()).add(holder)
            self._taken(key)
            return self._values[key]

    def release(self, holder: Hashable) -> None:
        """The holder needs none of its values any more."""
        with self._lock:
            for key in [key for key, holders in self._holders.items() if holder in holders]:
                self._holders[key].discard(holder)
                if not self._holders[key]:
                    del self._holders[key]
                    self._left(key)

    def _taken(self, key: K) -> None:
        """Somebody holds a value. The lock is held."""

    def _left(self, key: K) -> None:
        """Nobody holds a value any more. The lock is held."""
        del self._values[key]

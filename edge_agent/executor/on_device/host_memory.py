"""Host memory that a device copies to and from by itself, lent out piece by piece."""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

Piece = TypeVar("Piece")


class HostMemory(Generic[Piece]):
    """Pieces by size; `make` makes one of so many bytes when none is free. Thread-safe.

    Making a piece is slow (it is pinned), so a plan's are made when it is loaded, and never given up.
    """

    def __init__(self, make: Callable[[int], Piece]) -> None:
        self._make = make
        self._free: dict[int, list[Piece]] = defaultdict(list)
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, count: int) -> None:
        """Have `count` pieces of this size."""
        with self._lock:
            pieces = self._free[nbytes]
            while len(pieces) < count:
                pieces.append(self._make(nbytes))

    def take(self, nbytes: int) -> Piece:
        """A piece that nobody else has."""
        with self._lock:
            pieces = self._free[nbytes]
            if pieces:
                return pieces.pop()
        return self._make(nbytes)

    def give(self, nbytes: int, piece: Piece) -> None:
        """The device has ended with it."""
        with self._lock:
            self._free[nbytes].append(piece)

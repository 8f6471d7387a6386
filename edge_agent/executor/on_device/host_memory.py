"""Host memory that a device copies to and from by itself, lent out piece by piece."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

from stageloom.shared.bound import BoundPlan

Piece = TypeVar("Piece")


def pieces_of(bound: BoundPlan) -> Counter[int]:
    """How many pieces of each size a plan's steps in flight need for inputs and outputs.

    A block is in one lane at a time, so each replica takes part in `run_ahead` steps at most.
    """
    found: Counter[int] = Counter()
    for model in bound.models:
        for tensor in (*model.graph.inputs, *model.graph.outputs):
            size = model.plan.batch * model.graph.tensors[tensor].nbytes
            found[size] += model.plan.replicas * bound.plan.run_ahead
    return found


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

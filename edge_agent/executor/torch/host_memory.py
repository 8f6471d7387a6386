"""Host memory that a device copies to and from by itself, lent out piece by piece."""

import threading
from collections import defaultdict

from torch import Tensor

from edge_agent.executor.torch.device import Device


class HostMemory:
    """Pieces by size; one is made when none is free. Thread-safe.

    Making a piece is slow (it is pinned), so a plan's are made when it is loaded, and never given up.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, count: int) -> None:
        """Have `count` pieces of this size."""
        with self._lock:
            pieces = self._free[nbytes]
            while len(pieces) < count:
                pieces.append(self._device.host_bytes(nbytes))

    def take(self, nbytes: int) -> Tensor:
        """A piece that nobody else has. [nbytes], uint8"""
        with self._lock:
            pieces = self._free[nbytes]
            if pieces:
                return pieces.pop()
        return self._device.host_bytes(nbytes)

    def give(self, piece: Tensor) -> None:
        """The device has ended with it."""
        with self._lock:
            self._free[piece.numel()].append(piece)

"""Shared memory on the application's side: sealed memfds, and places in them given out and taken back."""

import fcntl
import mmap
import os
import threading
from bisect import insort
from collections.abc import Callable

from stageloom.edge_agent.ingest.messages import ALIGNMENT_BYTES
from stageloom.shared.errors import TaskRefused

_ARENA_BYTES = 64 << 20  # address space only: pages cost memory once they are touched


class ClientArena:
    """One memfd. First fit over a sorted free list, so that pages touched once are touched again."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("stageloom-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, nbytes)
        fcntl.fcntl(
            self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        self.memory = mmap.mmap(self.descriptor, nbytes)
        self._free: list[tuple[int, int]] = [(0, nbytes)]  # (offset, bytes), ascending, never adjacent

    def take(self, nbytes: int) -> int | None:
        """The offset of a free place, or None."""
        for index, (offset, room) in enumerate(self._free):
            if room >= nbytes:
                if room == nbytes:
                    del self._free[index]
                else:
                    self._free[index] = (offset + nbytes, room - nbytes)
                return offset
        return None

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free a place and join it with its neighbours."""
        insort(self._free, (offset, nbytes))
        joined: list[tuple[int, int]] = []
        for start, room in self._free:
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((start, room))
        self._free = joined

    def close(self) -> None:
        """Unmap; arrays that still look into it keep it mapped."""
        os.close(self.descriptor)


class Reservation:
    """Places of one task's tensors, one after the other in one arena."""

    __slots__ = ("arena", "nbytes", "offset", "offsets")

    def __init__(self, arena: ClientArena, offset: int, nbytes: int, offsets: tuple[int, ...]) -> None:
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.offsets = offsets  # per tensor, in the arena


class ArenaPool:
    """All arenas of one connection; grows by whole arenas up to a limit."""

    def __init__(self, max_bytes: int, max_arenas: int) -> None:
        self._max_bytes = max_bytes
        self._max_arenas = max_arenas
        self._arenas: list[ClientArena] = []
        self._lock = threading.Lock()

    def reserve(self, sizes: list[int], announce: Callable[[ClientArena], None]) -> Reservation:
        """Places for tensors of these sizes; `announce` is called first if they need a new arena.

        It is called under the lock: no other thread may name the arena before the agent knows it.

        Raises:
            TaskRefused: the limit is reached (code `arena_full`).
        """
        offsets, total = [], 0
        for size in sizes:
            offsets.append(total)
            total += max(_aligned(size), ALIGNMENT_BYTES)
        total = max(total, ALIGNMENT_BYTES)
        with self._lock:
            for arena in self._arenas:
                if (start := arena.take(total)) is not None:
                    return Reservation(arena, start, total, tuple(start + o for o in offsets))
            made = self._grow(total)
            announce(made)
            self._arenas.append(made)
            start = made.take(total) or 0
            return Reservation(made, start, total, tuple(start + o for o in offsets))

    def _grow(self, least_bytes: int) -> ClientArena:
        room = self._max_bytes - sum(arena.nbytes for arena in self._arenas)
        if room < least_bytes or len(self._arenas) >= self._max_arenas:
            raise TaskRefused(
                "arena_full",
                f"{least_bytes} bytes do not fit beside the tasks that have not ended",
                remedy="wait for results before submitting more",
            )
        page = mmap.PAGESIZE
        nbytes = min(max(_ARENA_BYTES, -(-least_bytes // page) * page), room)
        return ClientArena(len(self._arenas), nbytes)

    def release(self, reservation: Reservation) -> None:
        """Take the places back."""
        with self._lock:
            reservation.arena.give_back(reservation.offset, reservation.nbytes)

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            for arena in self._arenas:
                arena.close()
            self._arenas.clear()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

"""System shared memory that clients of this account registered: files in /dev/shm, read by offset.

They are never mapped: a client may shorten its file at any time, and a process that looks into a mapping of
it would be killed.
"""

import os
import stat
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from stageloom.edge_agent.ingest.client_memory import Array, InputSource
from stageloom.edge_agent.serving.failures import FailureKind, InferenceFailure
from stageloom.shared.errors import InputError, NotFoundError

_DIRECTORY: Final = Path("/dev/shm")
_MAX_REGIONS: Final = 256
_MAX_BYTES: Final = 1 << 44


class MemoryRegion:
    """`byte_size` bytes of a file from `offset` on; closed once nothing refers to it."""

    def __init__(self, name: str, key: str, offset: int, byte_size: int, descriptor: int) -> None:
        self.name, self.key, self.offset, self.byte_size = name, key, offset, byte_size
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def place(self, offset: int, nbytes: int) -> int:
        """The position in the file of a part of the region.

        Raises:
            InputError: the part does not lie inside.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.byte_size:
            raise InputError(
                f"bytes {offset} to {offset + nbytes} lie outside shared memory region {self.name!r} "
                f"of {self.byte_size} bytes"
            )
        return self.offset + offset

    def read(self, place: Array, position: int) -> None:
        """Fill `place` from a position in the file.

        Raises:
            InputError: the file has become too short.
        """
        rest = place.reshape(-1).view(np.uint8).data
        while rest:
            count = os.preadv(self.descriptor, [rest], position)
            if not count:
                raise InputError(f"the file of shared memory region {self.name!r} is too short")
            rest, position = rest[count:], position + count

    def write(self, view: Array, position: int) -> None:
        """Write all of `view` to a position in the file.

        Raises:
            InputError: the file cannot hold it.
        """
        rest = np.ascontiguousarray(view).reshape(-1).view(np.uint8).data
        try:
            while rest:
                count = os.pwrite(self.descriptor, rest, position)
                rest, position = rest[count:], position + count
        except OSError as error:
            raise InputError(f"shared memory region {self.name!r} cannot be written: {error}") from error


class RegionInput(InputSource):
    """A tensor in a region, or some of its rows."""

    def __init__(
        self, dtype: "np.dtype[Any]", shape: tuple[int, ...], region: MemoryRegion, position: int
    ) -> None:
        super().__init__(dtype, shape)
        self._region = region
        self._position = position

    def read_into(self, place: Array) -> None:
        self._region.read(place, self._position)

    def rows(self, first: int, count: int) -> "RegionInput":
        """`count` rows from row `first` on."""
        shape = (count, *self.shape[1:])
        row_bytes = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        return RegionInput(self.dtype, shape, self._region, self._position + first * row_bytes)


class RegionTable:
    """Regions by the names that clients gave them; for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of changes: each look is one of the dictionary's own operations
        self._regions: dict[str, MemoryRegion] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open the file that `shm_open` calls `key`.

        Raises:
            InferenceFailure: the name is taken.
            InputError: there is no such file of this account with so many bytes, or there are too many.
        """
        if not 0 <= offset <= _MAX_BYTES or not 1 <= byte_size <= _MAX_BYTES:
            raise InputError(f"a region of {byte_size} bytes from byte {offset} on is impossible")
        with self._lock:
            if name in self._regions:
                kind = FailureKind.EXISTS
                raise InferenceFailure(kind, f"shared memory region {name[:64]!r} already in manager")
            if len(self._regions) >= _MAX_REGIONS:
                raise InputError(f"more than {_MAX_REGIONS} regions", remedy="unregister some")
            descriptor = _open(key, offset + byte_size)
            self._regions[name] = MemoryRegion(name, key, offset, byte_size, descriptor)

    def unregister(self, name: str) -> None:
        """Forget one, or all of them for an empty name; one that is not there is forgotten already."""
        with self._lock:
            if name:
                self._regions.pop(name, None)
            else:
                self._regions.clear()

    def get(self, name: str) -> MemoryRegion:
        """A region that is registered.

        Raises:
            NotFoundError: there is none.
        """
        if (region := self._regions.get(name)) is None:
            raise NotFoundError(f"Unable to find shared memory region: '{name[:64]}'")
        return region

    def status(self, name: str) -> Mapping[str, MemoryRegion]:
        """All regions, or the one that is named.

        Raises:
            NotFoundError: there is none of that name.
        """
        return {name: self.get(name)} if name else dict(self._regions)


def _open(key: str, least_bytes: int) -> int:
    name = key.removeprefix("/")
    if not name or "/" in name or "\0" in name or name in (".", "..") or len(name) > 255:
        raise InputError(f"{key[:64]!r} is no key of shared memory", remedy="give the name from shm_open")
    try:
        descriptor = os.open(_DIRECTORY / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"Unable to open shared memory region: '{key[:64]}'") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size < least_bytes:
        os.close(descriptor)
        raise InputError(
            f"{key[:64]!r} is no shared memory of this account with {least_bytes} bytes",
            remedy="make it as the account that runs the agent",
        )
    return descriptor

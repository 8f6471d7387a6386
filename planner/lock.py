"""Locks that one process holds: a planner's data directory, and the file of its SQLite database."""

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Final

from stageloom.shared.errors import InputError, StorageError

LOCK_FILE: Final = "planner.lock"
DATABASE_LOCK: Final = ".planner-lock"
"""What the name of a SQLite database's lock ends with."""

_LONGEST: Final = 4096  # bytes of what a holder says of itself


class HeldLock:
    """A lock file, held from `__init__` to `release`; the kernel lets go when the process dies."""

    def __init__(self, path: Path, *, what: str, holder: str, remedy: str) -> None:
        """Take it; the file is made if need be, and says who holds it (`holder`, one line).

        Raises:
            InputError: another process holds it; the message says `what` it holds and names it.
            StorageError: the file cannot be made or written.
        """
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"{error.filename or path}: {error.strerror}", remedy=remedy) from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            other = os.pread(self._handle, _LONGEST, 0).decode("utf-8", "replace").strip() or "unknown"
            os.close(self._handle)
            raise InputError(
                f"a planner already runs on {what} (process {other})", remedy=f"stop that one, or {remedy}"
            ) from error
        with contextlib.suppress(OSError):  # for people only, and the disk may be full
            os.truncate(self._handle, 0)
            os.pwrite(self._handle, f"{holder}\n".encode()[:_LONGEST], 0)

    def release(self) -> None:
        """Let go; the file stays, since removing it would race with the next holder."""
        os.truncate(self._handle, 0)
        os.close(self._handle)

    def __enter__(self) -> "HeldLock":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def lock_data_dir(data_dir: Path) -> HeldLock:
    """Make the data directory if need be and hold it.

    Raises:
        InputError: another planner holds it; the message names its process.
        StorageError: the directory cannot be made or written.
    """
    remedy = "name a --data-dir that can be written"
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(f"{error.filename or data_dir}: {error.strerror}", remedy=remedy) from error
    return HeldLock(
        data_dir / LOCK_FILE, what=str(data_dir), holder=str(os.getpid()), remedy="name another --data-dir"
    )


def lock_sqlite(file: Path, data_dir: Path) -> HeldLock:
    """Hold a SQLite database, whatever name it is opened by: the lock lies beside the file itself.

    Not on the file: to close a descriptor of it would end SQLite's own locks. Symbolic links lead to the same
    file and so to the same lock. Hard links do not, and SQLite's log goes by the name: they are refused.

    Raises:
        InputError: another planner holds it, or the file has several names.
        StorageError: the lock cannot be made.
    """
    real = file.resolve()
    names = real.stat().st_nlink if real.exists() else 1
    if names > 1:
        raise InputError(
            f"the database {real} has {names} names (hard links), and SQLite would damage it",
            remedy="keep one of them; a symbolic link does no harm",
        )
    return HeldLock(
        real.with_name(real.name + DATABASE_LOCK),
        what=f"the database {real}",
        holder=f"{os.getpid()}, data in {data_dir.absolute()}",
        remedy="name another --database-url",
    )

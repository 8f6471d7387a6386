"""One planner per data directory."""

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType

from shared.errors import InputError, StorageError

LOCK_FILE = "planner.lock"


class DataDirLock:
    """Makes the data directory if need be and holds it; the kernel lets go when the process dies."""

    def __init__(self, data_dir: Path) -> None:
        """Take the lock.

        Raises:
            InputError: another planner holds it; the message names its process.
            StorageError: the directory cannot be made or written.
        """
        path = data_dir / LOCK_FILE
        try:
            data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(
                f"{error.filename or path}: {error.strerror}",
                remedy="name a --data-dir that can be written",
            ) from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._handle)
            raise InputError(
                f"a planner already runs on {data_dir} (process {owner})",
                remedy="stop that one, or name another --data-dir",
            ) from error
        with contextlib.suppress(OSError):  # for people only, and the disk may be full
            os.truncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let go; the file stays, since removing it would race with the next planner."""
        os.truncate(self._handle, 0)
        os.close(self._handle)

    def __enter__(self) -> "DataDirLock":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

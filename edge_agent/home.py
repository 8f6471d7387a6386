"""The agent's state directory: one agent at a time, for its owner only."""

import contextlib
import fcntl
import os
from pathlib import Path

from stageloom.shared.errors import StorageError

LOCK_NAME = "lock"


class HomeLock:
    """Held for the life of the main process; the kernel lets go of it, however the process ends."""

    def __init__(self, home: Path) -> None:
        """Take it.

        Raises:
            StorageError: another agent holds it, or the directory cannot be used.
        """
        path = home / LOCK_NAME
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(
                f"the state directory {home} cannot be used: {error.strerror}",
                remedy="mend its permissions or choose another with STAGELOOM_AGENT_HOME",
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise StorageError(
                f"another agent (process {holder or 'unknown'}) uses the state directory {home}",
                remedy="stop it, or choose another with STAGELOOM_AGENT_HOME",
            ) from None
        with contextlib.suppress(OSError):  # for people only, and the disk may be full
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next agent in."""
        os.close(self._descriptor)

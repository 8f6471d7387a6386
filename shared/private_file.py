"""Files of secrets: mode 0600, never overwritten, and refused where others could have read them."""

import os
import stat
from pathlib import Path

from stageloom.shared.durable_file import create_synced
from stageloom.shared.errors import StorageError


def write_private(path: Path, text: str) -> None:
    """Write a new file with mode 0600, durably.

    Raises:
        StorageError: there is a file already (keys are never overwritten), or it cannot be written.
    """
    try:
        create_synced(path, text.encode())
    except FileExistsError as error:
        raise StorageError(f"{path} exists already", remedy="move it away to make new keys") from error
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", remedy="check the folder"
        ) from error


def read_private(path: Path, *, limit_chars: int, remedy: str) -> str:
    """At most `limit_chars` of the file; `remedy` is what to do where it cannot be read.

    Raises:
        StorageError: it is missing or unreadable, no regular file, someone else's, or readable by others.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(file) as stream:
            status = os.fstat(stream.fileno())
            text = stream.read(limit_chars) if stat.S_ISREG(status.st_mode) else ""
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"the key file {path} cannot be read: {error}", remedy=remedy) from error
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"the key file {path} is no regular file", remedy=f"restore it or {remedy}")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise StorageError(
            f"the key file {path} has mode {mode:04o} and may have been read by others",
            remedy=f"revoke the key and {remedy}, or run chmod 600 if you trust everyone on this machine",
        )
    if status.st_uid != os.geteuid():
        raise StorageError(f"the key file {path} belongs to another user", remedy="run as its owner")
    return text

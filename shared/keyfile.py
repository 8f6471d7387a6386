"""CURVE key pairs in files that only their owner can read.

The format is two lines of Z85, public then secret. The keys are made by whoever holds the transport library.
"""

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shared.durable_file import create_synced
from shared.errors import StateError, StorageError

_KEY: Final = re.compile(r"[\x21-\x7e]{40}")


@dataclass(frozen=True)
class KeyPair:
    """Both keys in Z85, 40 characters each. The secret one is kept out of `repr`, and so out of logs."""

    public: str
    secret: str = field(repr=False)


def write_keys(path: Path, keys: KeyPair) -> None:
    """Write a new key file with mode 0600, durably.

    Raises:
        StorageError: there is a file already (keys are never overwritten), or it cannot be written.
    """
    try:
        create_synced(path, f"{keys.public}\n{keys.secret}\n".encode())
    except FileExistsError as error:
        raise StorageError(f"{path} exists already", remedy="move it away to make new keys") from error
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", remedy="check the folder"
        ) from error


def read_keys(path: Path) -> KeyPair:
    """Read a key file, refusing one that others could have read.

    Raises:
        StorageError: it is missing or unreadable, no regular file, someone else's, or readable by others.
        StateError: it does not hold two keys.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(file) as stream:
            status = os.fstat(stream.fileno())
            text = stream.read(200) if stat.S_ISREG(status.st_mode) else ""
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"the key file {path} cannot be read: {error}", remedy="join again") from error
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"the key file {path} is no regular file", remedy="restore it or join again")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise StorageError(
            f"the key file {path} has mode {mode:04o} and may have been read by others",
            remedy="revoke the device and join again, or run chmod 600 if you trust everyone on this machine",
        )
    if status.st_uid != os.geteuid():
        raise StorageError(f"the key file {path} belongs to another user", remedy="run as its owner")
    lines = text.split("\n")
    if len(lines) != 3 or lines[2] or not all(_KEY.fullmatch(line) for line in lines[:2]):
        raise StateError(f"the key file {path} does not hold two keys", remedy="join again")
    return KeyPair(lines[0], lines[1])

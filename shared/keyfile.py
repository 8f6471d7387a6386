"""CURVE key pairs in files that only their owner can read.

The format is two lines of Z85, public then secret. The keys are made by whoever holds the transport library.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stageloom.shared.errors import StateError
from stageloom.shared.private_file import read_private, write_private

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
    write_private(path, f"{keys.public}\n{keys.secret}\n")


def read_keys(path: Path) -> KeyPair:
    """Read a key file, refusing one that others could have read.

    Raises:
        StorageError: it is missing or unreadable, no regular file, someone else's, or readable by others.
        StateError: it does not hold two keys.
    """
    text = read_private(path, limit_chars=200, remedy="join again")
    lines = text.split("\n")
    if len(lines) != 3 or lines[2] or not all(_KEY.fullmatch(line) for line in lines[:2]):
        raise StateError(f"the key file {path} does not hold two keys", remedy="join again")
    return KeyPair(lines[0], lines[1])

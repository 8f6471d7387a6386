"""Where the admin socket of a data directory lies."""

import os
from pathlib import Path

from stageloom.shared.errors import InputError

SOCKET_FILE = "admin.sock"
MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit is 107; ZeroMQ wants a little of it


def socket_path(data_dir: Path) -> Path:
    """Where the planner of a data directory listens.

    Raises:
        InputError: the path is longer than a local socket's may be.
    """
    path = data_dir.absolute() / SOCKET_FILE
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise InputError(
            f"{path} is longer than {MAX_SOCKET_PATH_BYTES} bytes, the most a local socket's name may have",
            remedy="use a shorter --data-dir",
        )
    return path

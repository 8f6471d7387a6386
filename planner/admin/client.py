"""The admin socket of a data directory: where it lies, and one request to the planner behind it."""

import os
import socket
from pathlib import Path
from typing import TypeVar

from stageloom.shared.errors import InputError, UnavailableError
from stageloom.shared.messages import admin
from stageloom.shared.messages.base import Message

R = TypeVar("R", bound=Message)

TIMEOUT_S = 60.0
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


def is_running(path: Path) -> bool:
    """Whether someone listens on a local socket; a killed planner leaves a file that nobody listens on."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def require_running(data_dir: Path) -> Path:
    """The running planner's socket.

    Raises:
        UnavailableError: no planner runs on `data_dir`.
    """
    path = socket_path(data_dir)
    if not is_running(path):
        raise UnavailableError(
            f"no planner runs on {data_dir}", remedy="start it with `stageloom up`, or name its --data-dir"
        )
    return path


def ask(data_dir: Path, request: admin.AdminRequest, expected: type[R], *, timeout_s: float = TIMEOUT_S) -> R:
    """Send a request and wait for its reply.

    Raises:
        UnavailableError: no planner runs on `data_dir`, or it does not answer in time.
        AdminRefused: the planner said no; the request changed nothing.
    """
    path = require_running(data_dir)  # at once, where ZeroMQ would wait for a planner to come
    from stageloom.planner.dispatch.admin import call

    return call(path, request, expected, timeout_s=timeout_s)

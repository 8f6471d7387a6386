"""One request to the planner of a data directory, and its reply."""

import socket
from pathlib import Path
from typing import TypeVar

from stageloom.planner.admin.path import socket_path
from stageloom.shared.errors import UnavailableError
from stageloom.shared.messages import admin
from stageloom.shared.messages.base import Message

R = TypeVar("R", bound=Message)

TIMEOUT_S = 60.0


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

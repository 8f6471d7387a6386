"""One request to a running planner, and its reply."""

import socket
from pathlib import Path
from typing import TypeVar

from planner.admin.path import socket_path
from shared.errors import ExitCode, StageloomError, UnavailableError
from shared.messages import admin
from shared.messages.base import Message

R = TypeVar("R", bound=Message)

TIMEOUT_S = 60.0


class PlannerFailed(StageloomError):
    """The planner's own answer: its cause, remedy and exit code."""

    def __init__(self, reply: admin.Failed) -> None:
        super().__init__(reply.cause, remedy=reply.remedy)
        try:
            self.exit_code = ExitCode(reply.exit_code)
        except ValueError:
            self.exit_code = ExitCode.FAILED


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
        PlannerFailed: the planner refused; the request changed nothing.
    """
    path = require_running(data_dir)
    import zmq

    frame = admin.REQUESTS.encode(request)
    with zmq.Context() as context, context.socket(zmq.REQ) as door:
        door.linger = 0
        door.connect(f"ipc://{path}")
        door.send(frame)
        if not door.poll(round(timeout_s * 1000)):
            raise UnavailableError(
                f"the planner on {data_dir} did not answer within {timeout_s:g} s",
                remedy="see whether it still runs, and its log",
            )
        reply = admin.REPLIES.decode(door.recv())
    if isinstance(reply, admin.Failed):
        raise PlannerFailed(reply)
    if not isinstance(reply, expected):
        raise UnavailableError(
            f"the planner answered with {type(reply).__name__}", remedy="use its own version of this command"
        )
    return reply

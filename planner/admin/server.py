"""The admin socket: one thread, one request at a time, mode 0600. Whoever may open it is the operator."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from shared.errors import DecodeError, ExitCode, StorageError
from shared.messages import admin
from shared.messages.base import Message

logger = logging.getLogger(__name__)

_POLL_MS = 200


class AdminServer:
    """Binds at once; serves from `start` to `close`."""

    def __init__(self, path: Path, handle: Callable[[admin.AdminRequest], Message]) -> None:
        self._path = path
        self._handle = handle
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, admin.REQUESTS.limits.frame_bytes)
        mask = os.umask(0o177)  # the socket file must never exist with a wider mode
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StorageError(
                f"{path}: {error.strerror}", remedy="check that the data directory is writable"
            ) from error
        finally:
            os.umask(mask)
        self._thread = threading.Thread(target=self._serve, name="admin", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread that answers runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Answer what is being answered, then stop and remove the socket file."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(30.0)
        self._socket.close()
        self._context.term()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if not self._socket.poll(_POLL_MS):
                continue
            frames = self._socket.recv_multipart()
            self._socket.send(self._answer(frames))

    def _answer(self, frames: list[bytes]) -> bytes:
        try:
            if len(frames) != 1:
                raise DecodeError(f"an admin request has one frame, not {len(frames)}")
            reply = self._handle(admin.REQUESTS.decode(frames[0]))
            return admin.REPLIES.encode(reply)  # type: ignore[arg-type]  # the handler returns AdminReply
        except DecodeError as error:
            return admin.REPLIES.encode(
                admin.Failed(
                    cause=error.cause[:512],
                    remedy="use the stageloom command of the planner's own version",
                    exit_code=ExitCode.USAGE,
                )
            )
        except Exception as error:
            # A defect in one request must not take the door away; the operator is told and the log has it.
            logger.exception("an admin request failed")
            return admin.REPLIES.encode(
                admin.Failed(
                    cause=f"the planner failed: {type(error).__name__}: {error}"[:512],
                    remedy="see the planner's log",
                    exit_code=ExitCode.FAILED,
                )
            )

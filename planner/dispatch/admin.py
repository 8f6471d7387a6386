"""The admin socket: how the `stageloom` command reaches a running planner.

An ipc socket of mode 0600: whoever may open it is the operator. Requests are handled by a few threads, so
that a search that takes seconds does not hold up a live view. A handler that only waits for the store returns
a future: a thousand pushes at once then wait together, and share commits, instead of four at a time.
"""

import logging
import os
import queue
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import zmq

from stageloom.planner.dispatch.sockets import Waker
from stageloom.shared.errors import DecodeError, ExitCode, SettingError, StageloomError, UnavailableError
from stageloom.shared.messages.admin import REPLIES, REQUESTS, AdminReply, AdminRequest, Failed
from stageloom.shared.messages.base import Message
from stageloom.shared.text import bounded

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)
_MAX_PATH: Final = 107  # sockaddr_un.sun_path
_ROUND: Final = 64  # requests taken before replies are sent
_FINISH_S: Final = 60.0  # what the store is given to answer the last requests

Answer = AdminReply | Future[AdminReply]


class AdminRefused(StageloomError):
    """The planner did not do what was asked; `exit_code` is what the command ends with."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.cause, remedy=failed.remedy)
        self.exit_code = ExitCode(failed.exit_code)


class AdminServer:
    """Serves requests from `start` to `stop`; `handle` runs on several threads at once."""

    def __init__(self, path: Path, handle: Callable[[AdminRequest], Answer], *, threads: int = 4) -> None:
        """Raises:
        SettingError: the path is too long for a socket.
        """
        if len(os.fsencode(path)) > _MAX_PATH:
            raise SettingError(f"the admin socket's path {path} is too long", remedy="use a shorter folder")
        self._path = path
        self._handle = handle
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="admin")
        self._done: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._waiting = 0  # requests whose handler left them a future
        self._answered = threading.Condition()
        self._waker = Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="admin", daemon=True)

    def start(self) -> None:
        """Bind and serve.

        Raises:
            UnavailableError: the socket cannot be made.
        """
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 500)
        # One reply per request, however many were sent before the first is read: a reply over the bound
        # would be dropped without a word, and its request wait for ever.
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, REQUESTS.limits.frame_bytes)
        before = os.umask(0o177)  # there is no moment at which others could connect
        try:
            self._router.bind(f"ipc://{self._path}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UnavailableError(
                f"the admin socket {self._path} cannot be made: {error}", remedy="check the folder"
            ) from error
        finally:
            os.umask(before)
        self._thread.start()

    def stop(self) -> None:
        """Finish what is being handled and stop."""
        self._pool.shutdown()
        with self._answered:
            self._answered.wait_for(lambda: self._waiting == 0, _FINISH_S)
        self._stopping = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll())
            if self._router in ready:
                self._take()
            self._send_done()
        self._send_done()
        self._context.destroy(linger=500)

    def _take(self) -> None:
        for _ in range(_ROUND):
            try:
                route, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._pool.submit(self._answer, route, frames)
            except RuntimeError:  # `stop` has closed the pool
                self._reply(route, Failed(cause="the planner is stopping", remedy="start it again"), 0)

    def _send_done(self) -> None:
        self._waker.clear()
        while not self._done.empty():
            self._router.send_multipart(self._done.get())

    def _answer(self, route: bytes, frames: list[bytes]) -> None:
        if len(frames) != 2:
            failed = Failed(cause="a request has one frame", exit_code=ExitCode.USAGE)
            return self._reply(route, failed, 0)
        try:
            request = REQUESTS.decode(frames[1])
        except DecodeError as error:
            failed = Failed(cause=bounded(str(error)), remedy="use the planner's own command")
            return self._reply(route, failed, 0)
        try:
            answer = self._handle(request)
        except Exception as error:
            answer = _failed(request, error)
        if not isinstance(answer, Future):
            return self._reply(route, answer, request.correlation)
        with self._answered:
            self._waiting += 1
        answer.add_done_callback(lambda done: self._later(route, request, done))

    def _later(self, route: bytes, request: AdminRequest, done: Future[AdminReply]) -> None:
        error = done.exception()
        reply = done.result() if error is None else _failed(request, error)
        self._reply(route, reply, request.correlation)
        with self._answered:
            self._waiting -= 1
            self._answered.notify()

    def _reply(self, route: bytes, reply: AdminReply, correlation: int) -> None:
        self._done.put([route, b"", REPLIES.encode(msgspec.structs.replace(reply, correlation=correlation))])
        self._waker.wake()


def _failed(request: AdminRequest, error: BaseException) -> Failed:
    if isinstance(error, StageloomError):
        return Failed(cause=bounded(error.cause), remedy=bounded(error.remedy), exit_code=error.exit_code)
    log.error("%s failed", type(request).__name__, exc_info=error)
    return Failed(cause=f"the planner failed: {type(error).__name__}", remedy="see its log")


def call(path: Path, request: AdminRequest, reply_type: type[R], *, timeout_s: float = 30.0) -> R:
    """Ask the planner behind `path`.

    Raises:
        AdminRefused: it answers, and says no.
        UnavailableError: no planner there, or no answer in time.
    """
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        raise UnavailableError(f"no planner listens at {path}", remedy="start one with `stageloom up`")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        requester = context.socket(zmq.REQ)
        requester.setsockopt(zmq.LINGER, 0)
        requester.setsockopt(zmq.MAXMSGSIZE, REPLIES.limits.frame_bytes)
        requester.connect(f"ipc://{path}")
        requester.send(REQUESTS.encode(request))
        if not requester.poll(int(timeout_s * 1000)):
            raise UnavailableError(
                f"the planner at {path} does not answer within {timeout_s:g} s",
                remedy="see its log, or restart it",
            )
        reply = REPLIES.decode(requester.recv())
    finally:
        context.destroy(linger=0)
    if isinstance(reply, Failed):
        raise AdminRefused(reply)
    if not isinstance(reply, reply_type):
        raise UnavailableError(f"the planner answers {type(request).__name__} with {type(reply).__name__}")
    return reply

"""The API's sockets: a local one of mode 0600, and, where it is wanted, TCP with TLS; both on one event loop.

uvicorn speaks HTTP. What it leaves open is bounded here: connections at once, of all and of one network,
counted before their TLS handshake; and how long a client may take for that and for a request's head. The loop
has a thread of its own: no client delays the thread that serves devices.
"""

import asyncio
import logging
import os
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from stageloom.planner.api.access import network_of
from stageloom.planner.api.problem import MEDIA_TYPE, problem
from stageloom.shared.errors import ExitCode, StateError, UnavailableError

logger = logging.getLogger(__name__)

_BACKLOG: Final = 128
_LOCAL_BACKLOG: Final = 1024  # of a local socket a connect that may not wait fails where it is full
_ACCEPTED: Final = 16  # in a row, before what has been accepted is served
_AGAIN_S: Final = 1.0  # after which a listener that could not accept tries again


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What clients may take; `finish_s` is for answers on their way when the server stops."""

    connections: int = 256
    connections_of_one: int = 64
    local_connections: int = 1024  # the owner's own programs
    handshake_s: float = 5.0
    head_s: float = 10.0
    idle_s: float = 30.0
    finish_s: float = 10.0


_Maker = Callable[[Callable[[], None]], "_BoundedProtocol"]
"""A protocol from what to call once its connection is lost."""


class _Listener:
    """A listening socket, what serves its connections, and how many there are, by network."""

    def __init__(self, listening: socket.socket, protocol: _Maker, tls: bool, most: int, of_one: int) -> None:
        self.listening, self.protocol, self.tls = listening, protocol, tls
        self.most, self.most_of_one = most, of_one
        self.by_source: Counter[str] = Counter()

    def take(self, source: str) -> bool:
        """Whether one more may come; it is counted if so."""
        if self.by_source.total() >= self.most or self.by_source[source] >= self.most_of_one:
            return False
        self.by_source[source] += 1
        return True

    def give_back(self, source: str) -> None:
        """One has gone."""
        self.by_source[source] -= 1
        if self.by_source[source] <= 0:
            del self.by_source[source]


class _BoundedProtocol(H11Protocol):
    """HTTP/1.1 for a client that may be slow.

    uvicorn closes a connection that is quiet after an answer. One that sends nothing at first, or on which a
    head or what is left of a refused body comes byte by byte, is closed here.
    """

    def __init__(self, head_s: float, lost: Callable[[], None], *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._head_s = head_s
        self._lost = lost
        self._head_timer: asyncio.TimerHandle | None = None
        self.conn.next_event = partial(_next_event, self.conn.next_event)  # type: ignore[method-assign]
        self.opened = False
        self.gone: asyncio.Future[None] = self.loop.create_future()

    def connection_made(self, transport: Any) -> None:
        # uvicorn may close it twice, after which asyncio's TLS transport can neither be asked nor aborted.
        close = transport.close
        transport.close = lambda: None if transport.is_closing() else close()
        super().connection_made(transport)
        self.opened = True
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()

    def send_400_response(self, msg: str) -> None:
        """As every other refusal is told. Amid an answer or after it, nothing more can be said."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        refused = problem(HTTPStatus.BAD_REQUEST, "this is no HTTP request", "see /schema", ExitCode.USAGE)
        headers = [("content-type", MEDIA_TYPE), ("connection", "close")]
        body = h11.Data(data=msgspec.json.encode(refused))
        for event in (h11.Response(status_code=400, headers=headers), body, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._lost()
        super().connection_lost(exc)
        if not self.gone.done():
            self.gone.set_result(None)

    def _await_head(self) -> None:
        """Have the timer run while no request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _next_event(read: Callable[[], Any]) -> Any:
    """What `read` finds, unless it is a head that says twice, and perhaps not the same, how long its body is.

    A proxy before this server may have believed the other one, and taken the rest for the request of another
    client (RFC 9112, section 6.3).

    Raises:
        h11.RemoteProtocolError: it is such a head, or no HTTP.
    """
    found = read()
    if isinstance(found, h11.Request):
        names = {name for name, _ in found.headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            raise h11.RemoteProtocolError("content-length beside transfer-encoding")
    return found


class ApiServer:
    """Serves two applications from `start` to `stop`."""

    def __init__(
        self,
        path: Path,
        local: ASGIApp,
        *,
        remote: ASGIApp | None = None,
        listening: socket.socket | None = None,
        certificate: tuple[Path, Path] | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        """`path` is of `socket_path`. `remote` is served on `listening`; certificate and key are in files.

        Raises:
            StateError: the certificate or its key cannot be used.
        """
        logging.getLogger("uvicorn.error").setLevel(
            logging.ERROR
        )  # below that, whoever connects fills the log
        self._path = path
        self._local, self._remote = local, remote
        self._listening = listening
        self._certificate = certificate
        self._tls_version = () if certificate is None else _version(certificate)
        self._tls = None if certificate is None else _tls(*certificate)
        self._limits = limits or ServerLimits()
        self._state = ServerState()
        self._loop = asyncio.new_event_loop()
        self._bound: socket.socket | None = None
        self._listeners: list[_Listener] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)

    def start(self) -> None:
        """Bind and serve.

        Raises:
            UnavailableError: the local socket cannot be made.
        """
        try:
            self._path.unlink(missing_ok=True)
            self._bound = bound = socket.socket(socket.AF_UNIX)
            before = os.umask(0o177)  # there is no moment at which others could connect
            try:
                bound.bind(str(self._path))
            finally:
                os.umask(before)
        except OSError as error:
            raise UnavailableError(
                f"the API's socket {self._path} cannot be made: {error.strerror}", remedy="check the folder"
            ) from error
        self._thread.start()
        self._on_loop(self._serve(bound)).result()

    def stop(self) -> None:
        """Take no more connections, finish what is being answered, stop."""
        self._on_loop(self._close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _serve(self, bound: socket.socket) -> None:
        limits = self._limits
        self._listen(bound, self._local, limits.local_connections, limits.local_connections, tls=False)
        if self._remote is not None and self._listening is not None:
            self._listen(
                self._listening, self._remote, limits.connections, limits.connections_of_one, tls=True
            )

    def _listen(
        self, listening: socket.socket, app: ASGIApp, most: int, most_of_one: int, *, tls: bool
    ) -> None:
        listening.listen(_BACKLOG if tls else _LOCAL_BACKLOG)
        listening.setblocking(False)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # whoever connects from this machine could name any address
            timeout_keep_alive=self._limits.idle_s,  # type: ignore[arg-type]
        )
        config.load()
        protocol = partial(
            _BoundedProtocol,
            self._limits.head_s,
            config=config,
            server_state=self._state,
            app_state={},
            _loop=self._loop,
        )
        listener = _Listener(listening, protocol, tls, most, most_of_one)
        self._loop.add_reader(listening, self._accept, listener)
        self._listeners.append(listener)

    def _accept(self, listener: _Listener) -> None:
        """Take some of those that wait; the loop calls again for the others."""
        for _ in range(_ACCEPTED):
            try:
                accepted, address = listener.listening.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no file descriptor is left
                logger.warning("the API cannot accept: %s", error)
                self._loop.remove_reader(listener.listening)
                self._loop.call_later(_AGAIN_S, self._accept_again, listener)
                return
            source = ""
            if isinstance(address, tuple):
                source = network_of(address[0])
                # The body follows its head in a write of its own: held back until the head is acknowledged,
                # it would come 40 ms later. asyncio turns that off only where a socket has a protocol number.
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not listener.take(source):
                accepted.close()
                continue
            accepted.setblocking(False)
            opening = self._loop.create_task(self._open(listener, accepted, source))
            self._opening.add(opening)
            opening.add_done_callback(partial(self._opened, listener, accepted, source))

    def _opened(
        self, listener: _Listener, accepted: socket.socket, source: str, opening: "asyncio.Task[None]"
    ) -> None:
        self._opening.discard(opening)
        if opening.cancelled():  # before it began
            accepted.close()
            listener.give_back(source)

    def _accept_again(self, listener: _Listener) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener.listening, self._accept, listener)

    async def _open(self, listener: _Listener, accepted: socket.socket, source: str) -> None:
        """Have a connection served; it counts until it is lost, or its handshake failed."""
        left = partial(listener.give_back, source)
        made = listener.protocol(left)
        try:
            await self._loop.connect_accepted_socket(
                lambda: made,
                accepted,
                ssl=self._tls_now() if listener.tls else None,
                ssl_handshake_timeout=self._limits.handshake_s if listener.tls else None,
            )
        except (OSError, asyncio.CancelledError):  # ssl.SSLError is one, and what a stranger says is no news
            if not made.opened:
                left()

    def _tls_now(self) -> ssl.SSLContext | None:
        """With the certificate that is in its files now: it may have been renewed."""
        if self._certificate is not None and (version := _version(self._certificate)) != self._tls_version:
            self._tls_version = version
            try:
                self._tls = _tls(*self._certificate)
            except StateError as error:  # one of two files is written before the other
                logger.warning("the API goes on with the certificate that it has: %s", error)
        return self._tls

    async def _close(self) -> None:
        while self._listeners:
            self._loop.remove_reader(self._listeners.pop().listening)
        for opening in self._opening:
            opening.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        if self._bound is not None:
            self._bound.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        until_s = self._loop.time() + self._limits.finish_s
        if tasks := list(self._state.tasks):
            _, late = await asyncio.wait(tasks, timeout=self._limits.finish_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=1.0)
        await self._hang_up(until_s - self._loop.time())

    async def _hang_up(self, flush_s: float) -> None:
        """End all connections; answers that are on their way get so long."""
        gone = {one: one.gone for one in self._state.connections if isinstance(one, _BoundedProtocol)}
        waiting = [future for one, future in gone.items() if one.transport.get_write_buffer_size()]
        if waiting and flush_s > 0.0:
            await asyncio.wait(waiting, timeout=flush_s)
        for connection in gone:
            connection.transport.abort()
        if gone:
            await asyncio.wait(gone.values(), timeout=1.0)


def _version(files: tuple[Path, Path]) -> tuple[int, ...]:
    """It differs once one of the files is another."""
    try:
        return tuple(part for file in map(os.stat, files) for part in (file.st_ino, file.st_mtime_ns))
    except OSError:
        return ()


def _tls(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(
            certificate, key, password=""
        )  # one that asks for a password would stand still
    except (OSError, ssl.SSLError) as error:
        raise StateError(
            f"the certificate {certificate} or its key {key} cannot be used: {error}",
            remedy="name PEM files that belong together",
        ) from error
    return context

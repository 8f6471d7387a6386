"""HTTP/1.1: uvicorn, with bounds on connections and on how long one may be silent.

uvicorn takes a body in pieces, copies each three times and stops reading after each. Whoever works on
a request may have the rest of its body read to where it is wanted instead, and its answer sent at once.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import httptools
import uvicorn
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

Headers = Sequence[tuple[bytes, bytes]]

_BACKLOG: Final = 256
_HEAD_S: Final = 10.0  # also of a TLS handshake
_BODY_S: Final = 60.0
_ANSWER_S: Final = 60.0  # until a client has taken what has been written
_IDLE_S: Final = 60  # between two requests of a connection
_FINISH_S: Final = 5.0
_PIECE_BYTES: Final = 64 << 10  # read at once of heads, and of bodies that uvicorn takes


class _BoundedHttp(HttpToolsProtocol, asyncio.BufferedProtocol):
    """A connection is closed that is one too many, or on which a part takes too long.

    Parts are a request's head, its body, and its answer until the client has taken it.

    Requests find it as `connection` in their scope's state.
    """

    _pieces: Final = memoryview(
        bytearray(_PIECE_BYTES)
    )  # of all connections: the parser copies what it keeps

    def __init__(self, most: int, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.app_state = {"connection": self}
        self.of_this_account = False  # as far as it has been looked at
        self._most = most
        self._timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None  # while written bytes wait for the client
        self._lost = False
        self._working: asyncio.Task[Any] | None = None  # is cancelled when the client goes
        self._rest: memoryview | None = None  # of a body that is read past the parser
        self._read: asyncio.Future[None] | None = None  # done when nothing of it is missing

    async def read_into(self, scope: Scope, body: bytearray) -> int:
        """Read what there is and what is still to come of a request's body, of which nobody has taken a part.

        Args:
            scope: the request's.
            body: as long as the request says that its body is.

        Returns: how many bytes have been read, which is all of them, or none: then take it as it comes.

        Raises:
            ClientDisconnect: the client is gone.
        """
        cycle = self.cycle
        begun = len(cycle.body)
        if cycle.scope is not scope or cycle.waiting_for_100_continue or cycle.disconnected:
            return 0
        if begun > len(body) or (begun == len(body)) is cycle.more_body:
            return 0
        body[:begun], cycle.body = cycle.body, bytearray()
        if begun == len(body):
            return begun
        self._rest, self._read = memoryview(body)[begun:], self.loop.create_future()
        self.flow.resume_reading()
        try:
            await self._read
        except asyncio.CancelledError:
            self.transport.abort()  # nobody can tell where the next request begins
            raise
        return len(body)

    @contextlib.contextmanager
    def work_for_client(self) -> Iterator[None]:
        """Work that is worth nothing without the client: the running task is cancelled when it goes.

        Raises:
            ClientDisconnect: it has gone, before or meanwhile.
        """
        if self._lost:
            raise ClientDisconnect
        self._working = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self._lost:
                raise ClientDisconnect from None
            raise
        finally:
            self._working = None

    def answer(self, scope: Scope, status: int, headers: Headers, body: bytes) -> bool:
        """Send a request's whole answer in one piece: of uvicorn's two, each wakes the client.

        Returns: whether it was sent. If not, it is to be sent as ASGI says: the client reads too slowly, or
        this is the answer to a request that something is special about.
        """
        cycle = self.cycle
        if cycle.scope is not scope or cycle.response_started or cycle.disconnected:
            return False
        if self.flow.write_paused or not cycle.keep_alive or scope["method"] == "HEAD":
            return False
        head = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            head += name, b": ", value, b"\r\n"
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        self.transport.write(b"".join((*head, b"\r\n", body)))
        cycle.message_event.set()
        cycle.on_response()
        return True

    def data_received(self, data: bytes) -> None:
        """Give a connection that has its answer the time until its next request, whatever bytes came.

        uvicorn takes that time away for all bytes, also for the rest of a refused body or a stray line end.
        """
        super().data_received(data)
        answered = self.cycle is not None and self.cycle.response_complete
        if answered and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def get_buffer(self, sizehint: int) -> memoryview:
        """asyncio's TLS writes to slices of it, which a bytearray would copy."""
        return self._pieces if self._rest is None else self._rest

    def buffer_updated(self, nbytes: int) -> None:
        if self._rest is None:
            self.data_received(self._pieces[:nbytes])  # type: ignore[arg-type]
            return
        self._rest = self._rest[nbytes:]
        if self._rest:
            return
        assert self._read is not None
        self._rest = None
        self.on_message_complete()
        self.parser = httptools.HttpRequestParser(self)  # the old one waits for this body's end
        if not self._read.done():
            self._read.set_result(None)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=1)  # `pause_writing` tells of every byte that waits
        self._allow(_HEAD_S)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._allow(_HEAD_S)

    def on_headers_complete(self) -> None:
        self._allow(_BODY_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._answer_timer = self.loop.call_later(_ANSWER_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_answer_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_answer_timer()
        self._lost = True
        if self._working is not None:
            self._working.cancel()
        self._rest = None
        if self._read is not None and not self._read.done():
            self._read.set_exception(ClientDisconnect())
        super().connection_lost(exc)

    def _allow(self, seconds: float) -> None:
        """So long may the next part take."""
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_answer_timer(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None


class HttpServer:
    """Serves an application from `start` to `stop`."""

    def __init__(
        self,
        application: ASGIApp,
        listening: Sequence[socket.socket],
        tls: ssl.SSLContext | None,
        connections: int,
    ) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else whoever connects fills the log
        self._config = uvicorn.Config(
            application,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # whoever connects from this machine could name any address
            timeout_keep_alive=_IDLE_S,
        )
        self._config.load()
        self._listening, self._tls, self._connections = listening, tls, connections
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        make = partial(
            _BoundedHttp,
            self._connections,
            config=self._config,
            server_state=self._state,
            app_state={},
            _loop=loop,
        )
        for listening in self._listening:
            server = await loop.create_server(
                make,
                sock=listening,
                ssl=self._tls,
                ssl_handshake_timeout=_HEAD_S if self._tls is not None else None,
                backlog=_BACKLOG,
            )
            self._servers.append(server)

    async def stop(self) -> None:
        """Take no more connections; what is being answered gets a few seconds."""
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if tasks := list(self._state.tasks):
            await asyncio.wait(tasks, timeout=_FINISH_S)
        for connection in list(self._state.connections):
            connection.transport.abort()  # else a client that does not read holds up the end of the loop


def listen_on(host: str, port: int) -> list[socket.socket]:
    """Bound sockets, for `HttpServer` to listen on: at every address of the name, all with one port.

    An address of a version of IP that this machine does not have is left out, unless there is no other.

    Raises:
        OSError: an address is in use, or none is of this machine.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    sockets: list[socket.socket] = []
    left_out: OSError | None = None
    with contextlib.ExitStack() as failed:
        for family, _, _, _, address in dict.fromkeys(found):  # a name may be twice in /etc/hosts
            try:
                bound = failed.enter_context(_bind(family, (address[0], port, *address[2:])))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                left_out = error
                continue
            sockets.append(bound)
            port = bound.getsockname()[1]  # 0 takes a free one, once
        failed.pop_all()
    if not sockets:
        assert left_out is not None
        raise left_out
    return sockets


def _bind(family: int, address: tuple[Any, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def address_text(host: str, port: int) -> str:
    """`HOST:PORT`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""The TLS side of enrolment: a frame in, a frame out, and nothing that a stranger can make grow.

A peer is an IPv4 address or the /64 network of an IPv6 one, which is what one subscriber has.
"""

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from stageloom.shared.errors import DecodeError
from stageloom.shared.messages import enrol
from stageloom.shared.messages.base import RefusalCode, Refused

PACKET_BYTES: Final = 4096


Ticket = Annotated[int, Meta(ge=0, le=2**62)]

Frame = Annotated[bytes, Meta(max_length=2048)]


class Ask(Struct, frozen=True, array_like=True):
    """To the planner: a request's frame, and the network address that it came from."""

    ticket: Ticket
    peer: Annotated[str, Meta(max_length=64)]
    frame: Frame


class Answer(Struct, frozen=True, array_like=True):
    """To the listener: the reply's frame for a ticket."""

    ticket: Ticket
    frame: Frame


encode = msgspec.msgpack.Encoder().encode

decode_ask = msgspec.msgpack.Decoder(Ask).decode

decode_answer = msgspec.msgpack.Decoder(Answer).decode


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What strangers may hold at once, and for how long."""

    connections: int = 64
    connections_per_peer: int = 8
    handshake_s: float = 5.0
    conversation_s: float = 10.0  # the whole of it, handshake included


class Listener:
    """Serves connections of `listening` until `channel` ends; asks the planner through `channel`."""

    def __init__(
        self, listening: socket.socket, channel: socket.socket, tls: ssl.SSLContext, bounds: Bounds
    ) -> None:
        """Both sockets do not block; `channel` is SOCK_SEQPACKET."""
        self._listening = listening
        self._channel = channel
        self._tls = tls
        self._bounds = bounds
        self._open: Counter[str] = Counter()  # connections by peer
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[int, asyncio.Future[bytes]] = {}  # by ticket
        self._last_ticket = 0

    async def serve(self) -> None:
        """Serve until the planner closes its end of the channel."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._channel, self._take_answer, ended)
        accepting = loop.create_task(self._accept())
        await asyncio.wait([ended, accepting], return_when=asyncio.FIRST_COMPLETED)
        loop.remove_reader(self._channel)
        for task in [accepting, *self._tasks]:
            task.cancel()
        await asyncio.gather(accepting, *self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listening)
            except OSError as error:  # it is gone again, or there are no files left
                log.debug("no connection accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            peer = peer_of(address)
            bounds = self._bounds
            if self._open.total() >= bounds.connections or self._open[peer] >= bounds.connections_per_peer:
                connection.close()
                await asyncio.sleep(0)  # accepting a flood at once must not keep the others waiting
                continue
            self._open[peer] += 1
            task = loop.create_task(self._converse(connection, peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _converse(self, connection: socket.socket, peer: str) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._bounds.conversation_s):
                reader, writer = await self._handshake(connection)
                reply = await self._reply(await _read_frame(reader), peer)
                writer.write(enrol.LENGTH.pack(len(reply)) + reply)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, DecodeError) as error:  # TimeoutError and ssl.SSLError are OSErrors
            log.debug("a conversation with %s ends: %s", peer, error)
        finally:
            if writer is not None:
                writer.transport.abort()
            connection.close()
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]

    async def _handshake(
        self, connection: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=enrol.TO_PLANNER.limits.frame_bytes)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            connection,
            ssl=self._tls,
            ssl_handshake_timeout=self._bounds.handshake_s,
            ssl_shutdown_timeout=1.0,
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _reply(self, frame: bytes, peer: str) -> bytes:
        """The planner's answer; what is no request at all does not get that far."""
        try:
            enrol.TO_PLANNER.decode(frame)
        except DecodeError as error:
            return enrol.TO_DEVICE.encode(Refused(code=RefusalCode.MALFORMED, reason=str(error)[:200]))
        self._last_ticket += 1
        ticket = self._last_ticket
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[ticket] = answer
        try:
            self._channel.send(encode(Ask(ticket, peer, frame)))  # BlockingIOError, an OSError, if it is full
            return await answer
        finally:
            del self._asked[ticket]

    def _take_answer(self, ended: "asyncio.Future[None]") -> None:
        try:
            packet = self._channel.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            if not ended.done():
                ended.set_result(None)
            return
        try:
            answer = decode_answer(packet)
        except msgspec.MsgspecError:
            log.exception("the planner's answer is unreadable")
            return
        waiting = self._asked.get(answer.ticket)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.frame)


def peer_of(address: tuple[Any, ...]) -> str:
    """The peer behind a socket address, as described above."""
    found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    """One frame behind its length.

    Raises:
        DecodeError: it announces more bytes than a request may have.
        EOFError: the connection ends before.
    """
    (length,) = enrol.LENGTH.unpack(await reader.readexactly(enrol.LENGTH.size))
    if length > enrol.TO_PLANNER.limits.frame_bytes:
        raise DecodeError(f"a request of {length} bytes is announced")
    return await reader.readexactly(length)

"""Bodies that are read past the parser: whole, however they come, and the next request begins behind them."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from stageloom.edge_agent.serving.body import ReceivedBody, WaitingBytes
from stageloom.edge_agent.serving.http_server import HttpServer, listen_on

_BODY = random.Random(0).randbytes(300_000)
_MOST = 1 << 20


class _Bodies:
    """An application that keeps the bodies of its requests, and answers with their lengths.

    `whole`: it answers in one piece where the connection can, and counts these answers.
    """

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.pieces = 0
        self.found: asyncio.Queue[bytes | type[BaseException]] = asyncio.Queue()
        self.began = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.began.set()
        try:
            with ReceivedBody(WaitingBytes(_MOST)) as received:
                body = bytes(await received.receive(Request(scope, receive), _MOST))
        except ClientDisconnect:
            await self.found.put(ClientDisconnect)
            return
        await self.found.put(body)
        text = str(len(body)).encode()
        head = [(b"content-length", str(len(text)).encode())]
        if self.whole and scope["state"]["connection"].answer(scope, 200, head, text):
            self.pieces += 1
            return
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": text})


def _head(nbytes: int, more: str = "") -> bytes:
    return f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {nbytes}\r\n{more}\r\n".encode()


Talk = Callable[[_Bodies, asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def _serve(talk: Talk, *, whole: bool = True) -> None:
    async def run() -> None:
        bodies, listening = _Bodies(whole), listen_on("127.0.0.1", 0)
        server = HttpServer(bodies, listening, None, 8)
        await server.start()
        reader, writer = await asyncio.open_connection(*listening[0].getsockname())
        await asyncio.wait_for(talk(bodies, reader, writer), 60.0)
        writer.close()
        await server.stop()

    asyncio.run(run())


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    return await reader.readexactly(int(length.split(b":")[1]))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("together", [0, 1, 100, 70_000, 299_999, 300_000])
def test_body_is_whole_wherever_it_is_cut_and_the_next_request_follows(together: int, whole: bool) -> None:
    async def talk(bodies: _Bodies, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for length in (300_000, 5, 0, 300_000):
            body = _BODY[:length]
            writer.write(_head(length) + body[:together])
            await bodies.began.wait()
            writer.write(body[together:])
            assert await bodies.found.get() == body
            assert await _answer(reader) == str(length).encode()
            bodies.began.clear()
        assert bodies.pieces == (4 if whole else 0)

    _serve(talk, whole=whole)


@pytest.mark.parametrize("whole", [False, True])
def test_requests_that_follow_without_waiting_are_kept_apart(whole: bool) -> None:
    async def talk(bodies: _Bodies, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lengths = [300_000, 0, 70_000, 3, 299_999]
        writer.write(b"".join(_head(length) + _BODY[-length:][:length] for length in lengths))
        for length in lengths:
            assert await bodies.found.get() == _BODY[-length:][:length]
            assert await _answer(reader) == str(length).encode()

    _serve(talk, whole=whole)


def test_a_client_that_wants_no_further_answer_is_answered_and_the_connection_ends() -> None:
    async def talk(bodies: _Bodies, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_head(5, "Connection: close\r\n") + _BODY[:5])
        assert await _answer(reader) == b"5"
        assert await reader.read() == b""
        assert bodies.pieces == 0

    _serve(talk)


def test_client_that_leaves_in_the_middle_ends_the_wait() -> None:
    async def talk(bodies: _Bodies, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_head(300_000) + _BODY[:1000])
        await bodies.began.wait()
        writer.close()
        assert await bodies.found.get() is ClientDisconnect

    _serve(talk)


def test_client_that_waits_to_be_asked_for_its_body_is_asked() -> None:
    async def talk(bodies: _Bodies, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_head(300_000, "Expect: 100-continue\r\n"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(_BODY)
        assert await bodies.found.get() == _BODY
        assert await _answer(reader) == b"300000"

    _serve(talk)

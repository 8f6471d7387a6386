"""Fifty clients of the planner's API that mean no good: idle, slow, or asking without end.

Idle ones connect and say nothing, with and without a TLS handshake. Slow ones send a request a byte a second,
or read nothing of what they asked for. The others ask for what takes the planner longest, with a token and
without, over connections that they keep and over new ones.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

CLIENTS: Final = 50
_READ: Final = 1 << 16


@dataclass(frozen=True)
class ApiTarget:
    """Where the API listens, and the token of one viewer."""

    port: int
    bearer: str


def attack(targets: Sequence[ApiTarget], seconds: float) -> int:
    """Have one client at each target for `seconds`; how many requests were answered.

    Each has a token of its own: of one token the planner carries out four requests at once and fifty a
    second, so clients that share it press no harder than one.
    """
    return asyncio.run(_attack(targets, seconds))


async def _attack(targets: Sequence[ApiTarget], seconds: float) -> int:
    answered = [0]
    kinds: tuple[Callable[[ApiTarget, list[int]], Awaitable[None]], ...] = (
        _idle,
        _idle_in_tls,
        _slow_sender,
        _slow_reader,
        _asks_without_end,
        _asks_without_token,
        _connects_without_end,
    )
    clients = [
        asyncio.create_task(_again(kinds[at % len(kinds)], target, answered))
        for at, target in enumerate(targets)
    ]
    await asyncio.sleep(seconds)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return answered[0]


async def _again(
    kind: Callable[[ApiTarget, list[int]], Awaitable[None]], target: ApiTarget, answered: list[int]
) -> None:
    """Whoever is thrown out comes back."""
    while True:
        began_s = time.monotonic()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ssl.SSLError):
            await kind(target, answered)
        if time.monotonic() - began_s < 0.01:
            await asyncio.sleep(0.01)


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _connected(target: ApiTarget, *, tls: bool = True) -> Streams:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the default one loads files, for 0.1 s a connection
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection("127.0.0.1", target.port, ssl=context if tls else None)


def _request(target: ApiTarget, path: str, *, token: bool = True) -> bytes:
    bearer = f"Authorization: Bearer {target.bearer}\r\n" if token else ""
    return f"GET {path} HTTP/1.1\r\nHost: planner\r\n{bearer}\r\n".encode()


async def _answer(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    await reader.readexactly(length)


async def _idle(target: ApiTarget, answered: list[int]) -> None:
    reader, writer = await _connected(target, tls=False)
    with contextlib.closing(writer):
        await reader.read(_READ)


async def _idle_in_tls(target: ApiTarget, answered: list[int]) -> None:
    reader, writer = await _connected(target)
    with contextlib.closing(writer):
        await reader.read(_READ)


async def _slow_sender(target: ApiTarget, answered: list[int]) -> None:
    _, writer = await _connected(target)
    with contextlib.closing(writer):
        for byte in _request(target, "/v1/devices"):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(1.0)


async def _slow_reader(target: ApiTarget, answered: list[int]) -> None:
    _, writer = await _connected(target)
    with contextlib.closing(writer):
        for _ in range(1000):
            writer.write(_request(target, "/schema"))
            await writer.drain()
            await asyncio.sleep(0.01)
        await asyncio.sleep(3600.0)


async def _asks_without_end(target: ApiTarget, answered: list[int]) -> None:
    reader, writer = await _connected(target)
    with contextlib.closing(writer):
        while True:
            writer.write(_request(target, "/v1/watch"))
            await _answer(reader)
            answered[0] += 1


async def _asks_without_token(target: ApiTarget, answered: list[int]) -> None:
    reader, writer = await _connected(target)
    with contextlib.closing(writer):
        while True:
            writer.write(_request(target, "/v1/watch", token=False))
            await _answer(reader)
            answered[0] += 1


async def _connects_without_end(target: ApiTarget, answered: list[int]) -> None:
    reader, writer = await _connected(target)
    with contextlib.closing(writer):
        writer.write(_request(target, "/v1/status"))
        await _answer(reader)
        answered[0] += 1

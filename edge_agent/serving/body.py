"""Bodies of requests and answers over HTTP: bounded in size, decompressed, compressed."""

import asyncio
import gzip
import threading
import zlib
from collections.abc import Callable
from typing import Final

from starlette.requests import Request

from stageloom.edge_agent.serving.failures import FailureKind, InferenceFailure, unsupported
from stageloom.shared.errors import InputError

_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}
_LEVEL: Final = 1  # tensors hardly shrink; speed counts


class WaitingBytes:
    """Bytes of requests that are being received or worked on, over HTTP and gRPC together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """So many more.

        Raises:
            InferenceFailure: together they are too many.
        """
        with self._lock:
            fits = self._used + nbytes <= self._most
            if fits:
                self._used += nbytes
        if not fits:
            raise InferenceFailure(
                FailureKind.UNAVAILABLE, "too many bytes of requests are waiting", remedy="send more slowly"
            )

    def give_back(self, nbytes: int) -> None:
        """They have been worked on."""
        with self._lock:
            self._used -= nbytes


class ReceivedBody:
    """One request's body; `with` it counts as waiting."""

    def __init__(self, waiting: WaitingBytes) -> None:
        self._waiting = waiting
        self._counted = 0

    def __enter__(self) -> "ReceivedBody":
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.give_back(self._counted)

    def count(self, nbytes: int) -> None:
        """So many bytes more are held."""
        self._waiting.take(nbytes)
        self._counted += nbytes

    async def receive(self, request: Request, most: int) -> memoryview:
        """The body as it is meant, decompressed.

        Raises:
            InferenceFailure: it is larger than `most`, or in an unknown encoding.
            InputError: it is not what its headers say.
        """
        encoding = request.headers.get("content-encoding", "").lower()
        if encoding not in ("", "identity", *_WINDOW_BITS):
            raise unsupported(f"Content-Encoding {encoding[:32]!r} is not supported", "use gzip or deflate")
        body = await self._read(request, most)
        if encoding in _WINDOW_BITS:
            return memoryview(
                await asyncio.to_thread(_inflate, body, _WINDOW_BITS[encoding], most, self.count)
            )
        return memoryview(body)

    async def _read(self, request: Request, most: int) -> "bytes | bytearray":
        length = request.headers.get("content-length")
        if length is not None and int(length) > most:  # the server has checked that it is a number
            raise too_large(most)
        if length is not None:
            self.count(int(length))
            body = bytearray(int(length))
            at: int = await request.state.connection.read_into(request.scope, body)
            if at == len(body):
                return body
            async for chunk in request.stream():
                body[at : at + len(chunk)] = chunk
                at += len(chunk)
            return body
        body = bytearray()
        async for chunk in request.stream():
            if len(body) + len(chunk) > most:
                raise too_large(most)
            self.count(len(chunk))
            body += chunk
        return body


def too_large(most: int) -> InferenceFailure:
    """The refusal of a request of more than `most` bytes."""
    return InferenceFailure(FailureKind.TOO_LARGE, f"the request is larger than {most} bytes")


def _inflate(body: "bytes | bytearray", window_bits: int, most: int, count: Callable[[int], None]) -> bytes:
    inflater = zlib.decompressobj(window_bits)
    try:
        found = inflater.decompress(body, most + 1)
    except zlib.error as error:
        raise InputError(f"the body cannot be decompressed: {error}") from error
    if len(found) > most:
        raise too_large(most)
    if not inflater.eof or inflater.unused_data:
        raise InputError("the compressed body ends too soon, or something follows it")
    count(len(found))
    return found


def encoding_for(accepted: str) -> str:
    """The encoding of an answer to `Accept-Encoding` (RFC 9110, 12.5.3); empty: as it is.

    It is one that the client names and wants at least as much as no encoding. What the client refuses (`q=0`)
    is not used; where it takes nothing that there is, the answer goes as it is.
    """
    wanted = dict(map(_weighed, accepted.lower().split(",")))
    named = [name for name in _WINDOW_BITS if wanted.get(name, 0.0) > 0.0]
    best = max(named, key=wanted.__getitem__, default="")
    if best and wanted[best] >= wanted.get("identity", 0.0):
        return best
    as_it_is = wanted.get("identity", wanted.get("*", 1.0)) > 0.0
    if as_it_is or wanted.get("*", 0.0) <= 0.0:
        return ""
    return next((name for name in _WINDOW_BITS if name not in wanted), "")


def _weighed(part: str) -> tuple[str, float]:
    """An encoding and how much it is wanted: `gzip;q=0.5`."""
    name, _, parameter = part.partition(";")
    key, _, text = parameter.partition("=")
    if key.strip() != "q":
        return name.strip(), 1.0
    try:
        return name.strip(), float(text)
    except ValueError:
        return name.strip(), 0.0  # unreadable: the answer as it is can be read by all


def compressed(body: bytes, encoding: str) -> bytes:
    """The body in an encoding that `encoding_for` named."""
    return gzip.compress(body, _LEVEL) if encoding == "gzip" else zlib.compress(body, _LEVEL)

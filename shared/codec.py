"""Messages to frames and back, for bytes that may come from anyone.

A frame is one flag byte and a body: `0x00` plain, `0x01` zlib. The body is msgpack of one message. Decoding
checks in this order, so that each step bounds the cost of the next: frame size, decompressed size (the
decompressor stops at the limit, the stream must end there and nothing may follow it), msgpack with limits on
every container, duplicate keys, typed conversion with bounds on every field. Every failure is a
`DecodeError`. What a message *means* (known digests, known device) is checked by whoever handles it.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgpack
import msgspec

from stageloom.shared.errors import DecodeError

PLAIN: Final = b"\x00"
ZLIB: Final = b"\x01"
_COMPRESS_FROM_BYTES: Final = 256  # below this zlib's header and tables eat what it saves

T = TypeVar("T")


@dataclass(frozen=True)
class CodecLimits:
    """What a decoder accepts; `frame_bytes` is before decompression, `body_bytes` after."""

    frame_bytes: int
    body_bytes: int
    array_items: int = 4096
    map_items: int = 64


class Codec(Generic[T]):
    """Encodes and decodes the messages of one direction of one conversation.

    `types` is a tagged struct, or the union of those that may arrive. `compress` False never tries: trying
    costs more than it saves where the payload is weights.
    """

    def __init__(self, types: Any, limits: CodecLimits, *, compress: bool = True) -> None:
        self.types = types
        self.limits = limits
        self._compress = compress
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: T) -> bytes:
        """One frame.

        Raises:
            ValueError: the message is larger than the other side accepts.
        """
        body = self.encode_body(message)
        if len(body) > self.limits.body_bytes:
            raise ValueError(
                f"{type(message).__name__} has {len(body)} bytes, more than {self.limits.body_bytes}"
            )
        frame = pack_body(body) if self._compress else PLAIN + body
        if len(frame) > self.limits.frame_bytes:
            raise ValueError(
                f"{type(message).__name__} packs to {len(frame)} bytes, more than {self.limits.frame_bytes}"
            )
        return frame

    def encode_body(self, message: T) -> bytes:
        """The msgpack bytes alone, unbounded and uncompressed."""
        return self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> T:
        """The message in a frame.

        Raises:
            DecodeError: the frame is too large, malformed, or no message of this conversation.
        """
        message: T = convert(unpack(unpack_body(frame, self.limits), self.limits), self.types)
        return message


def pack_body(body: bytes) -> bytes:
    """Flag byte and body, compressed only where that is smaller."""
    if len(body) >= _COMPRESS_FROM_BYTES:
        packed = zlib.compress(body, 6)
        if len(packed) < len(body):
            return ZLIB + packed
    return PLAIN + body


def unpack_body(frame: bytes | memoryview, limits: CodecLimits) -> bytes:
    """The msgpack bytes in a frame.

    Raises:
        DecodeError: the frame or what it decompresses to is over its limit, or the stream is malformed.
    """
    if len(frame) > limits.frame_bytes:
        raise DecodeError(f"a frame has {len(frame)} bytes, more than {limits.frame_bytes}")
    flag, rest = bytes(frame[:1]), bytes(frame[1:])
    if flag == PLAIN:
        body = rest
    elif flag == ZLIB:
        body = _inflate(rest, limits.body_bytes)
    else:
        raise DecodeError(f"a frame starts with {flag.hex() or 'nothing'}, not with 00 or 01")
    if len(body) > limits.body_bytes:
        raise DecodeError(f"a body has {len(body)} bytes, more than {limits.body_bytes}")
    return body


def _inflate(packed: bytes, limit_bytes: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(packed, limit_bytes)
        if not stream.eof:
            # The limit may have been reached exactly, with only the checksum left to read.
            body += stream.decompress(stream.unconsumed_tail, 1)
    except zlib.error as error:
        raise DecodeError(f"a frame does not decompress: {error}") from error
    if len(body) > limit_bytes:
        raise DecodeError(f"a frame decompresses to more than {limit_bytes} bytes")
    if not stream.eof:
        raise DecodeError("a compressed frame is cut off")
    if stream.unused_data:
        raise DecodeError(f"{len(stream.unused_data)} bytes follow the compressed stream of a frame")
    return body


def _unique_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("duplicate keys in a map")
    return made


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} has no meaning here")


def unpack(body: bytes, limits: CodecLimits) -> Any:
    """Plain values from msgpack bytes: no extension types, no duplicate keys, containers bounded.

    Raises:
        DecodeError: malformed, truncated, too deep, trailing bytes or over a limit.
    """
    try:
        return msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique_pairs,
            ext_hook=_no_extension,
            max_str_len=limits.body_bytes,
            max_bin_len=limits.body_bytes,
            max_array_len=limits.array_items,
            max_map_len=limits.map_items,
            max_ext_len=0,
        )
    except RecursionError as error:
        raise DecodeError("msgpack nested too deep") from error
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise DecodeError(f"not msgpack within limits: {str(error)[:200] or type(error).__name__}") from error


def convert(value: Any, types: Any) -> Any:
    """Typed conversion of plain values; every field's bounds are in its type.

    Raises:
        DecodeError: a missing or unknown tag, a wrong type, or a value outside its bounds.
    """
    try:
        return msgspec.convert(value, types)
    except RecursionError as error:
        raise DecodeError("a message nested too deep") from error
    except (msgspec.ValidationError, ValueError) as error:
        raise DecodeError(f"not a message of this conversation: {str(error)[:200]}") from error

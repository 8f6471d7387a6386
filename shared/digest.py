"""Canonical msgpack and the digest over it: equal values have equal bytes, on every machine."""

import hashlib
from collections.abc import Iterable
from typing import Any

import msgpack

from stageloom.shared.ids import Digest

DIGEST_BYTES = 32

_LEAST_INTEGER, _GREATEST_INTEGER = -(1 << 63), (1 << 64) - 1  # what msgpack can hold


def canonical(value: Any) -> bytes:
    """Encode lists, tuples, strings, bytes, integers, booleans and None.

    Dictionaries and floats are refused: the first have no one order, the second no one width.

    Raises:
        TypeError: the value holds something that has no canonical form, such as an integer beyond 64 bits.
    """
    _require_canonical(value)
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def _require_canonical(value: Any) -> None:
    if isinstance(value, list | tuple):
        for item in value:
            _require_canonical(item)
    elif isinstance(value, int):
        if not _LEAST_INTEGER <= value <= _GREATEST_INTEGER:
            raise TypeError(f"an integer of {value.bit_length()} bits has no canonical form")
    elif value is not None and not isinstance(value, str | bytes):
        raise TypeError(f"{type(value).__name__} has no canonical form")


def digest_of(value: Any) -> Digest:
    """Digest of `canonical(value)`."""
    return digest_bytes([canonical(value)])


def digest_bytes(chunks: Iterable[bytes]) -> Digest:
    """Digest of the chunks' concatenation, without holding it."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for chunk in chunks:
        state.update(chunk)
    return Digest(state.hexdigest())


def digest_to_raw(digest: Digest) -> bytes:
    """The 32 bytes of a digest.

    Raises:
        ValueError: `digest` is not 64 lower-case hexadecimal characters. (`bytes.fromhex` alone would also
            take capitals and blanks, and so give one digest several spellings.)
    """
    raw = bytes.fromhex(digest)
    if len(raw) != DIGEST_BYTES or raw.hex() != digest:
        raise ValueError(f"a digest is {2 * DIGEST_BYTES} lower-case hexadecimal characters")
    return raw


def digest_from_raw(raw: bytes) -> Digest:
    """The text form of 32 raw bytes.

    Raises:
        ValueError: `raw` is something else, whatever type a decoder made of it.
    """
    if not isinstance(raw, bytes) or len(raw) != DIGEST_BYTES:
        raise ValueError(f"a digest is {DIGEST_BYTES} raw bytes")
    return Digest(raw.hex())

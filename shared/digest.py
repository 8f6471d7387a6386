"""Canonical msgpack and the digest over it: equal values have equal bytes, on every machine."""

import hashlib
from collections.abc import Iterable
from typing import Any

import msgpack

from shared.ids import Digest

DIGEST_BYTES = 32


def canonical(value: Any) -> bytes:
    """Encode lists, tuples, strings, bytes, integers, booleans and None.

    Dictionaries and floats are refused: the first have no one order, the second no one width.

    Raises:
        TypeError: the value holds something that has no canonical form.
    """
    _require_canonical(value)
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def _require_canonical(value: Any) -> None:
    if isinstance(value, list | tuple):
        for item in value:
            _require_canonical(item)
    elif value is not None and not isinstance(value, str | bytes | int):
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
        ValueError: `digest` is not 64 hexadecimal characters.
    """
    raw = bytes.fromhex(digest)
    if len(raw) != DIGEST_BYTES:
        raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(raw)}")
    return raw


def digest_from_raw(raw: bytes) -> Digest:
    """The text form of 32 raw bytes.

    Raises:
        ValueError: `raw` has another length.
    """
    if len(raw) != DIGEST_BYTES:
        raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(raw)}")
    return Digest(raw.hex())

"""The decoder against bytes that mean harm: whatever arrives, the answer is a value or a `DecodeError`."""

import resource
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageloom.shared.codec import PLAIN, ZLIB, Codec, CodecLimits, convert, pack_body, unpack, unpack_body
from stageloom.shared.errors import DecodeError
from stageloom.shared.messages import bulk, control, enrol, telemetry
from stageloom.shared.messages.base import Message
from tests.link.samples import MESSAGES
from tests.link.test_messages import CODECS, _codec_for

CORPUS = Path(__file__).parents[1] / "data" / "fuzz" / "frames"
SMALL = CodecLimits(frame_bytes=1 << 10, body_bytes=4 << 10, array_items=16, map_items=8)


def _heartbeat(**changes: Any) -> bytes:
    fields = {"type": "heartbeat", "version": 1, "correlation": 0, "boot": 1, "epoch": 1, "generation": 1}
    body: bytes = msgpack.packb(fields | {"state": None, "revision": 1} | changes)
    return PLAIN + body


def _welcome(device: str) -> bytes:
    fields = {"type": "welcome", "device": device, "epoch": 1, "heartbeat_interval_s": 1.0, "bulk_credits": 4}
    body: bytes = msgpack.packb(fields)
    return PLAIN + body


@pytest.mark.promise("decoder-stage-string-parser")
@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.hex")), ids=lambda path: path.stem)
def test_every_frame_of_the_corpus_is_refused_by_every_decoder(path: Path) -> None:
    frame = bytes.fromhex(path.read_text())
    for codec in CODECS.values():
        with pytest.raises(DecodeError):
            codec.decode(frame)


def test_the_corpus_is_there() -> None:
    assert len(list(CORPUS.glob("*.hex"))) >= 15


@pytest.mark.promise("decoder-stage-string-parser")
@given(frame=st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_random_bytes_decode_or_are_refused(frame: bytes) -> None:
    for codec in CODECS.values():
        for flag in (b"", PLAIN, ZLIB):
            with suppress(DecodeError):
                codec.decode(flag + frame)


JSON_LIKE: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=5),
    max_leaves=20,
)


@pytest.mark.promise("decoder-stage-string-parser")
@given(value=JSON_LIKE, index=st.integers(0, len(MESSAGES) - 1), field=st.integers(0, 20))
@settings(max_examples=300, deadline=None)
def test_a_message_with_one_field_replaced_decodes_or_is_refused(value: Any, index: int, field: int) -> None:
    message = MESSAGES[index]
    codec = _codec_for(message)
    fields = msgpack.unpackb(codec.encode_body(message))
    fields[sorted(fields)[field % len(fields)]] = value
    try:
        decoded = codec.decode(PLAIN + msgpack.packb(fields))
    except DecodeError:
        return
    assert isinstance(decoded, Message)


@given(index=st.integers(0, len(MESSAGES) - 1), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_truncated_message_is_refused(index: int, data: st.DataObject) -> None:
    codec = _codec_for(MESSAGES[index])
    frame = codec.encode(MESSAGES[index])
    with pytest.raises(DecodeError):
        codec.decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(body=st.binary(max_size=2000))
def test_packing_round_trips_and_never_grows_by_more_than_its_flag(body: bytes) -> None:
    frame = pack_body(body)
    assert len(frame) <= len(body) + 1
    assert unpack_body(frame, CodecLimits(4096, 4096)) == body


def test_compression_is_used_only_where_it_is_smaller() -> None:
    assert pack_body(b"a" * 1000)[:1] == ZLIB
    assert pack_body(bytes(i * i * 7919 % 251 for i in range(255)))[:1] == PLAIN


@pytest.mark.promise("zip-bombs-deep-nesting")
@pytest.mark.parametrize("size", [4 << 10, (4 << 10) + 1])
def test_the_decompressed_size_is_exact(size: int) -> None:
    frame = ZLIB + zlib.compress(b"\xc0" * size)
    if size <= SMALL.body_bytes:
        assert len(unpack_body(frame, SMALL)) == size
    else:
        with pytest.raises(DecodeError, match="decompresses to more than"):
            unpack_body(frame, SMALL)


@pytest.mark.promise("zip-bombs-deep-nesting")
def test_a_zip_bomb_is_refused_without_growing() -> None:
    """64 MiB of zeros in 64 KiB: the decompressor stops at the limit instead of finding out."""
    frame = ZLIB + zlib.compress(bytes(64 << 20))
    limits = CodecLimits(frame_bytes=1 << 20, body_bytes=64 << 10)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DecodeError, match="decompresses to more than"):
        unpack_body(frame, limits)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 8 << 10


def test_a_compressed_stream_must_end_and_nothing_may_follow() -> None:
    packed = zlib.compress(b"\xc0" * 300)
    assert unpack_body(ZLIB + packed, SMALL) == b"\xc0" * 300
    with pytest.raises(DecodeError, match="cut off"):
        unpack_body(ZLIB + packed[:-1], SMALL)
    with pytest.raises(DecodeError, match="1 bytes follow"):
        unpack_body(ZLIB + packed + b"\x00", SMALL)


@pytest.mark.promise("zip-bombs-deep-nesting")
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_two_megabytes_of_empty_lists_stop_at_the_frame_size_or_the_item_limit(codec: Codec[Any]) -> None:
    lists = b"\xdd" + (2 << 20).to_bytes(4, "big") + b"\x90" * (2 << 20)
    with pytest.raises(DecodeError, match="bytes, more than"):
        codec.decode(PLAIN + lists)
    with pytest.raises(DecodeError, match=r"limits|decompresses|more than"):
        codec.decode(ZLIB + zlib.compress(lists))


def _deep_list(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def _deep_map(depth: int) -> bytes:
    return b"\x81\xa1a" * depth + b"\xc0"


@pytest.mark.promise("zip-bombs-deep-nesting")
@pytest.mark.parametrize("deep", [_deep_list, _deep_map])
@pytest.mark.parametrize("depth", [100, 600, 1_000, 100_000])
def test_deep_nesting_is_refused(deep: Callable[[int], bytes], depth: int) -> None:
    limits = CodecLimits(frame_bytes=1 << 20, body_bytes=1 << 20)
    with pytest.raises(DecodeError):
        convert(unpack(deep(depth), limits), control.ControlToPlanner)


@pytest.mark.promise("zip-bombs-deep-nesting")
def test_duplicate_keys_are_refused() -> None:
    body = b"\x82\xa1a\x01\xa1a\x02"
    assert msgpack.unpackb(body) == {"a": 2}
    with pytest.raises(DecodeError, match="duplicate keys"):
        unpack(body, SMALL)


def test_the_reference_heartbeat_is_accepted() -> None:
    """What the next tests break, one thing at a time."""
    assert control.TO_PLANNER.decode(_heartbeat()) == control.Heartbeat(
        boot=1, epoch=1, generation=1, state=None, revision=1
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"boot": 0},
        {"boot": 2**63},
        {"boot": True},
        {"boot": 1.0},
        {"boot": "1"},
        {"epoch": -1},
        {"generation": float("nan")},
        {"state": "flying"},
        {"type": "welcome"},
        {"type": None},
        {"revision": [1]},
        {"correlation": None},
        {"version": 0},
        {"version": 256},
    ],
)
def test_a_heartbeat_with_one_bad_field_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DecodeError):
        control.TO_PLANNER.decode(_heartbeat(**changes))


@pytest.mark.promise("zip-bombs-deep-nesting")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused_in_both_directions(value: float) -> None:
    assert telemetry.decode_row(msgpack.packb([1, [10, "m", -1.0, 1.0]]))
    with pytest.raises(DecodeError):
        telemetry.decode_row(msgpack.packb([1, [10, "m", value, 1.0]]))
    with pytest.raises(DecodeError):
        telemetry.encode_row(telemetry.Row(1, telemetry.DifferenceSample("m", value, 1.0)))


def test_trailing_bytes_and_extension_types_are_refused() -> None:
    with pytest.raises(DecodeError):
        control.TO_PLANNER.decode(_heartbeat() + b"\xc0")
    for extension in (b"\xd4\x05\x00", b"\xd6\xff\x00\x00\x00\x00", b"\xc7\x00\x05"):
        with pytest.raises(DecodeError):
            unpack(extension, SMALL)


def test_an_oversized_message_is_not_encoded() -> None:
    secret = bytes(16)
    request = enrol.EnrolRequest(secret=secret, public_key="k" * 40, device="x" * 2000)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="EnrolRequest has"):
        enrol.TO_PLANNER.encode(request)


def test_incompressible_data_fits_a_chunk_frame() -> None:
    data = b"".join(hash((i, 7)).to_bytes(8, "big", signed=True) for i in range(bulk.MAX_CHUNK_BYTES // 8))
    chunk = bulk.Chunk(digest="f" * 64, offset_bytes=2**44, size_bytes=2**44, data=data)  # type: ignore[arg-type]
    assert bulk.TO_DEVICE.decode(bulk.TO_DEVICE.encode(chunk)) == chunk


def test_names_have_no_room_for_tricks() -> None:
    for name in ("", ".", "..", "../x", "a/b", "a\n", "-rf", "a b", "x" * 65, "é"):
        with pytest.raises(DecodeError):
            control.TO_DEVICE.decode(_welcome(name))
    for name in ("a", "bench-1", "Jetson.2_b", "x" * 64):
        control.TO_DEVICE.decode(_welcome(name))

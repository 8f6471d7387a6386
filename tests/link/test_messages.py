"""Every message: golden bytes, round trips, and a bound on every field."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect as shapes

from stageloom.shared.codec import PLAIN, Codec
from stageloom.shared.messages import bulk, control, enrol, telemetry
from stageloom.shared.messages.base import Message
from tests.link.samples import MESSAGES, NEED, ROWS

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CODECS: dict[str, Codec[Any]] = {
    "control.to_planner": control.TO_PLANNER,
    "control.to_device": control.TO_DEVICE,
    "telemetry.to_planner": telemetry.TO_PLANNER,
    "telemetry.to_device": telemetry.TO_DEVICE,
    "bulk.to_planner": bulk.TO_PLANNER,
    "bulk.to_device": bulk.TO_DEVICE,
    "enrol.to_planner": enrol.TO_PLANNER,
    "enrol.to_device": enrol.TO_DEVICE,
}


def _types(union: Any) -> tuple[type, ...]:
    return getattr(union, "__args__", (union,))


def _codec_for(message: Message) -> Codec[Any]:
    return next(codec for codec in CODECS.values() if type(message) in _types(codec.types))


def _golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text().replace("\n", ""))


@pytest.mark.promise("message-type-telemetry-row")
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_matches_its_golden_bytes(message: Message) -> None:
    """Golden frames are uncompressed: zlib's output may differ between its versions, ours may not."""
    codec, golden = _codec_for(message), _golden(type(message).__name__)
    assert PLAIN + codec.encode_body(message) == golden
    assert codec.decode(golden) == message
    assert codec.decode(codec.encode(message)) == message


def test_an_alarm_may_say_what_is_usual_and_without_it_has_the_bytes_of_before() -> None:
    (alarm,) = (message for message in MESSAGES if isinstance(message, control.Alarm))
    known = msgspec.structs.replace(alarm, usual=(control.UsualLoad(2.52, 500_000),))
    assert control.TO_PLANNER.decode(control.TO_PLANNER.encode(known)) == known
    assert b"usual" not in control.TO_PLANNER.encode_body(alarm)


@pytest.mark.promise("message-type-telemetry-row")
@pytest.mark.parametrize("data", ROWS, ids=lambda data: type(data).__name__)
def test_row_matches_its_golden_bytes(data: telemetry.RowData) -> None:
    body = telemetry.encode_row(telemetry.Row(1_700_000_000_000_000, data))
    assert body == _golden(f"row.{type(data).__name__}")
    assert telemetry.decode_row(body) == telemetry.Row(1_700_000_000_000_000, data)


@pytest.mark.promise("message-type-telemetry-row")
def test_every_message_type_and_row_kind_has_a_sample_and_a_golden_file() -> None:
    types = {kind for codec in CODECS.values() for kind in _types(codec.types)}
    rows = set(_types(telemetry.RowData))
    assert {type(message) for message in MESSAGES} == types == set(Message.__subclasses__())
    assert {type(data) for data in ROWS} == rows == set(telemetry.KIND_OF)
    names = {kind.__name__ for kind in types} | {f"row.{kind.__name__}" for kind in rows}
    assert names == {path.stem for path in GOLDEN.glob("*.hex")}


def test_tags_are_unique_over_all_conversations() -> None:
    tags = [kind.__struct_config__.tag for kind in Message.__subclasses__()]
    assert len(set(tags)) == len(tags) and all(isinstance(tag, str) for tag in tags)


@pytest.mark.parametrize("name", CODECS)
def test_every_field_of_every_message_is_bounded(name: str) -> None:
    assert list(_unbounded(shapes.type_info(CODECS[name].types), name)) == []


def test_every_field_of_every_row_is_bounded() -> None:
    assert list(_unbounded(shapes.type_info(telemetry.Row), "row")) == []


def test_the_inspection_finds_an_unbounded_field() -> None:
    class Loose(msgspec.Struct):
        text: str
        values: tuple[float, ...]

    assert list(_unbounded(shapes.type_info(Loose), "loose")) == [
        "loose.text",
        "loose.values",
        "loose.values[]",
    ]


def _unbounded(kind: shapes.Type, where: str) -> list[str]:
    """Paths of fields through which an unbounded value, or a NUL, could arrive."""
    match kind:
        case shapes.UnionType(types=members):
            return [path for member in members for path in _unbounded(member, where)]
        case shapes.StructType(fields=fields):
            return [path for field in fields for path in _unbounded(field.type, f"{where}.{field.name}")]
        case shapes.TupleType(item_types=items):
            return [path for item in items for path in _unbounded(item, f"{where}[]")]
        case shapes.VarTupleType(item_type=item, max_length=longest):
            return ([] if longest is not None else [where]) + _unbounded(item, f"{where}[]")
        case shapes.StrType(max_length=longest, pattern=pattern):
            refuses_nul = pattern is not None and not re.search(pattern, "a\0" * 20)
            return [] if longest is not None and refuses_nul else [where]
        case shapes.BytesType(max_length=longest):
            return [] if longest is not None else [where]
        case shapes.IntType(ge=low, gt=above, le=high) | shapes.FloatType(ge=low, gt=above, le=high):
            return [] if (low is not None or above is not None) and high is not None else [where]
        case shapes.BoolType() | shapes.NoneType() | shapes.EnumType():
            return []
    return [where]


@pytest.mark.promise("message-type-telemetry-row")
def test_a_message_of_an_older_version_decodes_with_defaults() -> None:
    """A peer that does not know `origin`, `local_counter` and `reason` yet still makes itself understood."""
    older = {
        "type": "reported",
        "version": 1,
        "correlation": 0,
        "boot": 7,
        "report": {"revision": 3, "epoch": 1, "generation": 4},
    }
    decoded = control.TO_PLANNER.decode(b"\x00" + msgspec.msgpack.encode(older))
    assert decoded == control.Reported(boot=7, report=control.Report(revision=3, epoch=1, generation=4))


@pytest.mark.promise("message-type-telemetry-row")
def test_a_trial_that_an_older_agent_told_decodes_without_its_figure() -> None:
    """The bytes are those of agents that knew one figure only."""
    body = bytes.fromhex(
        "92cf00060a24181e40009f0c0209a7706c616e6e6572a5747269616ca6636f6d6d6974d9406162616261626162616261"
        "626162616261626162616261626162616261626162616261626162616261626162616261626162616261626162616261"
        "6261626162d9406364636463646364636463646364636463646364636463646364636463646364636463646364636463"
        "6463646364636463646364636463646364636463646364cb3ff4f5c28f5c28f6cb3ff451eb851eb852cb3ff5c28f5c28"
        "f5c309cf00060a24181e4000cf00060a241865f760b6626574746572206279206d6f7265207468616e203225"
    )
    ended = telemetry.decode_row(body).data
    assert isinstance(ended, telemetry.TrialEnded)
    assert (ended.verdict, ended.ratio, ended.reason) == ("commit", 1.31, "better by more than 2%")
    assert (ended.figure, ended.latency_ratio, ended.busy_ratio) == ("", None, None)


@pytest.mark.promise("message-type-telemetry-row")
def test_a_trial_that_an_agent_told_which_compared_no_outputs_decodes_without_them() -> None:
    """The bytes are those of agents that knew figures only."""
    body = bytes.fromhex(
        "92cf00060a24181e4000dc00120c0209a7706c616e6e6572a5747269616ca6636f6d6d6974d940616261626162616261"
        "626162616261626162616261626162616261626162616261626162616261626162616261626162616261626162616261"
        "62616261626162d940636463646364636463646364636463646364636463646364636463646364636463646364636463"
        "64636463646364636463646364636463646364636463646364cb3ff4f5c28f5c28f6cb3ff451eb851eb852cb3ff5c28f"
        "5c28f5c309cf00060a24181e4000cf00060a241865f760b6626574746572206279206d6f7265207468616e203225a76c"
        "6174656e6379cb3ff4f5c28f5c28f6cb3ff051eb851eb852"
    )
    ended = telemetry.decode_row(body).data
    assert isinstance(ended, telemetry.TrialEnded)
    assert (ended.verdict, ended.figure, ended.outputs) == ("commit", "latency", None)


@pytest.mark.promise("message-type-telemetry-row")
def test_a_trial_that_an_agent_told_without_its_environment_decodes_without_it() -> None:
    """The bytes are those of agents that left it to the planner to know."""
    body = bytes.fromhex(
        "92cf00060a24181e4000dc00130c0209a7706c616e6e6572a5747269616ca6636f6d6d6974d940616261626162616261"
        "626162616261626162616261626162616261626162616261626162616261626162616261626162616261626162616261"
        "62616261626162d940636463646364636463646364636463646364636463646364636463646364636463646364636463"
        "64636463646364636463646364636463646364636463646364cb3ff4f5c28f5c28f6cb3ff451eb851eb852cb3ff5c28f"
        "5c28f5c309cf00060a24181e4000cf00060a241865f760b6626574746572206279206d6f7265207468616e203225a76c"
        "6174656e6379cb3ff4f5c28f5c28f6cb3ff051eb851eb8529ccb3f847ae147ae147b20c2a87265736e65743530a66c6f"
        "67697473cb3fe8000000000000cb4008000000000000cb3fd0000000000000cb3fec000000000000920011a133a42d30"
        "2e35"
    )
    ended = telemetry.decode_row(body).data
    assert isinstance(ended, telemetry.TrialEnded)
    assert (ended.verdict, ended.outputs is not None, ended.environment) == ("commit", True, "")


def test_an_older_planner_reads_a_trial_without_what_it_does_not_know() -> None:
    """Trailing fields of a row are skipped, as its decoder of then did."""

    class Older(msgspec.Struct, frozen=True, tag=12, array_like=True):
        epoch: int
        generation: int

    (sample,) = (row for row in ROWS if isinstance(row, telemetry.TrialEnded))
    assert sample.outputs is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=Older) == Older(2, 9)


def test_a_comparison_of_outputs_is_asked_for_by_a_field_that_is_left_out_without_one() -> None:
    plain = control.Desired(epoch=1, generation=2)
    asked = control.Desired(epoch=1, generation=2, compare_outputs=0.05)
    for message in (plain, asked):
        assert control.TO_DEVICE.decode(control.TO_DEVICE.encode(message)) == message
    assert b"compare_outputs" not in control.TO_DEVICE.encode(plain)


def test_parts_are_asked_for_by_a_field_that_is_left_out_without_and_passed_over_by_older_agents() -> None:
    plain = control.ProfileRequest(3, NEED, 1, 20.0)
    asked = control.ProfileRequest(3, NEED, 1, 20.0, "onnx", 1, parts=9)
    for request in (plain, asked):
        message = control.Desired(epoch=1, generation=2, profiles=(request,))
        assert control.TO_DEVICE.decode(control.TO_DEVICE.encode(message)) == message
    assert b"parts" not in msgspec.msgpack.encode(plain)
    older = msgspec.defstruct(
        "ProfileRequest", [(name, object) for name in control.ProfileRequest.__struct_fields__[:-1]]
    )
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=older)
    assert read.executor == "onnx"  # type: ignore[attr-defined]


def test_a_message_of_a_newer_version_decodes_without_its_new_fields() -> None:
    newer = {"type": "reported_ack", "version": 2, "correlation": 0, "revision": 3, "because": "of reasons"}
    decoded = control.TO_DEVICE.decode(b"\x00" + msgspec.msgpack.encode(newer))
    assert decoded == control.ReportedAck(version=2, revision=3)


def test_the_largest_desired_value_fits_its_frame() -> None:
    needs = tuple(
        control.ArtifactNeed(f"{i:064d}".replace("0", "m", 1), "f" * 64, 2**44)  # type: ignore[arg-type]
        for i in range(64)
    )
    profiles = tuple(control.ProfileRequest(2**53, need, 1024, 3600.0) for need in needs)
    message = control.Desired(
        epoch=2**53,
        generation=2**53,
        plan_digest="f" * 64,  # type: ignore[arg-type]
        plan=bytes(i * 7919 % 251 for i in range(96 << 10)),
        artifacts=needs,
        profiles=profiles,
    )
    assert control.TO_DEVICE.decode(control.TO_DEVICE.encode(message)) == message

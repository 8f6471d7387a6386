"""From a batch to rows for the store, off the thread that owns the sockets."""

from collections.abc import Iterable
from typing import Final

from stageloom.planner.dispatch.ports import StoredRow, TelemetryWrite
from stageloom.shared.errors import DecodeError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import (
    KIND_OF,
    PlanActivated,
    ProfileResult,
    RowKind,
    StageProfileResult,
    StateChange,
    TelemetryBatch,
    TrialEnded,
    decode_row,
)

_SINGLE_TAGS: Final = frozenset(
    kind.__struct_config__.tag
    for kind in (PlanActivated, ProfileResult, StageProfileResult, StateChange, TrialEnded)
)
_INTEGER_BYTES: Final = dict.fromkeys(range(0x80), 1) | {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}


def single_rows(rows: Iterable[bytes]) -> int:
    """How many rows the store works on one by one, told by their first bytes; other rows share a statement.

    A row is written as agents write it or it counts: decoding takes other encodings of the same values too.
    """
    return sum(map(_is_single, rows))


def _is_single(body: bytes) -> bool:
    """See `single_rows`. A row is [at_us, [tag, ...]]: an array of two, an integer, an array, its tag."""
    if body[0] != 0x92 or len(body) < 4:
        return body[0] & 0xF0 == 0x90 or body[0] in (0xDC, 0xDD)  # an array in another encoding, or no row
    array = 1 + _INTEGER_BYTES.get(body[1], len(body))
    if array + 1 >= len(body) or body[array] & 0xF0 != 0x90 or body[array + 1] >= 0x80:
        return True
    return body[array + 1] in _SINGLE_TAGS


def telemetry_write(device: DeviceId, batch: TelemetryBatch) -> TelemetryWrite:
    """The batch's rows with their numbers; one that cannot be read is kept as its bytes, kind UNREADABLE.

    Raises:
        ValueError: the ranges do not number the rows (the core refuses such a batch before).
    """
    numbers = [(one.boot, at) for one in batch.ranges for at in range(one.first, one.last + 1)]
    rows = tuple(
        _stored(boot, sequence, body) for (boot, sequence), body in zip(numbers, batch.rows, strict=True)
    )
    return TelemetryWrite(device, rows, batch.ledgers)


def _stored(boot: int, sequence: int, body: bytes) -> StoredRow:
    try:
        row = decode_row(body)
    except DecodeError as error:
        return StoredRow(boot, sequence, 0, RowKind.UNREADABLE, body, None, error.cause)
    return StoredRow(boot, sequence, row.at_us, KIND_OF[type(row.data)], body, row.data)

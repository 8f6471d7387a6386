"""From a batch to rows for the store, off the thread that owns the sockets."""

from planner.dispatch.ports import StoredRow, TelemetryWrite
from shared.errors import DecodeError
from shared.ids import DeviceId
from shared.messages.telemetry import KIND_OF, RowKind, TelemetryBatch, decode_row


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

"""Telemetry read back over its whole age: hours, then minutes, then rows."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct
from sqlalchemy import select
from sqlalchemy.orm import Session

from stageloom.planner.store.showing import read_row
from stageloom.planner.store.tables import RollupRow, TelemetryRow
from stageloom.planner.telemetry.rollup import (
    KINDS,
    Span,
    SpanData,
    SpanKey,
    Width,
    decode_data,
    merge,
    span_of,
    widen,
)
from stageloom.shared.errors import DecodeError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import Row, RowData, RowKind, StepTimings

_PAGE = 5_000


class UnreadableData(Struct, frozen=True, array_like=True):
    """A row that is kept as its bytes, and why nobody reads them."""

    reason: str
    size_bytes: int


class Entry(NamedTuple):
    """One row, or what `rows` of them say in `width_s` seconds from `at_us` on (0: it is a row).

    A row that cannot be read is of kind UNREADABLE, whatever it was stored as.
    """

    at_us: int
    width_s: int
    kind: RowKind
    rows: int
    data: RowData | SpanData | UnreadableData


def history(
    session: Session, device: DeviceId, kinds: Sequence[RowKind], *, since_us: int = 0, limit: int = 10_000
) -> list[Entry]:
    """Everything there is of some kinds, as fine as it is kept, oldest first; at most the newest `limit`."""
    entries = [
        _entry(span, width)
        for width in (Width.HOUR, Width.MINUTE)
        for span in _spans(session, device, width, kinds, since_us=since_us, limit=limit)
    ]
    rows = [
        _row_entry(at_us, kind, body)
        for at_us, kind, body in _rows(session, device, kinds, since_us=since_us, limit=limit)
    ]
    entries += reversed(rows)
    entries.sort(key=lambda entry: entry.at_us)
    return entries[-limit:]


def history_by(
    session: Session,
    device: DeviceId,
    kinds: Sequence[RowKind],
    width: Width,
    *,
    since_us: int = 0,
    limit: int = 10_000,
) -> list[Entry]:
    """The same rolled up to one width, whatever is still kept finer; hours stay hours.

    Kinds that are not rolled up are left out.
    """
    wanted = [kind for kind in kinds if kind in KINDS]
    since_us = width.begin_us(since_us)

    def finer() -> Iterator[Span]:
        for at_us, kind, body in _rows(session, device, wanted, since_us=since_us):
            if isinstance(row := read_row(body), Row):
                yield span_of(at_us, kind, row.data, width)
        for span in _spans(session, device, Width.MINUTE, wanted, since_us=since_us):
            yield widen(span, width)
        if width is Width.HOUR:
            yield from _spans(session, device, Width.HOUR, wanted, since_us=since_us)

    entries = [_entry(span, width) for span in merge(finer()).values()]
    if width is Width.MINUTE:
        hours = _spans(session, device, Width.HOUR, wanted, since_us=since_us)
        entries += [_entry(span, Width.HOUR) for span in hours]
    return sorted(entries, key=lambda entry: (entry.at_us, entry.kind))[-limit:]


def first_steps(session: Session, device: DeviceId, *, since_us: int, limit: int) -> list[StepTimings]:
    """Steps from `since_us` on, oldest first, the oldest `limit` of rows and spans that begin after it."""
    kind = RowKind.STEP_TIMINGS.value
    spans = session.execute(
        select(RollupRow.begin_us, RollupRow.body)
        .where(RollupRow.device == device, RollupRow.kind == kind, RollupRow.begin_us >= since_us)
        .order_by(RollupRow.begin_us, RollupRow.subject)
        .limit(limit)
    )
    found: list[tuple[int, RowData | SpanData]] = [(at_us, decode_data(body)) for at_us, body in spans]
    rows = session.execute(
        select(TelemetryRow.at_us, TelemetryRow.body)
        .where(TelemetryRow.device == device, TelemetryRow.kind == kind, TelemetryRow.at_us >= since_us)
        .order_by(TelemetryRow.at_us, TelemetryRow.sequence)
        .limit(limit)
    )
    found += [(at_us, row.data) for at_us, body in rows if isinstance(row := read_row(body), Row)]
    found.sort(key=lambda one: one[0])
    return [data for _, data in found[:limit] if isinstance(data, StepTimings)]


def _row_entry(at_us: int, kind: RowKind, body: bytes) -> Entry:
    row = read_row(body)
    if isinstance(row, DecodeError):
        return Entry(at_us, 0, RowKind.UNREADABLE, 1, UnreadableData(row.cause, len(body)))
    if kind is RowKind.UNREADABLE:
        reason = "the database would not take what it says; see `stageloom device show`"
        return Entry(at_us, 0, kind, 1, UnreadableData(reason, len(body)))
    return Entry(row.at_us, 0, kind, 1, row.data)


def _entry(span: Span, width: Width) -> Entry:
    return Entry(span.key.begin_us, width.value, span.key.kind, span.rows, span.data)


def _rows(
    session: Session,
    device: DeviceId,
    kinds: Sequence[RowKind],
    *,
    since_us: int,
    limit: int | None = None,
) -> Iterator[tuple[int, RowKind, bytes]]:
    """(time, kind, bytes) of rows, newest first."""
    found = session.execute(
        select(TelemetryRow.at_us, TelemetryRow.kind, TelemetryRow.body)
        .where(
            TelemetryRow.device == device,
            TelemetryRow.kind.in_([kind.value for kind in kinds]),
            TelemetryRow.at_us >= since_us,
        )
        .order_by(TelemetryRow.at_us.desc(), TelemetryRow.sequence.desc())
        .limit(limit)
        .execution_options(yield_per=_PAGE)
    )
    for at_us, kind, body in found:
        yield at_us, RowKind(kind), body


def _spans(
    session: Session,
    device: DeviceId,
    width: Width,
    kinds: Sequence[RowKind],
    *,
    since_us: int,
    limit: int | None = None,
) -> Iterator[Span]:
    """Spans of one width that hold `since_us` or begin later, newest first."""
    found = session.execute(
        select(RollupRow.begin_us, RollupRow.kind, RollupRow.subject, RollupRow.rows, RollupRow.body)
        .where(
            RollupRow.device == device,
            RollupRow.width_s == width.value,
            RollupRow.begin_us >= width.begin_us(since_us),
            RollupRow.kind.in_([kind.value for kind in kinds]),
        )
        .order_by(RollupRow.begin_us.desc(), RollupRow.kind, RollupRow.subject)
        .limit(limit)
        .execution_options(yield_per=_PAGE)
    )
    for row in found:
        yield span_from(*row)


def span_from(begin_us: int, kind: str, subject: str, rows: int, body: bytes) -> Span:
    """A span as the table holds it."""
    return Span(SpanKey(begin_us, RowKind(kind), subject), rows, decode_data(body))

"""Telemetry of a device over its whole age, page by page from the newest on: rows, minutes, hours."""

import heapq
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Final, NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from stageloom.planner.store.rows import read_row
from stageloom.planner.store.tables import RollupRow
from stageloom.planner.store.telemetry import SPAN_COLUMNS, FiledRow, newest_rows, span_from
from stageloom.planner.telemetry import (
    ROLLED_KINDS,
    TelemetryEntry,
    UnreadableData,
    Width,
    merge,
    span_of,
    widen,
)
from stageloom.shared.errors import DecodeError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.base import MOST
from stageloom.shared.messages.telemetry import Row, RowKind

_CHUNK: Final = 5_000


class TelemetryPosition(NamedTuple):
    """Where a history goes on: the moment of the last entry, and how many entries of it were seen."""

    at_us: int
    seen: int


def telemetry_history(
    session: Session,
    device: DeviceId,
    kinds: Sequence[RowKind],
    *,
    by: Width | None = None,
    since_us: int = 0,
    after: TelemetryPosition | None = None,
    limit: int = 10_000,
) -> tuple[list[TelemetryEntry], TelemetryPosition | None]:
    """Telemetry over its whole age, newest first, from `after` on; and where it goes on, None at its end.

    It is as fine as it is kept, or rolled up to `by` whatever is kept finer; hours stay hours, and kinds that
    are not rolled up are left out then.
    """
    until_us, seen = after or TelemetryPosition(MOST, 0)
    window = _Window(session, device, since_us, until_us, seen + limit + 1)
    entries = _as_kept(window, kinds) if by is None else _rolled_up(window, kinds, by)
    shown = list(islice(entries, seen, seen + limit + 1))
    if len(shown) <= limit:
        return [entry for _, entry in shown], None
    last_us = shown[limit - 1][0]
    again = sum(at_us == last_us for at_us, _ in shown[:limit]) + (seen if last_us == until_us else 0)
    return [entry for _, entry in shown[:limit]], TelemetryPosition(last_us, again)


class _Window(NamedTuple):
    """What of a device's telemetry is read, and how much of each kind at most."""

    session: Session
    device: DeviceId
    since_us: int
    until_us: int
    limit: int | None


_Filed = tuple[int, TelemetryEntry]
"""An entry under the moment that it is kept under."""


def _newest_first(*streams: Iterator[_Filed]) -> Iterator[_Filed]:
    return heapq.merge(*streams, key=lambda filed: -filed[0])


def _as_kept(window: _Window, kinds: Sequence[RowKind]) -> Iterator[_Filed]:
    # A statement per kind reads an index in its order; one of all kinds would sort whatever there is.
    by_kind = (newest_rows(*window[:2], [kind], **_bounds(window)) for kind in kinds)
    rows = heapq.merge(*by_kind, key=lambda row: row[:2], reverse=True)
    return _newest_first(
        ((row.at_us, _row_entry(row)) for row in rows),
        *(_span_entries(window, width, kinds) for width in (Width.MINUTE, Width.HOUR)),
    )


def _span_entries(window: _Window, width: Width, kinds: Sequence[RowKind]) -> Iterator[_Filed]:
    for span in _spans(*window[:2], width, kinds, **_bounds(window)):
        yield span.at_us, span


def _bounds(window: _Window) -> dict[str, Any]:
    return {"since_us": window.since_us, "until_us": window.until_us, "limit": window.limit}


def _rolled_up(window: _Window, kinds: Sequence[RowKind], width: Width) -> Iterator[_Filed]:
    """Streams of finer spans, newest first, are merged from one span of `width` to the one before it."""
    wanted = [kind for kind in kinds if kind in ROLLED_KINDS]
    whole = window._replace(
        since_us=width.begin_us(window.since_us),
        until_us=window.until_us + width.value * 1_000_000 - 1,
        limit=None,
    )
    merged = _merged(whole, wanted, width)
    if width is Width.HOUR:
        return merged
    return _newest_first(merged, _span_entries(window, Width.HOUR, wanted))


def _merged(whole: _Window, kinds: Sequence[RowKind], width: Width) -> Iterator[_Filed]:
    kept = [one for one in (Width.MINUTE, Width.HOUR) if one <= width]
    streams = [
        *(_row_spans(whole, kind, width) for kind in kinds),
        *(_widened(_spans(*whole[:2], one, kinds, **_bounds(whole)), width) for one in kept),
    ]
    finer = heapq.merge(*streams, key=attrgetter("at_us"), reverse=True)
    for at_us, spans in groupby(finer, key=attrgetter("at_us")):
        for _, span in sorted(merge(spans).items(), reverse=True):
            yield at_us, span


def _row_spans(whole: _Window, kind: RowKind, width: Width) -> Iterator[TelemetryEntry]:
    for filed in newest_rows(*whole[:2], [kind], **_bounds(whole)):
        if isinstance(row := read_row(filed.body), Row):
            yield span_of(filed.at_us, filed.kind, row.data, width)


def _widened(spans: Iterator[TelemetryEntry], width: Width) -> Iterator[TelemetryEntry]:
    return (widen(span, width) for span in spans)


def _row_entry(filed: FiledRow) -> TelemetryEntry:
    row = read_row(filed.body)
    if isinstance(row, Row) and filed.kind is not RowKind.UNREADABLE:
        return TelemetryEntry(row.at_us, 0, filed.kind, 1, row.data)
    reason = (
        row.cause
        if isinstance(row, DecodeError)
        else "the database would not take what it says; see `stageloom device show`"
    )
    return TelemetryEntry(filed.at_us, 0, RowKind.UNREADABLE, 1, UnreadableData(reason, len(filed.body)))


def _spans(
    session: Session,
    device: DeviceId,
    width: Width,
    kinds: Sequence[RowKind],
    *,
    since_us: int,
    until_us: int = MOST,
    limit: int | None = None,
) -> Iterator[TelemetryEntry]:
    """Spans of one width that hold `since_us` or begin later, up to `until_us`, newest first."""
    found = session.execute(
        select(*SPAN_COLUMNS)
        .where(
            RollupRow.device == device,
            RollupRow.width_s == width.value,
            RollupRow.begin_us.between(width.begin_us(since_us), until_us),
            RollupRow.kind.in_([kind.value for kind in kinds]),
        )
        .order_by(RollupRow.begin_us.desc(), RollupRow.kind.desc(), RollupRow.subject.desc())
        .limit(limit)
        .execution_options(yield_per=_CHUNK)
    )
    with closing(found):
        for row in found:
            yield span_from(*row)

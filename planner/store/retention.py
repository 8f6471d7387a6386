"""What stays of telemetry, and for how long: rows, then minutes, then hours, then nothing.

Everything happens in transactions that treat at most `CHUNK` rows, so that what devices send is never kept
waiting for long. A row that is rolled up is deleted in the same transaction: at any moment it is counted in
exactly one place, and rows that come late are merged into the minute or hour that is there already.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Executable, bindparam, delete, exists, select, tuple_
from sqlalchemy.orm import Session

from stageloom.planner.store import newest
from stageloom.planner.store.database import Database
from stageloom.planner.store.history import span_from
from stageloom.planner.store.showing import read_row
from stageloom.planner.store.tables import ConsideredPlanRow, DeviceRow, EventRow, RollupRow, TelemetryRow
from stageloom.planner.store.writer import Writer
from stageloom.planner.telemetry.rollup import (
    KINDS,
    Span,
    SpanKey,
    Width,
    decode_data,
    encode_data,
    merge,
    span_of,
    widen,
)
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import Row, RowKind

CHUNK: Final = 500
"""Rows that one transaction treats at most."""

_UNSETTLED_US: Final = 3_600_000_000
"""A plan this young may be about to be referred to."""

_LOOKED_AT: Final = 64
"""Devices that are looked at together."""

FACTS: Final = (
    RowKind.STATE_CHANGE,
    RowKind.EVENT,
    RowKind.TRIAL_ENDED,
    RowKind.PLAN_ACTIVATED,
)
"""Kinds of rows that are few and each of its own worth: they stay as long as the hours do."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Ages in seconds at which telemetry becomes coarser or goes, and how many rows of each of its histories
    (`stageloom.planner.store.newest`) a device keeps; 0 keeps for ever."""

    rows_s: float
    minutes_s: float
    hours_s: float
    history_rows: int = 0

    def row_age_s(self, kind: RowKind) -> float:
        """How old a row of a kind becomes."""
        return self.hours_s if kind in FACTS else self.rows_s


_Step = Callable[[Session], int]
"""Treats up to `CHUNK` rows in one transaction and says how many."""
_Steps = Callable[[DeviceId, Retention, int], list[tuple[int, _Step]]]
"""Per step what lies before which moment in microseconds is its; for a device, at a moment."""


def tidy(database: Database, writer: Writer, keep: Retention, now_us: int) -> Iterator[int]:
    """Apply `keep`, step by step: each `next` is one transaction and gives the number of rows it treated.

    0 after looking at some devices: that costs milliseconds, and there may be thousands.

    The caller may pause between steps, or stop.

    Raises:
        StorageError: the database cannot be read or written; the steps before are kept.
    """
    with database.read() as session:
        devices = [
            DeviceId(name) for name in session.scalars(select(DeviceRow.name).order_by(DeviceRow.name))
        ]
    for at in range(0, len(devices), _LOOKED_AT):
        for look, wanted in _LEVELS:  # each finds what the one before left
            steps = _old(database, look, wanted, devices[at : at + _LOOKED_AT], keep, now_us)
            for step in steps:
                yield from _repeat(writer, step)
        for step in newest.steps(database, devices[at : at + _LOOKED_AT], keep.history_rows, CHUNK):
            yield from _repeat(writer, step)
        yield 0
    if keep.history_rows:
        settled_us = now_us - _UNSETTLED_US
        yield from _repeat(writer, lambda session: newest.delete_unused_plans(session, settled_us, CHUNK))
    if before_us := _before(now_us, keep.hours_s):
        yield from _repeat(writer, lambda session: _delete_older(session, EventRow, before_us))
        yield from _repeat(writer, lambda session: _delete_older(session, ConsideredPlanRow, before_us))


def _old(
    database: Database,
    look: Executable,
    wanted: _Steps,
    devices: Sequence[DeviceId],
    keep: Retention,
    now_us: int,
) -> list[_Step]:
    """The steps that would treat something. Looked up first: a step is a writing transaction."""
    limits = {f"before_{at}": before_us for at, (before_us, _) in enumerate(wanted(devices[0], keep, now_us))}
    with database.read() as session:
        found = session.connection().execute(look, {"devices": devices, **limits}).all()
    return [
        step
        for name, *olds in found
        if any(olds)
        for (_, step), old in zip(wanted(DeviceId(name), keep, now_us), olds, strict=True)
        if old
    ]


def _repeat(writer: Writer, step: _Step) -> Iterator[int]:
    treated = CHUNK
    while treated == CHUNK:
        treated = writer.run(step, bulk=True)
        if treated:
            yield treated


def _before(now_us: int, age_s: float) -> int:
    """The moment before which something is too old; 0: nothing is."""
    return max(now_us - round(age_s * 1e6), 0) if age_s else 0


def _row_steps(device: DeviceId, keep: Retention, now_us: int) -> list[tuple[int, _Step]]:
    ages = {kind: _before(now_us, keep.row_age_s(kind)) for kind in RowKind}
    return [(before_us, _rows_step(device, kind, before_us)) for kind, before_us in ages.items()]


def _minute_steps(device: DeviceId, keep: Retention, now_us: int) -> list[tuple[int, _Step]]:
    # Whole hours of minutes go, so that an hour is not shown in part as minutes.
    before_us = Width.HOUR.begin_us(_before(now_us, keep.minutes_s))
    return [(before_us, lambda session: _widen_minutes(session, device, before_us))]


def _hour_steps(device: DeviceId, keep: Retention, now_us: int) -> list[tuple[int, _Step]]:
    before_us = Width.HOUR.begin_us(_before(now_us, keep.hours_s))
    return [(before_us, lambda session: _delete_hours(session, device, before_us))]


def _rows_step(device: DeviceId, kind: RowKind, before_us: int) -> _Step:
    return lambda session: _take_rows(session, device, kind, before_us)


def _old_rows(at: int, kind: RowKind) -> ColumnElement[bool]:
    return exists().where(
        TelemetryRow.device == DeviceRow.name,
        TelemetryRow.kind == kind.value,
        TelemetryRow.at_us < bindparam(f"before_{at}"),
    )


def _old_rollups(width: Width) -> ColumnElement[bool]:
    return exists().where(
        RollupRow.device == DeviceRow.name,
        RollupRow.width_s == width.value,
        RollupRow.begin_us < bindparam("before_0"),
    )


def _look(olds: Sequence[ColumnElement[bool]]) -> Executable:
    labelled = (old.label(f"old_{at}") for at, old in enumerate(olds))
    return (
        select(DeviceRow.name, *labelled)
        .where(DeviceRow.name.in_(bindparam("devices", expanding=True)))
        .order_by(DeviceRow.name)
    )


_LEVELS: Final[tuple[tuple[Executable, _Steps], ...]] = (
    (_look([_old_rows(at, kind) for at, kind in enumerate(RowKind)]), _row_steps),
    (_look([_old_rollups(Width.MINUTE)]), _minute_steps),
    (_look([_old_rollups(Width.HOUR)]), _hour_steps),
)
"""What of `devices` lies before `before_0`, `before_1`...; and what treats it.

Made once: making the first one takes longer than running it.
"""


def _take_rows(session: Session, device: DeviceId, kind: RowKind, before_us: int) -> int:
    """Delete the oldest rows of a kind; those that can be are rolled up into minutes."""
    key = (TelemetryRow.device, TelemetryRow.boot, TelemetryRow.sequence)
    oldest = (
        select(*key)
        .where(
            TelemetryRow.device == device,
            TelemetryRow.kind == kind.value,
            TelemetryRow.at_us < before_us,
        )
        .order_by(TelemetryRow.at_us)
        .limit(CHUNK)
    )
    gone = session.execute(
        delete(TelemetryRow)
        .where(tuple_(*key).in_(oldest))
        .returning(TelemetryRow.at_us, TelemetryRow.body)
        .execution_options(synchronize_session=False)
    ).all()
    if kind in KINDS:
        _add(
            session,
            device,
            Width.MINUTE,
            merge(
                span_of(at_us, kind, row.data, Width.MINUTE)
                for at_us, body in gone
                if isinstance(row := read_row(body), Row)  # an older version took what this one does not
            ),
        )
    return len(gone)


def _widen_minutes(session: Session, device: DeviceId, before_us: int) -> int:
    """Roll the oldest minutes up into hours."""
    gone = _take_rollups(session, device, Width.MINUTE, before_us)
    _add(session, device, Width.HOUR, merge(widen(span, Width.HOUR) for span in gone))
    return len(gone)


def _delete_hours(session: Session, device: DeviceId, before_us: int) -> int:
    return len(_take_rollups(session, device, Width.HOUR, before_us))


def _take_rollups(session: Session, device: DeviceId, width: Width, before_us: int) -> list[Span]:
    key = (RollupRow.device, RollupRow.width_s, RollupRow.begin_us, RollupRow.kind, RollupRow.subject)
    oldest = (
        select(*key)
        .where(
            RollupRow.device == device,
            RollupRow.width_s == width.value,
            RollupRow.begin_us < before_us,
        )
        .order_by(RollupRow.begin_us)
        .limit(CHUNK)
    )
    gone = session.execute(
        delete(RollupRow)
        .where(tuple_(*key).in_(oldest))
        .returning(RollupRow.begin_us, RollupRow.kind, RollupRow.subject, RollupRow.rows, RollupRow.body)
        .execution_options(synchronize_session=False)
    ).all()
    return [span_from(*row) for row in gone]


def _add(session: Session, device: DeviceId, width: Width, spans: dict[SpanKey, Span]) -> None:
    """Merge spans into those that are there."""
    if not spans:
        return
    # Locked where rows can be (Postgres), so that two who roll up at once do not undo each other.
    found = session.scalars(
        select(RollupRow)
        .where(
            RollupRow.device == device,
            RollupRow.width_s == width.value,
            RollupRow.begin_us.in_({key.begin_us for key in spans}),
            RollupRow.kind.in_({key.kind.value for key in spans}),
        )
        .with_for_update()
    )
    rows = {SpanKey(row.begin_us, RowKind(row.kind), row.subject): row for row in found}
    for key, span in spans.items():
        row = rows.get(key)
        if row is None:
            session.add(
                RollupRow(
                    device=device,
                    width_s=width.value,
                    begin_us=key.begin_us,
                    kind=key.kind.value,
                    subject=key.subject,
                    rows=span.rows,
                    body=encode_data(span.data),
                )
            )
            continue
        both = merge((Span(key, row.rows, decode_data(row.body)), span))[key]
        row.rows, row.body = both.rows, encode_data(both.data)


def _delete_older(session: Session, table: type[EventRow | ConsideredPlanRow], before_us: int) -> int:
    """Delete the oldest rows of a table that is numbered as it grows."""
    (number,) = table.__table__.primary_key
    oldest = select(number).where(table.at_us < before_us).order_by(table.at_us).limit(CHUNK)
    # `session.execute` of a delete returns a CursorResult, which its annotation does not say.
    result: Any = session.execute(
        delete(table).where(number.in_(oldest)).execution_options(synchronize_session=False)
    )
    return int(result.rowcount)

"""What stays of telemetry, and for how long: rows, then minutes, then hours, then nothing.

Everything happens in transactions that treat at most `CHUNK` rows, so that what devices send is never kept
waiting for long. A row that is rolled up is deleted in the same transaction: at any moment it is counted in
exactly one place, and rows that come late are merged into the minute or hour that is there already.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Executable,
    and_,
    bindparam,
    delete,
    exists,
    false,
    func,
    not_,
    or_,
    select,
    tuple_,
)
from sqlalchemy.orm import InstrumentedAttribute, Session

from stageloom.planner.store.regimes import delete_rolled_back
from stageloom.planner.store.rollouts import delete_old_rollouts
from stageloom.planner.store.rows import read_row
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import (
    AlarmRow,
    ConsideredPlanRow,
    DesiredRow,
    DeviceRow,
    EventRow,
    GenerationRow,
    RegimeRow,
    ReplanRow,
    ReportedRow,
    RollupRow,
    TelemetryRow,
    TrialRow,
)
from stageloom.planner.store.telemetry import SPAN_COLUMNS, span_from
from stageloom.planner.store.trials import TRIAL_AGE
from stageloom.planner.store.tried_replans import PENDING
from stageloom.planner.store.trusted_time import trusted_now_us
from stageloom.planner.store.unused_plans import delete_unused_plans, unused_plans
from stageloom.planner.telemetry import (
    ROLLED_KINDS,
    SpanKey,
    TelemetryEntry,
    Width,
    decode_data,
    encode_data,
    merge,
    span_of,
    widen,
)
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import DeviceState
from stageloom.shared.messages.telemetry import Row, RowKind

Column: TypeAlias = InstrumentedAttribute[Any]

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
    RowKind.MACHINE_FACTS,
    RowKind.EXECUTOR_TIME,
    RowKind.STAGE_PROFILE_RESULT,  # costs know its stages, and it alone its whole steps
)
"""Kinds of rows that are few and each of its own worth: they stay as long as the hours do."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Ages in seconds at which telemetry becomes coarser or goes, and how many rows of each of its histories
    (`_HISTORIES`) a device keeps; 0 keeps for ever."""

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


def tidy(store: Store, keep: Retention) -> Iterator[int]:
    """Apply `keep`, step by step: each `next` is one transaction and gives the number of rows it treated.

    0 after looking at some devices: that costs milliseconds, and there may be thousands. Ages are counted
    from the trusted time: `advance_clock` first. The caller may pause between steps, or stop.

    Raises:
        StorageError: the database cannot be read or written; the steps before are kept.
    """
    with store.database.read() as session:
        at_us = trusted_now_us(session)
        devices = [
            DeviceId(name) for name in session.scalars(select(DeviceRow.name).order_by(DeviceRow.name))
        ]
    for at in range(0, len(devices), _LOOKED_AT):
        for look, wanted in _LEVELS:  # each finds what the one before left
            steps = _old(store, look, wanted, devices[at : at + _LOOKED_AT], keep, at_us)
            for step in steps:
                yield from _repeat(store, step)
        for step in _history_steps(store, devices[at : at + _LOOKED_AT], keep.history_rows, CHUNK):
            yield from _repeat(store, step)
        yield 0
    if keep.history_rows:
        yield from _tidy_plans(store, at_us - _UNSETTLED_US)
    if before_us := _before(at_us, keep.hours_s):
        yield from _repeat(store, lambda session: _delete_older(session, EventRow, before_us))
        yield from _repeat(store, lambda session: _delete_older(session, ConsideredPlanRow, before_us))
        yield from _repeat(store, lambda session: delete_old_rollouts(session, before_us, CHUNK))


def _tidy_plans(store: Store, before_us: int) -> Iterator[int]:
    unused = store.read(unused_plans, before_us)
    for at in range(0, len(unused), CHUNK):
        yield store.writer.run(_plans_step(unused[at : at + CHUNK]), bulk=True)


def _plans_step(names: Sequence[str]) -> _Step:
    return lambda session: delete_unused_plans(session, names)


def _old(
    store: Store,
    look: Executable,
    wanted: _Steps,
    devices: Sequence[DeviceId],
    keep: Retention,
    now_us: int,
) -> list[_Step]:
    """The steps that would treat something. Looked up first: a step is a writing transaction."""
    limits = {f"before_{at}": before_us for at, (before_us, _) in enumerate(wanted(devices[0], keep, now_us))}
    with store.database.read() as session:
        found = session.connection().execute(look, {"devices": devices, **limits}).all()
    return [
        step
        for name, *olds in found
        if any(olds)
        for (_, step), old in zip(wanted(DeviceId(name), keep, now_us), olds, strict=True)
        if old
    ]


def _repeat(store: Store, step: _Step) -> Iterator[int]:
    treated = CHUNK
    while treated == CHUNK:
        treated = store.writer.run(step, bulk=True)
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
        .where(TelemetryRow.device == device, TelemetryRow.kind == kind.value, TelemetryRow.at_us < before_us)
        .order_by(TelemetryRow.at_us)
        .limit(CHUNK)
    )
    gone = _delete(session, key, oldest, TelemetryRow.at_us, TelemetryRow.body).all()
    if kind in ROLLED_KINDS:
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


def _take_rollups(session: Session, device: DeviceId, width: Width, before_us: int) -> list[TelemetryEntry]:
    key = (RollupRow.device, RollupRow.width_s, RollupRow.begin_us, RollupRow.kind, RollupRow.subject)
    oldest = (
        select(*key)
        .where(RollupRow.device == device, RollupRow.width_s == width.value, RollupRow.begin_us < before_us)
        .order_by(RollupRow.begin_us)
        .limit(CHUNK)
    )
    return [span_from(*row) for row in _delete(session, key, oldest, *SPAN_COLUMNS)]


def _delete(session: Session, key: Sequence[Column], chosen: Any, *returning: Column) -> Any:
    """Delete the rows of a table whose `key` is among the `chosen`; the result has the columns asked for, or
    the number of rows."""
    statement: Any = delete(key[0].class_).where(tuple_(*key).in_(chosen))
    if returning:
        statement = statement.returning(*returning)
    return session.execute(statement.execution_options(synchronize_session=False))


def _add(session: Session, device: DeviceId, width: Width, spans: dict[SpanKey, TelemetryEntry]) -> None:
    """Merge spans into those that are there."""
    if not spans:
        return
    # Locked where rows can be (Postgres), so that two who roll up at once do not undo each other.
    found = session.scalars(
        select(RollupRow)
        .where(
            RollupRow.device == device,
            RollupRow.width_s == width.value,
            RollupRow.begin_us.in_({span.at_us for span in spans.values()}),
            RollupRow.kind.in_({span.kind.value for span in spans.values()}),
        )
        .with_for_update()
    )
    rows = {(row.begin_us, RowKind(row.kind), row.subject): row for row in found}
    for key, span in spans.items():
        row = rows.get(key)
        if row is None:
            session.add(
                RollupRow(
                    device=device,
                    width_s=width.value,
                    begin_us=span.at_us,
                    kind=span.kind.value,
                    subject=span.subject,
                    rows=span.rows,
                    body=encode_data(span.data),
                )
            )
            continue
        both = merge((span._replace(rows=row.rows, data=decode_data(row.body)), span))[key]
        row.rows, row.body = both.rows, encode_data(both.data)


def _delete_older(session: Session, table: type[EventRow | ConsideredPlanRow], before_us: int) -> int:
    """Delete the oldest rows of a table that is numbered as it grows."""
    number: Column = EventRow.id if table is EventRow else ConsideredPlanRow.number
    oldest = select(number).where(table.at_us < before_us).order_by(table.at_us).limit(CHUNK)
    return int(_delete(session, [number], oldest).rowcount)


_History: TypeAlias = tuple[Column, tuple[Column, ...], ColumnElement[bool]]
"""Of a table of which each device keeps its newest rows: the device, what they are ordered by (age first,
together a key), and which rows stay whatever their age."""

_REPORTED: Final = exists().where(
    ReportedRow.device == GenerationRow.device,
    ReportedRow.epoch == GenerationRow.epoch,
    ReportedRow.generation == GenerationRow.generation,
)

_DESIRED: Final = exists().where(
    DesiredRow.device == GenerationRow.device,
    DesiredRow.epoch == GenerationRow.epoch,
    DesiredRow.generation == GenerationRow.generation,
)

_ACTIVE: Final = exists().where(
    ReportedRow.device == GenerationRow.device, ReportedRow.active == GenerationRow.digest
)

_later = GenerationRow.__table__.alias("later")

_LAST_GOOD: Final = and_(
    GenerationRow.state == DeviceState.COMMITTED.value,
    not_(
        exists().where(
            _later.c.device == GenerationRow.device,
            _later.c.state == DeviceState.COMMITTED.value,
            _later.c.position > GenerationRow.position,
        )
    ),
)

_OF_A_REPLAN: Final = exists().where(
    ReplanRow.device == GenerationRow.device,
    ReplanRow.epoch == GenerationRow.epoch,
    ReplanRow.generation == GenerationRow.generation,
    ReplanRow.outcome == PENDING,
)

_BEGAN_A_REPLAN: Final = exists().where(
    ReplanRow.device == AlarmRow.device,
    ReplanRow.boot == AlarmRow.boot,
    ReplanRow.number == AlarmRow.number,
    ReplanRow.outcome == PENDING,
)


_HISTORIES: Final[tuple[_History, ...]] = (
    (
        GenerationRow.device,
        (GenerationRow.position,),
        or_(_REPORTED, _DESIRED, _ACTIVE, _LAST_GOOD, _OF_A_REPLAN),
    ),
    (AlarmRow.device, (AlarmRow.received_at_us, AlarmRow.boot, AlarmRow.number), _BEGAN_A_REPLAN),
    (ReplanRow.device, (ReplanRow.replan,), ReplanRow.outcome == PENDING),
    (TrialRow.device, (*TRIAL_AGE, TrialRow.boot, TrialRow.sequence), false()),
    (RegimeRow.device, (RegimeRow.at_us, RegimeRow.boot, RegimeRow.sequence), false()),
    (EventRow.device, (EventRow.id,), false()),
)


_TELL_OF_WINNERS: Final = (GenerationRow, ReplanRow, TrialRow)
"""What alone tells that a winner was rolled back, and in which environment."""


def _history_steps(store: Store, devices: Sequence[DeviceId], keep: int, chunk: int) -> Iterator[_Step]:
    """Transactions that leave each device its newest `keep` rows of each history; 0 keeps all.

    Each treats at most `chunk` rows and says how many; it is to be run again while it treats that many.

    Raises:
        StorageError: the database cannot be read.
    """
    if not keep:
        return
    looked_at: set[str] = set()
    for history in _HISTORIES:
        of_device = history[0]
        counted = (
            select(of_device).where(of_device.in_(devices)).group_by(of_device).having(func.count() > keep)
        )
        with store.database.read() as session:
            over = list(session.scalars(counted))
        for device in over:
            if of_device.class_ in _TELL_OF_WINNERS and device not in looked_at:
                looked_at.add(device)
                yield _winners_step(DeviceId(device), chunk)
            yield _step(history, DeviceId(device), keep, chunk)


def _winners_step(device: DeviceId, chunk: int) -> _Step:
    return lambda session: delete_rolled_back(session, device, chunk)


def _step(history: _History, device: DeviceId, keep: int, chunk: int) -> _Step:
    return lambda session: _delete_oldest(session, history, device, keep, chunk)


def _delete_oldest(session: Session, history: _History, device: DeviceId, keep: int, chunk: int) -> int:
    of_device, order, stays = history
    newest_first = [column.desc() for column in order]
    border = session.execute(
        select(*order).where(of_device == device).order_by(*newest_first).offset(keep - 1).limit(1)
    ).first()
    if border is None:
        return 0
    older = (
        select(*order)
        .where(of_device == device, tuple_(*order) < tuple_(*border), not_(stays))
        .order_by(*order)
        .limit(chunk)
    )
    result: Any = session.execute(
        delete(of_device.class_)
        .where(of_device == device, tuple_(*order).in_(older))
        .execution_options(synchronize_session=False)
    )
    return int(result.rowcount)

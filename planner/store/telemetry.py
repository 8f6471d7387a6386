"""Telemetry rows in, figures out, over their whole age: hours, then minutes, then rows."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import fields
from typing import Any, Final, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from stageloom.planner.dispatch.ports import StoredRow, TelemetryWrite
from stageloom.planner.store.database import now_us
from stageloom.planner.store.desired import settled_desired
from stageloom.planner.store.devices import note_heard
from stageloom.planner.store.events import MEASUREMENT_REFUSED, count_unreadable, note_refusal
from stageloom.planner.store.generations import ENDS, set_states
from stageloom.planner.store.machines import store_executor_time, store_machine
from stageloom.planner.store.parts import store_part_times
from stageloom.planner.store.profiles import store_profile, store_stage_profile, tell_requests
from stageloom.planner.store.rows import (
    insert_rows,
    known_device,
    read_row,
    readable,
    run_on_rows,
    saturated,
    sum_of,
)
from stageloom.planner.store.tables import EventRow, LedgerRow, RollupRow, TelemetryRow
from stageloom.planner.store.trials import store_trial_row
from stageloom.planner.store.trusted_time import NEWEST_US, present_us
from stageloom.planner.telemetry import (
    Balance,
    SpanData,
    TelemetryAccount,
    TelemetryEntry,
    decode_data,
)
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.base import MOST
from stageloom.shared.messages.control import Desired
from stageloom.shared.messages.telemetry import (
    ExecutorTime,
    MachineFacts,
    PartProfileResult,
    PlanActivated,
    ProfileResult,
    Row,
    RowData,
    RowKind,
    StageProfileResult,
    StateChange,
    StepTimings,
    TrialEnded,
)

_BOOK: Final = tuple(field.name for field in fields(TelemetryAccount))

_LEDGERS: Final = LedgerRow.__tablename__

_LEDGER_COLUMNS: Final = ("device", "boot", "version", *_BOOK)

_UPDATE_BOOK: Final = (
    f"ON CONFLICT (device, boot) DO UPDATE SET version = {_LEDGERS}.version + 1, "
    + ", ".join(f"{name} = excluded.{name}" for name in _BOOK)
)

_BOOKS: Final = f"""
WITH given (whose, life) AS (VALUES {{rows}})
SELECT book.device, book.boot, {", ".join(f"book.{name}" for name in _BOOK)}
FROM given JOIN {_LEDGERS} AS book ON book.device = whose AND book.boot = life ORDER BY book.device, book.boot
"""

_OLDEST_US: Final = 400 * 86_400_000_000

_PAGE: Final = 5_000

_HEARD_US: Final = 10_000_000  # so much older than its newest telemetry may be what is known of a device


def append_telemetry(
    session: Session, writes: Sequence[TelemetryWrite]
) -> tuple[list[tuple[DeviceId, StoredRow]], list[tuple[DeviceId, Desired]]]:
    """Store the rows that are new and the ledgers; see `stageloom.planner.telemetry`.

    Returns those rows, and what is desired of devices that are asked for more measurements as they have
    answered.

    Many devices send few rows each, so a commit takes a few statements for all of them, not a few for each.
    It also notes when they were heard of: a planner that is killed has no other moment to do so.
    """
    at_us = now_us(session)
    note_heard(session, {write.device for write in writes}, after_us=_HEARD_US)
    new = _settle(session, writes, at_us)
    if new:
        filed_us = present_us(session)
        insert_rows(
            session.connection(),
            TelemetryRow.__tablename__,
            ("device", "boot", "sequence", "kind", "at_us", "body"),
            [
                (device, row.boot, row.sequence, row.kind.value, _filed_us(row.at_us, filed_us), row.body)
                for device, row in new
            ],
        )
    count_unreadable(
        session,
        ((device, "telemetry row", row.reason) for device, row in new if row.kind is RowKind.UNREADABLE),
    )
    answering = {device for device, row in new if _ends_request(row)}
    before = {device: settled_desired(session, device) for device in sorted(answering)}
    refused: dict[DeviceId, str] = {}
    for device, row in new:
        if isinstance(row.data, ProfileResult):
            why = store_profile(session, device, row.data)
            refused |= {device: why} if why else {}
        elif isinstance(row.data, StageProfileResult):
            why = store_stage_profile(session, device, row.data)
            refused |= {device: why} if why else {}
        elif isinstance(row.data, ExecutorTime):
            why = store_executor_time(session, device, row.data)
            refused |= {device: why} if why else {}
        elif isinstance(row.data, PartProfileResult):
            why = store_part_times(session, device, row.data)
            refused |= {device: why} if why else {}
        elif isinstance(row.data, MachineFacts):
            store_machine(session, device, row.data)
        elif isinstance(row.data, TrialEnded | PlanActivated):
            store_trial_row(session, device, row)
        elif isinstance(row.data, StateChange) and row.data.state in ENDS:
            # The device reports only its newest generation: an older one's end is known only from here.
            change = row.data
            end = (device, change.epoch, change.generation, change.state, change.reason, row.at_us)
            set_states(session, [end])
    for device, why in refused.items():
        note_refusal(session, device, MEASUREMENT_REFUSED, why)
    return new, [
        (device, told) for device, known in before.items() if (told := _told(session, device, known))
    ]


def _ends_request(row: StoredRow) -> bool:
    return isinstance(row.data, ProfileResult | StageProfileResult) and row.data.last


def _told(session: Session, device: DeviceId, before: Desired | None) -> Desired | None:
    try:
        return tell_requests(session, device, before) if before is not None else None
    except InputError:
        return None  # it is revoked; what it measured stays


def _settle(
    session: Session, writes: Sequence[TelemetryWrite], at_us: int
) -> list[tuple[DeviceId, StoredRow]]:
    """Enter writes into the books of their boots; returns the rows that are not stored yet, each once."""
    kept = _books(session, writes)
    books = {of: TelemetryAccount(*values) for of, values in kept.items()}
    new: list[tuple[DeviceId, StoredRow]] = []
    for write in writes:
        by_boot: dict[int, dict[int, StoredRow]] = {ledger.boot: {} for ledger in write.ledgers}
        for row in write.rows:
            by_boot.setdefault(row.boot, {})[row.sequence] = row
        for boot, rows in by_boot.items():
            before = books.get((write.device, boot), TelemetryAccount())
            after, sequences = before.take(rows, (one for one in write.ledgers if one.boot == boot))
            books[write.device, boot] = after
            new += [(write.device, rows[sequence]) for sequence in sorted(sequences)]
            if after.lost > before.lost:
                session.add(_loss(write.device, boot, after.lost - before.lost, at_us))
    connection = session.connection()
    known = [_ledger(of, books[of]) for of in kept]
    insert_rows(connection, _LEDGERS, _LEDGER_COLUMNS, known, conflict=_UPDATE_BOOK)
    # Without the clause: books that another planner has opened since must not be written over.
    opened = [_ledger(of, book) for of, book in books.items() if of not in kept]
    insert_rows(connection, _LEDGERS, _LEDGER_COLUMNS, opened)
    return new


def _books(session: Session, writes: Sequence[TelemetryWrite]) -> dict[tuple[DeviceId, int], tuple[int, ...]]:
    """The books that these writes touch and that exist, by device and boot."""
    opened = {(write.device, ledger.boot) for write in writes for ledger in write.ledgers}
    opened |= {(write.device, row.boot) for write in writes for row in write.rows}
    connection = session.connection()
    # On a server another planner may write the same books; SQLite has one writer, and no such clause.
    lock = "" if connection.dialect.name == "sqlite" else "FOR UPDATE OF book"
    found = run_on_rows(connection, _BOOKS + lock, sorted(opened))
    return {(DeviceId(device), boot): tuple(values) for device, boot, *values in found}


def _ledger(of: tuple[DeviceId, int], book: TelemetryAccount) -> tuple[Any, ...]:
    return (*of, 1, *(getattr(book, name) for name in _BOOK))


def _loss(device: DeviceId, boot: int, rows: int, at_us: int) -> EventRow:
    return EventRow(
        at_us=at_us,
        device=device,
        code="telemetry_lost",
        text=f"{rows} telemetry rows of boot {boot:016x} were acknowledged and are not in this database: "
        "it was restored from an older copy",
    )


def _filed_us(at_us: int, present_us: int) -> int:
    """The time that a row is kept under: the device's, or now if that device's clock cannot be right.

    Rows go by this time. Without this a device with a clock in the future would fill the disk, and one
    without a battery, in 1970, would see its rows go at once.
    """
    return at_us if is_believed(at_us, present_us) else present_us


def is_believed(at_us: int, present_us: int) -> bool:
    """Whether a moment by a device's clock can be right."""
    return present_us - _OLDEST_US <= at_us <= present_us + NEWEST_US


def telemetry_balance(session: Session, device: DeviceId | None = None) -> Balance:
    """The books over all boots of one device or of all devices; each sum ends at the wire's largest count."""
    columns = (LedgerRow.produced, LedgerRow.stored, LedgerRow.dropped, LedgerRow.lost)
    wanted = select(*(sum_of(column) for column in columns))
    if device is not None:
        wanted = wanted.where(LedgerRow.device == device)
    return Balance(*(saturated(total) for total in session.execute(wanted).one()))


def telemetry_rows(
    session: Session, device: DeviceId, kinds: Sequence[RowKind], *, since_us: int = 0, limit: int = 10_000
) -> list[Row]:
    """Rows of some kinds filed from `since_us` on, oldest first, at most the newest `limit`.

    Rows that this version cannot read are left out.
    """
    return _readable_between(session, device, kinds, since_us, MOST, limit=limit)[0]


def step_times(session: Session, device: DeviceId) -> dict[tuple[Digest, int], float]:
    """Microseconds of whole steps by plan and combined block, as stage profiles found them last in what is
    now the device's class. Those of agents that told no environment count for any.

    Raises:
        InputError: there is no such device.
    """
    there = known_device(session, device).device_class
    told = [row.data for row in telemetry_rows(session, device, [RowKind.STAGE_PROFILE_RESULT])]
    return {
        (data.plan, data.combined_block): data.step_us
        for data in told
        if isinstance(data, StageProfileResult) and data.step_us > 0.0 and data.environment in ("", there)
    }


def filed_rows(
    session: Session, device: DeviceId, kinds: Sequence[RowKind], *, since_us: int = 0, limit: int = 10_000
) -> list[tuple[int, Row]]:
    """As `telemetry_rows`, each with the moment that it is filed under.

    That is the row's own, by its device's clock, unless that clock cannot be right.
    """
    found = [
        (one.at_us, read_row(one.body))
        for one in newest_rows(session, device, kinds, since_us=since_us, limit=limit)
    ]
    return [(filed_us, row) for filed_us, row in reversed(found) if isinstance(row, Row)]


def _readable_between(
    session: Session,
    device: DeviceId,
    kinds: Sequence[RowKind],
    since_us: int,
    until_us: int,
    *,
    limit: int = 10_000,
) -> tuple[list[Row], str]:
    rows = list(newest_rows(session, device, kinds, since_us=since_us, until_us=until_us, limit=limit))
    return readable(row.body for row in reversed(rows))


def newest_telemetry(
    session: Session, device: DeviceId, kinds: Sequence[RowKind], window_us: int
) -> tuple[list[Row], str]:
    """Rows of the last `window_us` before the device's newest row of these kinds, oldest first.

    Also returns why rows among them cannot be read; empty where all can. The window is measured by the
    device's clock, which need not agree with this machine's. Rows that were filed in the future, while this
    machine's clock was wrong, are none of the newest.
    """
    until_us = present_us(session) + NEWEST_US
    newest = [
        session.scalar(
            select(func.max(TelemetryRow.at_us)).where(
                TelemetryRow.device == device,
                TelemetryRow.kind == kind.value,
                TelemetryRow.at_us <= until_us,
            )
        )
        for kind in kinds
    ]
    newest_us = max((at_us for at_us in newest if at_us is not None), default=0)
    return _readable_between(session, device, kinds, newest_us - window_us + 1, newest_us)


def oldest_step_timings(
    session: Session, device: DeviceId, *, since_us: int, limit: int
) -> list[StepTimings]:
    """Steps filed from `since_us` on, oldest first, the oldest `limit` of rows and spans that begin then."""
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


class FiledRow(NamedTuple):
    """A row under the moment that it is kept under, with its number in its boot."""

    at_us: int
    sequence: int
    kind: RowKind
    body: bytes


def newest_rows(
    session: Session,
    device: DeviceId,
    kinds: Sequence[RowKind],
    *,
    since_us: int,
    until_us: int = MOST,
    limit: int | None = None,
) -> Iterator[FiledRow]:
    """Rows, newest first."""
    found = session.execute(
        select(TelemetryRow.at_us, TelemetryRow.sequence, TelemetryRow.kind, TelemetryRow.body)
        .where(
            TelemetryRow.device == device,
            TelemetryRow.kind.in_([kind.value for kind in kinds]),
            TelemetryRow.at_us.between(since_us, until_us),
        )
        .order_by(TelemetryRow.at_us.desc(), TelemetryRow.sequence.desc())
        .limit(limit)
        .execution_options(yield_per=_PAGE)
    )
    with closing(found):
        for at_us, sequence, kind, body in found:
            yield FiledRow(at_us, sequence, RowKind(kind), body)


SPAN_COLUMNS: Final = (
    *(RollupRow.begin_us, RollupRow.width_s, RollupRow.kind),
    *(RollupRow.rows, RollupRow.body, RollupRow.subject),
)


def span_from(begin_us: int, width_s: int, kind: str, rows: int, body: bytes, subject: str) -> TelemetryEntry:
    """A span from the columns of `SPAN_COLUMNS`."""
    return TelemetryEntry(begin_us, width_s, RowKind(kind), rows, decode_data(body), subject)

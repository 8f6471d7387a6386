"""Telemetry rows in, figures out. A row is stored as the device sent it, once."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from stageloom.planner.dispatch.ports import StoredRow, TelemetryWrite
from stageloom.planner.store import refusals, unreadable
from stageloom.planner.store.costs import store_profile
from stageloom.planner.store.devices import heard, set_state
from stageloom.planner.store.manyrows import insert_rows, run_on_rows
from stageloom.planner.store.replans import take_in
from stageloom.planner.store.saturating import saturated, sum_of
from stageloom.planner.store.showing import readable
from stageloom.planner.store.stages import store_stages
from stageloom.planner.store.tables import EventRow, LedgerRow, TelemetryRow
from stageloom.planner.telemetry.books import Balance, Book
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import DeviceState
from stageloom.shared.messages.telemetry import (
    PlanActivated,
    ProfileResult,
    Row,
    RowKind,
    StageProfileResult,
    StateChange,
    TrialEnded,
)

_FINAL = (DeviceState.COMMITTED, DeviceState.REJECTED, DeviceState.NO_GAIN, DeviceState.ROLLED_BACK)
_BOOK: Final = tuple(field.name for field in fields(Book))
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
_NEWEST_US: Final = 86_400_000_000
_HEARD_US: Final = 10_000_000  # so much older than its newest telemetry may be what is known of a device


def append(session: Session, writes: Sequence[TelemetryWrite], now_us: int) -> None:
    """Store the rows that are new, and the ledgers; see `stageloom.planner.telemetry.books`.

    Many devices send few rows each, so a commit takes a few statements for all of them, not a few for each.
    It also notes when they were heard of: a planner that is killed has no other moment to do so.
    """
    heard(session, {write.device for write in writes}, now_us, after_us=_HEARD_US)
    new = _settle(session, writes, now_us)
    if new:
        insert_rows(
            session.connection(),
            TelemetryRow.__tablename__,
            ("device", "boot", "sequence", "kind", "at_us", "body"),
            [
                (device, row.boot, row.sequence, row.kind.value, _filed_us(row.at_us, now_us), row.body)
                for device, row in new
            ],
        )
    unreadable.note(
        session,
        (
            unreadable.Unreadable(device, "telemetry row", row.reason)
            for device, row in new
            if row.kind is RowKind.UNREADABLE
        ),
        now_us,
    )
    refused: dict[DeviceId, str] = {}
    for device, row in new:
        if isinstance(row.data, ProfileResult):
            why = store_profile(session, device, row.data, now_us)
            refused |= {device: why} if why else {}
        elif isinstance(row.data, StageProfileResult):
            why = store_stages(session, device, row.data, now_us)
            refused |= {device: why} if why else {}
        elif isinstance(row.data, TrialEnded | PlanActivated):
            take_in(session, device, row)
        elif isinstance(row.data, StateChange) and row.data.state in _FINAL:
            # The device reports only its newest generation: an older one's end is known only from here.
            change = row.data
            set_state(
                session, device, change.epoch, change.generation, change.state, change.reason, row.at_us
            )
    for device, why in refused.items():
        refusals.note(session, device, refusals.MEASUREMENT_REFUSED, why, now_us)


def _settle(
    session: Session, writes: Sequence[TelemetryWrite], now_us: int
) -> list[tuple[DeviceId, StoredRow]]:
    """Enter writes into the books of their boots; returns the rows that are not stored yet, each once."""
    kept = _books(session, writes)
    books = {of: Book(*values) for of, values in kept.items()}
    new: list[tuple[DeviceId, StoredRow]] = []
    for write in writes:
        by_boot: dict[int, dict[int, StoredRow]] = {ledger.boot: {} for ledger in write.ledgers}
        for row in write.rows:
            by_boot.setdefault(row.boot, {})[row.sequence] = row
        for boot, rows in by_boot.items():
            before = books.get((write.device, boot), Book())
            after, sequences = before.take(rows, (one for one in write.ledgers if one.boot == boot))
            books[write.device, boot] = after
            new += [(write.device, rows[sequence]) for sequence in sorted(sequences)]
            if after.lost > before.lost:
                session.add(_loss(write.device, boot, after.lost - before.lost, now_us))
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


def _ledger(of: tuple[DeviceId, int], book: Book) -> tuple[Any, ...]:
    return (*of, 1, *(getattr(book, name) for name in _BOOK))


def _loss(device: DeviceId, boot: int, rows: int, now_us: int) -> EventRow:
    return EventRow(
        at_us=now_us,
        device=device,
        code="telemetry_lost",
        text=f"{rows} telemetry rows of boot {boot:016x} were acknowledged and are not in this database: "
        "it was restored from an older copy",
    )


def _filed_us(at_us: int, now_us: int) -> int:
    """The time that a row is kept under: the device's, or now if that device's clock cannot be right.

    Rows go by this time. Without this a device with a clock in the future would fill the disk, and one
    without a battery, in 1970, would see its rows go at once.
    """
    return at_us if now_us - _OLDEST_US <= at_us <= now_us + _NEWEST_US else now_us


def balance(session: Session, device: DeviceId | None = None) -> Balance:
    """The books over all boots of one device or of all devices; each sum ends at the wire's largest count."""
    columns = (LedgerRow.produced, LedgerRow.stored, LedgerRow.dropped, LedgerRow.lost)
    wanted = select(*(sum_of(column) for column in columns))
    if device is not None:
        wanted = wanted.where(LedgerRow.device == device)
    return Balance(*(saturated(total) for total in session.execute(wanted).one()))


def rows_since(
    session: Session,
    device: DeviceId,
    kinds: Sequence[RowKind],
    *,
    since_us: int = 0,
    limit: int = 10_000,
) -> tuple[list[Row], str]:
    """Rows of some kinds from `since_us` on, oldest first, at most the newest `limit`; and what of them
    cannot be read (`stageloom.planner.store.showing.readable`)."""
    found = session.execute(
        select(TelemetryRow.body)
        .where(
            TelemetryRow.device == device,
            TelemetryRow.kind.in_([kind.value for kind in kinds]),
            TelemetryRow.at_us >= since_us,
        )
        .order_by(TelemetryRow.at_us.desc(), TelemetryRow.sequence.desc())
        .limit(limit)
    )
    return readable(body for (body,) in reversed(found.all()))


def newest_rows(
    session: Session, device: DeviceId, kinds: Sequence[RowKind], window_us: int
) -> tuple[list[Row], str]:
    """`rows_since` for the last `window_us` before the device's newest row of these kinds.

    Measured by the device's own clock, which need not agree with this machine's.
    """
    newest = [
        session.scalar(
            select(func.max(TelemetryRow.at_us)).where(
                TelemetryRow.device == device, TelemetryRow.kind == kind.value
            )
        )
        for kind in kinds
    ]
    newest_us = max((at_us for at_us in newest if at_us is not None), default=0)
    return rows_since(session, device, kinds, since_us=newest_us - window_us + 1)

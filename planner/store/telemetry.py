"""Telemetry rows in, figures out. A row is stored as the device sent it, once."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.orm import Session

from planner.dispatch.ports import StoredRow, TelemetryWrite
from planner.store.costs import store_profile
from planner.store.devices import set_state
from planner.store.replans import take_in
from planner.store.stages import store_stages
from planner.store.tables import EventRow, LedgerRow, TelemetryRow
from shared.ids import DeviceId
from shared.messages.control import DeviceState
from shared.messages.telemetry import (
    Ledger,
    PlanActivated,
    ProfileResult,
    Row,
    RowKind,
    StageProfileResult,
    StateChange,
    TrialEnded,
    decode_row,
)

_FINAL = (DeviceState.COMMITTED, DeviceState.REJECTED, DeviceState.NO_GAIN, DeviceState.ROLLED_BACK)


def append(session: Session, write: TelemetryWrite, now_us: int) -> None:
    """Store rows and ledgers. A row that is stored already is skipped; of a ledger the larger counts win."""
    ledgers = _ledgers(session, write.device, {row.boot for row in write.rows}, write.ledgers)
    by_boot: dict[int, list[StoredRow]] = {}
    for row in write.rows:
        by_boot.setdefault(row.boot, []).append(row)
    for boot, rows in by_boot.items():
        ledgers[boot].stored += _insert(session, write.device, rows)
    for row in write.rows:
        if isinstance(row.data, ProfileResult):
            store_profile(session, write.device, row.data, row.at_us, now_us)
        elif isinstance(row.data, StageProfileResult):
            store_stages(session, write.device, row.data, row.at_us, now_us)
        elif isinstance(row.data, TrialEnded | PlanActivated):
            take_in(session, write.device, row)
        elif isinstance(row.data, StateChange) and row.data.state in _FINAL:
            # The device reports only its newest generation: an older one's end is known only from here.
            change = row.data
            set_state(
                session,
                write.device,
                change.epoch,
                change.generation,
                change.state,
                change.reason,
                row.at_us,
            )


def _insert(session: Session, device: DeviceId, rows: Sequence[StoredRow]) -> int:
    """Insert the rows that are not there yet and return their number."""
    values: list[dict[str, Any]] = [
        {
            "device": device,
            "boot": row.boot,
            "sequence": row.sequence,
            "kind": row.kind.value,
            "at_us": row.at_us,
            "body": row.body,
        }
        for row in rows
    ]
    connection = session.connection()
    if connection.dialect.name == "sqlite":
        return connection.execute(sqlite_insert(TelemetryRow).on_conflict_do_nothing(), values).rowcount
    # Postgres gives no count for many rows at once, but the rows that it inserted.
    inserted = insert(TelemetryRow).on_conflict_do_nothing().returning(TelemetryRow.sequence)
    return len(connection.execute(inserted, values).all())


def _ledgers(
    session: Session, device: DeviceId, boots: set[int], said: Sequence[Ledger]
) -> dict[int, LedgerRow]:
    """The books of all boots that a write touches, with what the device says in them."""
    wanted = boots | {ledger.boot for ledger in said}
    rows = {
        row.boot: row
        for row in session.scalars(
            select(LedgerRow).where(LedgerRow.device == device, LedgerRow.boot.in_(wanted))
        )
    }
    for boot in wanted - rows.keys():
        rows[boot] = LedgerRow(device=device, boot=boot, produced=0, dropped=0, stored=0)
        session.add(rows[boot])
    for ledger in said:
        row = rows[ledger.boot]
        row.produced = max(row.produced, ledger.produced)
        row.dropped = max(row.dropped, ledger.dropped)
    return rows


def balance(session: Session, device: DeviceId | None = None) -> tuple[int, int, int]:
    """(produced, stored, dropped) rows, over all boots of one device or of all devices."""
    wanted = select(
        func.coalesce(func.sum(LedgerRow.produced), 0),
        func.coalesce(func.sum(LedgerRow.stored), 0),
        func.coalesce(func.sum(LedgerRow.dropped), 0),
    )
    if device is not None:
        wanted = wanted.where(LedgerRow.device == device)
    produced, stored, dropped = session.execute(wanted).one()
    return int(produced), int(stored), int(dropped)


def rows_since(
    session: Session,
    device: DeviceId,
    kinds: Sequence[RowKind],
    *,
    since_us: int = 0,
    limit: int = 10_000,
) -> list[Row]:
    """Rows of some kinds from `since_us` on, oldest first, at most the newest `limit`."""
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
    return [decode_row(body) for (body,) in reversed(found.all())]


def newest_rows(session: Session, device: DeviceId, kinds: Sequence[RowKind], window_us: int) -> list[Row]:
    """Rows of the last `window_us` before the device's newest row of these kinds, oldest first.

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


def prune(session: Session, before_us: int) -> int:
    """Delete rows measured before `before_us`, and events; the ledgers go on counting rows as stored."""
    session.execute(delete(EventRow).where(EventRow.at_us < before_us))
    # `session.execute` of a delete returns a CursorResult, which its annotation does not say.
    result: Any = session.execute(delete(TelemetryRow).where(TelemetryRow.at_us < before_us))
    return int(result.rowcount)

"""What devices sent and the database would not take: how much of it, and why; a row per device and kind."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from stageloom.planner.store.manyrows import insert_rows
from stageloom.planner.store.saturating import saturated, sum_of
from stageloom.planner.store.tables import UnreadableRow
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.base import MOST
from stageloom.shared.text import bounded

_TABLE: Final = UnreadableRow.__tablename__
_ADD: Final = (
    "ON CONFLICT (device, kind) DO UPDATE SET reason = excluded.reason, at_us = excluded.at_us, "
    f"number = CASE WHEN {_TABLE}.number > {MOST} - excluded.number THEN {MOST} "
    f"ELSE {_TABLE}.number + excluded.number END"
)


class Unreadable(NamedTuple):
    """A record that could not be stored as it was sent; `kind` is what it was: `alarm`, `report`..."""

    device: DeviceId
    kind: str
    reason: str


def note(session: Session, records: Iterable[Unreadable], now_us: int) -> None:
    """Count records; of each device and kind the last one's reason is kept."""
    numbers: dict[tuple[DeviceId, str], tuple[int, str]] = {}
    for record in records:
        before, _ = numbers.get(record[:2], (0, ""))
        numbers[record[:2]] = before + 1, bounded(record.reason)
    rows = [(*of, number, reason, now_us) for of, (number, reason) in sorted(numbers.items())]
    columns = ("device", "kind", "number", "reason", "at_us")
    insert_rows(session.connection(), _TABLE, columns, rows, conflict=_ADD)


def of_devices(session: Session, first: str, last: str) -> dict[str, tuple[int, str]]:
    """Per device from `first` to `last` that has any: (number of records, why the newest of them)."""
    found: dict[str, tuple[int, str]] = {}
    wanted = (
        select(UnreadableRow).where(UnreadableRow.device.between(first, last)).order_by(UnreadableRow.at_us)
    )
    for row in session.scalars(wanted):
        before, _ = found.get(row.device, (0, ""))
        found[row.device] = min(before + row.number, MOST), f"{row.kind}: {row.reason}"[:512]
    return found


def number(session: Session) -> int:
    """Records of all devices."""
    return saturated(session.scalar(select(sum_of(UnreadableRow.number))))

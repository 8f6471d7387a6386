"""Events that operators see: what a device may not do, what the database could not store, and notices.

A device that repeats itself a thousand times a second leaves one event an hour, and one line in the log.
"""

import logging
from collections.abc import Iterable
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from stageloom.planner.store.database import now_us
from stageloom.planner.store.rows import add_event, insert_rows, saturated, sum_of
from stageloom.planner.store.tables import EventRow, UnreadableRow
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.base import MOST
from stageloom.shared.text import bounded

logger = logging.getLogger(__name__)

LOCAL_PLAN_REFUSED: Final = "local_plan_refused"
MEASUREMENT_REFUSED: Final = "measurement_refused"
AGAIN_US: Final = 3_600_000_000
_SHOWN_US: Final = 86_400_000_000
_SHOWN: Final = 8
_UNREADABLE: Final = UnreadableRow.__tablename__
_ADD_UNREADABLE: Final = (
    "ON CONFLICT (device, kind) DO UPDATE SET reason = excluded.reason, at_us = excluded.at_us, "
    f"number = CASE WHEN {_UNREADABLE}.number > {MOST} - excluded.number THEN {MOST} "
    f"ELSE {_UNREADABLE}.number + excluded.number END"
)


def newest_events(session: Session, *, limit: int = 100) -> list[tuple[int, str, str, str]]:
    """The newest events, newest first: (at_us, device or "", code, text)."""
    rows = session.scalars(select(EventRow).order_by(EventRow.id.desc()).limit(limit))
    return [(row.at_us, row.device or "", row.code, row.text) for row in rows]


def note_refusal(session: Session, device: DeviceId, code: str, reason: str) -> None:
    """Keep an event that something of a device was refused, once per device and code in `AGAIN_US`."""
    at_us = now_us(session)
    noted = (
        select(EventRow.id)
        .where(
            EventRow.at_us.between(at_us - AGAIN_US, at_us), EventRow.device == device, EventRow.code == code
        )
        .limit(1)
    )
    if session.scalar(noted) is None:
        add_event(session, device, code, reason)
        session.flush()
        logger.warning("device %s: %s: %s", device, code, reason)


def recent_refusals(session: Session) -> list[str]:
    """What was refused within the last day, newest first, a line each."""
    at_us = now_us(session)
    rows = session.execute(
        select(EventRow.device, EventRow.code, EventRow.text)
        .where(
            EventRow.at_us.between(at_us - _SHOWN_US, at_us),
            EventRow.code.in_([LOCAL_PLAN_REFUSED, MEASUREMENT_REFUSED]),
        )
        .order_by(EventRow.id.desc())
        .limit(_SHOWN)
    )
    return [f"device {device}: {code}: {text}" for device, code, text in rows]


def count_unreadable(session: Session, records: Iterable[tuple[DeviceId, str, str]]) -> None:
    """Count records that the database did not take: (device, kind such as `alarm`, reason).

    Each device and kind has one row, which keeps the last reason.
    """
    numbers: dict[tuple[DeviceId, str], tuple[int, str]] = {}
    for device, kind, reason in records:
        before, _ = numbers.get((device, kind), (0, ""))
        numbers[device, kind] = before + 1, bounded(reason)
    rows = [(*key, number, reason, now_us(session)) for key, (number, reason) in sorted(numbers.items())]
    columns = ("device", "kind", "number", "reason", "at_us")
    insert_rows(session.connection(), _UNREADABLE, columns, rows, conflict=_ADD_UNREADABLE)


def unreadable_by_device(session: Session, first: str, last: str) -> dict[str, tuple[int, str]]:
    """Per device from `first` to `last` that has any: (number of records, reason of the newest)."""
    result: dict[str, tuple[int, str]] = {}
    wanted = (
        select(UnreadableRow).where(UnreadableRow.device.between(first, last)).order_by(UnreadableRow.at_us)
    )
    for row in session.scalars(wanted):
        before, _ = result.get(row.device, (0, ""))
        result[row.device] = min(before + row.number, MOST), f"{row.kind}: {row.reason}"[:512]
    return result


def unreadable_records(session: Session) -> int:
    """How many records of all devices the database did not take."""
    return saturated(session.scalar(select(sum_of(UnreadableRow.number))))

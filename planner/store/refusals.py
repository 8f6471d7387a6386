"""What devices said and may not say: an event a person sees, once per device and kind in `AGAIN_US`.

A device that repeats itself a thousand times a second leaves one event in an hour, and one line in the log.
"""

import logging
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from stageloom.planner.store.devices import add_event
from stageloom.planner.store.tables import EventRow
from stageloom.shared.ids import DeviceId

logger = logging.getLogger(__name__)

LOCAL_PLAN_REFUSED: Final = "local_plan_refused"
MEASUREMENT_REFUSED: Final = "measurement_refused"
AGAIN_US: Final = 3_600_000_000
_SHOWN_US: Final = 86_400_000_000
_SHOWN: Final = 8


def note(session: Session, device: DeviceId, code: str, reason: str, now_us: int) -> None:
    """Keep that something of a device was refused, unless that was noted within the last hour."""
    noted = (
        select(EventRow.id)
        .where(
            EventRow.at_us.between(now_us - AGAIN_US, now_us),
            EventRow.device == device,
            EventRow.code == code,
        )
        .limit(1)
    )
    if session.scalar(noted) is None:
        add_event(session, now_us, device, code, reason)
        session.flush()
        logger.warning("device %s: %s: %s", device, code, reason)


def recent(session: Session, now_us: int) -> list[str]:
    """What was refused within the last day, the newest first, a line each."""
    rows = session.execute(
        select(EventRow.device, EventRow.code, EventRow.text)
        .where(
            EventRow.at_us.between(now_us - _SHOWN_US, now_us),
            EventRow.code.in_([LOCAL_PLAN_REFUSED, MEASUREMENT_REFUSED]),
        )
        .order_by(EventRow.id.desc())
        .limit(_SHOWN)
    )
    return [f"device {device}: {code}: {text}" for device, code, text in rows]

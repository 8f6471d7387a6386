"""What an older version stored outside the wire's range, brought back into it when the planner starts.

Version 0.1.0 let one device's `hello` raise the epoch above what a message holds. From then on no `welcome`
could be read, and every generation pushed to any device carried that epoch. The device that did it is
quarantined; the others find themselves in an epoch above every one that is within reach.
"""

from typing import Final

from sqlalchemy import ColumnElement, delete, func, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from stageloom.planner.counters import CEILING
from stageloom.planner.store.devices import add_event, planner_row, quarantine
from stageloom.planner.store.tables import DesiredRow, GenerationRow, PlannerRow, ReplanRow, ReportedRow
from stageloom.shared.ids import DeviceId

_TOO_FAR: Final = or_(
    ReportedRow.epoch > CEILING,
    ReportedRow.generation > CEILING,
    ReportedRow.revision > CEILING,
    ReportedRow.local_counter > CEILING,
)


def mend(session: Session, now_us: int) -> None:
    """Make this database's own row at first use, and mend what is out of range; usually nothing is."""
    planner = planner_row(session, now_us)
    for device in _beyond(session):
        reason = f"an older version stored counters of it beyond {CEILING}"
        quarantine(session, device, reason, now_us)
        session.execute(delete(ReportedRow).where(ReportedRow.device == device, _TOO_FAR))
    if planner.epoch > CEILING:
        _lower_epoch(session, planner, now_us)
    _lower_generations(session)


def _beyond(session: Session) -> list[DeviceId]:
    """Devices that have counted too far, or have made the planner do so."""
    told = select(ReportedRow.device).where(_TOO_FAR)
    asked = select(DesiredRow.device).where(DesiredRow.generation > CEILING)
    return sorted({DeviceId(name) for name in (*session.scalars(told), *session.scalars(asked))})


def _lower_epoch(session: Session, planner: PlannerRow, now_us: int) -> None:
    columns = (ReportedRow.epoch, DesiredRow.epoch, GenerationRow.epoch)
    epoch = 1 + max(_highest(session, column) for column in columns)
    text = f"epoch {planner.epoch} is out of range; this is epoch {epoch}"
    planner.epoch = epoch
    for row in (DesiredRow, GenerationRow, ReplanRow):
        session.execute(
            update(row).where(row.epoch > CEILING, row.generation <= CEILING).values(epoch=epoch),
            execution_options={"synchronize_session": False},
        )
    add_event(session, now_us, None, "epoch", text)


def _lower_generations(session: Session) -> None:
    """A device's desired generation goes back to the highest in its history that is in range."""
    for row in session.scalars(select(DesiredRow).where(DesiredRow.generation > CEILING)):
        row.generation = _highest(session, GenerationRow.generation, GenerationRow.device == row.device)
        row.epoch = min(row.epoch, planner_row(session, 0).epoch)


def _highest(session: Session, column: InstrumentedAttribute[int], *conditions: ColumnElement[bool]) -> int:
    return session.scalar(select(func.max(column)).where(column <= CEILING, *conditions)) or 0

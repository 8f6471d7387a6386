"""How much of a device's history stays: its newest generations, alarms, re-plans, trials and events.

What is current, what ran well last and what something else refers to stays whatever its age. Plans that
devices made themselves go once nothing refers to them; a plan that a person or a search made stays.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, and_, delete, exists, func, not_, or_, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from stageloom.planner.store.database import Database
from stageloom.planner.store.replans import PENDING
from stageloom.planner.store.tables import (
    AlarmRow,
    DesiredRow,
    EventRow,
    GenerationRow,
    PlanRow,
    PredictionRow,
    ReplanRow,
    ReportedRow,
    StageProfileRow,
    Table,
    TrialRow,
)
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import DeviceState

LOCAL: Final = "local"
"""The scheduler that plans are kept under which a device made."""

Column = InstrumentedAttribute[Any]


@dataclass(frozen=True, slots=True)
class _History:
    """A table of which each device keeps its newest rows, by `order`: age first, together a key."""

    table: type[Table]
    device: Column
    order: tuple[Column, ...]
    stays: ColumnElement[bool] | None = None  # rows that stay whatever their age


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

_HISTORIES: Final = (
    _History(
        GenerationRow,
        GenerationRow.device,
        (GenerationRow.position,),
        or_(_REPORTED, _DESIRED, _ACTIVE, _LAST_GOOD, _OF_A_REPLAN),
    ),
    _History(
        AlarmRow, AlarmRow.device, (AlarmRow.received_at_us, AlarmRow.boot, AlarmRow.number), _BEGAN_A_REPLAN
    ),
    _History(ReplanRow, ReplanRow.device, (ReplanRow.replan,), ReplanRow.outcome == PENDING),
    _History(TrialRow, TrialRow.device, (TrialRow.decided_us, TrialRow.boot, TrialRow.sequence)),
    _History(EventRow, EventRow.device, (EventRow.id,)),
)
_PLANS_IN_USE: Final = or_(
    exists().where(DesiredRow.plan == PlanRow.name),
    exists().where(GenerationRow.plan == PlanRow.name),
    exists().where(StageProfileRow.plan == PlanRow.name),
    exists().where(or_(ReportedRow.active == PlanRow.digest, ReportedRow.seen == PlanRow.digest)),
    exists().where(or_(TrialRow.candidate == PlanRow.digest, TrialRow.control == PlanRow.digest)),
    exists().where(ReplanRow.digest == PlanRow.digest),
    exists().where(PredictionRow.digest == PlanRow.digest),
)

Step = Callable[[Session], int]


def steps(database: Database, devices: Sequence[DeviceId], keep: int, chunk: int) -> Iterator[Step]:
    """Transactions that leave each device its newest `keep` rows of each history; 0 keeps all.

    Each treats at most `chunk` rows and says how many; it is to be run again while it treats that many.

    Raises:
        StorageError: the database cannot be read.
    """
    if not keep:
        return
    for history in _HISTORIES:
        counted = (
            select(history.device)
            .where(history.device.in_(devices))
            .group_by(history.device)
            .having(func.count() > keep)
        )
        with database.read() as session:
            over = list(session.scalars(counted))
        for device in over:
            yield _step(history, DeviceId(device), keep, chunk)


def _step(history: _History, device: DeviceId, keep: int, chunk: int) -> Step:
    return lambda session: _delete_oldest(session, history, device, keep, chunk)


def _delete_oldest(session: Session, history: _History, device: DeviceId, keep: int, chunk: int) -> int:
    newest_first = [column.desc() for column in history.order]
    border = session.execute(
        select(*history.order)
        .where(history.device == device)
        .order_by(*newest_first)
        .offset(keep - 1)
        .limit(1)
    ).first()
    if border is None:
        return 0
    older = (
        select(*history.order)
        .where(history.device == device, tuple_(*history.order) < tuple_(*border))
        .order_by(*history.order)
        .limit(chunk)
    )
    if history.stays is not None:
        older = older.where(not_(history.stays))
    # `session.execute` of a delete returns a CursorResult, which its annotation does not say.
    result: Any = session.execute(
        delete(history.table)
        .where(history.device == device, tuple_(*history.order).in_(older))
        .execution_options(synchronize_session=False)
    )
    return int(result.rowcount)


def delete_unused_plans(session: Session, before_us: int, chunk: int) -> int:
    """Delete up to `chunk` plans of devices, older than this, that nothing refers to; returns how many."""
    unused = (
        select(PlanRow.name)
        .where(PlanRow.scheduler == LOCAL, PlanRow.created_at_us < before_us, not_(_PLANS_IN_USE))
        .limit(chunk)
    )
    result: Any = session.execute(
        delete(PlanRow).where(PlanRow.name.in_(unused)).execution_options(synchronize_session=False)
    )
    return int(result.rowcount)

"""Plans that no person and no search made go once nothing refers to them.

To find them reads all of what refers to plans, so that is done in a transaction that only reads; the writer
gets their names. Each table that refers to plans is read once, whatever the number of plans: a question per
plan, asked of columns without an index, takes minutes with a hundred devices.
"""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from stageloom.planner.replan.policy import How
from stageloom.planner.store.desired import LOCAL
from stageloom.planner.store.tables import (
    DesiredRow,
    ExpectedRegimeRow,
    GenerationRow,
    PlanRow,
    PredictionRow,
    RegimeRow,
    ReplanRow,
    ReportedRow,
    RolloutDeviceRow,
    StageProfileRow,
    TrialRow,
)

_BY_NAME: Final[tuple[InstrumentedAttribute[Any], ...]] = (
    DesiredRow.plan,
    GenerationRow.plan,
    StageProfileRow.plan,
    RolloutDeviceRow.old_plan,
    RolloutDeviceRow.new_plan,
)

_BY_DIGEST: Final[tuple[InstrumentedAttribute[Any], ...]] = (
    ReportedRow.active,
    ReportedRow.seen,
    TrialRow.candidate,
    TrialRow.control,
    ReplanRow.digest,
    ReplanRow.control,
    RegimeRow.won,
    RegimeRow.replaced,
    ExpectedRegimeRow.plan,
    PredictionRow.digest,
)

_IN_USE: Final = (
    *(select(column) for column in _BY_NAME),
    *(select(PlanRow.name).join(column.class_, column == PlanRow.digest) for column in _BY_DIGEST),
)
"""Names of plans that something refers to."""

_MADE_AT_AN_ALARM: Final = (LOCAL, *(how.value for how in How if how is not How.SEARCH))
"""Schedulers of plans that no person and no search made: with other launch intervals each is another plan."""


def unused_plans(session: Session, before_us: int) -> list[str]:
    """Names of plans, older than this, that nobody asked for and nothing refers to."""
    return list(session.scalars(_unused(PlanRow.created_at_us < before_us)))


def delete_unused_plans(session: Session, names: Sequence[str]) -> int:
    """Delete those of these plans, found by `unused_plans`, that nothing refers to by now; how many."""
    result: Any = session.execute(
        delete(PlanRow)
        .where(PlanRow.name.in_(_unused(PlanRow.name.in_(names))))
        .execution_options(synchronize_session=False)
    )
    return int(result.rowcount)


def _unused(which: ColumnElement[bool]) -> Any:
    # EXCEPT, since both databases sort or hash it: Postgres asks NOT IN per plan where a hash gets too large.
    return select(PlanRow.name).where(PlanRow.scheduler.in_(_MADE_AT_AN_ALARM), which).except_(*_IN_USE)

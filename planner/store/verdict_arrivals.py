"""Under which arrivals a re-plan's trial was decided: those of its alarm, or newer ones; parts of statements.

Where arrivals move during a trial, the device drops the pairs of before (`TrialCore.arrivals_moved`), so that
the verdict is about what came since. It tells of that by an alarm, which begins a re-plan of its own. What
came first is told by the planner's clock: a device's may be set in between.
"""

from typing import Final

from sqlalchemy import and_, select
from sqlalchemy.orm import aliased

from stageloom.planner.store.tables import AlarmRow, ReplanRow
from stageloom.shared.policy.trigger import Cause

_MOVED: Final = aliased(AlarmRow)
_LATER: Final = aliased(ReplanRow)

MOVED_ALARM: Final = (
    select(_MOVED.body)
    .join(
        _LATER,
        and_(_LATER.device == _MOVED.device, _LATER.boot == _MOVED.boot, _LATER.number == _MOVED.number),
    )
    .where(
        _LATER.device == ReplanRow.device,
        _LATER.replan > ReplanRow.replan,
        _LATER.cause == Cause.REGIME.value,
        _LATER.begun_at_us <= ReplanRow.begun_at_us + 1000.0 * ReplanRow.trigger_to_decision_ms,
    )
    .order_by(_LATER.replan.desc())
    .limit(1)
    .correlate(ReplanRow)
    .scalar_subquery()
)
"""Of a `ReplanRow` in the statement around it: the last alarm for other arrivals before its verdict."""

"""Under which arrivals a re-plan's trial was decided: those of its alarm, or newer ones; parts of statements.

Where arrivals move during a trial, the device drops the pairs of before (`TrialCore.arrivals_moved`), so that
the verdict is about what came since. It tells of that by an alarm, which begins a re-plan of its own. What
came first is told by its clock, as alarms may come late; by the planner's where it was set in between.
"""

from typing import Final

from sqlalchemy import and_, case, select
from sqlalchemy.orm import aliased

from stageloom.planner.store.tables import AlarmRow, ReplanRow
from stageloom.shared.policy.trigger import Cause

ON_THE_WAY_US: Final = 60_000_000
"""That an alarm may take to the planner: so much less time has passed for it than for the device."""

_MOVED: Final = aliased(AlarmRow)
_LATER: Final = aliased(ReplanRow)

_TOLD_US: Final = _LATER.at_us - ReplanRow.at_us
_HEARD_US: Final = _LATER.begun_at_us - ReplanRow.begun_at_us
_AFTER_ALARM_US: Final = case((_TOLD_US.between(0, _HEARD_US + ON_THE_WAY_US), _TOLD_US), else_=_HEARD_US)
"""How long after the other one its alarm was, told as of a verdict (`stageloom.planner.store.trials`)."""

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
        _AFTER_ALARM_US <= 1000.0 * ReplanRow.trigger_to_decision_ms,
    )
    .order_by(_LATER.replan.desc())
    .limit(1)
    .correlate(ReplanRow)
    .scalar_subquery()
)
"""Of a `ReplanRow` in the statement around it: the last alarm for other arrivals before its verdict."""

"""Searches of re-plans that found no other plan to try, as far as they hold yet; part of a transaction."""

from typing import Final

import msgspec
from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session

from stageloom.planner.replan.alarm_loads import loads_of
from stageloom.planner.replan.backoff import FruitlessSearch, judged_rates
from stageloom.planner.replan.decide import NOTHING_BETTER, NOTHING_TO_TRY
from stageloom.planner.store.regimes import known_plan
from stageloom.planner.store.tables import AlarmRow, ExecutorTimeRow, OperatorCostRow, ReplanRow, StageCostRow
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Alarm

_MOST: Final = 64


def fruitless_searches(
    session: Session, device: DeviceId, environment: str, runs: Digest, costs_key: str, since_us: int
) -> list[FruitlessSearch]:
    """Those of a device since anything was measured that plans are judged by, newest first: those that ended
    since, as one that has its device measure first searches after that.

    One after which the plan that ran got other launch intervals is among them: a backlog always asks for
    some. None counts that is older than `since_us`, or than a re-plan that pushed a plan of another structure
    than `runs`: who won its trial is known since.
    """
    since_us = max(since_us, measured_us(session, device, environment, costs_key))
    of_device = (ReplanRow.device == device, ReplanRow.environment == environment)
    another = (ReplanRow.generation > 0, ReplanRow.structure != runs)
    pushed = session.scalar(select(func.max(ReplanRow.replan)).where(*of_device, *another))
    rows = session.execute(
        select(ReplanRow.begun_at_us, ReplanRow.trigger_to_decision_ms, ReplanRow.control, AlarmRow.body)
        .join(
            AlarmRow,
            and_(
                AlarmRow.device == ReplanRow.device,
                AlarmRow.boot == ReplanRow.boot,
                AlarmRow.number == ReplanRow.number,
            ),
        )
        .where(
            *of_device,
            ReplanRow.replan > (pushed or 0),
            ReplanRow.begun_at_us + 1e3 * func.coalesce(ReplanRow.trigger_to_decision_ms, 0.0) >= since_us,
            or_(
                and_(ReplanRow.outcome == "no_gain", ReplanRow.reason.startswith(NOTHING_TO_TRY)),
                ReplanRow.remark.startswith(NOTHING_BETTER),
            ),
        )
        .order_by(ReplanRow.replan.desc())
        .limit(_MOST)
    ).all()
    plans = {digest: known_plan(session, digest) for digest in {row.control for row in rows} if digest}
    return [
        FruitlessSearch(
            ended_us=row.begun_at_us + round(1e3 * (row.trigger_to_decision_ms or 0.0)),
            structure=plan.structure,
            rates=judged_rates(loads_of(msgspec.msgpack.decode(row.body, type=Alarm))),
        )
        for row in rows
        if (plan := plans.get(row.control)) is not None
    ]


def measured_us(session: Session, device: DeviceId, environment: str, costs_key: str) -> int:
    """When the newest cost was measured that holds for a device; 0: none was."""
    newest = [
        select(func.max(ExecutorTimeRow.measured_at_us)).where(
            ExecutorTimeRow.device == device, ExecutorTimeRow.environment == environment
        ),
        *(
            select(func.max(table.measured_at_us)).where(table.device_class == costs_key)
            for table in (OperatorCostRow, StageCostRow)
        ),
    ]
    return max(session.scalar(one) or 0 for one in newest)

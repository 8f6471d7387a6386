"""Where costs and schedules come from: who measured them, when, and how often; what else was ever found."""

from collections.abc import Iterable, Sequence

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from stageloom.planner.costs.records import FoundBy, MeasurementOrigin
from stageloom.planner.store.replans import trial_info
from stageloom.planner.store.stages import executor_key
from stageloom.planner.store.tables import (
    ConsideredPlanRow,
    GenerationRow,
    OperatorCostRow,
    PlanRow,
    ScheduleRow,
    StageCostRow,
    TrialRow,
)
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.admin import TrialInfo
from stageloom.shared.plan import ExecutorOptions


def operator_origins(
    session: Session, device_class: str, artifact: Digest, batch: int
) -> dict[int, MeasurementOrigin]:
    """Per measured operator of an artifact where its time comes from."""
    rows = session.scalars(
        select(OperatorCostRow).where(
            OperatorCostRow.device_class == device_class,
            OperatorCostRow.artifact == artifact,
            OperatorCostRow.batch == batch,
        )
    )
    return {
        row.operator: MeasurementOrigin(row.runs, row.spread_us, row.measured_on, row.measured_at_us)
        for row in rows
    }


def stage_origins(
    session: Session, device_class: str, executor: ExecutorOptions, combined_block: Digest, batch: int
) -> dict[str, MeasurementOrigin]:
    """Per measured stage of a combined block, by its stage string, where its time comes from."""
    rows = session.scalars(
        select(StageCostRow).where(
            StageCostRow.device_class == device_class,
            StageCostRow.executor == executor_key(executor),
            StageCostRow.combined_block == combined_block,
            StageCostRow.batch == batch,
        )
    )
    return {
        row.stage: MeasurementOrigin(row.runs, row.spread_us, row.measured_on, row.measured_at_us)
        for row in rows
    }


def schedules_of(session: Session, device_class: str, combined_block: Digest, batch: int) -> list[FoundBy]:
    """Every schedule that was found for a combined block of a device class, by scheduler."""
    rows = session.scalars(
        select(ScheduleRow)
        .where(
            ScheduleRow.device_class == device_class,
            ScheduleRow.combined_block == combined_block,
            ScheduleRow.batch == batch,
        )
        .order_by(ScheduleRow.scheduler)
    )
    return [FoundBy(row.scheduler, row.stage_string, row.found_at_us) for row in rows]


def trials_of(session: Session, plans: Iterable[Digest], environment: str) -> list[TrialInfo]:
    """Trials of these plans on any device of a class, newest first."""
    wanted = list(plans)
    rows = session.scalars(
        select(TrialRow)
        .where(
            TrialRow.environment == environment,
            or_(TrialRow.candidate.in_(wanted), TrialRow.control.in_(wanted)),
        )
        .order_by(TrialRow.decided_us.desc())
    )
    return [trial_info(row) for row in rows]


def device_of(session: Session, plan: Digest) -> DeviceId | None:
    """The device that was asked last to run a plan, else the last one for which it was looked at."""
    found = session.scalar(
        select(GenerationRow.device)
        .where(GenerationRow.digest == plan)
        .order_by(GenerationRow.position.desc())
        .limit(1)
    ) or session.scalar(
        select(ConsideredPlanRow.device)
        .where(ConsideredPlanRow.digest == plan, ConsideredPlanRow.device.is_not(None))
        .order_by(ConsideredPlanRow.number.desc())
        .limit(1)
    )
    return DeviceId(found) if found else None


def plan_names(session: Session, plans: Iterable[Digest]) -> Sequence[tuple[Digest, str]]:
    """(digest, name) of those plans that were kept, the oldest name of each last."""
    rows = session.execute(
        select(PlanRow.digest, PlanRow.name)
        .where(PlanRow.digest.in_(list(plans)))
        .order_by(PlanRow.created_at_us.desc(), PlanRow.name)
    )
    return [(Digest(digest), name) for digest, name in rows]

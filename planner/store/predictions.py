"""What the twin predicted until a device measured it, and plans that a search or re-plan evaluated."""

from collections.abc import Iterable
from typing import Final, TypeAlias

from msgspec import structs
from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from stageloom.planner.schema.explanation import EvaluationVerdict, PlanEvaluation
from stageloom.planner.schema.prediction import PredictionInfo
from stageloom.planner.store.database import now_us
from stageloom.planner.store.rows import message_of
from stageloom.planner.store.tables import ConsideredPlanRow, PredictionRow
from stageloom.shared.ids import DeviceId, Digest

_KEPT: Final = ("device", "plan", "digest", "twin", "arrivals", "seconds", "made_at_us")
"""What a row and a prediction both call by its name, beside the number."""


def keep_prediction(session: Session, prediction: PredictionInfo) -> int:
    """Keep a prediction, but not what was measured; returns its number."""
    same = {name: getattr(prediction, name) for name in _KEPT}
    row = PredictionRow(figures=prediction.predicted, **same)
    session.add(row)
    session.flush()
    return row.number


def newest_predictions(
    session: Session, device: DeviceId | None = None, *, before: int = 0, limit: int = 100
) -> list[PredictionInfo]:
    """Predictions of one device or of all, newest first; with `before` those of a lower number."""
    wanted = select(PredictionRow).order_by(PredictionRow.number.desc()).limit(limit)
    if device is not None:
        wanted = wanted.where(PredictionRow.device == device)
    if before:
        wanted = wanted.where(PredictionRow.number < before)
    return [
        message_of(PredictionInfo, row, predicted=row.figures, measured=None, relative_errors=None, doubt="")
        for row in session.scalars(wanted)
    ]


LookedAt: TypeAlias = tuple[PlanEvaluation, ConsideredPlanRow]
"""A plan that was evaluated, and the row that says when, for which device class, and in which re-plan."""


def keep_considered(
    session: Session,
    plans: Iterable[PlanEvaluation],
    *,
    device_class: str,
    device: DeviceId | None = None,
    replan: int | None = None,
) -> None:
    """Keep the plans that one search or re-plan evaluated, for `stageloom plan explain`."""
    about = {"at_us": now_us(session), "replan": replan, "device": device, "device_class": device_class}
    rows = []
    for plan in plans:
        fields = structs.asdict(plan)
        digest = fields.pop("plan")
        rows.append({**fields, **about, "digest": digest, "verdict": plan.verdict.value})
    if rows:
        session.connection().execute(insert(ConsideredPlanRow), rows)


def considered_plans(
    session: Session, serves: Digest, device_class: str, *, limit: int = 1000
) -> list[LookedAt]:
    """Plans over the same models that were looked at for a device class, or for none, newest first."""
    rows = session.scalars(
        select(ConsideredPlanRow)
        .where(ConsideredPlanRow.serves == serves, ConsideredPlanRow.device_class.in_({device_class, ""}))
        .order_by(ConsideredPlanRow.number.desc())
        .limit(limit)
    )
    return [
        (message_of(PlanEvaluation, row, plan=row.digest, verdict=EvaluationVerdict(row.verdict)), row)
        for row in rows
    ]


def searches_of(session: Session, plan: Digest, *, limit: int = 16) -> list[PlanEvaluation]:
    """The searches of operators that found a plan, newest first; tournaments, too."""
    rows = session.scalars(
        select(ConsideredPlanRow)
        .where(
            ConsideredPlanRow.digest == plan,
            ConsideredPlanRow.how.in_(["operator", "contest"]),
            ConsideredPlanRow.verdict == EvaluationVerdict.FOUND.value,
        )
        .order_by(ConsideredPlanRow.number.desc())
        .limit(limit)
    )
    return [message_of(PlanEvaluation, row, plan=row.digest, verdict=EvaluationVerdict.FOUND) for row in rows]

"""What the twin predicted until a device measured it, and plans that a search or re-plan evaluated."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Final, TypeAlias

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from stageloom.planner.replan.predict import EvaluationVerdict, PlanEvaluation
from stageloom.planner.store.database import now_us
from stageloom.planner.store.tables import ConsideredPlanRow, PredictionRow
from stageloom.shared.ids import DeviceId, Digest

KeptPrediction = PredictionRow
"""One prediction; `number` is None until it is kept."""


def keep_prediction(session: Session, prediction: KeptPrediction) -> int:
    """Keep a prediction; returns its number."""
    session.add(prediction)
    session.flush()
    return prediction.number


def newest_predictions(
    session: Session, device: DeviceId | None = None, *, limit: int = 100
) -> Sequence[KeptPrediction]:
    """The newest predictions, of one device or of all, newest first."""
    wanted = select(PredictionRow).order_by(PredictionRow.number.desc()).limit(limit)
    if device is not None:
        wanted = wanted.where(PredictionRow.device == device)
    return session.scalars(wanted).all()


LookedAt: TypeAlias = tuple[PlanEvaluation, ConsideredPlanRow]
"""A plan that was evaluated, and the row that says when, for which device class, and in which re-plan."""

_EVALUATED: Final = tuple(
    field.name for field in fields(PlanEvaluation) if field.name not in {"plan", "verdict"}
)
"""What a row and an evaluation both call by its name."""


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
    rows = [
        {
            **{name: getattr(plan, name) for name in _EVALUATED},
            **about,
            "digest": plan.plan,
            "verdict": plan.verdict.value,
        }
        for plan in plans
    ]
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
    return [(_evaluation(row), row) for row in rows]


def _evaluation(row: ConsideredPlanRow) -> PlanEvaluation:
    return PlanEvaluation(
        plan=Digest(row.digest),
        verdict=EvaluationVerdict(row.verdict),
        **{name: getattr(row, name) for name in _EVALUATED},
    )

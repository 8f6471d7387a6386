"""What the twin predicted until a device measured it, and plans that a search or re-plan evaluated."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from stageloom.planner.replan.predict import EvaluationVerdict, PlanEvaluation
from stageloom.planner.store.database import now_us
from stageloom.planner.store.tables import ConsideredPlanRow, PredictionRow
from stageloom.shared.ids import DeviceId, Digest


@dataclass(frozen=True, kw_only=True)
class KeptPrediction:
    """One prediction; `device` None: for no device in particular. `number` 0: not kept yet."""

    device: DeviceId | None
    plan: str
    digest: Digest
    twin: str  # where its step times are from
    arrivals: str  # and its load
    seconds: float
    figures: Mapping[str, float]  # see `stageloom.planner.twin.replay.figures`
    made_at_us: int
    number: int = 0


def keep_prediction(session: Session, prediction: KeptPrediction) -> int:
    """Keep a prediction; returns its number."""
    row = PredictionRow(
        device=prediction.device,
        plan=prediction.plan,
        digest=prediction.digest,
        twin=prediction.twin,
        arrivals=prediction.arrivals,
        seconds=prediction.seconds,
        figures=json.dumps(dict(prediction.figures), sort_keys=True),
        made_at_us=prediction.made_at_us,
    )
    session.add(row)
    session.flush()
    return row.prediction


def newest_predictions(
    session: Session, device: DeviceId | None = None, *, limit: int = 100
) -> list[KeptPrediction]:
    """The newest predictions, of one device or of all, newest first."""
    wanted = select(PredictionRow).order_by(PredictionRow.prediction.desc()).limit(limit)
    if device is not None:
        wanted = wanted.where(PredictionRow.device == device)
    return [
        KeptPrediction(
            device=None if row.device is None else DeviceId(row.device),
            plan=row.plan,
            digest=Digest(row.digest),
            twin=row.twin,
            arrivals=row.arrivals,
            seconds=row.seconds,
            figures=json.loads(row.figures),
            made_at_us=row.made_at_us,
            number=row.prediction,
        )
        for row in session.scalars(wanted)
    ]


@dataclass(frozen=True, slots=True)
class KeptConsidered:
    """A plan that was looked at: when, for which device class, and in which re-plan if it was one."""

    considered: PlanEvaluation
    at_us: int
    replan: int | None
    device: DeviceId | None
    device_class: str


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
        fields = asdict(plan)
        digest = fields.pop("plan")
        rows.append({**fields, **about, "digest": digest, "verdict": plan.verdict.value})
    if rows:
        session.connection().execute(insert(ConsideredPlanRow), rows)


def considered_plans(
    session: Session, serves: Digest, device_class: str, *, limit: int = 1000
) -> list[KeptConsidered]:
    """Plans over the same models that were looked at for a device class, or for none, newest first."""
    rows = session.scalars(
        select(ConsideredPlanRow)
        .where(ConsideredPlanRow.serves == serves, ConsideredPlanRow.device_class.in_({device_class, ""}))
        .order_by(ConsideredPlanRow.number.desc())
        .limit(limit)
    )
    return [
        KeptConsidered(
            PlanEvaluation(
                plan=Digest(row.digest),
                serves=Digest(row.serves),
                scheduler=row.scheduler,
                how=row.how,
                verdict=EvaluationVerdict(row.verdict),
                blocks=row.blocks,
                members_max=row.members_max,
                busy=row.busy,
                predicted=row.predicted,
                measured=row.measured,
                search_s=row.search_s,
                judged_at_s=row.judged_at_s,
                throughput_per_s=row.throughput_per_s,
                p99_s=row.p99_s,
            ),
            row.at_us,
            row.replan,
            DeviceId(row.device) if row.device is not None else None,
            row.device_class,
        )
        for row in rows
    ]

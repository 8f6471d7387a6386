"""Plans that were looked at, each with what became of it; they go with the oldest telemetry."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from stageloom.planner.replan.predict import EvaluationVerdict, PlanEvaluation
from stageloom.planner.store.tables import ConsideredPlanRow
from stageloom.shared.ids import DeviceId, Digest


@dataclass(frozen=True, slots=True)
class KeptConsidered:
    """A plan that was looked at: when, for which device class, and in which re-plan if it was one."""

    considered: PlanEvaluation
    at_us: int
    replan: int | None
    device: DeviceId | None
    device_class: str


def keep(
    session: Session,
    found: Iterable[PlanEvaluation],
    *,
    replan: int | None,
    device: DeviceId | None,
    device_class: str,
    now_us: int,
) -> None:
    """Keep what one search or re-plan looked at."""
    about = {"at_us": now_us, "replan": replan, "device": device, "device_class": device_class}
    rows = []
    for one in found:
        fields = asdict(one)
        digest = fields.pop("plan")
        rows.append({**fields, **about, "digest": digest, "verdict": one.verdict.value})
    if rows:
        session.connection().execute(insert(ConsideredPlanRow), rows)


def of_models(session: Session, serves: Digest, device_class: str, *, limit: int) -> Sequence[KeptConsidered]:
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

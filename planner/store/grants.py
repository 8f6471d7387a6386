"""What a device may plan with: its autonomy, and the artifacts that the planner assigned to it."""

from collections.abc import Collection
from typing import Final

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from stageloom.planner.store.desired import desired
from stageloom.planner.store.tables import GenerationRow, PlanRow
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Autonomy, LocalPlan
from stageloom.shared.plan import Plan, decode_plan

MOST_PLANS: Final = 64
"""Of a device's history that are looked at, the newest: what it runs is among them."""

_ASSIGNED: Final = (
    select(GenerationRow.plan)
    .where(GenerationRow.device == bindparam("of"), GenerationRow.plan.is_not(None))
    .group_by(GenerationRow.plan)
    .order_by(func.max(GenerationRow.position).desc())
    .limit(MOST_PLANS)
)


def permits(session: Session, device: DeviceId, local: LocalPlan, plan: Plan) -> bool:
    """Whether a device may run `plan`, which it made; False where a newer value is desired by now.

    Its artifacts are those of what is desired or of a plan that the planner gave this device before: until a
    desired plan has won its trial, the one before runs.

    Raises:
        InputError: the device may not plan alone, or was never given an artifact.
    """
    wanted = desired(session, device)
    if ((wanted.epoch, wanted.generation) if wanted else (0, 0)) != (local.epoch, local.generation):
        return False
    if wanted is None or wanted.autonomy is Autonomy.OFF:
        raise InputError("it may not plan alone", remedy="push a plan with --autonomy, if it should")
    needed = {model.artifact for model in plan.models} - {need.digest for need in wanted.artifacts}
    for digest in sorted(needed - _assigned(session, device, needed)):
        raise InputError(f"artifact {digest[:12]} was never assigned to it")
    return True


def _assigned(session: Session, device: DeviceId, needed: Collection[Digest]) -> set[Digest]:
    """Artifacts of the plans in a device's history; nothing is read where none is needed."""
    if not needed:
        return set()
    names = list(session.scalars(_ASSIGNED, {"of": device}))
    wires = session.scalars(select(PlanRow.wire).where(PlanRow.name.in_(names)))
    return {model.artifact for wire in wires for model in decode_plan(wire).models}

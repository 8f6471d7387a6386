"""The history of what devices were to run: who decided each generation, how it ended, and which artifacts
a device was given.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from stageloom.planner.schema.plan import HistoryEntry
from stageloom.planner.store.desired import desired
from stageloom.planner.store.rows import blank_of, known_device, message_of, run_on_rows, shown
from stageloom.planner.store.tables import ConsideredPlanRow, DesiredRow, GenerationRow, PlanRow
from stageloom.planner.store.tried_replans import PENDING
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Autonomy, DeviceState, LocalPlan
from stageloom.shared.plan import Plan, decode_plan

ENDS: Final = (
    DeviceState.COMMITTED,
    DeviceState.REJECTED,
    DeviceState.NO_GAIN,
    DeviceState.ROLLED_BACK,
)
"""States in which a generation stays; a re-plan ends with the state of the generation that it pushed."""

REFUSED: Final = tuple(state.value for state in ENDS if state is not DeviceState.COMMITTED)
"""Those of a plan that its device did not keep."""


def generation_history(
    session: Session, device: DeviceId | None, *, before: int = 0, limit: int = 64
) -> tuple[list[HistoryEntry], int]:
    """Generations of one device or of all, newest first, and the position to continue before (0: no more).

    Raises:
        InputError: there is no such device.
    """
    if device is not None:
        known_device(session, device)
    wanted = select(GenerationRow).order_by(GenerationRow.position.desc()).limit(limit + 1)
    if device is not None:
        wanted = wanted.where(GenerationRow.device == device)
    if before:
        wanted = wanted.where(GenerationRow.position < before)
    rows = list(session.scalars(wanted))
    newest = {
        desired.device: (desired.epoch, desired.generation)
        for desired in session.scalars(
            select(DesiredRow).where(DesiredRow.device.in_({row.device for row in rows}))
        )
    }
    entries = [
        shown(partial(_entry, row, newest.get(row.device)), partial(_unshown_entry, row))
        for row in rows[:limit]
    ]
    return entries, rows[limit - 1].position if len(rows) > limit else 0


def _entry(row: GenerationRow, newest: tuple[int, int] | None) -> HistoryEntry:
    return message_of(
        HistoryEntry, row, plan=row.plan or "", state=_shown_state(row, newest), at_us=row.decided_at_us
    )


def _unshown_entry(row: GenerationRow, reason: str) -> HistoryEntry:
    return blank_of(HistoryEntry, device=row.device, reason=reason)


def _shown_state(row: GenerationRow, newest: tuple[int, int] | None) -> str:
    """A generation that was on its way when a newer one came has no end of its own."""
    on_its_way = row.state not in ("", *_ENDED)
    overtaken = newest is not None and (row.epoch, row.generation) < newest
    return "superseded" if on_its_way and overtaken else row.state


_ENDED: Final = frozenset(state.value for state in ENDS)
_END: Final = f"""
WITH given (whose, in_epoch, in_generation, ended_as, why) AS (VALUES {{rows}})
UPDATE replans SET outcome = ended_as, reason = why
FROM given WHERE device = whose AND epoch = in_epoch AND generation = in_generation AND outcome = '{PENDING}'
"""
_STATE: Final = """
WITH given (whose, in_epoch, in_generation, now, why, at_us) AS (VALUES {rows})
UPDATE generations SET state = now, reason = why, state_at_us = at_us
FROM given WHERE device = whose AND epoch = in_epoch AND generation = in_generation
"""


def set_states(session: Session, states: Sequence[tuple[DeviceId, int, int, DeviceState, str, int]]) -> None:
    """Write into the history how far generations have come, and end the re-plans that pushed them.

    A state is (device, epoch, generation, state, reason, at_us). Generations that this database never gave
    out are left out.
    """
    rows = {
        (device, epoch, number): (device, epoch, number, state.value, reason, at_us)
        for device, epoch, number, state, reason, at_us in states
    }
    run_on_rows(session.connection(), _STATE, list(rows.values()))
    ends = [
        (device, epoch, number, state.value, reason)
        for device, epoch, number, state, reason, _ in states
        if state in ENDS
    ]
    if ends:
        session.flush()
        run_on_rows(session.connection(), _END, list(dict.fromkeys(ends)))


MOST_PLANS: Final = 64
"""Of a device's history that are looked at, the newest: what it runs is among them."""


_ASSIGNED: Final = (
    select(GenerationRow.plan)
    .where(GenerationRow.device == bindparam("of"), GenerationRow.plan.is_not(None))
    .group_by(GenerationRow.plan)
    .order_by(func.max(GenerationRow.position).desc())
    .limit(MOST_PLANS)
)


def require_permitted(session: Session, device: DeviceId, local: LocalPlan, plan: Plan) -> None:
    """See that a device may run `plan`, which it made.

    Its artifacts are those of what is desired or of a plan that the planner gave this device before: until a
    desired plan has won its trial, the one before runs. Where a newer value is desired by now, whether it may
    plan alone was another's to say.

    Raises:
        InputError: the device may not plan alone, or was never given an artifact.
    """
    wanted = desired(session, device)
    newest = (wanted.epoch, wanted.generation) if wanted else (0, 0)
    forbidden = wanted is None or wanted.autonomy is Autonomy.OFF
    if forbidden and newest == (local.epoch, local.generation):
        raise InputError("it may not plan alone", remedy="push a plan with --autonomy, if it should")
    given = {need.digest for need in wanted.artifacts} if wanted else set()
    needed = {model.artifact for model in plan.models} - given
    for digest in sorted(needed - _assigned(session, device, needed)):
        raise InputError(f"artifact {digest[:12]} was never assigned to it")


def _assigned(session: Session, device: DeviceId, needed: Collection[Digest]) -> set[Digest]:
    """Artifacts of the plans in a device's history; nothing is read where none is needed."""
    if not needed:
        return set()
    names = list(session.scalars(_ASSIGNED, {"of": device}))
    wires = session.scalars(select(PlanRow.wire).where(PlanRow.name.in_(names)))
    return {model.artifact for wire in wires for model in decode_plan(wire).models}


def device_of_plan(session: Session, plan: Digest) -> DeviceId | None:
    """The device that was asked last to run a plan, else the last one for which it was looked at."""
    name = session.scalar(
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
    return DeviceId(name) if name else None

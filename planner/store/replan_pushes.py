"""What a re-plan pushes, and when it stands back for what somebody else decided; parts of a transaction."""

from typing import Final

from sqlalchemy import and_, bindparam, literal, or_, select, update
from sqlalchemy.orm import Session, aliased

from stageloom.planner.store.desired import Push, desired_of, may_plan, newest_desired, push
from stageloom.planner.store.generations import ENDS, REFUSED
from stageloom.planner.store.plans import keep_plan
from stageloom.planner.store.regimes import known_structures
from stageloom.planner.store.replan_settings import replan_settings
from stageloom.planner.store.replans import IS_PENDING, LINE, RUNS_NOW
from stageloom.planner.store.tables import (
    DesiredRow,
    GenerationRow,
    PlanRow,
    ReplanRow,
)
from stageloom.planner.store.tried_replans import PENDING
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Activation, Desired, DeviceState
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.policy.trigger import Cause

_PUSHED: Final = update(ReplanRow).where(ReplanRow.replan == bindparam("pushed_by"))

_EARLIER: Final = update(ReplanRow).where(
    ReplanRow.device == bindparam("whose"),
    ReplanRow.replan < bindparam("than"),
    IS_PENDING,
)

_ANOTHERS: Final = (
    select(GenerationRow.position)
    .join(
        DesiredRow,
        and_(
            DesiredRow.device == GenerationRow.device,
            DesiredRow.epoch == GenerationRow.epoch,
            DesiredRow.generation == GenerationRow.generation,
        ),
    )
    .where(
        GenerationRow.device == bindparam("whose"),
        GenerationRow.decided_by != "replan",
        GenerationRow.state.in_([state.value for state in DeviceState if state not in ENDS]),
        # A re-plan's trial goes on under a generation that asks for a measurement or brings a policy.
        ~select(ReplanRow.replan)
        .where(
            ReplanRow.device == GenerationRow.device,
            ReplanRow.epoch == GenerationRow.epoch,
            ReplanRow.generation == GenerationRow.generation,
            IS_PENDING,
        )
        .exists(),
    )
    .limit(1)
)

_NAMED: Final = aliased(GenerationRow)
_NEWEST: Final = aliased(GenerationRow)

_STANDING: Final = (
    select(_NAMED.digest, ReplanRow.control)
    .select_from(ReplanRow)
    .join(
        _NAMED,
        _NAMED.position
        == select(GenerationRow.position)
        .where(GenerationRow.device == ReplanRow.device, GenerationRow.digest.is_not(None))
        .order_by(GenerationRow.epoch.desc(), GenerationRow.generation.desc())
        .limit(1)
        .correlate(ReplanRow)
        .scalar_subquery(),
    )
    .join(DesiredRow, DesiredRow.device == ReplanRow.device)
    .join(
        _NEWEST,
        and_(
            _NEWEST.device == DesiredRow.device,
            _NEWEST.epoch == DesiredRow.epoch,
            _NEWEST.generation == DesiredRow.generation,
        ),
    )
    .where(
        ReplanRow.replan == bindparam("number"),
        _NAMED.decided_by != "replan",
        _NAMED.decided_at_us > ReplanRow.begun_at_us,
        _NAMED.digest.is_distinct_from(ReplanRow.control),
        _NEWEST.state.not_in(REFUSED),
        or_(ReplanRow.cause != Cause.REGIME.value, _NEWEST.state != DeviceState.COMMITTED.value),
    )
)
"""Another plan than the one that ran, which somebody else decided since a re-plan began. Its state is that of
the newest generation, which may only ask for a measurement of it."""

_ON_TRIAL: Final = aliased(ReplanRow)

_AWAITED: Final = select(literal(1)).where(
    or_(
        _STANDING.where(ReplanRow.cause == Cause.REGIME.value).exists(),
        select(_ON_TRIAL.replan)
        .join(ReplanRow, and_(ReplanRow.device == _ON_TRIAL.device, ReplanRow.replan > _ON_TRIAL.replan))
        .where(
            ReplanRow.replan == bindparam("number"),
            ReplanRow.cause.in_([Cause.DRIFT.value, Cause.POWER_MODE.value]),
            _ON_TRIAL.outcome == literal(PENDING, literal_execute=True),
            _ON_TRIAL.generation > 0,
        )
        .exists(),
    )
)

_UNDECIDED: Final = select(ReplanRow.replan).where(
    ReplanRow.replan == bindparam("number"), IS_PENDING, ReplanRow.generation == 0
)


def is_trying(session: Session, device: DeviceId, replan: int, structure: Digest) -> bool:
    """Whether a plan of this structure, which an earlier re-plan pushed, is still being tried."""
    found = select(ReplanRow.replan).where(
        ReplanRow.device == device,
        ReplanRow.replan < replan,
        IS_PENDING,
        ReplanRow.structure == structure,
    )
    return session.connection().execute(found.limit(1)).first() is not None


def tries_anothers(session: Session, device: DeviceId) -> bool:
    """Whether the device fetches, tries or guards what somebody else than a re-plan pushed."""
    found = session.connection().execute(_ANOTHERS, {"whose": device}).first()
    return found is not None


def awaits_trial(session: Session, device: DeviceId, replan: int) -> bool:
    """Whether a re-plan leaves its device alone until that has tried what somebody else pushed.

    Where arrivals moved, what was pushed since counts before the device says that it tries it. After a drift
    and in another power mode what an earlier re-plan pushed counts, too.
    """
    if tries_anothers(session, device):
        return True
    return session.connection().execute(_AWAITED, {"number": replan}).first() is not None


def _is_overruled(session: Session, replan: int, plan: Plan) -> bool:
    """Whether a plan that somebody else decided since a re-plan began stands against the one it found.

    One that the device refused does not. Arrivals that moved are told once: for them a plan stands until its
    trial has ended. Launch intervals alone are no other plan, unless they are all that was found.
    """
    row = session.connection().execute(_STANDING, {"number": replan}).first()
    if row is None:
        return False
    known = known_structures(session, [digest for digest in row if digest is not None])
    ran = known.get(row.control)
    return ran is None or known.get(row.digest) != ran or plan.structure == ran


def _undecided(session: Session, replan: int) -> bool:
    """Whether a re-plan is under way and has pushed nothing yet."""
    return session.connection().execute(_UNDECIDED, {"number": replan}).first() is not None


def push_replan(
    session: Session,
    device: DeviceId,
    replan: int,
    plan: Plan,
    *,
    runs: Digest | None = None,
    scheduler: str,
    above: tuple[int, int],
    how: str,
    predicted: float | None,
    remark: str = "",
    fitting: Digest | None = None,
    activation: Activation = Activation.TRIAL,
) -> Desired | None:
    """Keep and push a re-plan's plan, if `above` is still the newest desired (epoch, generation).

    Kept beside the plan: `how` it was proposed, its `predicted` cost over the incumbent's, and a `remark` on
    what else went into the decision. `runs` is the plan that it was weighed against, `fitting` the trained
    policy that fits it.

    Returns what is desired now, or None where somebody decided something newer: since `above` was read, or
    another plan since the re-plan began. That is so as well where the device runs another plan than `runs` by
    now, or other versions of its models are desired of it and it has not refused them.

    Raises:
        InputError: the device is revoked, or a model of the plan was removed.
    """
    if newest_desired(session, device) != above or not _undecided(session, replan):
        return None
    now_runs = session.connection().scalar(RUNS_NOW, {"number": replan})
    if None not in (runs, now_runs) and runs != now_runs:
        return None
    if _brings_others(session, device, above, plan) or _is_overruled(session, replan, plan):
        return None
    name = keep_plan(session, plan, scheduler)
    attached = fitting is not None and replan_settings(session, device).attach
    policy = fitting if attached and may_plan(session, device) else None
    desired = push(
        session,
        Push(device=device, plan=name, decided_by="replan", activation=activation, policy=policy),
    )
    now = f"{desired.epoch}.{desired.generation}"
    session.connection().execute(
        _EARLIER,
        {"whose": device, "than": replan, "outcome": "no_gain", "reason": f"overtaken by generation {now}"},
    )
    session.connection().execute(
        _PUSHED,
        {
            "pushed_by": replan,
            "plan": name,
            "digest": plan.digest,
            "structure": plan.structure,
            "how": how,
            "predicted": predicted,
            "remark": remark[:LINE],
            "epoch": desired.epoch,
            "generation": desired.generation,
            "control": now_runs,
        },
    )
    session.flush()
    session.expire_all()  # a work of the same group may have read the row before
    return desired_of(session, [device])[device]  # which says that it is a re-plan's


def _brings_others(session: Session, device: DeviceId, above: tuple[int, int], plan: Plan) -> bool:
    """Whether what is desired of a device, and not refused by it, has other artifacts than a plan."""
    found = session.execute(
        select(PlanRow.wire, GenerationRow.state)
        .join(DesiredRow, DesiredRow.plan == PlanRow.name)
        .outerjoin(
            GenerationRow,
            and_(
                GenerationRow.device == device,
                GenerationRow.epoch == above[0],
                GenerationRow.generation == above[1],
            ),
        )
        .where(DesiredRow.device == device)
    ).first()
    if found is None or found.state in REFUSED:
        return False
    wanted = {one.name: one.artifact for one in decode_plan(found.wire).models}
    return wanted != {one.name: one.artifact for one in plan.models}

"""Models, plans, what each device should run, and the history of who decided it."""

from functools import lru_cache
from typing import Final

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from planner.store.devices import hold, known_device, planner_row
from planner.store.tables import (
    ArtifactRow,
    DesiredRow,
    GenerationRow,
    ModelRow,
    PlanRow,
    ProfileRow,
    StageProfileRow,
)
from shared.errors import InputError
from shared.graph import Graph
from shared.ids import DeviceId, Digest
from shared.messages.admin import HistoryEntry, ModelInfo, PlanInfo
from shared.messages.control import (
    Activation,
    ArtifactNeed,
    Autonomy,
    Desired,
    LocalPlan,
    ProfileRequest,
    StageProfileRequest,
)
from shared.plan import Plan, decode_plan, plan_text

_ENDS: Final = ("committed", "rejected", "no_gain", "rolled_back")

_decoded = lru_cache(maxsize=64)(decode_plan)
"""A plan is a value, and a fleet runs few of them."""
# What a transaction found out of plans: a group of a thousand pushes of one plan asks once.
_WHOLE: Final = "plans whose models are all here"
_NEEDS: Final = "artifacts by plan"


def add_model(
    session: Session, name: str, digest: Digest, graph: Graph, size_bytes: int, now_us: int
) -> ModelInfo:
    """Give an artifact a name; a repeat with the same artifact changes nothing.

    Raises:
        InputError: the name belongs to another artifact.
    """
    _models_changed(session)
    row = session.get(ModelRow, name)
    if row is not None and row.digest != digest:
        raise InputError(
            f"model {name!r} is artifact {row.digest[:12]}",
            remedy=f"choose another name, or run `stageloom model remove {name}` first",
        )
    if session.get(ArtifactRow, digest) is None:
        session.add(
            ArtifactRow(
                digest=digest,
                size_bytes=size_bytes,
                operators=len(graph.operators),
                base_cuts=len(graph.base_cuts),
                opaque=sum(1 for operator in graph.operators if operator.opaque),
                added_at_us=now_us,
            )
        )
        session.flush()
    if row is None:
        session.add(ModelRow(name=name, digest=digest, added_at_us=now_us))
        session.flush()
    return models(session, [name])[0]


def remove_model(session: Session, name: str) -> Digest | None:
    """Forget a name; returns the artifact's digest if nothing else needs its file.

    Raises:
        InputError: there is no such model, or a device's desired plan runs it.
    """
    _models_changed(session)
    info = models(session, [name])[0]
    users = [
        device
        for device, wire in session.execute(
            select(DesiredRow.device, PlanRow.wire).join(PlanRow, PlanRow.name == DesiredRow.plan)
        )
        if any(model.artifact == info.digest for model in decode_plan(wire).models)
    ]
    if users:
        raise InputError(
            f"model {name!r} is part of what {users[0]} should run",
            remedy="push a plan without it there first, or revoke the device",
        )
    session.execute(delete(ModelRow).where(ModelRow.name == name))
    shared = session.scalar(select(func.count()).select_from(ModelRow).where(ModelRow.digest == info.digest))
    return None if shared else info.digest


def models(session: Session, names: list[str]) -> list[ModelInfo]:
    """The named models, in the order asked.

    Raises:
        InputError: one of them does not exist.
    """
    found = {info.model: info for info in model_infos(session, names=names, limit=len(names))}
    for name in names:
        if name not in found:
            raise InputError(f"there is no model {name!r}", remedy="see `stageloom model list`")
    return [found[name] for name in names]


def model_infos(
    session: Session, *, names: list[str] | None = None, after: str = "", limit: int = 256
) -> list[ModelInfo]:
    """Models by name."""
    wanted = (
        select(ModelRow, ArtifactRow)
        .join(ArtifactRow, ArtifactRow.digest == ModelRow.digest)
        .where(ModelRow.name > after)
        .order_by(ModelRow.name)
        .limit(limit)
    )
    if names is not None:
        wanted = wanted.where(ModelRow.name.in_(names))
    return [
        ModelInfo(
            model=model.name,
            digest=Digest(model.digest),
            size_bytes=artifact.size_bytes,
            operators=artifact.operators,
            base_cuts=artifact.base_cuts,
            opaque=artifact.opaque,
            added_at_us=model.added_at_us,
        )
        for model, artifact in session.execute(wanted)
    ]


def add_plan(session: Session, name: str, plan: Plan, scheduler: str, now_us: int) -> PlanInfo:
    """Keep a plan under a name; a repeat with the same plan changes nothing.

    Raises:
        InputError: the name belongs to another plan.
    """
    row = session.get(PlanRow, name)
    if row is not None and row.digest != plan.digest:
        raise InputError(f"plan {name!r} is {row.digest[:12]}", remedy="choose another --name")
    if row is None:
        row = PlanRow(
            name=name, digest=plan.digest, wire=plan.wire, scheduler=scheduler, created_at_us=now_us
        )
        session.add(row)
        session.flush()
    return _plan_info(row)


def named(session: Session, plan: Plan, scheduler: str, now_us: int) -> str:
    """The plan's name; one that nobody named gets the first characters of its digest."""
    known = session.scalars(select(PlanRow.name).where(PlanRow.digest == plan.digest).limit(1)).first()
    return known or add_plan(session, plan.digest[:12], plan, scheduler, now_us).plan


def plan_info(session: Session, name: str) -> PlanInfo:
    """The plan of that name, or whose digest begins with it (at least 8 characters).

    Raises:
        InputError: there is none.
    """
    return _plan_info(_plan_row(session, name))


def _plan_row(session: Session, name: str) -> PlanRow:
    row = session.get(PlanRow, name)
    if row is not None:
        hold(session, row)
    elif len(name) >= 8:
        row = session.scalars(
            select(PlanRow)
            .where(PlanRow.digest.startswith(name, autoescape=True))
            .order_by(PlanRow.created_at_us)
        ).first()
    if row is None:
        raise InputError(f"there is no plan {name!r}", remedy="see `stageloom plan list`")
    return row


def plan_infos(session: Session, *, after: str = "", limit: int = 256) -> list[PlanInfo]:
    """Plans by name."""
    wanted = select(PlanRow).where(PlanRow.name > after).order_by(PlanRow.name).limit(limit)
    return [_plan_info(row) for row in session.scalars(wanted)]


def _plan_info(row: PlanRow) -> PlanInfo:
    plan = decode_plan(row.wire, Digest(row.digest))
    text = plan_text(plan)
    return PlanInfo(
        plan=row.name,
        digest=Digest(row.digest),
        scheduler=row.scheduler,
        models=tuple(model.name for model in plan.models),
        created_at_us=row.created_at_us,
        text=text,
        wire=row.wire,
        text_bytes=len(text.encode()),
        wire_bytes=len(row.wire),
    )


def push(
    session: Session,
    device: DeviceId,
    plan: str | None,
    *,
    decided_by: str,
    now_us: int,
    autonomy: Autonomy | None = None,
    activation: Activation = Activation.TRIAL,
    above_generation: int = 0,
) -> tuple[int, int]:
    """Make a plan the device's next generation; returns (epoch, generation).

    `activation` says whether the plan must win a trial on the device. `plan` None keeps what runs and only
    numbers the change, such as a profile request. Generations rise by one, over epochs too, and are above
    `above_generation`.

    Raises:
        InputError: there is no such device or plan, or the device is revoked.
    """
    if known_device(session, device).revoked:
        raise InputError(f"device {device!r} is revoked", remedy="enrol it again with a new token")
    wanted = _plan_row(session, plan) if plan is not None else None
    if wanted is not None:
        _require_models(session, wanted)
    epoch = planner_row(session, now_us).epoch
    row = session.get(DesiredRow, device)
    if row is None:
        row = DesiredRow(
            device=device,
            epoch=epoch,
            generation=0,
            autonomy=Autonomy.OFF.value,
            activation=activation.value,
        )
        session.add(row)
    row.epoch, row.generation = epoch, max(row.generation, above_generation) + 1
    if wanted is not None:
        row.plan, row.activation = wanted.name, activation.value
    if autonomy is not None:
        row.autonomy = autonomy.value
    session.add(
        GenerationRow(
            device=device,
            epoch=row.epoch,
            generation=row.generation,
            plan=wanted.name if wanted else None,
            digest=wanted.digest if wanted else None,
            decided_by=decided_by,
            decided_at_us=now_us,
            state="",
            reason="",
            state_at_us=0,
        )
    )
    session.flush()
    hold(session, row)  # it is read again to tell the device
    return row.epoch, row.generation


def _require_models(session: Session, row: PlanRow) -> None:
    """A plan that names a removed model would leave a device waiting for its artifact for ever."""
    whole: set[str] = session.info.setdefault(_WHOLE, set())
    if row.name in whole:
        return
    for model in _decoded(row.wire).models:
        if session.scalar(select(ModelRow.name).where(ModelRow.digest == model.artifact).limit(1)) is None:
            raise InputError(
                f"plan {row.name!r} needs artifact {model.artifact[:12]} of model {model.name!r}, "
                "which was removed",
                remedy="add the model again, or make another plan",
            )
    whole.add(row.name)


def desired(session: Session, device: DeviceId) -> Desired | None:
    """What the device should do, whole; None if nothing was ever desired of it."""
    row = session.get(DesiredRow, device)
    if row is None:
        return None
    plan_row = session.get(PlanRow, row.plan) if row.plan else None
    needs = _needs(session, plan_row) if plan_row is not None else ()
    return Desired(
        epoch=row.epoch,
        generation=row.generation,
        plan_digest=Digest(plan_row.digest) if plan_row else None,
        plan=plan_row.wire if plan_row else b"",
        artifacts=needs,
        profiles=_open_profiles(session, device),
        stage_profile=_open_stage_profile(session, device),
        autonomy=Autonomy(row.autonomy),
        activation=Activation(row.activation),
    )


def _open_profiles(session: Session, device: DeviceId) -> tuple[ProfileRequest, ...]:
    wanted = (
        select(ProfileRow, ArtifactRow.size_bytes)
        .join(ArtifactRow, ArtifactRow.digest == ProfileRow.artifact)
        .where(ProfileRow.device == device, ProfileRow.answered_at_us.is_(None))
        .order_by(ProfileRow.request)
        .limit(64)
    )
    return tuple(
        ProfileRequest(
            row.request,
            ArtifactNeed(row.model, Digest(row.artifact), size_bytes),
            batch=row.batch,
            budget_s=row.budget_s,
        )
        for row, size_bytes in session.execute(wanted)
    )


def _open_stage_profile(session: Session, device: DeviceId) -> StageProfileRequest | None:
    """The oldest one that is not answered: a device measures one plan at a time."""
    row = session.scalars(
        select(StageProfileRow)
        .where(StageProfileRow.device == device, StageProfileRow.answered_at_us.is_(None))
        .order_by(StageProfileRow.request)
        .limit(1)
    ).first()
    plan = session.get(PlanRow, row.plan) if row is not None else None
    if row is None or plan is None:
        return None
    return StageProfileRequest(
        request=row.request,
        plan_digest=Digest(plan.digest),
        plan=plan.wire,
        artifacts=_needs(session, plan),
        budget_s=row.budget_s,
    )


def _needs(session: Session, row: PlanRow) -> tuple[ArtifactNeed, ...]:
    known: dict[str, tuple[ArtifactNeed, ...]] = session.info.setdefault(_NEEDS, {})
    if row.name not in known:
        plan = _decoded(row.wire)
        sizes = _sizes(session, [model.artifact for model in plan.models])
        known[row.name] = tuple(
            ArtifactNeed(model.name, model.artifact, sizes.get(model.artifact, 1)) for model in plan.models
        )
    return known[row.name]


def _models_changed(session: Session) -> None:
    """What is known of plans in this transaction may have become wrong."""
    session.info.pop(_WHOLE, None)
    session.info.pop(_NEEDS, None)


def adopt(session: Session, device: DeviceId, local: LocalPlan, now_us: int) -> bool:
    """Make a plan that the device made its next generation, if nothing newer was desired meanwhile.

    Raises:
        PlanError: the plan does not decode.
        InputError: an artifact of it is not here, or the device is revoked.
    """
    row = session.get(DesiredRow, device)
    if ((row.epoch, row.generation) if row is not None else (0, 0)) != (local.epoch, local.generation):
        return False
    plan = decode_plan(local.plan, local.plan_digest)
    push(session, device, named(session, plan, "local", now_us), decided_by="local", now_us=now_us)
    return True


def _sizes(session: Session, digests: list[Digest]) -> dict[str, int]:
    found = session.execute(
        select(ArtifactRow.digest, ArtifactRow.size_bytes).where(ArtifactRow.digest.in_(digests))
    )
    return {digest: size for digest, size in found}


def history(
    session: Session, device: DeviceId | None, *, before: int = 0, limit: int = 64
) -> tuple[list[HistoryEntry], int]:
    """Generations, newest first, and the position to continue before (0: no more)."""
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
        HistoryEntry(
            device=DeviceId(row.device),
            epoch=row.epoch,
            generation=row.generation,
            plan=row.plan or "",
            digest=Digest(row.digest) if row.digest else None,
            decided_by=row.decided_by,
            state=_shown_state(row, newest.get(row.device)),
            reason=row.reason,
            at_us=row.decided_at_us,
        )
        for row in rows[:limit]
    ]
    return entries, rows[limit - 1].position if len(rows) > limit else 0


def _shown_state(row: GenerationRow, newest: tuple[int, int] | None) -> str:
    """A generation that was on its way when a newer one came has no end of its own."""
    on_its_way = row.state not in ("", *_ENDS)
    overtaken = newest is not None and (row.epoch, row.generation) < newest
    return "superseded" if on_its_way and overtaken else row.state

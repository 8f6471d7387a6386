"""Models, plans, and the history of who decided what a device should run."""

from functools import partial
from typing import Final

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from stageloom.planner.store.database import Database
from stageloom.planner.store.showing import shown
from stageloom.planner.store.tables import ArtifactRow, DesiredRow, GenerationRow, ModelRow, PlanRow
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.admin import HistoryEntry, ModelInfo, PlanInfo
from stageloom.shared.plan import Plan, decode_plan, plan_text

_ENDS: Final = ("committed", "rejected", "no_gain", "rolled_back")


def add_model(
    session: Session, name: str, digest: Digest, graph: Graph, size_bytes: int, now_us: int
) -> ModelInfo:
    """Give an artifact a name; a repeat with the same artifact changes nothing.

    Raises:
        InputError: the name belongs to another artifact.
    """
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
    return _plan_info(_kept(session, name, plan, scheduler, now_us))


def _kept(session: Session, name: str, plan: Plan, scheduler: str, now_us: int) -> PlanRow:
    row = session.get(PlanRow, name)
    if row is not None and row.digest != plan.digest:
        raise InputError(f"plan {name!r} is {row.digest[:12]}", remedy="choose another --name")
    if row is None:
        row = PlanRow(
            name=name, digest=plan.digest, wire=plan.wire, scheduler=scheduler, created_at_us=now_us
        )
        session.add(row)
        session.flush()
    return row


def named(session: Session, plan: Plan, scheduler: str, now_us: int) -> str:
    """The plan's name; one that nobody named gets the first characters of its digest."""
    known = session.scalars(select(PlanRow.name).where(PlanRow.digest == plan.digest).limit(1)).first()
    return known or _kept(session, plan.digest[:12], plan, scheduler, now_us).name


def keep(database: Database, plan: Plan, *, scheduler: str, now_us: int) -> str:
    """Keep a plan that was made beside the planner, in one short transaction; its name.

    Raises:
        StorageError: the database cannot be written.
    """
    return database.change(lambda session: named(session, plan, scheduler, now_us))


def plan_info(session: Session, name: str) -> PlanInfo:
    """The plan of that name, or whose digest begins with it (at least 8 characters).

    Raises:
        InputError: there is none.
    """
    return _plan_info(_plan_row(session, name))


def _plan_row(session: Session, name: str) -> PlanRow:
    row = session.get(PlanRow, name)
    if row is None and len(name) >= 8:
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
    return [shown(partial(_plan_info, row), partial(_unshown_plan, row)) for row in session.scalars(wanted)]


def _unshown_plan(row: PlanRow, reason: str) -> PlanInfo:
    return PlanInfo(
        plan=row.name,
        digest=Digest(row.digest),
        scheduler=row.scheduler,
        models=(),
        created_at_us=row.created_at_us,
        text=reason,
        wire=b"",
        text_bytes=0,
        wire_bytes=len(row.wire),
    )


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
        shown(partial(_entry, row, newest.get(row.device)), partial(_unshown_entry, row))
        for row in rows[:limit]
    ]
    return entries, rows[limit - 1].position if len(rows) > limit else 0


def _entry(row: GenerationRow, newest: tuple[int, int] | None) -> HistoryEntry:
    return HistoryEntry(
        device=DeviceId(row.device),
        epoch=row.epoch,
        generation=row.generation,
        plan=row.plan or "",
        digest=Digest(row.digest) if row.digest else None,
        decided_by=row.decided_by,
        state=_shown_state(row, newest),
        reason=row.reason,
        at_us=row.decided_at_us,
    )


def _unshown_entry(row: GenerationRow, reason: str) -> HistoryEntry:
    return HistoryEntry(
        device=DeviceId(row.device),
        epoch=0,
        generation=0,
        plan="",
        digest=None,
        decided_by="",
        state="",
        reason=reason,
        at_us=0,
    )


def _shown_state(row: GenerationRow, newest: tuple[int, int] | None) -> str:
    """A generation that was on its way when a newer one came has no end of its own."""
    on_its_way = row.state not in ("", *_ENDS)
    overtaken = newest is not None and (row.epoch, row.generation) < newest
    return "superseded" if on_its_way and overtaken else row.state

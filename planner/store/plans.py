"""Plans by name and by digest."""

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Final

import msgspec
from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from stageloom.planner.schema.outputs import OutputsInfo, OutputsOnDevice
from stageloom.planner.schema.plan import PlanInfo
from stageloom.planner.store.database import now_us
from stageloom.planner.store.rows import blank_of, message_of, shown
from stageloom.planner.store.tables import PlanRow, TrialRow
from stageloom.shared.errors import InputError, NotFoundError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.plan import Plan, decode_plan, plan_text

_MOST_COMPARED: Final = 64
_MOST_READ: Final = 4096

_WIRES: Final = select(PlanRow.digest, PlanRow.wire).where(
    PlanRow.digest.in_(bindparam("wanted", expanding=True))
)


def add_plan(session: Session, name: str, plan: Plan, scheduler: str) -> PlanInfo:
    """Keep a plan under a name; a repeat with the same plan changes nothing.

    Raises:
        InputError: the name belongs to another plan.
    """
    return _plan_info(_kept(session, name, plan, scheduler))


def add_plan_anyhow(session: Session, name: str, plan: Plan, scheduler: str) -> tuple[PlanInfo, str]:
    """`add_plan`, but where the name belongs to another plan, this one is named by its digest's beginning.

    Returns a sentence that says so, too; empty where the plan has the name.
    """
    row = session.get(PlanRow, name)
    if row is None or row.digest == plan.digest:
        return add_plan(session, name, plan, scheduler), ""
    info = add_plan(session, plan.digest[:12], plan, scheduler)
    return info, f"{name!r} was given to another plan meanwhile, so this one is {info.plan!r}"


def require_unnamed(session: Session, name: str) -> None:
    """Raises:
    InputError: there is a plan of that name.
    """
    row = session.get(PlanRow, name)
    if row is not None:
        raise InputError(
            f"there is a plan {name!r} already, {row.digest[:12]}", remedy="choose another --name"
        )


def _kept(session: Session, name: str, plan: Plan, scheduler: str) -> PlanRow:
    row = session.get(PlanRow, name)
    if row is not None and row.digest != plan.digest:
        raise InputError(
            f"there is another plan {name!r} already, {row.digest[:12]}", remedy="choose another --name"
        )
    if row is None:
        row = PlanRow(
            name=name, digest=plan.digest, wire=plan.wire, scheduler=scheduler, created_at_us=now_us(session)
        )
        session.add(row)
        session.flush()
    return row


def keep_plan(session: Session, plan: Plan, scheduler: str) -> str:
    """Keep a plan that nobody named, under the first characters of its digest; returns the plan's name."""
    known = session.scalars(select(PlanRow.name).where(PlanRow.digest == plan.digest).limit(1)).first()
    return known or _kept(session, plan.digest[:12], plan, scheduler).name


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
        raise NotFoundError(f"there is no plan {name!r}", remedy="see `stageloom plan list`")
    return row


def plan_infos(session: Session, *, after: str = "", limit: int = 256) -> list[PlanInfo]:
    """Plans by name."""
    wanted = select(PlanRow).where(PlanRow.name > after).order_by(PlanRow.name).limit(limit)
    return [shown(partial(_plan_info, row), partial(_unshown_plan, row)) for row in session.scalars(wanted)]


def _unshown_plan(row: PlanRow, reason: str) -> PlanInfo:
    return blank_of(
        PlanInfo,
        plan=row.name,
        digest=row.digest,
        scheduler=row.scheduler,
        created_at_us=row.created_at_us,
        text=reason,
        wire_bytes=len(row.wire),
    )


def _plan_info(row: PlanRow) -> PlanInfo:
    plan = decode_plan(row.wire, Digest(row.digest))
    text = plan_text(plan)
    return message_of(
        PlanInfo,
        row,
        plan=row.name,
        models=tuple(model.name for model in plan.models),
        text=text,
        text_bytes=len(text.encode()),
        wire_bytes=len(row.wire),
        compared=(),
    )


def with_comparisons(session: Session, infos: Sequence[PlanInfo]) -> list[PlanInfo]:
    """The plans with what devices found when their outputs were compared."""
    found: dict[str, list[OutputsOnDevice]] = {}
    rows = session.scalars(
        select(TrialRow)
        .where(TrialRow.candidate.in_([info.digest for info in infos]), TrialRow.how == "outputs")
        .order_by(TrialRow.decided_us.desc(), TrialRow.device)
        .limit(_MOST_READ)
    )
    for row in rows:
        if row.outputs is not None:
            outputs = msgspec.convert(row.outputs, OutputsInfo)
            one = OutputsOnDevice(device=DeviceId(row.device), decided_us=row.decided_us, outputs=outputs)
            found.setdefault(row.candidate, []).append(one)
    return [
        msgspec.structs.replace(info, compared=tuple(found.get(info.digest, ())[:_MOST_COMPARED]))
        for info in infos
    ]


def plan_names(session: Session, plans: Iterable[Digest]) -> dict[Digest, str]:
    """The names of those plans that were kept, the oldest one of each."""
    rows = session.execute(
        select(PlanRow.digest, PlanRow.name)
        .where(PlanRow.digest.in_(list(plans)))
        .order_by(PlanRow.created_at_us.desc(), PlanRow.name)
    )
    return {Digest(digest): name for digest, name in rows}


def plan_wires(session: Session, digests: Collection[Digest]) -> dict[Digest, bytes]:
    """The wire forms of those plans that are known here."""
    rows = session.connection().execute(_WIRES, {"wanted": list(digests)})
    return {Digest(digest): wire for digest, wire in rows}

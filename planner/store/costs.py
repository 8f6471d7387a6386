"""Measured operator times and found schedules, shared by all devices of one class."""

from collections.abc import Iterable, Sequence
from typing import Final

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from stageloom.planner.costs.records import FoundSchedule, OperatorCost
from stageloom.planner.store import answers
from stageloom.planner.store.calibrations import calibration
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.devices import known_device
from stageloom.planner.store.manyrows import insert_rows
from stageloom.planner.store.plans import models
from stageloom.planner.store.stages import next_request
from stageloom.planner.store.tables import ArtifactRow, OperatorCostRow, ProfileRow, ScheduleRow
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Desired
from stageloom.shared.messages.telemetry import ProfileResult

MOST_SCHEDULES: Final = 5_000
"""That a proposal looks among: those found last are of plans that matter now."""

_OPERATORS: Final = select(
    OperatorCostRow.operator,
    OperatorCostRow.median_us,
    OperatorCostRow.spread_us,
    OperatorCostRow.runs,
    OperatorCostRow.measured_at_us,
).where(
    OperatorCostRow.device_class == bindparam("there"),
    OperatorCostRow.artifact == bindparam("of"),
    OperatorCostRow.batch == bindparam("batch_of"),
)
_COST_KEY: Final = ("device_class", "artifact", "batch", "operator")
_COST: Final = (*_COST_KEY, "median_us", "spread_us", "runs", "measured_on", "measured_at_us")
_NEWER_COST: Final = f"ON CONFLICT ({', '.join(_COST_KEY)}) DO UPDATE SET " + ", ".join(
    f"{name} = excluded.{name}" for name in _COST[len(_COST_KEY) :]
)


def request_profile(
    session: Session, device: DeviceId, names: list[str], *, batch: int, budget_s: float, now_us: int
) -> tuple[list[int], Desired]:
    """Ask a device to measure the operators of some models; returns the requests' numbers, and what is
    desired now.

    The budget is shared evenly. A request is part of desired state and so takes a generation,
    decided by "profile".

    Raises:
        InputError: there is no such device or model, or the device is revoked.
    """
    own = known_device(session, device).device_class
    first = next_request(session)
    rows = [
        ProfileRow(
            request=first + at,
            device=device,
            model=info.model,
            artifact=info.digest,
            batch=batch,
            budget_s=budget_s / len(names),
            requested_at_us=now_us,
            environment=own,
            reason="",
        )
        for at, info in enumerate(models(session, names))
    ]
    session.add_all(rows)
    session.flush()
    desired = push(session, Push(device=device, plan=None, decided_by="profile"), now_us)
    return [row.request for row in rows], desired


def store_profile(session: Session, device: DeviceId, result: ProfileResult, now_us: int) -> str:
    """Keep part of a profile; returns why not, empty where it is kept.

    Costs belong to the environment that the device measured them in. They count as measured when they arrive:
    a device's wall clock may be wrong by years.
    """
    request = session.get(ProfileRow, result.request)
    why = answers.not_open(request, device, result.request)
    if request is None or why:
        return why
    there = result.environment or known_device(session, device).device_class
    why = _refusal(session, device, request, result)
    answers.note(request, result, there, why, now_us)
    if why:
        return why
    key = calibration(session, device, there).costs_key
    rows = {
        one.operator: (
            *(key, result.artifact, result.batch, one.operator),
            *(one.median_us, one.spread_us, one.runs, device, now_us),
        )
        for one in result.timings
    }
    insert_rows(
        session.connection(),
        OperatorCostRow.__tablename__,
        _COST,
        list(rows.values()),
        conflict=_NEWER_COST,
    )
    return ""


def _refusal(session: Session, device: DeviceId, request: ProfileRow, result: ProfileResult) -> str:
    """Why an answer to an open request cannot be taken."""
    if (result.artifact, result.batch) != (request.artifact, request.batch):
        return f"request {request.request} is about another artifact or batch"
    artifact = session.get(ArtifactRow, request.artifact)
    operators = artifact.operators if artifact is not None else 0
    if any(timing.operator >= operators for timing in result.timings):
        return f"the artifact of request {request.request} has {operators} operators"
    return answers.foreign(session, device, request, result.environment) or answers.implausible(
        result.timings
    )


def open_profiles(session: Session, requests: list[int]) -> list[int]:
    """Those of the requests that are not answered yet."""
    return list(
        session.scalars(
            select(ProfileRow.request).where(
                ProfileRow.request.in_(requests), ProfileRow.answered_at_us.is_(None)
            )
        )
    )


def profile_reasons(session: Session, requests: list[int]) -> dict[int, str]:
    """Per answered request why it is incomplete; an empty text where it is not."""
    found = session.execute(
        select(ProfileRow.request, ProfileRow.reason).where(
            ProfileRow.request.in_(requests), ProfileRow.answered_at_us.is_not(None)
        )
    )
    return {request: reason for request, reason in found}


def operator_costs(
    session: Session, device_class: str, artifact: Digest, batch: int
) -> dict[int, OperatorCost]:
    """Measured operators by index; those that were never measured are absent."""
    rows = session.connection().execute(
        _OPERATORS, {"there": device_class, "of": artifact, "batch_of": batch}
    )
    return {row[0]: OperatorCost(*row) for row in rows}


def keep_schedules(
    session: Session, device_class: str, scheduler: str, found: Iterable[FoundSchedule], now_us: int
) -> None:
    """Remember schedules that were found (TOP's stage_dict); a newer one replaces an older."""
    for one in found:
        session.merge(
            ScheduleRow(
                device_class=device_class,
                batch=one.batch,
                combined_block=one.combined_block,
                scheduler=scheduler,
                stage_string=one.stage_string,
                found_at_us=now_us,
            )
        )


def schedules(session: Session, keys: Sequence[str]) -> dict[tuple[Digest, int], tuple[str, ...]]:
    """Stage strings that were found under some keys, by (combined block, batch), the newest of them."""
    row = ScheduleRow
    found: dict[tuple[Digest, int], dict[str, None]] = {}
    rows = session.execute(
        select(row.combined_block, row.batch, row.stage_string)
        .where(row.device_class.in_(keys))
        .order_by(row.found_at_us.desc(), row.combined_block, row.scheduler)
        .limit(MOST_SCHEDULES)
    )
    for combined_block, batch, text in rows:
        found.setdefault((Digest(combined_block), batch), {})[text] = None
    return {key: tuple(texts) for key, texts in found.items()}


def kept_schedule(
    session: Session, device_class: str, batch: int, combined_block: Digest, scheduler: str
) -> str | None:
    """The stage string that was kept under this key."""
    row = session.get(ScheduleRow, (device_class, batch, combined_block, scheduler))
    return row.stage_string if row is not None else None

"""Measured stages, shared by all devices of one class: asked for plan by plan, kept stage by stage.

A stage's key is what it computes, whatever plan it came from: the device class, the executor's options, the
batch, the digest of its combined block, and its own text.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

import msgspec
from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from planner.store.calibrations import calibration
from planner.store.desired import Push, push
from planner.store.devices import known_device
from planner.store.plans import plan_info
from planner.store.tables import ArtifactRow, PlanRow, ProfileRow, StageCostRow, StageProfileRow
from shared.digest import digest_bytes
from shared.ids import DeviceId, Digest
from shared.messages.control import Desired
from shared.messages.telemetry import StageProfileResult
from shared.plan import ExecutorOptions, Plan, decode_plan
from shared.schedule import Stage, StageSchedule, joint_stage
from shared.search.costs import MeasuredStage, Members, combined_digest
from shared.stage_string import parse, to_string

_MEMBERS: Final = msgspec.msgpack.Decoder(Members)
MOST_STAGES: Final = 2_000
"""The newest that a search reads of a device class: what they teach is known long before."""

_STAGES: Final = (
    select(
        StageCostRow.members,
        StageCostRow.batch,
        StageCostRow.stage,
        StageCostRow.median_us,
        StageCostRow.runs,
        StageCostRow.measured_at_us,
    )
    .where(
        StageCostRow.device_class == bindparam("there"),
        StageCostRow.executor == bindparam("under"),
    )
    .order_by(StageCostRow.measured_at_us.desc(), StageCostRow.combined_block, StageCostRow.stage_digest)
    .limit(MOST_STAGES)
)
_parsed = lru_cache(maxsize=4096)(parse)  # every re-plan reads all stages of its class


def executor_key(options: ExecutorOptions) -> str:
    """What a stage's time depends on beside the device class."""
    return f"{options.name} threads={options.intra_op_threads} {options.precision}"


def next_request(session: Session) -> int:
    """A number that no profile request has: a device answers each number once."""
    used = [session.scalar(select(func.max(table.request))) for table in (ProfileRow, StageProfileRow)]
    return 1 + max(number or 0 for number in used)


def request_stages(
    session: Session,
    device: DeviceId,
    plan: str,
    *,
    combined_blocks: Sequence[int] = (),
    budget_s: float,
    now_us: int,
) -> tuple[int, Desired]:
    """Ask a device to measure a plan's stages; returns the request's number, and what is desired now.

    Of all its combined blocks, or of those named. Part of desired state, so it takes a generation, decided by
    "profile".

    Raises:
        InputError: there is no such device or plan, or the device is revoked.
    """
    known_device(session, device)
    name = plan_info(session, plan).plan
    request = next_request(session)
    session.add(
        StageProfileRow(
            request=request,
            device=device,
            plan=name,
            combined_blocks=msgspec.msgpack.encode(combined_blocks),
            budget_s=budget_s,
            requested_at_us=now_us,
            environment="",
            reason="",
        )
    )
    session.flush()
    return request, push(session, Push(device=device, plan=None, decided_by="profile"), now_us)


def store_stages(session: Session, device: DeviceId, result: StageProfileResult, now_us: int) -> None:
    """Keep part of a stage profile; a plan that this database does not know has nothing to keep it under.

    As with operators, measured is when it arrives.
    """
    request = session.get(StageProfileRow, result.request)
    if request is not None and request.device == device:
        request.environment, request.reason = result.environment, result.reason
        if result.last and request.answered_at_us is None:
            request.answered_at_us = now_us
    row = session.scalars(select(PlanRow).where(PlanRow.digest == result.plan).limit(1)).first()
    plan = decode_plan(row.wire) if row is not None else None
    if plan is None or result.combined_block >= len(plan.combined):
        return
    schedule = plan.combined[result.combined_block].schedule
    if not isinstance(schedule, StageSchedule):
        return
    members, batch = combined_block_key(session, plan, result.combined_block)
    there = result.environment or known_device(session, device).device_class
    key = calibration(session, device, there).costs_key
    for timing in result.timings:
        stage = joint_stage(schedule.stages[timing.stage : timing.stage + timing.stages])
        if stage is None:
            continue
        text = stage_text(stage)
        session.merge(
            StageCostRow(
                device_class=key,
                executor=executor_key(plan.executor),
                batch=batch,
                combined_block=combined_digest(members),
                members=msgspec.msgpack.encode(members),
                stage_digest=digest_bytes([text.encode()]),
                stage=text,
                median_us=timing.median_us,
                spread_us=timing.spread_us,
                runs=timing.runs,
                measured_on=device,
                measured_at_us=now_us,
            )
        )


def stage_text(stage: Stage) -> str:
    """The stage string of one stage."""
    return to_string(StageSchedule((stage,)))


def combined_block_key(session: Session, plan: Plan, combined_block: int) -> tuple[Members, int]:
    """(members, batch) of one combined block of a plan; its last borders come from the artifacts' sizes."""
    parts: list[tuple[Digest, int, int]] = []
    batch = 1
    for member in plan.combined[combined_block].members:
        model = plan.models[member.model]
        artifact = session.get(ArtifactRow, model.artifact)
        borders = (0, *model.cuts, artifact.operators if artifact is not None else 0)
        start, stop = list(pairwise(borders))[member.block]
        parts.append((model.artifact, start, stop))
        batch = max(batch, model.batch)
    return tuple(parts), batch


def stage_costs(session: Session, device_class: str, executor: ExecutorOptions) -> list[MeasuredStage]:
    """Measured stages of a device class under these options, the newest first, MOST_STAGES at most."""
    rows = session.connection().execute(_STAGES, {"there": device_class, "under": executor_key(executor)})
    found = []
    for members, batch, stage, median_us, runs, measured_at_us in rows:
        schedule = _parsed(stage)
        if isinstance(schedule, StageSchedule) and len(schedule.stages) == 1:
            (parsed,) = schedule.stages
            known = _MEMBERS.decode(members)
            found.append(
                MeasuredStage(
                    known, batch, parsed.groups, median_us / 1e6, parsed.merge, runs, measured_at_us
                )
            )
    return found


def open_requests(session: Session, requests: list[int]) -> list[int]:
    """Those of the stage requests that are not answered yet."""
    return list(
        session.scalars(
            select(StageProfileRow.request).where(
                StageProfileRow.request.in_(requests), StageProfileRow.answered_at_us.is_(None)
            )
        )
    )


def reasons(session: Session, requests: list[int]) -> dict[int, str]:
    """Per answered stage request why it is incomplete; an empty text where it is not."""
    found = session.execute(
        select(StageProfileRow.request, StageProfileRow.reason).where(
            StageProfileRow.request.in_(requests), StageProfileRow.answered_at_us.is_not(None)
        )
    )
    return {request: reason for request, reason in found}

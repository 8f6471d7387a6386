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

from stageloom.planner.store import answers
from stageloom.planner.store.calibrations import calibration
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.devices import known_device
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.tables import ArtifactRow, PlanRow, ProfileRow, StageCostRow, StageProfileRow
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Desired
from stageloom.shared.messages.telemetry import StageProfileResult
from stageloom.shared.plan import ExecutorOptions, Plan, decode_plan
from stageloom.shared.schedule import Stage, StageSchedule, joint_stage
from stageloom.shared.search.costs import MeasuredStage, Members, combined_digest
from stageloom.shared.stage_string import parse, to_string

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
    own = known_device(session, device).device_class
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
            environment=own,
            reason="",
        )
    )
    session.flush()
    return request, push(session, Push(device=device, plan=None, decided_by="profile"), now_us)


def store_stages(session: Session, device: DeviceId, result: StageProfileResult, now_us: int) -> str:
    """Keep part of a stage profile; returns why not, empty where it is kept.

    As with operators, measured is when it arrives.
    """
    request = session.get(StageProfileRow, result.request)
    why = answers.not_open(request, device, result.request)
    if request is None or why:
        return why
    row = session.get(PlanRow, request.plan)
    assert row is not None, "a request names a plan that is here"
    plan = decode_plan(row.wire)
    there = result.environment or known_device(session, device).device_class
    why = _refusal(plan, result)
    why = why or answers.foreign(session, device, request, result.environment)
    answers.note(request, result, there, why, now_us)
    if why or not result.timings:
        return why
    key = calibration(session, device, there).costs_key
    members, batch = combined_block_key(session, plan, result.combined_block)
    schedule = plan.combined[result.combined_block].schedule
    assert isinstance(schedule, StageSchedule), "other schedules have no stages to tell of"
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
    return ""


def _refusal(plan: Plan, result: StageProfileResult) -> str:
    """Why an answer to an open request about `plan` cannot be taken."""
    if result.plan != plan.digest:
        return f"request {result.request} is about another plan"
    if not result.timings:
        return ""
    stages = 0
    if result.combined_block < len(plan.combined):
        schedule = plan.combined[result.combined_block].schedule
        stages = len(schedule.stages) if isinstance(schedule, StageSchedule) else 0
    if any(timing.stages < 1 or timing.stage + timing.stages > stages for timing in result.timings):
        return f"combined block {result.combined_block} of the plan has {stages} stages"
    if not 0.0 <= result.step_us <= answers.MOST_US:
        return f"a step of {result.step_us:g} us is outside 0 to {answers.MOST_US:g}"
    return answers.implausible(result.timings)


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

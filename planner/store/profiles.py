"""Requests for measurements, and the devices'

Devices of one class share costs, so a device's answer counts only for what it was asked, and only in the
environment that it was asked in or has now.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import msgspec
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from stageloom.planner.store.costs import calibration_of, executor_key, stage_row
from stageloom.planner.store.database import now_us
from stageloom.planner.store.desired import Push, desired, desired_of, push, settled_desired
from stageloom.planner.store.machines import machine_of, usual_executor
from stageloom.planner.store.models import named_models
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.rows import insert_rows, known_device
from stageloom.planner.store.tables import (
    ArtifactRow,
    OperatorCostRow,
    PlanRow,
    ProfileRow,
    StageProfileRow,
)
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Desired
from stageloom.shared.messages.telemetry import (
    OperatorTiming,
    PartTiming,
    ProfileResult,
    StageProfileResult,
    StageTiming,
)
from stageloom.shared.plan import ExecutorOptions, Plan, decode_plan
from stageloom.shared.schedule import StageSchedule, joint_stage
from stageloom.shared.search.costs import Members, stage_batch

Request: TypeAlias = ProfileRow | StageProfileRow


MOST_US: Final = 3600e6
"""No operator or stage takes longer: a request may spend an hour at most (`ProfileRequest.budget_s`)."""


LEAST_US: Final = 1e-3
"""Nor less: clocks count whole nanoseconds. What divides by a time stays within bounds, too."""


_LINE: Final = 512  # characters of a reason

NO_ANSWER: Final = "no answer came: it was lost on its way, or the planner's database was restored"
"""Why a request ended that its device is taken to have answered. An answer that comes all the same counts."""


def _not_open(request: Request | None, device: DeviceId, number: int) -> str:
    """Why a device has nothing to say about a request; empty where it was asked and has not answered."""
    if request is None or request.device != device:
        return f"request {number} was not made of this device"
    is_open = request.answered_at_us is None or request.reason == NO_ANSWER
    return "" if is_open else f"request {number} was answered before"


def _foreign(session: Session, device: DeviceId, request: Request, environment: str) -> str:
    """Why measurements of an environment are not the device's to tell; empty where they are.

    They are of the class that it was when it was asked, or is now: its power mode may change in between.
    """
    own = known_device(session, device).device_class
    if environment in ("", own, request.environment):
        return ""
    return f"it measured in {environment!r}, and is {own!r}"


def answers_request(
    session: Session, device: DeviceId, request: Request | None, number: int, environment: str
) -> str:
    """Why measurements are no answer to a request: it is not open, or they are of another environment; empty
    where they are."""
    why = _not_open(request, device, number)
    return why if request is None or why else _foreign(session, device, request, environment)


def implausible(timings: Iterable[OperatorTiming | PartTiming | StageTiming]) -> str:
    """Why these cannot be times; empty where they can. NaN and infinity have not passed the decoder."""
    for timing in timings:
        if not LEAST_US <= timing.median_us <= MOST_US:
            return f"a time of {timing.median_us:g} us is outside {LEAST_US:g} to {MOST_US:g}"
        if not 0.0 <= timing.spread_us <= MOST_US or timing.runs < 1:
            return f"a spread of {timing.spread_us:g} us over {timing.runs} runs cannot be"
    return ""


def _note_answer(
    request: Request, result: ProfileResult | StageProfileResult, environment: str, refusal: str, now_us: int
) -> None:
    """Enter part of an answer into its request.

    A refused answer ends the request as well: the device sends no other.
    """
    if request.reason == NO_ANSWER:
        request.answered_at_us, request.reason = None, ""
    if not refusal:
        request.environment = environment
    if result.reason or refusal:
        request.reason = (f"refused: {refusal}" if refusal else result.reason)[:_LINE]
    if result.last:
        request.answered_at_us = now_us


_COST_KEY: Final = ("device_class", "executor", "artifact", "batch", "operator")

_COST: Final = (*_COST_KEY, "median_us", "spread_us", "runs", "measured_on", "measured_at_us")

_NEWER_COST: Final = f"ON CONFLICT ({', '.join(_COST_KEY)}) DO UPDATE SET " + ", ".join(
    f"{name} = excluded.{name}" for name in _COST[len(_COST_KEY) :]
)


def request_profile(
    session: Session,
    device: DeviceId,
    names: list[str],
    *,
    batch: int = 1,
    budget_s: float = 20.0,
    executor: ExecutorOptions | None = None,
    parts: int = 0,
    unless_open: bool = False,
) -> tuple[list[int], Desired]:
    """Ask a device to measure some models; returns the requests' numbers, and what is desired now.

    On `executor`; None: on what runs a model there by the plan that is desired, else on what the agent is
    set to. `parts`: and parts of operators, of so many extents per axis. The budget is shared evenly. A
    request is part of desired state and so takes a generation, decided by "profile", once it has its turn
    (`tell_requests`). With `unless_open` an open request for the same stands for a new one.

    Raises:
        InputError: there is no such device or model, the device is revoked, or it cannot use the executor.
    """
    own = known_device(session, device).device_class
    before = settled_desired(session, device)
    first = next_request(session)
    machine = machine_of(session, device)
    if parts and machine is None:
        raise InputError(
            f"the agent of {device} is too old to measure parts of operators",
            remedy="start an agent of this version there",
        )
    if executor is not None:
        if machine is None:
            raise InputError(
                f"{device} has not told which executors it has, so none can be named",
                remedy="start an agent of this version there, or leave the executor out",
            )
        machine.require(executor.name, device)
    serving = {} if machine is None else _serving(session, device)
    usual = usual_executor(machine)

    def asked(artifact: Digest) -> tuple[str, int]:
        found = executor or serving.get(artifact) or usual
        return ("", 0) if found is None else (found.name, found.intra_op_threads)

    models = [(info, *asked(info.digest)) for info in named_models(session, names)]
    opened = _open_profiles(session, device, own, batch, parts) if unless_open else {}
    known = [opened.get((info.digest, name, threads)) for info, name, threads in models]
    rows = [
        ProfileRow(
            request=first + at,
            device=device,
            model=info.model,
            artifact=info.digest,
            batch=batch,
            budget_s=budget_s / len(names),
            requested_at_us=now_us(session),
            environment=own,
            reason="",
            executor=name,
            intra_op_threads=threads,
            parts=parts,
        )
        for at, ((info, name, threads), number) in enumerate(zip(models, known, strict=True))
        if number is None
    ]
    session.add_all(rows)
    asked_before = [number for number in known if number is not None]
    return [*asked_before, *(row.request for row in rows)], _asked(session, device, before)


def _open_profiles(
    session: Session, device: DeviceId, environment: str, batch: int, parts: int
) -> dict[tuple[Digest, str, int], int]:
    """Requests that a device has not answered yet, by (artifact, executor, threads) that they name."""
    rows = session.scalars(
        select(ProfileRow)
        .where(
            ProfileRow.device == device,
            ProfileRow.environment == environment,
            ProfileRow.batch == batch,
            ProfileRow.parts == parts,
            ProfileRow.answered_at_us.is_(None),
        )
        .order_by(ProfileRow.request)
    )
    return {(Digest(row.artifact), row.executor, row.intra_op_threads): row.request for row in rows}


def _serving(session: Session, device: DeviceId) -> dict[Digest, ExecutorOptions]:
    """What runs each artifact by the plan that is desired of a device."""
    wanted = desired(session, device)
    if wanted is None or not wanted.plan:
        return {}
    plan = decode_plan(wanted.plan)
    return {
        plan.models[member.model].artifact: plan.executors[block.executor]
        for block in plan.combined
        for member in block.members
    }


def store_profile(session: Session, device: DeviceId, result: ProfileResult) -> str:
    """Keep part of a profile; returns why not, empty where it is kept.

    Costs belong to the environment that the device measured them in. They count as measured when they arrive:
    a device's wall clock may be wrong by years.
    """
    request = session.get(ProfileRow, result.request)
    why = _not_open(request, device, result.request)
    if request is None or why:
        return why
    there = result.environment or known_device(session, device).device_class
    why = _refusal(session, device, request, result)
    _note_answer(request, result, there, why, now_us(session))
    if why:
        return why
    key = calibration_of(session, device, there).costs_key
    asked = ExecutorOptions(name=request.executor, intra_op_threads=request.intra_op_threads)
    under = executor_key(asked) if request.executor else ""
    rows = {
        one.operator: (
            *(key, under, result.artifact, result.batch, one.operator),
            *(one.median_us, one.spread_us, one.runs, device, now_us(session)),
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
    return _foreign(session, device, request, result.environment) or implausible(result.timings)


def next_request(session: Session) -> int:
    """A number that no profile request has: a device answers each number once."""
    used = [session.scalar(select(func.max(table.request))) for table in (ProfileRow, StageProfileRow)]
    return 1 + max(number or 0 for number in used)


def request_stage_profile(
    session: Session,
    device: DeviceId,
    plan: str,
    *,
    combined_blocks: Sequence[int] = (),
    budget_s: float = 10.0,
) -> tuple[int, Desired]:
    """Ask a device to measure a plan's stages; returns the request's number, and what is desired now.

    Of all its combined blocks, or of those named. Part of desired state, so it takes a generation, decided by
    "profile", once it has its turn (`tell_requests`).

    Raises:
        InputError: there is no such device or plan, or the device is revoked.
    """
    own = known_device(session, device).device_class
    before = settled_desired(session, device)
    name = plan_info(session, plan).plan
    request = next_request(session)
    session.add(
        StageProfileRow(
            request=request,
            device=device,
            plan=name,
            combined_blocks=msgspec.msgpack.encode(combined_blocks),
            budget_s=budget_s,
            requested_at_us=now_us(session),
            environment=own,
            reason="",
        )
    )
    return request, _asked(session, device, before)


def tell_requests(session: Session, device: DeviceId, before: Desired | None) -> Desired | None:
    """Push where a device is now to measure something that `before`, what it was told, did not ask for.

    A value holds the oldest requests: as many as a message has room for, and the stages of one plan. The
    others have their turn as those end. A push without a new request would be one too many: it says to try
    a rejected plan again.

    Raises:
        InputError: the device is revoked.
    """
    if before is not None and (now := desired(session, device)) is not None and _asks(now) <= _asks(before):
        return None
    return push(session, Push(device=device, plan=None, decided_by="profile"))


def listed_requests(session: Session, devices: Collection[DeviceId]) -> dict[DeviceId, frozenset[int]]:
    """Numbers of the open requests that devices are told of; those without any are left out."""
    found = desired_of(session, sorted(devices))
    return {device: frozenset(asked) for device, value in found.items() if (asked := _asks(value))}


def end_unanswered(session: Session, device: DeviceId, requests: Collection[int]) -> Desired | None:
    """End requests that are still open; returns what is desired where others have their turn now.

    Raises:
        InputError: the device is revoked.
    """
    before = settled_desired(session, device)
    for table in (ProfileRow, StageProfileRow):
        still_open = table.request.in_(requests), table.answered_at_us.is_(None)
        ended = {"answered_at_us": now_us(session), "reason": NO_ANSWER}
        session.execute(update(table).where(*still_open).values(ended))
    return tell_requests(session, device, before)


def _asked(session: Session, device: DeviceId, before: Desired | None) -> Desired:
    """What is desired now that more was asked of a device.

    Raises:
        InputError: the device is revoked.
    """
    session.flush()
    told = tell_requests(session, device, before)
    if told is not None:
        return told
    assert before is not None, "the first request of all is told at once"
    if known_device(session, device).revoked:
        raise InputError(f"device {device!r} is revoked", remedy="enrol it again with a new token")
    return before


def _asks(value: Desired) -> set[int]:
    """Numbers of the requests in a value."""
    stages = {value.stage_profile.request} if value.stage_profile is not None else set()
    return {profile.request for profile in value.profiles} | stages


def store_stage_profile(session: Session, device: DeviceId, result: StageProfileResult) -> str:
    """Keep part of a stage profile; returns why not, empty where it is kept.

    As with operators, measured is when it arrives.
    """
    request = session.get(StageProfileRow, result.request)
    why = _not_open(request, device, result.request)
    if request is None or why:
        return why
    asked = session.get(PlanRow, request.plan)
    assert asked is not None, "a request names a plan that is here"
    plan = decode_plan(asked.wire)
    there = result.environment or known_device(session, device).device_class
    why = _stage_refusal(plan, result) or _foreign(session, device, request, result.environment)
    _note_answer(request, result, there, why, now_us(session))
    if why or not result.timings:
        return why
    if any(plan.models[member.model].splits for member in plan.combined[result.combined_block].members):
        return ""  # its stages are of other operators than the artifacts', which share what is kept
    key = calibration_of(session, device, there).costs_key
    members, batch = combined_block_key(session, plan, result.combined_block)
    if batch is None:
        return ""  # its stages are of no other block
    schedule = plan.combined[result.combined_block].schedule
    assert isinstance(schedule, StageSchedule), "other schedules have no stages to tell of"
    for timing in result.timings:
        stage = joint_stage(schedule.stages[timing.stage : timing.stage + timing.stages])
        if stage is None or stage.resources:  # of groups elsewhere it tells nothing of the block's executor
            continue
        row = stage_row(
            *(key, plan.executors[plan.combined[result.combined_block].executor], members, batch, stage),
            median_us=timing.median_us,
            spread_us=timing.spread_us,
            runs=timing.runs,
            measured_on=device,
            measured_at_us=now_us(session),
        )
        session.merge(row)
    return ""


def _stage_refusal(plan: Plan, result: StageProfileResult) -> str:
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
    if not 0.0 <= result.step_us <= MOST_US:
        return f"a step of {result.step_us:g} us is outside 0 to {MOST_US:g}"
    return implausible(result.timings)


def combined_block_key(session: Session, plan: Plan, combined_block: int) -> tuple[Members, int | None]:
    """(members, `stage_batch`) of a combined block; its last borders come from the artifacts' sizes."""
    own = plan.combined[combined_block].members
    parts: list[tuple[Digest, int, int]] = []
    for member in own:
        model = plan.models[member.model]
        artifact = session.get(ArtifactRow, model.artifact)
        borders = (0, *model.cuts, artifact.operators if artifact is not None else 0)
        start, stop = list(pairwise(borders))[member.block]
        parts.append((model.artifact, start, stop))
    return tuple(parts), stage_batch(plan.models[member.model].batch for member in own)


def open_requests(session: Session, requests: Sequence[int]) -> list[int]:
    """Those of the requests, for operators or stages, that are not answered yet; ascending."""
    return sorted(
        number
        for table in (ProfileRow, StageProfileRow)
        for number in session.scalars(
            select(table.request).where(table.request.in_(requests), table.answered_at_us.is_(None))
        )
    )


def asked_executors(session: Session, requests: Sequence[int]) -> dict[int, ExecutorOptions]:
    """Per request for operators what it named to measure on; those that named none are absent."""
    rows = session.scalars(
        select(ProfileRow).where(ProfileRow.request.in_(requests), ProfileRow.executor != "")
    )
    return {
        row.request: ExecutorOptions(name=row.executor, intra_op_threads=row.intra_op_threads) for row in rows
    }


def answer_reasons(session: Session, requests: Sequence[int]) -> dict[int, str]:
    """Per answered request, for operators or stages, why its answer is incomplete; empty where it is not."""
    return {
        number: reason
        for table in (ProfileRow, StageProfileRow)
        for number, reason in session.execute(
            select(table.request, table.reason).where(
                table.request.in_(requests), table.answered_at_us.is_not(None)
            )
        )
    }

"""Devices: join tokens, the list, revocation, quarantine, how they are re-planned, what they measure."""

import math
import secrets
import time
from typing import Final

import msgspec

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiCall, ApiContext, desiring, handles
from stageloom.planner.api.jobs import Job
from stageloom.planner.labels import checked_changes, parse_selection
from stageloom.planner.plan_search import unsure_of
from stageloom.planner.schema import device as schema
from stageloom.planner.schema.base import Done, Page
from stageloom.planner.schema.plan import Pushed
from stageloom.planner.schema.replan import Replanning, ReplanningChangeRequest, ReplanningShowRequest
from stageloom.planner.store.costs import calibration_of, operator_costs
from stageloom.planner.store.devices import (
    add_token,
    device_info,
    device_infos,
    release_device,
    revoke_device,
)
from stageloom.planner.store.generations import generation_history
from stageloom.planner.store.labels import change_labels
from stageloom.planner.store.machines import machine_of, whole_times
from stageloom.planner.store.models import named_models, newest_models
from stageloom.planner.store.parts import part_samples_of
from stageloom.planner.store.policies import attach_policy
from stageloom.planner.store.profiles import (
    answer_reasons,
    asked_executors,
    open_requests,
    request_profile,
    request_stage_profile,
)
from stageloom.planner.store.replan_settings import change_replan_settings, replan_settings
from stageloom.planner.store.telemetry import telemetry_rows
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError, UnavailableError
from stageloom.shared.failpoint import failpoint
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import MAX_PROFILED, Desired
from stageloom.shared.messages.telemetry import RowKind, StageProfileResult
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.registry import require_scheduler
from stageloom.shared.token import format_token

SECRET_BYTES: Final = 16
_POLL_S: Final = 0.2

SPLIT_POINTS: Final = 9
"""Extents per axis of parts of operators: as many as patterns need (`stageloom.shared.search.patterns`)."""


def now(api: ApiContext, infos: list[schema.DeviceInfo]) -> tuple[schema.DeviceInfo, ...]:
    """Devices with who is online; the store learns of that only when a report changes."""
    if api.running is None:
        return tuple(infos)
    online, now_us = api.running.fleet.online(), api.clock.wall_us()
    return tuple(
        msgspec.structs.replace(info, online=True, last_seen_us=max(info.last_seen_us, now_us))
        if info.device in online
        else info
        for info in infos
    )


@handles(routes.DEVICE_LIST)
def device_list(api: ApiContext, request: schema.DeviceListRequest, call: ApiCall) -> Page[schema.DeviceInfo]:
    labels = parse_selection(request.label)
    infos = api.reader.read(device_infos, after=request.after, limit=request.limit + 1, labels=labels)
    shown = now(api, infos[: request.limit])
    return Page(items=shown, next=shown[-1].device if len(infos) > request.limit else "")


@handles(routes.DEVICE_SHOW)
def device_show(api: ApiContext, request: schema.DeviceShowRequest, call: ApiCall) -> schema.DeviceShowReply:
    (device,) = now(api, [api.reader.read(device_info, request.device)])
    entries, _ = api.reader.read(generation_history, request.device)
    told = api.reader.read(machine_of, request.device)
    machine = (
        None
        if told is None
        else schema.MachineInfo(
            cores=told.cores,
            executors=tuple(
                schema.ExecutorInfo(name=name, problem=why) for name, why in told.problems.items()
            ),
        )
    )
    return schema.DeviceShowReply(device=device, machine=machine, history=tuple(entries))


@handles(routes.DEVICE_TOKEN)
def device_token(
    api: ApiContext, request: schema.DeviceTokenRequest, call: ApiCall
) -> schema.DeviceTokenReply:
    secret = secrets.token_bytes(SECRET_BYTES)
    expires_at_us = api.store.write(add_token, digest_bytes([secret]), request.device, request.lifetime_s)
    token = format_token(api.live.fleet.token(secret))
    return schema.DeviceTokenReply(token=token, expires_at_us=expires_at_us)


@handles(routes.DEVICE_REVOKE)
def device_revoke(api: ApiContext, request: schema.DeviceRevokeRequest, call: ApiCall) -> Done:
    api.store.write(revoke_device, request.device)
    api.live.fleet.revoked(request.device)
    return Done()


@handles(routes.DEVICE_LABEL)
def device_label(api: ApiContext, request: schema.DeviceLabelRequest, call: ApiCall) -> schema.DeviceLabels:
    changes = checked_changes(request.labels, request.remove)
    labels = api.store.write(change_labels, request.device, changes)
    return schema.DeviceLabels(device=request.device, labels=labels)


@handles(routes.DEVICE_RELEASE)
def device_release(api: ApiContext, request: schema.DeviceReleaseRequest, call: ApiCall) -> Done:
    api.store.write(release_device, request.device)
    api.live.fleet.released(request.device)
    return Done()


# -- how a device is re-planned ---------------------------------------------------------------------------


@handles(routes.REPLANNING_SHOW)
def replanning_show(api: ApiContext, request: ReplanningShowRequest, call: ApiCall) -> Replanning:
    return Replanning(**api.reader.read(replan_settings, request.device).fields())


@handles(routes.REPLANNING_CHANGE)
def replanning_change(api: ApiContext, request: ReplanningChangeRequest, call: ApiCall) -> Replanning:
    names = Replanning.__struct_fields__
    changes = {name: value for name in names if (value := getattr(request, name)) is not None}
    if request.scheduler is not None:
        require_scheduler(request.scheduler)
    return Replanning(**api.store.write(change_replan_settings, request.device, changes).fields())


@handles(routes.POLICY_ATTACH)
def policy_attach(api: ApiContext, request: schema.PolicyAttachRequest, call: ApiCall) -> Pushed:
    with desiring(api.live.fleet, request.device):
        desired = api.store.write(attach_policy, request.device, request.policy, unchecked=request.unchecked)
    return pushed(api, request.device, desired)


def pushed(api: ApiContext, device: DeviceId, desired: Desired) -> Pushed:
    """Tell a device what it should do now, and the client what that is."""
    failpoint("planner.desired.after")
    api.live.fleet.desired_changed(device, desired)
    return Pushed(
        device=device, epoch=desired.epoch, generation=desired.generation, autonomy=desired.autonomy
    )


# -- measurements -----------------------------------------------------------------------------------------


@handles(routes.DEVICE_PROFILE)
def device_profile(api: ApiContext, request: schema.DeviceProfileRequest, call: ApiCall) -> object:
    named = request.executor or request.intra_op_threads
    if request.plan is not None and (request.models or request.batch != 1 or named):
        raise InputError(
            "the stages of a plan are measured as it is",
            remedy="leave out models, batch, executor and threads",
        )
    if request.intra_op_threads is not None and request.executor is None:
        raise InputError("threads are those of an executor", remedy="name the executor, too")
    if request.splits and (request.plan is not None or request.batch != 1):
        raise InputError(
            "parts of operators are of models, one task at a time", remedy="leave out the plan and the batch"
        )
    if request.unsure_only and request.plan is None:
        raise InputError("unsure_only is about the stages of a plan", remedy="name the plan")
    api.store.read(device_info, request.device)  # known before a job begins
    return lambda job: measured(api, request, job)


def measured(api: ApiContext, request: schema.DeviceProfileRequest, job: Job) -> schema.DeviceProfileReply:
    """Ask a device, and wait for what it answers.

    Raises:
        InputError: there is no such device, model or plan, or nothing to measure.
        UnavailableError: it does not answer in time.
        JobCancelled: the job should end.
    """
    models = request.models or tuple(api.store.read(newest_models, schema.MOST_PROFILED))
    if request.plan is not None:
        reply = _ask_stages(api, request, request.plan)
    elif models:
        reply = _ask_operators(api, request, models)
    else:
        raise InputError("the planner has no models to measure", remedy="add some with `stageloom model add`")
    if not reply.requests or not request.wait_s:
        return reply
    _wait(api, request, reply, job)
    reasons = api.store.read(answer_reasons, list(reply.requests))
    rows = _costs(api, request, models, reply, reasons) if request.plan is None else ()
    told = [reason for reason in reasons.values() if reason]
    told += [
        f"{row.model}: no parts of operators were told; start an agent of this version there"
        for row in rows
        if row.parts == 0 and not row.reason
    ]
    said = tuple(dict.fromkeys(told))
    stages = None if request.plan is None else _stages(api, request.device, reply.requests[0])
    return msgspec.structs.replace(reply, measured=rows, stages=stages, reasons=said)


def _stages(api: ApiContext, device: DeviceId, number: int) -> int:
    """How many stages a device has told times of for a request, whether they are kept as costs or not."""
    rows = api.store.read(telemetry_rows, device, [RowKind.STAGE_PROFILE_RESULT])
    told = [row.data for row in rows if isinstance(row.data, StageProfileResult)]
    return sum(len(result.timings) for result in told if result.request == number)


def _ask_operators(
    api: ApiContext, request: schema.DeviceProfileRequest, models: tuple[str, ...]
) -> schema.DeviceProfileReply:
    with desiring(api.live.fleet, request.device):
        numbers, desired = api.store.write(
            request_profile,
            request.device,
            list(models),
            batch=request.batch,
            budget_s=request.budget_s,
            executor=_named_executor(request),
            parts=SPLIT_POINTS if request.splits else 0,
        )
    return _asked(api, request.device, tuple(numbers), desired)


def _named_executor(request: schema.DeviceProfileRequest) -> ExecutorOptions | None:
    if request.executor is None:
        return None
    return ExecutorOptions(name=request.executor, intra_op_threads=request.intra_op_threads or 1)


def _ask_stages(
    api: ApiContext, request: schema.DeviceProfileRequest, plan: str
) -> schema.DeviceProfileReply:
    blocks: tuple[int, ...] = ()
    if request.unsure_only:
        blocks = unsure_of(api.store, request.device, plan, api.clock.wall_us())
        if not blocks:
            return schema.DeviceProfileReply(requests=(), epoch=0, generation=0)
    with desiring(api.live.fleet, request.device):
        number, desired = api.store.write(
            request_stage_profile,
            request.device,
            plan,
            combined_blocks=blocks if len(blocks) <= MAX_PROFILED else (),
            budget_s=request.budget_s,
        )
    return _asked(api, request.device, (number,), desired)


def _asked(
    api: ApiContext, device: DeviceId, requests: tuple[int, ...], desired: Desired
) -> schema.DeviceProfileReply:
    api.live.fleet.desired_changed(device, desired)
    return schema.DeviceProfileReply(requests=requests, epoch=desired.epoch, generation=desired.generation)


def _wait(
    api: ApiContext, request: schema.DeviceProfileRequest, reply: schema.DeviceProfileReply, job: Job
) -> None:
    size = len(reply.requests)
    give_up_s = api.clock.monotonic_s() + request.wait_s
    left = -1
    while still_open := len(api.store.read(open_requests, list(reply.requests))):
        job.check()
        if still_open != left:
            left = still_open
            online = request.device in api.live.fleet.online()
            waits = "it measures when it is idle" if online else "it is offline"
            job.progress(f"{request.device} has {left} requests left; {waits}", done=size - left, size=size)
        if api.clock.monotonic_s() > give_up_s:
            raise UnavailableError(
                f"{request.device} has not answered within {request.wait_s:g} s",
                remedy="it answers when it is online and idle; see `stageloom device show`",
            )
        time.sleep(_POLL_S)


def _costs(
    api: ApiContext,
    request: schema.DeviceProfileRequest,
    models: tuple[str, ...],
    reply: schema.DeviceProfileReply,
    reasons: dict[int, str],
) -> tuple[schema.ModelMeasured, ...]:
    key = api.store.read(calibration_of, request.device).costs_key
    rows = []
    infos = api.store.read(named_models, list(models))
    asked = api.store.read(asked_executors, list(reply.requests))
    for number, info in zip(reply.requests, infos, strict=True):
        executor = asked.get(number)
        timings = api.store.read(
            operator_costs, key, info.digest, request.batch, executor or ExecutorOptions()
        )
        rows.append(
            schema.ModelMeasured(
                model=info.model,
                batch=request.batch,
                executor="" if executor is None else executor.name,
                intra_op_threads=0 if executor is None else executor.intra_op_threads,
                whole_us=None if executor is None else _whole_us(api, request, info.digest, executor),
                operators=info.operators,
                measured=len(timings),
                total_us=round(sum(timing.median_us for timing in timings.values()), 1),
                reason=reasons.get(number, ""),
                parts=_parts(api, request, info.digest, executor),
            )
        )
    return tuple(rows)


def _parts(
    api: ApiContext, request: schema.DeviceProfileRequest, artifact: Digest, executor: ExecutorOptions | None
) -> int | None:
    if not request.splits or executor is None:
        return None
    device_class = api.store.read(device_info, request.device).device_class
    return len(api.store.read(part_samples_of, device_class, artifact, executor))


def _whole_us(
    api: ApiContext, request: schema.DeviceProfileRequest, artifact: Digest, executor: ExecutorOptions
) -> float | None:
    times = api.store.read(whole_times, request.device, [artifact]).get(artifact, {})
    way = ExecutorOptions(name=executor.name, intra_op_threads=executor.intra_op_threads)
    seconds = times.get((way, request.batch), math.inf)
    return 1e6 * seconds if seconds < math.inf else None

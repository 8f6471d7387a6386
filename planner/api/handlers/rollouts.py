"""Rollouts: begun, shown, paused, resumed, aborted. The service carries them out."""

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiCall, ApiContext, desiring, handles
from stageloom.planner.schema import rollout as schema
from stageloom.planner.schema.base import Page
from stageloom.planner.store.rollouts import (
    abort_rollout,
    create_rollout,
    pause_rollout,
    resume_rollout,
    rollout_devices,
    rollout_info,
    rollout_infos,
)


@handles(routes.ROLLOUT_CREATE)
def rollout_create(
    api: ApiContext, request: schema.RolloutCreateRequest, call: ApiCall
) -> schema.RolloutInfo:
    info = api.store.write(create_rollout, request)
    api.live.wake_rollouts()
    return info


@handles(routes.ROLLOUT_LIST)
def rollout_list(
    api: ApiContext, request: schema.RolloutListRequest, call: ApiCall
) -> Page[schema.RolloutInfo]:
    found = api.reader.read(rollout_infos, after=request.after, limit=request.limit + 1)
    shown = tuple(found[: request.limit])
    return Page(items=shown, next=shown[-1].rollout if len(found) > request.limit else "")


@handles(routes.ROLLOUT_SHOW)
def rollout_show(api: ApiContext, request: schema.RolloutShowRequest, call: ApiCall) -> schema.RolloutInfo:
    return api.reader.read(rollout_info, request.rollout)


@handles(routes.ROLLOUT_DEVICES)
def rollout_members(
    api: ApiContext, request: schema.RolloutDevicesRequest, call: ApiCall
) -> Page[schema.RolloutDeviceInfo]:
    found = api.reader.read(rollout_devices, request.rollout, after=request.after, limit=request.limit + 1)
    shown = tuple(found[: request.limit])
    return Page(items=shown, next=shown[-1].device if len(found) > request.limit else "")


@handles(routes.ROLLOUT_PAUSE)
def rollout_pause(api: ApiContext, request: schema.RolloutPauseRequest, call: ApiCall) -> schema.RolloutInfo:
    info = api.store.write(pause_rollout, request.rollout)
    api.live.wake_rollouts()
    return info


@handles(routes.ROLLOUT_RESUME)
def rollout_resume(
    api: ApiContext, request: schema.RolloutResumeRequest, call: ApiCall
) -> schema.RolloutInfo:
    info = api.store.write(resume_rollout, request.rollout)
    api.live.wake_rollouts()
    return info


@handles(routes.ROLLOUT_ABORT)
def rollout_abort(api: ApiContext, request: schema.RolloutAbortRequest, call: ApiCall) -> schema.RolloutInfo:
    with desiring(api.live.fleet):
        info, changed = api.store.write(abort_rollout, request.rollout, rollback=request.rollback)
    for device, desired in changed:
        api.live.fleet.desired_changed(device, desired)
    api.live.wake_rollouts()
    return info

"""What the buttons do: each is a verb of the API, with its role and its entry in the audit log."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiCall, ApiContext
from stageloom.planner.api.handlers import handler_of
from stageloom.planner.api.jobs import Job
from stageloom.planner.api.page.visit import Visit
from stageloom.planner.api.problem import ApiRefused, problem_of
from stageloom.planner.api.route import Route, plainly
from stageloom.planner.schema.base import Reply, Request
from stageloom.planner.schema.device import DeviceReleaseRequest, DeviceRevokeRequest
from stageloom.planner.schema.job import JobInfo
from stageloom.planner.schema.plan import PlanCreateRequest, PlanPushRequest
from stageloom.planner.schema.replan import ReplanningChangeRequest
from stageloom.planner.schema.rollout import RolloutAbortRequest, RolloutPauseRequest, RolloutResumeRequest
from stageloom.planner.store.access import note_request
from stageloom.planner.store.devices import device_info
from stageloom.shared.errors import InputError, StageloomError, TokenError, UnavailableError
from stageloom.shared.ids import DeviceId

logger = logging.getLogger(__name__)

_PUSH_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class PageAction:
    """A verb, what it is about, what carries it out, and the page to show after its answer."""

    route: Route[Any, Any]
    target: str
    do: Callable[[ApiCall], Any]
    then: Callable[[Any], str]


Action = Callable[[Visit], PageAction]


class PageReplan(Reply, frozen=True, kw_only=True):
    """What a re-plan by hand came to: the plan it found, and whether the device is to try it."""

    plan: str
    pushed: bool


def replan(visit: Visit) -> PageAction:
    """Search a plan for a device and have the device try it, unless that plan runs there."""
    device = DeviceId(visit.path["device"])

    def do(call: ApiCall) -> Any:
        create = _request(PlanCreateRequest, device=device)
        search = handler_of(routes.PLAN_CREATE)(visit.api, create, call)
        return lambda job: _search_and_push(visit.api, device, call, search, job)

    def then(job: JobInfo) -> str:
        return f"/ui/devices/{device}/jobs/{job.job}"

    return PageAction(route=routes.PLAN_CREATE, target=device, do=do, then=then)


def _search_and_push(
    api: ApiContext, device: DeviceId, call: ApiCall, search: Callable[[Job], Any], job: Job
) -> PageReplan:
    found = search(job).plan
    job.check()
    if found.digest == api.store.read(device_info, device).report.active:
        return PageReplan(plan=found.plan, pushed=False)
    _push(api, device, call, found.plan)
    return PageReplan(plan=found.plan, pushed=True)


def _push(api: ApiContext, device: DeviceId, call: ApiCall, plan: str) -> None:
    """As a request for it: while the token holds, and with its entry in the audit log however it ends.

    Raises:
        ApiRefused: it was not pushed, or not committed in time.
    """
    status: int = HTTPStatus.CREATED
    try:
        if not api.live.tokens.holds(call.principal):
            raise TokenError(
                f"the access token {call.principal.name} was revoked during the search",
                remedy="sign in with one that holds",
            )
        request = _request(PlanPushRequest, plan=plan, devices=(device,))
        _in_time(handler_of(routes.PLAN_PUSH)(api, request, call), device, plan)
    except Exception as error:
        refused = problem_of(error, routes.PLAN_PUSH.name)
        status = refused.status
        raise ApiRefused(refused) from error
    finally:
        try:
            api.store.write(note_request, call.principal, routes.PLAN_PUSH.name, plan, status)
        except StageloomError as error:
            logger.warning("the audit log lacks an entry: %s", error)


def _in_time(reply: "Future[Any]", device: DeviceId, plan: str) -> None:
    """Raises:
    UnavailableError: the push was not committed in time.
    StageloomError: it was refused.
    """
    try:
        reply.result(_PUSH_S)
    except TimeoutError as error:
        raise UnavailableError(
            f"the push of {plan} was not committed within {_PUSH_S:g} s and may still be",
            remedy=f"see `stageloom plan history {device}`",
        ) from error


def revoke(visit: Visit) -> PageAction:
    """Take a device's key away."""
    return _of_device(visit, routes.DEVICE_REVOKE, DeviceRevokeRequest)


def release(visit: Visit) -> PageAction:
    """End a device's quarantine."""
    return _of_device(visit, routes.DEVICE_RELEASE, DeviceReleaseRequest)


def set_replanning(visit: Visit) -> PageAction:
    """Have a device's alarms begin re-plans, or not."""
    return _of_device(
        visit, routes.REPLANNING_CHANGE, ReplanningChangeRequest, enabled=visit.query.get("enabled") == "yes"
    )


def pause(visit: Visit) -> PageAction:
    """Have a rollout ask no further device."""
    return _of_rollout(visit, routes.ROLLOUT_PAUSE, RolloutPauseRequest)


def resume(visit: Visit) -> PageAction:
    """Go on with a rollout."""
    return _of_rollout(visit, routes.ROLLOUT_RESUME, RolloutResumeRequest)


def abort(visit: Visit) -> PageAction:
    """End a rollout."""
    rollback = visit.query.get("rollback") == "yes"
    return _of_rollout(visit, routes.ROLLOUT_ABORT, RolloutAbortRequest, rollback=rollback)


def _of_device(visit: Visit, route: Route[Any, Any], kind: type[Request], **fields: Any) -> PageAction:
    device = visit.path["device"]
    return _verb(visit, route, _request(kind, device=device, **fields), device, f"/ui/devices/{device}")


def _of_rollout(visit: Visit, route: Route[Any, Any], kind: type[Request], **fields: Any) -> PageAction:
    name = visit.path["rollout"]
    return _verb(visit, route, _request(kind, rollout=name, **fields), name, f"/ui/rollouts/{name}")


def _verb(visit: Visit, route: Route[Any, Any], request: Request, target: str, page: str) -> PageAction:
    """A request, then a page."""
    return PageAction(
        route=route,
        target=target,
        do=lambda call: handler_of(route)(visit.api, request, call),
        then=lambda _: page,
    )


def _request(kind: type[Request], **fields: Any) -> Any:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise InputError(plainly(str(error)), remedy="use the buttons of the page") from error


ACTIONS: Final[tuple[tuple[str, Action], ...]] = (
    ("/ui/devices/{device}/replan", replan),
    ("/ui/devices/{device}/revoke", revoke),
    ("/ui/devices/{device}/release", release),
    ("/ui/devices/{device}/replanning", set_replanning),
    ("/ui/rollouts/{rollout}/pause", pause),
    ("/ui/rollouts/{rollout}/resume", resume),
    ("/ui/rollouts/{rollout}/abort", abort),
)

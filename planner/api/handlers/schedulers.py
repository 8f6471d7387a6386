"""Schedulers: which there are, and how they compare; searched where searches run, measured by a device."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Final

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiCall, ApiContext, handles
from stageloom.planner.api.handlers.devices import measured
from stageloom.planner.api.handlers.plans import keep_found
from stageloom.planner.api.jobs import Job
from stageloom.planner.api.work import computed
from stageloom.planner.costs.measured import trained_policy
from stageloom.planner.plan_search import search_job
from stageloom.planner.scheduler_comparison import (
    FoundSchedules,
    compared,
    judged_as,
    known_schedulers,
    optimum_of,
    outline,
    searched,
    with_schedules,
)
from stageloom.planner.schema import scheduler as schema
from stageloom.planner.schema.base import Page
from stageloom.planner.schema.device import DeviceProfileRequest
from stageloom.planner.schema.plan import PlanCreateRequest, PlanReply
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.store import ReadStore
from stageloom.shared.errors import ExtensionError, InputError
from stageloom.shared.extensions import Extensions
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.search.comparison import Standing
from stageloom.shared.search.eop import splitters
from stageloom.shared.search.registry import added_schedulers, help_line, reads_costs, schedulers
from stageloom.shared.search.rivals import added_policies, policies
from stageloom.shared.search.rivals import policy as find_policy
from stageloom.shared.text import bounded

_MEASURE_S: Final = 120.0
"""How long a device may take before it measures a plan."""


@handles(routes.SCHEDULER_LIST)
def scheduler_list(
    api: ApiContext, request: schema.SchedulerListRequest, call: ApiCall
) -> "Page[schema.SchedulerInfo] | Future[Page[schema.SchedulerInfo]]":
    added = [added_schedulers(), added_policies()]
    if any(found.usable for found in added):  # what they do is known once they are imported
        return api.apart(listed)
    return listed(api.reader)


def listed(_: ReadStore) -> Page[schema.SchedulerInfo]:
    """Every scheduler and policy. Imports those that other distributions add, so not for the planner's own
    process."""
    scheduler, policy = schema.SchedulerKind.SCHEDULER, schema.SchedulerKind.POLICY
    return Page(
        items=(
            *(schema.SchedulerInfo(kind=scheduler, name=name, help=help_line(name)) for name in schedulers()),
            *(
                schema.SchedulerInfo(kind=scheduler, name=name, help=own.help)
                for name, own in splitters().items()
            ),
            *_added_infos(scheduler, added_schedulers(), help_line),
            *(
                schema.SchedulerInfo(kind=policy, name=name, help=own.help)
                for name, own in policies().items()
            ),
            *_added_infos(policy, added_policies(), lambda name: find_policy(name).help),
        )
    )


def _added_infos(
    kind: schema.SchedulerKind, found: Extensions, told: Callable[[str], str]
) -> Iterator[schema.SchedulerInfo]:
    for name, extension in found.usable.items():
        try:
            text, problem = told(name), ""
        except ExtensionError as error:
            text, problem = "", str(error)
        yield schema.SchedulerInfo(
            kind=kind,
            name=name,
            help=bounded(text),
            distribution=bounded(extension.distribution),
            problem=bounded(problem),
        )
    for name, wrong in found.problems.items():
        yield schema.SchedulerInfo(kind=kind, name=bounded(name), help="", problem=bounded(str(wrong)))


@handles(routes.SCHEDULER_COMPARE)
def scheduler_compare(api: ApiContext, request: schema.SchedulerCompareRequest, call: ApiCall) -> object:
    names = known_schedulers(request.schedulers)
    search_job(api.reader, _plan_request(request))  # what is wrong with it is said before a job begins
    if request.measure_s is None:
        return partial(_compare, api, request, names)
    if request.device is None:
        raise InputError("measuring needs a device", remedy="name it")
    api.live.fleet  # noqa: B018  (only a running planner can have a device measure)
    return partial(_measure, api, request, names, request.device, request.measure_s)


def _plan_request(
    request: schema.SchedulerCompareRequest, scheduler: str = "sequential"
) -> PlanCreateRequest:
    return PlanCreateRequest(
        models=request.models,
        scheduler=scheduler,
        device=request.device,
        combination=request.combination,
        members_max=request.members_max,
        executor=request.executor,
        r=request.r,
        s=request.s,
    )


def _compare(
    api: ApiContext, request: schema.SchedulerCompareRequest, names: list[str], job: Job
) -> schema.SchedulerCompareReply:
    """One search after the other, so that their times compare."""
    wanted = search_job(api.reader, _plan_request(request))
    job.progress("looking for the optimum", size=len(names))
    known_s = computed(api, job, optimum_of, wanted)
    device_class = "" if request.device is None else api.reader.read(device_info, request.device).device_class
    found: list[Standing] = []
    failed: list[str] = []
    for done, name in enumerate(names):
        job.progress(f"searching with {name}", done=done, size=len(names))
        checkpoint = trained_policy(api.reader, device_class) if name == "gpg" else b""
        try:
            found.append(computed(api, job, searched, wanted, name, known_s, checkpoint))
        except ExtensionError as error:
            failed.append(bounded(str(error)))
    return schema.SchedulerCompareReply(
        compared=compared(api.reader, outline(wanted), found, request.device), failed=tuple(failed)
    )


def _measure(
    api: ApiContext,
    request: schema.SchedulerCompareRequest,
    names: list[str],
    device: DeviceId,
    budget_s: float,
    job: Job,
) -> schema.SchedulerCompareReply:
    """Each plan is searched, kept and measured once.

    Schedulers that read no costs come first: what is measured of their plans is then known to the searches.
    """
    found: list[FoundSchedules] = []
    reasons: list[str] = []
    failed: list[str] = []
    known: set[Digest] = set()
    for done, name in enumerate(sorted(names, key=reads_costs)):
        job.progress(f"searching with {name}", done=done, size=len(names))
        try:
            reply, made = _searched_plan(api, _plan_request(request, name), job)
        except ExtensionError as error:
            failed.append(bounded(str(error)))
            continue
        found.append(FoundSchedules(name, made.schedules, made.search_s))
        if reply.plan.digest not in known:
            known.add(reply.plan.digest)
            wanted = DeviceProfileRequest(
                device=device, plan=reply.plan.plan, budget_s=budget_s, wait_s=_MEASURE_S + budget_s
            )
            reasons += measured(api, wanted, job).reasons
    job.progress("comparing", done=len(names), size=len(names))
    since = search_job(api.reader, _plan_request(request))  # what was measured meanwhile counts
    standings = computed(api, job, judged_as, since, found)
    return schema.SchedulerCompareReply(
        compared=compared(api.reader, outline(since), standings, device),
        reasons=tuple(dict.fromkeys(reasons))[:64],
        failed=tuple(failed),
    )


def _searched_plan(api: ApiContext, request: PlanCreateRequest, job: Job) -> tuple[PlanReply, Standing]:
    """As a plan that is asked for: it is kept, and what was found counts later. The search alone is timed."""
    wanted = search_job(api.store, request)
    made = computed(api, job, searched, wanted, wanted.scheduler, None, wanted.checkpoint)
    plan = with_schedules(outline(wanted), made.schedules)
    return keep_found(api, request, plan, wanted.costs, made.search_s), made

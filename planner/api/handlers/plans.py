"""Plans: searched, shown, pushed, their history, why they are as they are, how those of a trial compare."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiCall, ApiContext, desiring, handles, then
from stageloom.planner.api.handlers.devices import measured, pushed
from stageloom.planner.api.jobs import Job
from stageloom.planner.api.work import waited
from stageloom.planner.auto_plan import is_auto, make, named, splits_carry_more
from stageloom.planner.costs.measured import plan_costs
from stageloom.planner.plan_request import request_of
from stageloom.planner.plan_search import (
    competes,
    record,
    run_search,
    scheduler_key,
    scheduler_of,
    search_job,
)
from stageloom.planner.replan.predict import CostPrediction, evaluation_of, predict
from stageloom.planner.schema import plan as schema
from stageloom.planner.schema.base import Page
from stageloom.planner.schema.device import DeviceProfileRequest
from stageloom.planner.schema.explanation import (
    EvaluationVerdict,
    PlanEvaluation,
    PlanExplainRequest,
    PlanExplanation,
)
from stageloom.planner.schema.trial import TrialCompareRequest, TrialComparison
from stageloom.planner.split_search import (
    EOP,
    Entrants,
    SplitPlan,
    check_request,
    clear_gain,
    entrants,
    splits_operators,
)
from stageloom.planner.split_search import make as make_split
from stageloom.planner.store.costs import calibration_of
from stageloom.planner.store.desired import Push, push_fleet, push_wanted
from stageloom.planner.store.generations import generation_history
from stageloom.planner.store.plans import (
    add_plan,
    add_plan_anyhow,
    plan_info,
    plan_infos,
    require_unnamed,
    with_comparisons,
)
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Desired
from stageloom.shared.plan import Plan
from stageloom.shared.search.auto import AUTO
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.rivals import policy as find_policy
from stageloom.shared.text import bounded

_ROUNDS: Final = 4
_MEASURE_S: Final = 120.0


@handles(routes.PLAN_LIST)
def plan_list(api: ApiContext, request: schema.PlanListRequest, call: ApiCall) -> Page[schema.PlanInfo]:
    infos = api.reader.read(plan_infos, after=request.after, limit=request.limit + 1)
    shown = tuple(api.reader.read(with_comparisons, infos[: request.limit]))
    return Page(items=shown, next=shown[-1].plan if len(infos) > request.limit else "")


@handles(routes.PLAN_SHOW)
def plan_show(api: ApiContext, request: schema.PlanShowRequest, call: ApiCall) -> schema.PlanInfo:
    (info,) = api.reader.read(with_comparisons, [api.reader.read(plan_info, request.plan)])
    return info


@handles(routes.PLAN_REQUEST)
def plan_request(
    api: ApiContext, request: schema.PlanRequestRequest, call: ApiCall
) -> "schema.PlanCreateRequest | Future[schema.PlanCreateRequest]":
    return api.apart(request_of, api.reader.read(plan_info, request.plan))  # it may make the plan again


@handles(routes.PLAN_HISTORY)
def plan_history(
    api: ApiContext, request: schema.PlanHistoryRequest, call: ApiCall
) -> Page[schema.HistoryEntry]:
    entries, following = api.reader.read(
        generation_history, request.device, before=position(request.after), limit=request.limit
    )
    return Page(items=tuple(entries), next=str(following) if following else "")


@handles(routes.PLAN_EXPLAIN)
def plan_explain(
    api: ApiContext, request: PlanExplainRequest, call: ApiCall
) -> "PlanExplanation | Future[PlanExplanation]":
    from stageloom.planner.explain.plan import explain  # all of the search, which few requests need

    return api.apart(explain, request.plan, request.device, api.clock.wall_us())


@handles(routes.PLAN_EXPORT)
def plan_export(
    api: ApiContext, request: schema.PlanExportRequest, call: ApiCall
) -> "schema.PlanExport | Future[schema.PlanExport]":
    from stageloom.planner.export.plan import export_plan  # all of the search, which few requests need

    return api.apart(export_plan, request.plan, request.format, request.device)


@handles(routes.TRIAL_COMPARE)
def trial_compare(
    api: ApiContext, request: TrialCompareRequest, call: ApiCall
) -> "TrialComparison | Future[TrialComparison]":
    from stageloom.planner.replan.compare import trial_comparison

    return api.apart(trial_comparison, request.device, request.generation)


def position(after: str) -> int:
    """Where a list by number goes on; 0 at its start.

    Raises:
        InputError: this was no page's `next`.
    """
    if not after:
        return 0
    if not after.isascii() or not after.isdecimal() or int(after) > 2**53:
        raise InputError(f"a list cannot go on after {after[:64]!r}", remedy="use `next` of the page before")
    return int(after)


# -- searches ---------------------------------------------------------------------------------------------


@handles(routes.PLAN_CREATE)
def plan_create(api: ApiContext, request: schema.PlanCreateRequest, call: ApiCall) -> object:
    request = named(api.store, request)
    _check(request)
    if is_auto(api.store, request) and request.device is not None:
        return partial(_auto, api, request, request.device)
    if request.plan is not None and _may_find_another(request):
        api.store.read(require_unnamed, request.plan)
    if splits_operators(request):
        return partial(_split, api, request, check_request(request))
    if competes(request):
        return partial(_tournament, api, request)
    search_job(api.store, request)  # what is wrong with it is said before a job begins
    return partial(_search, api, request)


def _may_find_another(request: schema.PlanCreateRequest) -> bool:
    """Whether the same request may end in another plan, and after a while: it has a budget, or measures."""
    return request.budget_s is not None or request.measure_s is not None


def _check(request: schema.PlanCreateRequest) -> None:
    """Raises:
    InputError: a field has no effect beside the others.
    """
    if request.rates and not competes(request):
        raise InputError(
            "rates say what arrives in a tournament", remedy="give a budget, and no scheduler or policy"
        )
    names = [rate.model for rate in request.rates]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"rates name {twice[0]} twice", remedy="give each model once")
    if request.measure_s is None:
        return
    if request.device is None:
        raise InputError("measuring needs a device", remedy="name it")
    if competes(request):
        raise InputError("measuring is for one scheduler", remedy="name it")
    if request.policy and "scheduler" in find_policy(request.policy).decides:
        raise InputError(
            f"nothing is searched under the policy {request.policy}, so measuring changes nothing",
            remedy="leave it out",
        )


def _tournament(api: ApiContext, request: schema.PlanCreateRequest, job: Job) -> schema.PlanReply:
    from stageloom.planner.tournament.stored import create  # the twin and numpy, which few planners need

    splits = Entrants((), {})
    if request.device is not None:
        found = api.apart(entrants, request, request.device)
        splits = waited(job, found) if isinstance(found, Future) else found
    return create(api.store, api.live.pool, api.clock, request, job, splits)


def _auto(api: ApiContext, request: schema.PlanCreateRequest, device: DeviceId, job: Job) -> schema.PlanReply:
    began_s = api.clock.monotonic_s()
    split = _clear_gain(api, request, device, job) if len(request.models) == 1 else None
    if split is not None and splits_carry_more(api.store, request, device, split.seconds):
        scheduler, plan, known, prediction = EOP, split.plan, split.known, split.prediction
    else:
        scheduler = AUTO
        plan, known = make(api.store, request, device)
        graphs = {model.artifact: api.store.graph(model.artifact) for model in plan.models}
        costs_key = api.store.read(calibration_of, device).costs_key
        costs = plan_costs(api.store, costs_key, plan, graph_of=api.store.graph)
        prediction = predict(plan, graphs, costs, ())
    job.check()
    search_s = api.clock.monotonic_s() - began_s
    return _keep(api, request, plan, _found_row(plan, prediction, scheduler, search_s), known)


def _clear_gain(
    api: ApiContext, request: schema.PlanCreateRequest, device: DeviceId, job: Job
) -> SplitPlan | None:
    found = api.apart(clear_gain, request, device)
    return waited(job, found) if isinstance(found, Future) else found


def _split(
    api: ApiContext, request: schema.PlanCreateRequest, device: DeviceId, job: Job
) -> schema.PlanReply:
    began_s = api.clock.monotonic_s()
    job.progress("searching")
    found = api.apart(make_split, request, device)
    made = waited(job, found) if isinstance(found, Future) else found
    job.check()  # it may have been cancelled when the plan was there already
    search_s = api.clock.monotonic_s() - began_s
    row = _found_row(made.plan, made.prediction, scheduler_of(request), search_s)
    return _keep(api, request, made.plan, row, made.known)


def _found_row(plan: Plan, prediction: CostPrediction, scheduler: str, search_s: float) -> PlanEvaluation:
    return evaluation_of(
        plan,
        EvaluationVerdict.FOUND,
        scheduler=scheduler,
        how="operator",
        prediction=prediction,
        search_s=search_s,
    )


def _keep(
    api: ApiContext, request: schema.PlanCreateRequest, plan: Plan, row: PlanEvaluation, known: str
) -> schema.PlanReply:
    """Keep a plan that was made of what is known of a device, and its row."""
    info, renamed = _named(api, request, plan, row.scheduler)
    graphs = {model.artifact: api.store.graph(model.artifact) for model in plan.models}
    record(api.store, request.device, row.scheduler, plan, graphs, [row])
    said = "; ".join(filter(None, (known, renamed)))
    return schema.PlanReply(plan=info, search_s=row.search_s or 0.0, known=said)


def _named(
    api: ApiContext, request: schema.PlanCreateRequest, plan: Plan, scheduler: str
) -> tuple[schema.PlanInfo, str]:
    """Keep a plan under its name; one that would not be found again so soon, under another if need be."""
    name = request.plan or plan.digest[:12]
    if _may_find_another(request):
        return api.store.write(add_plan_anyhow, name, plan, scheduler)
    return api.store.write(add_plan, name, plan, scheduler), ""


def _search(api: ApiContext, request: schema.PlanCreateRequest, job: Job) -> schema.PlanReply:
    if request.measure_s is not None and request.device is not None:
        _measure_unsure(api, request, request.device, request.measure_s, job)
    job.progress("searching")
    return _found(api, request, job)


def _measure_unsure(
    api: ApiContext, request: schema.PlanCreateRequest, device: DeviceId, budget_s: float, job: Job
) -> None:
    """Have the device measure what is unsure and matters, until nothing is.

    Stages of two plans: the one chosen, and the runner-up that would be chosen if all unsure stages took the
    least that they may. Once both are sure, no stage left unmeasured could have made a better plan but by
    taking less than its interval. At most four rounds.
    """
    unnamed = msgspec.structs.replace(request, plan=None)
    for number in range(1, _ROUNDS + 1):
        job.progress(f"round {number}: searching", done=number - 1, size=_ROUNDS)
        plans = [_found(api, unnamed, job, optimistic=optimistic).plan.plan for optimistic in (False, True)]
        asked = 0
        for plan in dict.fromkeys(plans):
            job.progress(f"round {number}: {device} measures the unsure stages of {plan}", size=_ROUNDS)
            wanted = DeviceProfileRequest(
                device=device, plan=plan, budget_s=budget_s, unsure_only=True, wait_s=_MEASURE_S + budget_s
            )
            asked += len(measured(api, wanted, job).requests)
        if not asked:
            return


def _found(
    api: ApiContext, request: schema.PlanCreateRequest, job: Job, *, optimistic: bool = False
) -> schema.PlanReply:
    began_s = api.clock.monotonic_s()
    wanted = search_job(api.store, request, optimistic=optimistic)
    plan = run_search(api.live.pool, wanted, job)
    search_s = api.clock.monotonic_s() - began_s
    if not optimistic:
        return keep_found(api, request, plan, wanted.costs, search_s)
    info, renamed = _named(api, request, plan, scheduler_of(request))  # for what it asks to be measured
    return schema.PlanReply(plan=info, search_s=search_s, known=renamed)


def keep_found(
    api: ApiContext, request: schema.PlanCreateRequest, plan: Plan, costs: CostTable, search_s: float
) -> schema.PlanReply:
    """Keep a plan that was searched by a request under these costs, its schedules, and its row."""
    info, renamed = _named(api, request, plan, scheduler_of(request))
    graphs = {model.artifact: api.store.graph(model.artifact) for model in plan.models}
    row = _found_row(plan, predict(plan, graphs, costs, ()), scheduler_key(request), search_s)
    record(api.store, request.device, scheduler_key(request), plan, graphs, [row])
    return schema.PlanReply(plan=info, search_s=search_s, known=renamed)


# -- pushes -----------------------------------------------------------------------------------------------


@handles(routes.PLAN_PUSH)
def plan_push(
    api: ApiContext, request: schema.PlanPushRequest, call: ApiCall
) -> "Future[schema.PlanPushReply]":
    if len(request.devices) == 1:  # many such requests at once share commits
        (device,) = request.devices
        wanted = Push(
            device=device,
            plan=request.plan,
            decided_by="operator",
            autonomy=request.autonomy,
            activation=request.activation,
            compare_outputs=request.compare_outputs,
        )
        one = api.store.submit_together(push_wanted, wanted)
        one.add_done_callback(partial(_doubt_failed, api, request.devices))
        return then(one, lambda desired: schema.PlanPushReply(pushed=(pushed(api, device, desired),)))
    many = api.store.submit(
        push_fleet,
        request.devices,
        request.plan,
        decided_by="operator",
        after=request.after,
        autonomy=request.autonomy,
        activation=request.activation,
        compare_outputs=request.compare_outputs,
    )
    many.add_done_callback(partial(_doubt_failed, api, request.devices))
    return then(many, lambda done: _push_reply(api, *done))


def _doubt_failed(api: ApiContext, devices: Sequence[DeviceId], done: "Future[Any]") -> None:
    with suppress(Exception), desiring(api.live.fleet, *devices):
        done.result()


def _push_reply(
    api: ApiContext, results: list[tuple[DeviceId, Desired | InputError]], more: bool
) -> schema.PlanPushReply:
    told = tuple(
        schema.Pushed(device=device, cause=bounded(str(result)))
        if isinstance(result, InputError)
        else pushed(api, device, result)
        for device, result in results
    )
    return schema.PlanPushReply(pushed=told, next=told[-1].device if more else "")

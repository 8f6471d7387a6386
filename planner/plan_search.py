"""The searches that operators ask for: the job of a request, its run in the pool, and what is kept of it."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from stageloom.planner.api.jobs import Job, JobCancelled
from stageloom.planner.cluster.interface import SearchPool, search
from stageloom.planner.costs.drift import unsure_blocks
from stageloom.planner.costs.measured import costs_on, trained_policy
from stageloom.planner.costs.measured_parts import costs_there
from stageloom.planner.costs.records import found_schedules
from stageloom.planner.schema.explanation import PlanEvaluation
from stageloom.planner.schema.plan import ModelOptions as Choice
from stageloom.planner.schema.plan import PlanCreateRequest
from stageloom.planner.store.costs import calibration_of, keep_schedules
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.machines import machine_of
from stageloom.planner.store.models import named_models
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.predictions import keep_considered
from stageloom.planner.store.store import ReadStore
from stageloom.shared.bound import bind
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.plan import (
    ExecutorOptions,
    PlacementPolicy,
    Plan,
    QueuePlan,
    Resource,
    StepChoice,
    Wait,
    decode_plan,
)
from stageloom.shared.search.assignment import Assignment
from stageloom.shared.search.compose import Combination, ModelChoice, Rules
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import Limits
from stageloom.shared.search.job import SearchJob
from stageloom.shared.search.registry import reads_costs
from stageloom.shared.search.rivals import policy as find_policy

if TYPE_CHECKING:
    from stageloom.planner.store.store import Store


def competes(request: PlanCreateRequest) -> bool:
    """Whether policies and schedulers compete for the budget, since nothing says which of them is meant."""
    return request.budget_s is not None and request.scheduler is None and request.policy is None


def scheduler_of(request: PlanCreateRequest) -> str:
    """The scheduler that searches.

    Raises:
        SettingError: no such policy.
    """
    policy = find_policy(request.policy).scheduler if request.policy is not None else "sequential"
    return request.scheduler or policy


def search_job(store: ReadStore, request: PlanCreateRequest, *, optimistic: bool = False) -> SearchJob:
    """The search that a request asks for, as plain data.

    `optimistic`: what is unsure costs the least that it may, so the plan has what is worth measuring.

    Raises:
        InputError: a model or the device does not exist, `combination` is unknown, or a field of the request
            has no effect beside the others.
        SettingError: no such policy.
    """
    try:
        combination = Combination(request.combination)
    except ValueError as error:
        raise InputError(
            f"there is no combination {request.combination!r}",
            remedy=f"choose one of {', '.join(combination.value for combination in Combination)}",
        ) from error
    _check_effect(request)
    choices = model_choices(store, request.models)
    _check_machine(store, request)
    executor = ExecutorOptions(
        name=request.executor,
        intra_op_threads=request.intra_op_threads,
        precision=request.precision,
        issue=request.issue,
    )
    assignment = _assignment(request)
    executors = (executor, *assignment.further_executors)
    job = SearchJob(
        models=choices,
        scheduler=scheduler_of(request),
        combination=combination,
        members_max=request.members_max,
        costs=_costs(store, request, choices, executors, optimistic=optimistic),
        limits=Limits(r=request.r, s=request.s),
        lanes=request.lanes,
        executor=executor,
        rules=Rules(
            run_ahead=request.run_ahead,
            step_choice=request.step_choice,
            wait=request.wait,
            wait_timeout_us=_us(request.wait_timeout_s),
            max_skips=request.max_skips,
            barrier=request.barrier,
        ),
        budget_s=request.budget_s,
        assignment=assignment,
        checkpoint=_checkpoint(store, request),
    )
    return job if request.policy is None else find_policy(request.policy).plan(job)


def model_choices(store: ReadStore, models: Sequence[Choice]) -> tuple[ModelChoice, ...]:
    """Models of a request with their graphs.

    Raises:
        InputError: a model does not exist, or has both cuts and a partition.
    """
    infos = store.read(named_models, [choice.model for choice in models])
    if both := [choice.model for choice in models if choice.cuts and choice.partition != "whole"]:
        raise InputError(f"{both[0]} has cuts and a partition", remedy="give one of the two")
    return tuple(
        ModelChoice(
            name=info.model,
            artifact=info.digest,
            graph=store.graph(info.digest),
            partition=choice.cuts or choice.partition,
            replicas=choice.replicas,
            batch=choice.batch,
            batch_max_delay_us=_us(choice.batch_max_delay_s),
            launch_interval_us=_us(choice.launch_interval_s),
            work_conserving=choice.work_conserving,
            weight=choice.weight,
            queue=QueuePlan(
                rule=choice.queue, max_tasks=choice.queue_max_tasks, max_bytes=choice.queue_max_bytes
            ),
        )
        for choice, info in zip(models, infos, strict=True)
    )


def _assignment(request: PlanCreateRequest) -> Assignment:
    """What blocks use beside the first executor.

    Raises:
        InputError: an executor is named twice.
    """
    names = [request.executor, *(one.name for one in request.further_executors)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"the executor {twice[0]} is named twice", remedy="give each executor once")
    return Assignment(
        further_executors=tuple(
            ExecutorOptions(
                name=one.name,
                intra_op_threads=one.intra_op_threads,
                precision=one.precision,
                issue=one.issue,
            )
            for one in request.further_executors
        ),
        resources=tuple(Resource(cores=one.cores) for one in request.resources),
        lane_resources=request.lane_resources,
        executors_of=tuple(choice.executors for choice in request.models),
        resources_of=tuple(choice.resources for choice in request.models),
        placement=request.placement,
    )


def _check_machine(store: ReadStore, request: PlanCreateRequest) -> None:
    """Refuse executors and cores that the device has told it does not have, the usual executor as any other.

    Raises:
        InputError: the request has one; or there is no such device.
    """
    machine = None if request.device is None else store.read(machine_of, request.device)
    if machine is None or request.device is None:
        return
    names = (request.executor, *(one.name for one in request.further_executors))
    for name in names if machine.problems else ():
        machine.require(name, request.device)
    cores = {core for resource in request.resources for core in resource.cores}
    if missing := cores - set(machine.cores):
        raise InputError(
            f"{request.device} has no core {min(missing)} for plans",
            remedy=f"choose among {', '.join(map(str, machine.cores))}",
        )


def _check_policy(request: PlanCreateRequest, name: str) -> None:
    """Refuse fields of the request that the policy itself decides."""
    policy = find_policy(name)
    plain = PlanCreateRequest(models=request.models)
    given = msgspec.structs.replace(
        request, scheduler=None if request.scheduler == policy.scheduler else request.scheduler
    )
    asked = [field for field in policy.decides if getattr(given, field, None) != getattr(plain, field, None)]
    for choice in request.models:
        usual = Choice(model=choice.model)
        asked += [
            f"{field} of {choice.model}"
            for field in policy.decides
            if getattr(choice, field, None) != getattr(usual, field, None)
        ]
    if asked:
        raise InputError(
            f"the policy {name} decides {sorted(asked)[0].replace('_', ' ')}",
            remedy="leave that out, or leave the policy out",
        )


def _checkpoint(store: ReadStore, request: PlanCreateRequest) -> bytes:
    """The policy trained for the device's class, or for any; none where the scheduler takes none."""
    if scheduler_of(request) != "gpg":
        return b""
    device_class = "" if request.device is None else store.read(device_info, request.device).device_class
    return trained_policy(store, device_class)


def _check_effect(request: PlanCreateRequest) -> None:
    """Refuse fields that the engine would ignore."""
    if request.policy is not None:
        _check_policy(request, request.policy)
    if (request.wait is Wait.TIMEOUT) != (request.wait_timeout_s > 0):
        raise InputError(
            f"wait {request.wait.value} and a timeout of {request.wait_timeout_s:g} s do not go together",
            remedy='in the plan file give wait = "timeout" and wait_timeout_s above 0, or neither',
        )
    if request.placement is not PlacementPolicy.FIXED and not request.resources:
        raise InputError(
            f"placement {request.placement.value} has no resources to choose among",
            remedy="name resources and lane_resources in the plan file",
        )
    for choice in request.models:
        proportional = request.policy == "proportional" or competes(request)  # where it takes part
        weighted = request.step_choice is StepChoice.WEIGHTED or proportional
        if choice.weight > 1 and not weighted:
            raise InputError(
                f"the weight of {choice.model} has no effect under step choice {request.step_choice.value}",
                remedy='give step_choice = "weighted" in the plan file',
            )
        if choice.batch_max_delay_s > 0 and choice.batch == 1:
            raise InputError(
                f"{choice.model} has a batch delay but takes one task at a time",
                remedy=f"give it a batch above 1, or --model {choice.model}:delay=0",
            )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def unsure_of(store: ReadStore, device: DeviceId, plan: str, now_us: int) -> tuple[int, ...]:
    """The combined blocks of a plan with stages whose costs on the device's class are unsure.

    Raises:
        InputError: there is no such device or plan, or a model of the plan was removed.
    """
    decoded = decode_plan(store.read(plan_info, plan).wire)
    graphs = {model.artifact: store.graph(model.artifact) for model in decoded.models}
    costs = costs_there(store, device, decoded, graphs, now_us=now_us)
    return unsure_blocks(bind(decoded, graphs), costs)


def scheduler_key(request: PlanCreateRequest) -> str:
    """Policy, scheduler and limits, which together decide what a search finds."""
    policy = f"{request.policy} " if request.policy is not None else ""
    return policy + scheduler_of(request) + limits_text(Limits(r=request.r, s=request.s))


def limits_text(limits: Limits) -> str:
    """The limits as words to append to what searched, such as ` r=3 s=8`; `limits_of` reads them back."""
    return "".join(f" {name}={value}" for name, value in (("r", limits.r), ("s", limits.s)) if value)


def limits_of(key: str) -> Limits:
    """The limits in a `scheduler_key`, or behind the name of a tournament's plan."""
    return Limits(**{word[0]: int(word[2:]) for word in key.split() if word[:2] in ("r=", "s=")})


def _costs(
    store: ReadStore,
    request: PlanCreateRequest,
    choices: Sequence[ModelChoice],
    executors: Sequence[ExecutorOptions],
    *,
    optimistic: bool,
) -> CostTable:
    """What the device's class measured on each executor, or itself since it drifted; estimates where no
    device is named."""
    if request.device is None:
        return CostTable()
    calibration = store.read(calibration_of, request.device)
    models = [(choice.artifact, choice.batch) for choice in choices]
    table = costs_on(
        *(store, calibration.costs_key, executors, models),
        graph_of=store.graph,
        taught_by=calibration.taught_by,
    )
    if not optimistic:
        return table
    others = {executor: replace(other, optimism=1.0) for executor, other in table.beside.items()}
    return replace(table, optimism=1.0, beside=others)


def record(
    store: "Store",
    device: DeviceId | None,
    scheduler: str,
    plan: Plan,
    graphs: Mapping[Digest, Graph],
    rows: Iterable[PlanEvaluation],
) -> None:
    """Keep the plan's schedules under the device's costs, and a row per plan that was considered."""
    device_class = ""
    if device is not None:
        device_class = store.read(device_info, device).device_class
        key = store.read(calibration_of, device).costs_key
        store.write(keep_schedules, key, scheduler, found_schedules(plan, graphs))
    store.write(keep_considered, rows, device_class=device_class, device=device)


def run_search(pool: SearchPool, search_for: SearchJob, job: Job | None = None) -> Plan:
    """Search in the pool and wait; a job that is cancelled ends the search.

    A scheduler that costs cannot change is no search: it takes a few milliseconds.

    Raises:
        JobCancelled: it was cancelled.
        SettingError, PlanError: as `search`.
        UnavailableError: the worker died.
    """
    if not reads_costs(search_for.scheduler):
        return search(search_for)
    future = pool.submit(search, search_for)
    if job is not None:
        job.when_cancelled(future.cancel)
    try:
        return future.result()
    except CancelledError as error:
        raise JobCancelled from error

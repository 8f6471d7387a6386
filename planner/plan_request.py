"""A plan as the request that makes it again: what `plan show --toml` prints."""

from collections.abc import Callable
from dataclasses import replace as replace_value
from itertools import product
from typing import Final, TypeVar, cast

from msgspec.structs import replace

from stageloom.planner.plan_search import limits_of, search_job
from stageloom.planner.schema.plan import (
    CoreSet,
    FurtherExecutor,
    ModelOptions,
    PlanCreateRequest,
    PlanInfo,
    PrecisionName,
)
from stageloom.planner.split_search import make as make_split
from stageloom.planner.store.generations import device_of_plan
from stageloom.planner.store.models import plan_references
from stageloom.planner.store.predictions import searches_of
from stageloom.planner.store.store import ReadStore
from stageloom.shared.errors import InputError, StageloomError
from stageloom.shared.graph import Graph
from stageloom.shared.plan import CombinedBlock, Plan, decode_plan
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.compose import Combination, combined_members
from stageloom.shared.search.eop import splitters
from stageloom.shared.search.interface import TOP_LIMITS, Limits
from stageloom.shared.search.job import run_search
from stageloom.shared.search.registry import added_schedulers, schedulers

T = TypeVar("T")

_REPEATABLE: Final = ("sequential", "greedy", "nimble", "opara")
"""Schedulers that find the same whatever is measured."""


def request_of(store: ReadStore, info: PlanInfo) -> PlanCreateRequest:
    """The request. Its search finds the plan's schedules again if costs are what they were.

    Raises:
        InputError: an artifact of the plan is not here, or a request cannot say what the plan does.
    """
    plan = decode_plan(info.wire)
    _refuse_unsayable(info, plan)
    if info.scheduler in splitters():
        request = _split_request(store, info, plan)
        if not _splits_so(store, info, request):
            raise _unnamed(info)
        return request
    combination = _combination(plan)
    if combination is None:
        raise _unnamed(info)
    return _named(store, info, plan, _rules(store, plan, combination))


def nearest_request(store: ReadStore, info: PlanInfo) -> PlanCreateRequest:
    """The request that says most of what a plan does, for a search that may end in another plan.

    What no request says is left out: models are not split, all replicas run as the first one does, and
    operators run one after another where no scheduler makes the plan's schedules.

    Raises:
        InputError: an artifact of the plan is not here.
    """
    if info.scheduler not in splitters():
        try:
            return request_of(store, info)
        except InputError:
            pass  # an artifact that is not here is missed again below
    plan = decode_plan(info.wire)
    rules = _rules(store, plan, _combination(plan) or Combination.ALONE)
    return replace(rules, scheduler=info.scheduler if _is_named(info.scheduler) else "sequential")


def _refuse_unsayable(info: PlanInfo, plan: Plan) -> None:
    """Raises:
    InputError: the plan does what no request can say.
    """
    if any(block.further_places for block in plan.combined):
        raise InputError(
            "blocks of this plan have several executors, as they are placed, which a plan file cannot say",
            remedy="push the plan itself",
        )
    if info.scheduler not in splitters() and any(model.splits for model in plan.models):
        raise InputError(
            f"this plan splits operators and is of {info.scheduler}, which a plan file cannot say",
            remedy="push the plan itself, or make one with --scheduler eop",
        )
    used: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
    for block in plan.combined:
        own = block.executor, block.resources
        for member in block.members:
            if used.setdefault((member.model, member.block), own) != own:
                raise InputError(
                    f"the replicas of {plan.models[member.model].name} use different executors or resources, "
                    "which a plan file cannot say",
                    remedy="push the plan itself",
                )


def _rules(store: ReadStore, plan: Plan, combination: Combination) -> PlanCreateRequest:
    """All that a request can say of a plan, but for its scheduler."""
    references = store.read(plan_references, plan)
    return PlanCreateRequest(
        models=tuple(
            _options(plan, at, references[one.name], store.graph(one.artifact))
            for at, one in enumerate(plan.models)
        ),
        combination=combination.value,
        members_max=_members_max(plan),
        lanes=plan.lanes,
        executor=plan.executor.name,
        intra_op_threads=plan.executor.intra_op_threads,
        precision=cast(PrecisionName, plan.executor.precision),
        issue=plan.executor.issue,
        further_executors=tuple(
            FurtherExecutor(
                name=one.name,
                intra_op_threads=one.intra_op_threads,
                precision=cast(PrecisionName, one.precision),
                issue=one.issue,
            )
            for one in plan.further_executors
        ),
        resources=tuple(CoreSet(cores=one.cores) for one in plan.resources),
        lane_resources=plan.lane_resources,
        placement=plan.placement,
        step_choice=plan.step_choice,
        wait=plan.wait,
        wait_timeout_s=plan.wait_timeout_us / 1e6,
        run_ahead=plan.run_ahead,
        max_skips=plan.max_skips,
        barrier=plan.barrier,
    )


def _split_request(store: ReadStore, info: PlanInfo, plan: Plan) -> PlanCreateRequest:
    """The request for a plan of a splitter, which decides all but the model's rules and the resources."""
    (model,) = plan.models
    return PlanCreateRequest(
        models=(
            ModelOptions(
                model=store.read(plan_references, plan)[model.name],
                launch_interval_s=model.launch_interval_us / 1e6,
                work_conserving=model.work_conserving,
                queue=model.queue.rule,
                queue_max_tasks=model.queue.max_tasks,
                queue_max_bytes=model.queue.max_bytes,
            ),
        ),
        scheduler=info.scheduler,
        executor=plan.executor.name,
        intra_op_threads=plan.executor.intra_op_threads,
        further_executors=tuple(
            FurtherExecutor(name=one.name, intra_op_threads=one.intra_op_threads)
            for one in plan.further_executors
        ),
        resources=tuple(CoreSet(cores=one.cores) for one in plan.resources),
        step_choice=plan.step_choice,
        run_ahead=plan.run_ahead,
        max_skips=plan.max_skips,
    )


def _splits_so(store: ReadStore, info: PlanInfo, request: PlanCreateRequest) -> bool:
    """Whether a splitter chooses the plan itself: a tournament may have chosen another of its proposals."""
    found = store.read(searches_of, info.digest)
    device = store.read(device_of_plan, info.digest)
    if device is None or not found or found[0].how != "contest":
        return True
    try:
        return make_split(store, replace(request, device=device), device).plan.digest == info.digest
    except StageloomError:
        return False  # what was measured then is not known any more


def _is_named(scheduler: str) -> bool:
    """Whether a request can name it, and search with it."""
    return scheduler in schedulers() or scheduler in added_schedulers().usable


def _named(store: ReadStore, info: PlanInfo, plan: Plan, request: PlanCreateRequest) -> PlanCreateRequest:
    """The request with the scheduler and the limits that make the plan.

    A scheduler that reads costs is not run: costs may be others by now, and a search may take minutes. All of
    its plan but the schedules must come again, and these must be within the limits.

    Raises:
        InputError: no request makes the plan.
    """
    name = info.scheduler
    if _is_named(name) and name not in _REPEATABLE:
        limits = _limits(store, info)
        outline = _made(store, replace(request, scheduler="sequential"))
        if outline is not None and _scheduled_as(outline, plan).digest == info.digest:
            if _within(plan, limits):
                return replace(request, scheduler=name, r=limits.r, s=limits.s)
        raise _unnamed(info)
    widest = max((len(stage.groups) for stage in _stages(plan)), default=None)
    names = sorted(_REPEATABLE, key=lambda one: one != name)
    for name, s in product(names, dict.fromkeys((None, widest))):
        tried = replace(request, scheduler=name, s=s)
        made = _made(store, tried)
        if made is not None and made.digest == info.digest:
            return tried
    raise _unnamed(info)


def _unnamed(info: PlanInfo) -> InputError:
    return InputError(
        f"this plan is of {info.scheduler}, and no scheduler that a plan file can name makes it again",
        remedy="push the plan itself, or make another with --scheduler",
    )


def _made(store: ReadStore, request: PlanCreateRequest) -> Plan | None:
    """The plan of a request; None where there is none: streams, for example, are not combined."""
    try:
        return run_search(search_job(store, request), lambda: 0.0)
    except StageloomError:
        return None


def _scheduled_as(outline: Plan, plan: Plan) -> Plan:
    """The outline with the schedules of another plan."""
    both = zip(outline.combined, plan.combined, strict=False)
    combined = tuple(replace_value(block, schedule=other.schedule) for block, other in both)
    return replace_value(outline, combined=combined)


def _limits(store: ReadStore, info: PlanInfo) -> Limits:
    """Those of the search that found the plan; none where it is not known any more."""
    for found in store.read(searches_of, info.digest):
        limits = limits_of(found.scheduler)
        if found.how == "contest" and found.scheduler.startswith(f"{info.scheduler}, "):
            return TOP_LIMITS if limits == Limits() else limits  # older rows name none
        if info.scheduler in found.scheduler.split():
            return limits
    return Limits()


def _within(plan: Plan, limits: Limits) -> bool:
    """Whether a search within these limits may have found the plan's schedules."""
    return all(
        len(stage.groups) <= (limits.s or len(stage.groups))
        and all(len(group) <= (limits.r or len(group)) for group in stage.groups)
        for stage in _stages(plan)
    )


def _stages(plan: Plan) -> list[Stage]:
    return [
        stage
        for block in plan.combined
        if isinstance(block.schedule, StageSchedule)
        for stage in block.schedule.stages
    ]


def _used(plan: Plan, index: int, of: Callable[[CombinedBlock], T], usual: T) -> tuple[T, ...]:
    """What each block of a model's first replica uses, as a request has it: nothing for `usual`, one for all,
    or one each."""
    found = {
        member.block: of(block)
        for block in plan.combined
        for member in block.members
        if member.model == index and not member.replica
    }
    each = tuple(found[block] for block in sorted(found))
    if len(set(each)) > 1:
        return each
    return () if each[0] == usual else each[:1]


def _options(plan: Plan, index: int, reference: str, graph: Graph) -> ModelOptions:
    model = plan.models[index]
    names = [name for name, cuts in graph.partitions if cuts == model.cuts]
    return ModelOptions(
        model=reference,
        replicas=model.replicas,
        batch=model.batch,
        partition=names[0] if names else "whole",
        cuts=() if names else model.cuts,
        executors=_used(plan, index, lambda block: block.executor, 0),
        resources=_used(plan, index, lambda block: block.resources, ()),
        launch_interval_s=model.launch_interval_us / 1e6,
        batch_max_delay_s=model.batch_max_delay_us / 1e6,
        work_conserving=model.work_conserving,
        weight=model.weight,
        queue=model.queue.rule,
        queue_max_tasks=model.queue.max_tasks,
        queue_max_bytes=model.queue.max_bytes,
    )


def _combination(plan: Plan) -> Combination | None:
    """The first way of combining that gives such blocks; None: a learned policy's may have no name."""
    members = [block.members for block in plan.combined]
    most = _members_max(plan)
    return next((one for one in Combination if combined_members(plan.models, one, most) == members), None)


def _members_max(plan: Plan) -> int:
    return max(2, *(len(block.members) for block in plan.combined))

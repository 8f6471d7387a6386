"""A plan as the request that makes it again: what `plan show --toml` prints."""

from collections.abc import Callable
from typing import Final, TypeVar, cast

from msgspec.structs import replace

from stageloom.planner.plan_search import search_job
from stageloom.planner.schema.plan import (
    CoreSet,
    FurtherExecutor,
    ModelOptions,
    PlanCreateRequest,
    PlanInfo,
    PrecisionName,
)
from stageloom.planner.store.store import ReadStore
from stageloom.shared.errors import InputError, StageloomError
from stageloom.shared.graph import Graph
from stageloom.shared.plan import CombinedBlock, Plan, decode_plan
from stageloom.shared.search.eop import splitters
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
    if any(block.further_places for block in plan.combined):
        raise InputError(
            "blocks of this plan have several executors, as they are placed, which a plan file cannot say",
            remedy="push the plan itself",
        )
    if info.scheduler in splitters():
        return _split_request(info, plan)
    if any(model.splits for model in plan.models):
        raise InputError(
            f"this plan splits operators and is of {info.scheduler}, which a plan file cannot say",
            remedy="push the plan itself, or make one with --scheduler eop",
        )
    request = PlanCreateRequest(
        models=tuple(_options(plan, at, store.graph(one.artifact)) for at, one in enumerate(plan.models)),
        combination=_combination(plan),
        members_max=max(2, *(len(block.members) for block in plan.combined)),
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
    return replace(request, scheduler=_scheduler(store, info, request))


def _split_request(info: PlanInfo, plan: Plan) -> PlanCreateRequest:
    """The request for a plan of a splitter, which decides all but the model's rules and the resources."""
    (model,) = plan.models
    return PlanCreateRequest(
        models=(
            ModelOptions(
                model=model.name,
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
    )


def _scheduler(store: ReadStore, info: PlanInfo, request: PlanCreateRequest) -> str:
    """The scheduler that the plan is of; of a policy, a re-plan or `auto`, one that makes the same plan.

    Raises:
        InputError: there is none.
    """
    if info.scheduler in schedulers() or info.scheduler in added_schedulers().usable:
        return info.scheduler
    for name in _REPEATABLE:
        try:
            made = run_search(search_job(store, replace(request, scheduler=name)), lambda: 0.0)
        except StageloomError:
            continue  # its streams, for example, cannot be combined so
        if made.digest == info.digest:
            return name
    raise InputError(
        f"this plan is of {info.scheduler}, and no scheduler that a plan file can name makes it again",
        remedy="push the plan itself, or make another with --scheduler",
    )


def _used(plan: Plan, index: int, of: Callable[[CombinedBlock], T], usual: T) -> tuple[T, ...]:
    """What each block of a model uses, as a request has it: nothing for `usual`, one for all, or one each.

    Raises:
        InputError: replicas of a block use different ones.
    """
    found: dict[int, set[T]] = {}
    for block in plan.combined:
        for member in block.members:
            if member.model == index:
                found.setdefault(member.block, set()).add(of(block))
    if any(len(used) > 1 for used in found.values()):
        raise InputError(
            f"the replicas of {plan.models[index].name} use different executors or resources, "
            "which a plan file cannot say",
            remedy="push the plan itself",
        )
    each = tuple(next(iter(found[block])) for block in sorted(found))
    if len(set(each)) > 1:
        return each
    return () if each[0] == usual else each[:1]


def _options(plan: Plan, index: int, graph: Graph) -> ModelOptions:
    model = plan.models[index]
    names = [name for name, cuts in graph.partitions if cuts == model.cuts]
    return ModelOptions(
        model=model.name,
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


def _combination(plan: Plan) -> str:
    """The way of combining that gives such blocks; a learned policy's may have no name."""
    together = [block.members for block in plan.combined if len(block.members) > 1]
    if not together:
        return "alone"
    same_model = all(len({member.model for member in members}) == 1 for members in together)
    return "replicas" if same_model else "aligned"

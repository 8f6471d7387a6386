"""Searches as plain data that is sent to worker processes, and the functions that carry them out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.ids import Digest
from stageloom.shared.plan import ExecutorOptions, Plan
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.assignment import Assignment
from stageloom.shared.search.beam import beam
from stageloom.shared.search.compose import Combination, ModelChoice, Rules, compose
from stageloom.shared.search.costs import CostTable, StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.makespan import schedule_s

T = TypeVar("T")

FIRST_EXPANSIONS = 25_000
GROWTH = 4
MOST_EXPANSIONS = 6_400_000
GREW = 1.5
"""A search that takes less than this many times as long as the smaller one before is exact."""


@dataclass(frozen=True, kw_only=True)
class SearchJob:
    """The arguments of `stageloom.shared.search.compose.compose`; `budget_s` None: one search of the size of
    `budget`."""

    models: tuple[ModelChoice, ...]
    scheduler: str = "sequential"
    combination: Combination = Combination.ALONE
    members_max: int = 2
    costs: CostTable = field(default_factory=CostTable)
    limits: Limits = field(default_factory=Limits)
    lanes: int = 1
    executor: ExecutorOptions = field(default_factory=ExecutorOptions)
    rules: Rules = field(default_factory=Rules)
    budget: Budget = field(default_factory=Budget)
    budget_s: float | None = None
    assignment: Assignment = field(default_factory=Assignment)
    checkpoint: bytes = b""
    """A trained policy for the scheduler that takes one; empty: the packaged one."""


def run_search(job: SearchJob, now: Callable[[], float]) -> Plan:
    """The plan; with a budget in seconds the best that searches of growing size found in it, by `now`.

    A larger search may find worse than a smaller one, so each block has the cheapest schedule of all.

    Raises:
        SettingError, PlanError: as `compose`.
    """
    if job.budget_s is None:
        return _compose(job, job.budget)
    return _cheapest(job, list(growing(lambda budget: _compose(job, budget), job.budget_s, now)))


def _cheapest(job: SearchJob, plans: Sequence[Plan]) -> Plan:
    """The last plan with the cheapest schedule of each block; of equal ones the last."""
    if len(plans) == 1:
        return plans[0]
    bound = bind(plans[-1], {choice.artifact: choice.graph for choice in job.models})
    combined = []
    for index, tried in enumerate(zip(*(plan.combined for plan in plans), strict=True)):
        graph, costs = bound.combined[index].graph, _block_costs(job, bound, index)
        seconds = [schedule_s(block.schedule, graph, costs) for block in tried]
        combined.append(tried[max(at for at, taken in enumerate(seconds) if taken == min(seconds))])
    return replace(plans[-1], combined=tuple(combined))


def _block_costs(job: SearchJob, bound: BoundPlan, index: int) -> StageCosts:
    """Those by which a block of a plan of the job was searched."""
    members = bound.plan.combined[index].members
    models = [bound.models[member.model] for member in members]
    parts = [
        (model.plan.artifact, model.graph, model.blocks[member.block])
        for model, member in zip(models, members, strict=True)
    ]
    under = job.costs.under(bound.executor_of(index))
    return under.for_members(parts, batches=[model.plan.batch for model in models])


def growing(search: Callable[[Budget], T], budget_s: float, now: Callable[[], float]) -> Iterator[T]:
    """What searches of growing size find, the largest last.

    A search is counted in expansions, so that it is reproducible; seconds are spent by repeating it four
    times as large while the next one should still fit. The first one always runs to its end.
    """
    end_s = now() + budget_s
    expansions, took_s = FIRST_EXPANSIONS, 0.0
    while True:
        began_s = now()
        yield search(Budget(expansions=expansions))
        before_s, took_s = took_s, now() - began_s
        exact = before_s > 0.0 and took_s < GREW * before_s
        expansions *= GROWTH
        if exact or expansions > MOST_EXPANSIONS or now() + GROWTH * took_s > end_s:
            return


def _compose(job: SearchJob, budget: Budget) -> Plan:
    return compose(
        job.models,
        scheduler=job.scheduler,
        combination=job.combination,
        members_max=job.members_max,
        costs=job.costs,
        limits=job.limits,
        budget=budget,
        lanes=job.lanes,
        executor=job.executor,
        rules=job.rules,
        checkpoint=job.checkpoint,
        assignment=job.assignment,
    )


@dataclass(frozen=True, kw_only=True)
class BlockJob:
    """A scheduled combined block, and the time to search for a better schedule."""

    combined_block: Digest
    batch: int  # the largest of its members
    graph: CombinedGraph
    costs: StageCosts
    first: StageSchedule
    limits: Limits = field(default_factory=Limits)
    budget_s: float


def run_block_search(job: BlockJob, now: Callable[[], float]) -> StageSchedule:
    """Return the cheapest of the present schedule and those of beams of growing size."""
    found = growing(lambda budget: beam(job.graph, job.costs, job.limits, budget), job.budget_s, now)
    return min((job.first, *found), key=job.costs.schedule_s)

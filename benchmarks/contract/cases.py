"""The plans of the contract: every kind of schedule, several models at once, masks, batches, replicas."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from benchmarks.contract.compare import Outcome, compare
from benchmarks.contract.schedules import bound_of, graph_of, merged, plan_of, random_stages, random_streams
from benchmarks.contract.subjects import Subject
from stageloom.edge_agent.executor.base import Executor
from stageloom.shared.blocks import CombinedGraph, split
from stageloom.shared.bound import BoundPlan
from stageloom.shared.launch_list import Barrier
from stageloom.shared.plan import ExecutorOptions, Member
from stageloom.shared.schedule import Schedule, StageSchedule
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.costs import CostTable, StageCosts
from stageloom.shared.search.interface import TOP_LIMITS, Budget
from stageloom.shared.search.registry import scheduler

RATES = DeviceRates(launch_s=1e-3, contention=0.3, barrier_s=1e-5)
"""Launches are dear and overlap well, so that searches both merge and put side by side all that they may."""

_BUDGET = Budget(expansions=4_000)
_SEARCHED = ("sequential", "greedy", "ios", "ios_parallel", "ios_merge", "opara", "nimble")
_DRAWN: Mapping[str, Callable[[CombinedGraph, random.Random], Schedule]] = {
    "random_stages": random_stages,
    "random_streams": random_streams,
}

SCHEDULES = (*_SEARCHED, "merged", *_DRAWN)
"""Schedulers by name; `merged` merges whatever is ready and may, the last two are drawn."""


@dataclass(frozen=True)
class Case:
    """One plan, searched for when it is first asked for, and how it is run."""

    name: str
    subjects: tuple[Subject, ...]
    plan: Callable[[], BoundPlan] = field(repr=False)
    tasks: int = 1
    fallback: bool = False
    models: tuple[int, ...] = ()  # that get instances; empty: all

    @cached_property
    def bound(self) -> BoundPlan:
        """The plan, made once."""
        return self.plan()

    def run(self, executor: Executor, *, repeats: int) -> Outcome:
        """Compare every tensor behind every block with the whole models'.

        Raises:
            ExecutorError: a step failed.
        """
        return compare(
            executor,
            self.bound,
            self.subjects,
            repeats=repeats,
            tasks=self.tasks,
            fallback=self.fallback,
            models=self.models or None,
        )

    @property
    def merges(self) -> int:
        """Merge stages of all combined blocks."""
        schedules = [block.schedule for block in self.bound.plan.combined]
        return sum(stage.merge for one in schedules if isinstance(one, StageSchedule) for stage in one.stages)


def schedule_of(
    name: str, subjects: Sequence[Subject], cuts: Sequence[tuple[int, ...]], members: Sequence[Member]
) -> Schedule:
    """The schedule of some blocks together; drawn ones are the same whenever they are asked for."""
    graph = graph_of([one.artifact for one in subjects], cuts, members)
    if name == "merged":
        return merged(graph)
    if name in _DRAWN:
        return _DRAWN[name](graph, random.Random(f"{name} {members} {graph.size}"))
    return scheduler(name)(graph, _costs(subjects, cuts, members), TOP_LIMITS, _BUDGET)


def _costs(
    subjects: Sequence[Subject], cuts: Sequence[tuple[int, ...]], members: Sequence[Member]
) -> StageCosts:
    parts = []
    for member in members:
        artifact = subjects[member.model].artifact
        block = split(artifact.graph, cuts[member.model])[member.block]
        parts.append((artifact.digest, artifact.graph, block))
    return CostTable(rates=RATES).for_members(parts)


def planned(
    name: str,
    subjects: Sequence[Subject],
    cuts: Sequence[tuple[int, ...]],
    groups: Sequence[Sequence[Member]],
    *,
    executor: str,
    batch: int = 1,
    replicas: int = 1,
    barrier: Barrier = Barrier.FULL,
) -> BoundPlan:
    """A plan whose combined blocks all have the schedule of that name."""
    artifacts = [one.artifact for one in subjects]
    schedules = [schedule_of(name, subjects, cuts, members) for members in groups]
    plan = plan_of(artifacts, cuts, groups, schedules, batch=batch, replicas=replicas, barrier=barrier)
    return bound_of(replace(plan, executor=ExecutorOptions(name=executor)), artifacts)


def alone(subject: Subject, schedule: str, executor: str) -> Case:
    """One model in its blocks, each by itself."""
    groups = [[Member(0, 0, block)] for block in range(len(subject.cuts) + 1)]

    def plan() -> BoundPlan:
        return planned(schedule, [subject], [subject.cuts], groups, executor=executor)

    return Case(f"{subject.name} {schedule}", (subject,), plan)


def together(subjects: Sequence[Subject], schedule: str, executor: str, barrier: Barrier) -> Case:
    """Several models, each in two blocks, the first ones combined and the second ones combined."""
    cuts = [one.half for one in subjects]
    groups = [
        [Member(model, 0, block) for model in range(len(subjects)) if block <= len(cuts[model])]
        for block in range(2)
    ]

    def plan() -> BoundPlan:
        return planned(schedule, subjects, cuts, groups, executor=executor, barrier=barrier)

    names = "+".join(one.name for one in subjects)
    return Case(f"{names} {schedule} barrier={barrier.value}", tuple(subjects), plan)


def masks(subjects: Sequence[Subject], schedule: str, executor: str) -> Iterator[Case]:
    """One combined block of whole models, under every mask, prepared and as a fallback."""
    cuts: list[tuple[int, ...]] = [()] * len(subjects)
    members = [Member(model, 0, 0) for model in range(len(subjects))]
    plan = cache(lambda: planned(schedule, subjects, cuts, [members], executor=executor))
    for size in range(1, len(subjects) + 1):
        for models in itertools.combinations(range(len(subjects)), size):
            for fallback in (False, True):
                name = f"{schedule} mask={''.join(map(str, models))}{' fallback' * fallback}"
                yield Case(name, tuple(subjects), plan, fallback=fallback, models=models)


def batches(subject: Subject, schedule: str, executor: str, batch: int = 4) -> Iterator[Case]:
    """Every number of tasks of a padded batch, prepared and as a fallback."""
    groups = [[Member(0, 0, block)] for block in range(len(subject.half) + 1)]
    plan = cache(lambda: planned(schedule, [subject], [subject.half], groups, executor=executor, batch=batch))
    for tasks in range(1, batch + 1):
        for fallback in (False, True):
            name = f"{subject.name} {schedule} tasks={tasks}/{batch}{' fallback' * fallback}"
            yield Case(name, (subject,), plan, tasks=tasks, fallback=fallback)


def replicas(subject: Subject, schedule: str, executor: str) -> Case:
    """Two replicas of one model in one combined block: same weights, different instances."""
    groups = [[Member(0, 0, block), Member(0, 1, block)] for block in range(len(subject.half) + 1)]

    def plan() -> BoundPlan:
        return planned(schedule, [subject], [subject.half], groups, executor=executor, replicas=2)

    return Case(f"{subject.name} {schedule} replicas=2", (subject,), plan)

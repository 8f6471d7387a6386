"""Schedulers side by side on the same combined blocks: cost, gaps, search time, shape.

A schedule's *gap* is how much longer it is predicted to take than what none can beat
(`stageloom.shared.search.makespan`) and, where dynamic programming ends within the budget, than the cheapest
stage schedule within r and s. Both as shares: 0 is as good as can be. Streams may lie below the optimum, as
no barrier stands between them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Schedule, StageSchedule
from stageloom.shared.search.baselines import sequential
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import GroupRule, TooManyError
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.ios import exact
from stageloom.shared.search.isomorphism import Shared, form
from stageloom.shared.search.makespan import lower_bounds, schedule_s
from stageloom.shared.search.registry import scheduler as find_scheduler
from stageloom.shared.search.registry import searches
from stageloom.shared.search.stages import Stages, Strategy

Block = tuple[CombinedGraph, StageCosts]
"""Graph and costs of one combined block."""

_ROUNDING = 9  # decimals of a gap: two equal sums of seconds differ by less


@dataclass(frozen=True, slots=True)
class Subject:
    """Combined blocks that run one after another, such as a network."""

    name: str
    blocks: tuple[Block, ...]
    optimum_s: float | None  # None: not known within the budget
    runs: tuple[float, ...] = ()  # of each block, by which its seconds count; empty: one of each

    def sum_s(self, seconds: Iterable[float]) -> float:
        """The sum of seconds by block, each as often as the block runs."""
        runs = self.runs or (1.0,) * len(self.blocks)
        return sum(often * taken for often, taken in zip(runs, seconds, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`streams_max` None: stages. `stages` and `groups_max` None: streams, in some block at least."""

    stages: int | None
    groups_max: int | None
    streams_max: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One scheduler on one subject; all seconds but `search_s` are sums over its blocks by their runs."""

    subject: str
    scheduler: str
    schedules: tuple[Schedule, ...]  # [num_blocks]
    predicted_s: float
    bound_s: float
    optimum_s: float | None
    search_s: float

    @property
    def over_bound(self) -> float:
        """The gap to the lower bound."""
        return gap(self.predicted_s, self.bound_s)

    @property
    def over_optimum(self) -> float | None:
        """The gap to the cheapest stages; None if these are unknown."""
        return None if self.optimum_s is None else gap(self.predicted_s, self.optimum_s)

    @property
    def shape(self) -> Shape:
        """Numbers of stages, groups and streams."""
        return shape(self.schedules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds that a standing's schedules took on a device."""

    median_s: float
    quartiles_s: tuple[float, float] | None = None
    runs: int | None = None
    over_sequential: float | None = None  # median over rounds, each against `sequential` in the same round


def subject(name: str, blocks: Iterable[Block], limits: Limits, budget: Budget) -> Subject:
    """Return the blocks to compare on, with the optimum if the budget suffices for it."""
    known = tuple(blocks)
    return Subject(name, known, optimum_s(known, limits, budget))


def standing(
    of: Subject,
    scheduler: str,
    limits: Limits,
    budget: Budget,
    now: Callable[[], float],
    checkpoint: bytes = b"",
) -> Standing:
    """What a scheduler makes of a subject; isomorphic blocks are searched once, as in a plan.

    `now` gives seconds of any clock that does not go back; `checkpoint` is a trained policy for a scheduler
    that takes one.

    Raises:
        SettingError: there is no such scheduler.
    """
    search = find_scheduler(scheduler, checkpoint)
    if searches(scheduler):
        search = Shared(search)
    begun_s = now()
    schedules = tuple(search(graph, costs, limits, budget) for graph, costs in of.blocks)
    return judged(of, scheduler, schedules, limits, now() - begun_s)


def judged(
    of: Subject, scheduler: str, schedules: tuple[Schedule, ...], limits: Limits, search_s: float
) -> Standing:
    """Return the standing of given schedules, one per block of the subject."""
    both = list(zip(schedules, of.blocks, strict=True))
    return Standing(
        subject=of.name,
        scheduler=scheduler,
        schedules=schedules,
        predicted_s=of.sum_s(schedule_s(schedule, graph, costs) for schedule, (graph, costs) in both),
        bound_s=of.sum_s(bound_s(schedule, block, limits) for schedule, block in both),
        optimum_s=of.optimum_s,
        search_s=search_s,
    )


def bound_s(schedule: Schedule, block: Block, limits: Limits) -> float:
    """Return a lower bound for schedules of this kind, seconds; s does not bind streams.

    Groups on resources of their own do not slow each other down, so as many run at full speed as there are.
    """
    graph, costs = block
    if not isinstance(schedule, StageSchedule):
        return max(lower_bounds(graph, costs, Limits()))
    resources = max(len(set(stage.resources)) for stage in schedule.stages)
    return max(lower_bounds(graph, costs, limits, resources=max(resources, 1)))


def optimum_s(
    blocks: Iterable[Block], limits: Limits, budget: Budget, runs: Sequence[float] = ()
) -> float | None:
    """Seconds of the cheapest stage schedules together; None: not known within the budget per block.

    `runs`: how often each block counts; empty: once.

    Dynamic programming adds stages up. Under the model of a device class, stages of one group that follow
    each other are one launch and may cost less than that: `sequential`, which has the most of them, counts.
    """
    known: dict[tuple[Any, ...], float] = {}
    total_s, listed = 0.0, tuple(blocks)
    for (graph, costs), often in zip(listed, runs or (1.0,) * len(listed), strict=True):
        key = form(graph, costs).key
        if key not in known:
            stages = Stages(graph, costs, limits, GroupRule.CONNECTED, Strategy.BOTH)
            try:
                best = stages.schedule(exact(stages, budget.expansions))
            except TooManyError:
                return None
            in_turn = sequential(graph, costs, limits, budget)
            known[key] = min(costs.schedule_s(best), costs.schedule_s(in_turn))
        total_s += often * known[key]
    return total_s


def gap(seconds: float, least_s: float) -> float:
    """Return the excess over `least_s` as a share of it; 0 if `least_s` is 0."""
    return round(seconds / least_s - 1.0, _ROUNDING) + 0.0 if least_s > 0.0 else 0.0


def shape(schedules: Sequence[Schedule]) -> Shape:
    """Return the number of stages and the most groups of one, or the most streams of a block."""
    stages = [stage for one in schedules if isinstance(one, StageSchedule) for stage in one.stages]
    streams = [
        len({launch.stream for launch in one.launches})
        for one in schedules
        if not isinstance(one, StageSchedule)
    ]
    if streams:
        return Shape(stages=None, groups_max=None, streams_max=max(streams))
    return Shape(stages=len(stages), groups_max=max(len(stage.groups) for stage in stages), streams_max=None)

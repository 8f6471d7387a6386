"""A scheduler and a policy of their own, as a package that anyone may write."""

from dataclasses import replace

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Schedule, stage_schedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.job import SearchJob
from stageloom.shared.search.rivals import Rival

WIDTH = 2  # operators side by side


def critical_path(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> Schedule:
    """Two operators at a time, those with the longest way to the end first.

    A pure function of its arguments. `graph.predecessors` and `graph.successors` are bit masks per operator.
    """
    way_s = [0.0] * graph.size
    for op in reversed(range(graph.size)):  # operators are numbered in topological order
        after = (way_s[later] for later in range(op + 1, graph.size) if graph.successors[op] >> later & 1)
        way_s[op] = costs.operators_s[op] + max(after, default=0.0)
    stages, done, left = [], 0, set(range(graph.size))
    while left:
        ready = [op for op in sorted(left) if not graph.predecessors[op] & ~done]
        ready.sort(key=lambda op: -way_s[op])
        chosen = ready[: min(WIDTH, limits.s or WIDTH)]
        stages.append([[op] for op in chosen])
        left -= set(chosen)
        done |= sum(1 << op for op in chosen)
    return stage_schedule(stages)


def _pairs(job: SearchJob) -> SearchJob:
    models = tuple(replace(choice, replicas=2) for choice in job.models)
    return replace(job, models=models, lanes=2)


PAIRS = Rival("two replicas of each model on two lanes", _pairs, frozenset({"lanes", "replicas"}))

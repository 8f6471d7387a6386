"""Wavefront: waves of operators in breadth-first order, each operator on the unit that can start it first.

Ma et al. 2020, "Rammer: Enabling Holistic Deep Learning Compiler Optimizations with rTasks", the scheduling
policy of its section 4. A wave holds the operators whose longest path from an entry has the same number of
operators. Wave by wave, each task goes to the virtual execution unit on which it can start earliest, and
waits only for the tasks that it reads from. O(operators * units + edges).

Ours: a task is a whole operator and a unit is a stream; one kernel per operator, so the policy's choice among
kernels falls away. There are as many units as the widest wave has operators, or `limits.s`. Ends are
predicted from operator costs alone, as if nothing slowed anything down.
"""

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Launch, StreamSchedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.stage_string import MAX_STREAMS


def wavefront(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StreamSchedule:
    """Operators wave by wave, on at most `limits.s` streams; the budget changes nothing."""
    waves = waves_of(graph)
    units = min(max(len(wave) for wave in waves), limits.s or MAX_STREAMS, MAX_STREAMS)
    free_s = [0.0] * units  # when each unit ends what it was given
    end_s = [0.0] * graph.size
    launches = []
    for wave in waves:
        for op in wave:
            read_s = max((end_s[before] for before in bits(graph.predecessors[op])), default=0.0)
            start_s, unit = min((max(free, read_s), unit) for unit, free in enumerate(free_s))
            free_s[unit] = end_s[op] = start_s + costs.operators_s[op]
            launches.append(Launch(op, unit))
    return StreamSchedule(tuple(launches))


def waves_of(graph: CombinedGraph) -> list[list[int]]:
    """Operators by depth, each wave ascending."""
    depth: list[int] = []
    waves: list[list[int]] = []
    for op, before in enumerate(graph.predecessors):
        depth.append(max((depth[one] + 1 for one in bits(before)), default=0))
        if depth[op] == len(waves):
            waves.append([])
        waves[depth[op]].append(op)
    return waves

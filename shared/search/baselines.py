"""Schedulers that make one pass and search nothing: sequential, greedy, wavefront."""

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Launch, Stage, StageSchedule, StreamSchedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.stage_string import MAX_STREAMS


def sequential(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StageSchedule:
    """The sequential schedule: one operator per stage, in the graph's own order.

    The baseline of IOS (Ding et al. 2021, section 6.1) and TOP, and the first incumbent on every device. The
    numbering of a combined graph is topological, so the order is canonical. O(operators).

    Costs, limits and budget change nothing.
    """
    return StageSchedule(tuple(Stage(((op,),)) for op in range(graph.size)))


def greedy(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StageSchedule:
    """The greedy schedule: each stage takes every operator that can run by then.

    IOS (Ding et al. 2021, section 6.1) publishes one sentence: it "puts all the operators that can be
    executed currently in one stage, and repeats this process until all operators have been scheduled"; its
    figure 2 shows a successor waiting for the next stage. The idea is that of Graphi (Tang et al. 2018).
    Operators that can run at the same moment do not depend on each other, so every group holds one operator
    and the number of stages is the number of operators on the longest path. O(operators + edges).

    Ours: with a limit of s groups the lowest-numbered s operators are taken and the rest stay for the next
    stage; the paper has no such limit. Costs play no part.

    Only `limits.s` is read.
    """
    missing = [before.bit_count() for before in graph.predecessors]
    ready = [op for op in range(graph.size) if not missing[op]]
    stages = []
    while ready:
        chosen, ready = ready[: limits.s], ready[limits.s :] if limits.s is not None else []
        stages.append(Stage(tuple((op,) for op in chosen)))
        for op in chosen:
            for successor in bits(graph.successors[op]):
                missing[successor] -= 1
                if not missing[successor]:
                    ready.append(successor)
        ready.sort()
    return StageSchedule(tuple(stages))


def wavefront(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StreamSchedule:
    """Wavefront: waves of operators in breadth-first order, each on the unit that can start it first.

    Ma et al. 2020, "Rammer: Enabling Holistic Deep Learning Compiler Optimizations with rTasks", the
    scheduling policy of its section 4. A wave holds the operators whose longest path from an entry has the
    same number of operators. Wave by wave, each task goes to the virtual execution unit on which it can start
    earliest, and waits only for the tasks that it reads from. O(operators * units + edges).

    Ours: a task is a whole operator and a unit is a stream; one kernel per operator, so the policy's choice
    among kernels falls away. There are as many units as the widest wave has operators, or `limits.s`. Ends
    are predicted from operator costs alone, as if nothing slowed anything down.

    At most `limits.s` streams; the budget changes nothing.
    """
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
    """Return the operators of each depth, ascending."""
    depth: list[int] = []
    waves: list[list[int]] = []
    for op, before in enumerate(graph.predecessors):
        depth.append(max((depth[one] + 1 for one in bits(before)), default=0))
        if depth[op] == len(waves):
            waves.append([])
        waves[depth[op]].append(op)
    return waves

"""The greedy schedule: each stage takes every operator that can run by then.

IOS (Ding et al. 2021, section 6.1) publishes one sentence: it "puts all the operators that can be executed
currently in one stage, and repeats this process until all operators have been scheduled"; its figure 2 shows
a successor waiting for the next stage. The idea is that of Graphi (Tang et al. 2018). Operators that can run
at the same moment do not depend on each other, so every group holds one operator and the number of stages is
the number of operators on the longest path. O(operators + edges).

Ours: with a limit of s groups the lowest-numbered s operators are taken and the rest stay for the next
stage; the paper has no such limit. Costs play no part.
"""

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits


def greedy(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StageSchedule:
    """All operators that can run form a stage, again and again; only `limits.s` is looked at."""
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

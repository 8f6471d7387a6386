"""The sequential schedule: one operator per stage, in the graph's own order.

The baseline of IOS (Ding et al. 2021, section 6.1) and TOP, and the first incumbent on every device. The
numbering of a combined graph is topological, so the order is canonical. O(operators).
"""

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits


def sequential(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StageSchedule:
    """One operator per stage; costs, limits and budget change nothing."""
    return StageSchedule(tuple(Stage(((op,),)) for op in range(graph.size)))

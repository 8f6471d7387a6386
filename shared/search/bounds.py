"""Lower bounds: what no schedule can beat under the same costs.

- Critical path: operators that depend on each other never overlap, so the longest chain is a bound.
- Work over capacity: where k groups or streams run side by side, the device does at most
  k / (1 + contention * (k - 1)) seconds of work per second (`makespan` and the formula of a stage agree in
  this), and k is at most the graph's width, and `s` where groups are limited. Where each operator's share of
  the device is known (`StageCosts.work_s`), that share, with what contention adds, takes its time, too.

A merged stage may do its operators' work in less: each counts with its cheapest merge, on the path as a whole
and in the sum by its share. Where a whole stage was measured to take less than its formula says, both bounds
shrink by the largest such factor, so that they stay bounds. Barriers count as nothing.

Where the model of a device class predicts (`stageloom.shared.search.interference`), all that is certain of a
stage is that it takes its longest group's seconds, times the least share of them that the model allows:
capacity is then the number of groups.
"""

from dataclasses import dataclass

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Limits
from stageloom.shared.search.states import width


@dataclass(frozen=True, slots=True)
class LowerBounds:
    """Seconds."""

    critical_path_s: float
    work_s: float  # over capacity

    @property
    def seconds(self) -> float:
        """The better of the two."""
        return max(self.critical_path_s, self.work_s)

    def gap(self, seconds: float) -> float:
        """How much longer than the bound, as a share of it: 0 is proven optimal."""
        return seconds / self.seconds - 1.0 if self.seconds > 0.0 else 0.0


def lower_bounds(graph: CombinedGraph, costs: StageCosts, limits: Limits) -> LowerBounds:
    """Both bounds; O(operators * dependent pairs), for the width. `limits.r` changes nothing."""
    path_s = list(costs.operators_s)
    share_s = list(costs.operators_s)
    device_s = list(costs.operators_s)  # as share_s, of what the whole device does
    if costs.work_s and costs.contention < 1.0:
        both = zip(costs.operators_s, costs.work_s, strict=True)
        device_s = [work_s + costs.contention * (alone_s - work_s) for alone_s, work_s in both]
    for ops, seconds in costs.merged_s.items():
        for op in ops:
            path_s[op] = min(path_s[op], seconds)
            share_s[op] = min(share_s[op], seconds / len(ops))
            device_s[op] = min(device_s[op], seconds / len(ops))
    ends_s: list[float] = []
    for before, seconds in zip(graph.predecessors, path_s, strict=True):
        ends_s.append(seconds + max((ends_s[op] for op in bits(before)), default=0.0))
    most = min(width(graph), limits.s or graph.size)
    if costs.interference is not None:
        learned = costs.interference
        known = ((costs.terms(groups).longest, seconds) for groups, seconds in costs.measured)
        factor = min([1.0, learned.least, *(seconds / longest for longest, seconds in known if longest)])
        return LowerBounds(factor * max(ends_s), factor * sum(share_s) / most)
    # Beyond contention 1 side by side is slower than in turn, and one group at a time is the best.
    capacity = max(most / (1.0 + costs.contention * (most - 1)), 1.0)
    formulas = ((costs.formula_s(groups), seconds) for groups, seconds in costs.measured)
    factor = min([1.0, *(seconds / formula_s for formula_s, seconds in formulas if formula_s > 0.0)])
    work_s = sum(share_s) / capacity
    if costs.work_s:
        work_s = max(work_s, sum(device_s))
    return LowerBounds(factor * max(ends_s), factor * work_s)

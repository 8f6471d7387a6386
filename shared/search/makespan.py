"""Seconds of any schedule on the same costs, so that stages and streams can be compared.

A stage schedule costs the sum of its stages (`StageCosts`). A stream schedule is simulated as a fluid: where
k items run at the same moment, each takes `least + contention * (k - least)` times as long, where `least` is
1, or the sum of their shares of the device where that is more. Without shares, groups that start together
take exactly what a stage's formula says, `longest + contention * (total - longest)`. An item that waits for
other streams starts `barrier_s` after what it waits for; several streams end with one.
"""

from collections.abc import Set

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.launch_list import Item, LaunchList, lower
from stageloom.shared.schedule import Schedule, StageSchedule, StreamSchedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Limits
from stageloom.shared.search.states import width


def schedule_s(schedule: Schedule, graph: CombinedGraph, costs: StageCosts) -> float:
    """Seconds from the first launch to the last end, all members active.

    Raises:
        KeyError: a stage merges operators that are not among the costs' `merges`.
    """
    if isinstance(schedule, StageSchedule):
        return costs.schedule_s(schedule)
    return streams_s(schedule, graph, costs, (1 << graph.num_members) - 1)


def streams_s(schedule: StreamSchedule, graph: CombinedGraph, costs: StageCosts, mask: int) -> float:
    """Predict as `schedule_s`, with the members of `mask` active."""
    return launch_list_s(lower(schedule, graph, mask), costs)


def launch_list_s(items: LaunchList, costs: StageCosts) -> float:
    """Return the seconds of a launch list as a fluid, from the first launch to the last end."""
    joined_s = costs.barrier_s if len({item.stream for item in items}) > 1 else 0.0
    return _Fluid(items, costs).run() + joined_s


class _Fluid:
    """Items that share a device; times are seconds since the first launch."""

    def __init__(self, items: tuple[Item, ...], costs: StageCosts) -> None:
        self._costs = costs
        self._left_s = [sum(costs.operators_s[op] for op in item.ops) for item in items]  # alone
        self._share = [
            self._share_of(item, alone_s) for item, alone_s in zip(items, self._left_s, strict=True)
        ]
        self._delay_s = [costs.barrier_s if item.waits else 0.0 for item in items]
        self._missing = [0] * len(items)
        self._followers: list[list[int]] = [[] for _ in items]
        last: dict[int, int] = {}
        for index, item in enumerate(items):
            before = {*item.waits, *([last[item.stream]] if item.stream in last else [])}
            self._missing[index] = len(before)
            for one in before:
                self._followers[one].append(index)
            last[item.stream] = index

    def run(self) -> float:
        """Return the moment of the last end."""
        now_s = 0.0
        starting = {index: 0.0 for index, missing in enumerate(self._missing) if not missing}  # when
        running: set[int] = set()
        while starting or running:
            rate = 1.0 / self._slower(running)
            end_s = min((now_s + self._left_s[index] / rate for index in running), default=float("inf"))
            next_s = min(end_s, min(starting.values(), default=float("inf")))
            ended = [index for index in running if now_s + self._left_s[index] / rate <= next_s]
            for index in running:
                self._left_s[index] -= (next_s - now_s) * rate
            now_s = next_s
            for index in ended:
                running.remove(index)
                for follower in self._followers[index]:
                    self._missing[follower] -= 1
                    if not self._missing[follower]:
                        starting[follower] = now_s + self._delay_s[follower]
            for index in [index for index, start_s in starting.items() if start_s <= now_s]:
                del starting[index]
                running.add(index)
        return now_s

    def _slower(self, running: Set[int]) -> float:
        """Return how many times as long as alone each of these takes."""
        least = max(sum(self._share[index] for index in running), 1.0)
        return least + self._costs.contention * max(len(running) - least, 0.0)

    def _share_of(self, item: Item, alone_s: float) -> float:
        """Return the mean share of the device over the item's operators; 0 if unknown."""
        if not self._costs.work_s or alone_s <= 0.0:
            return 0.0
        return sum(self._costs.work_s[op] for op in item.ops) / alone_s


def lower_bounds(
    graph: CombinedGraph, costs: StageCosts, limits: Limits, *, resources: int = 1
) -> tuple[float, float]:
    """Lower bounds, seconds: what no schedule can beat under the same costs. The larger one counts.

    - Critical path: operators that depend on each other never overlap, so the longest chain is a bound.
    - Work over capacity: where k groups or streams run side by side, the device does at most
      k / (1 + contention * (k - 1)) seconds of work per second (`makespan` and the formula of a stage agree
      in this), and k is at most the graph's width, and `s` where groups are limited. Where each operator's
      share of the device is known (`StageCosts.work_s`), that share, with what contention adds, takes its
      time, too.

    A merged stage may do its operators' work in less: each counts with its cheapest merge, on the path as a
    whole and in the sum by its share. Where a whole stage was measured to take less than its formula says,
    both bounds shrink by the largest such factor, so that they stay bounds. Barriers count as nothing.

    Where the model of a device class predicts (`stageloom.shared.search.interference`), all that is certain
    of a stage is that it takes its longest group's seconds, times the least share of them that the model
    allows: capacity is then the number of groups.

    On several `resources` as many groups run at full speed.

    Both bounds; O(operators * dependent pairs), for the width. `limits.r` changes nothing.
    """
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
        return factor * max(ends_s), factor * sum(share_s) / most
    # Beyond contention 1 side by side is slower than in turn, and one group at a time is the best.
    capacity = max(most / (1.0 + costs.contention * (most - 1)), resources)
    formulas = ((costs.formula_s(groups), seconds) for groups, seconds in costs.measured)
    factor = min([1.0, *(seconds / formula_s for formula_s, seconds in formulas if formula_s > 0.0)])
    work_s = sum(share_s) / capacity
    if costs.work_s:
        work_s = max(work_s, sum(device_s) / resources)
    return factor * max(ends_s), factor * work_s

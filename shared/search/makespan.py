"""Seconds of any schedule on the same costs, so that stages and streams can be compared.

A stage schedule costs the sum of its stages (`StageCosts`). A stream schedule is simulated as a fluid: where
k items run at the same moment, each takes `least + contention * (k - least)` times as long, where `least` is
1, or the sum of their shares of the device where that is more. Without shares, groups that start together
take exactly what a stage's formula says, `longest + contention * (total - longest)`. An item that waits for
other streams starts `barrier_s` after what it waits for; several streams end with one.
"""

from collections.abc import Set

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.launch_list import Item, LaunchList, lower
from stageloom.shared.schedule import Schedule, StageSchedule, StreamSchedule
from stageloom.shared.search.costs import StageCosts


def schedule_s(schedule: Schedule, graph: CombinedGraph, costs: StageCosts) -> float:
    """Seconds from the first launch to the last end, all members active.

    Raises:
        KeyError: a stage merges operators that are not among the costs' `merges`.
    """
    if isinstance(schedule, StageSchedule):
        return costs.schedule_s(schedule)
    return streams_s(schedule, graph, costs, (1 << graph.num_members) - 1)


def streams_s(schedule: StreamSchedule, graph: CombinedGraph, costs: StageCosts, mask: int) -> float:
    """As `schedule_s`, with the members of `mask` active."""
    return launch_list_s(lower(schedule, graph, mask), costs)


def launch_list_s(items: LaunchList, costs: StageCosts) -> float:
    """Seconds of a launch list as a fluid, from the first launch to the last end."""
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
        """The moment of the last end."""
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
        """How many times as long each of these takes as alone."""
        least = max(sum(self._share[index] for index in running), 1.0)
        return least + self._costs.contention * max(len(running) - least, 0.0)

    def _share_of(self, item: Item, alone_s: float) -> float:
        """The mean share of the device over the item's operators; 0 where it is not known."""
        if not self._costs.work_s or alone_s <= 0.0:
            return 0.0
        return sum(self._costs.work_s[op] for op in item.ops) / alone_s

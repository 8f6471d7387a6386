"""Schedulers on a network's blocks under the costs of a device: what searches say, without a device."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Final

from stageloom.planner.twin.device_file import load_device
from stageloom.shared.blocks import CombinedGraph, combine, split
from stageloom.shared.digest import digest_of
from stageloom.shared.graph import Graph
from stageloom.shared.schedule import Schedule, StageSchedule
from stageloom.shared.search.costs import CostTable, StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.isomorphism import Shared
from stageloom.shared.search.makespan import schedule_s
from stageloom.shared.search.registry import scheduler, searches

IOS_LIMITS: Final = Limits(r=3, s=8)
"""What IOS and TOP prune by."""


@dataclass(frozen=True)
class Scheduled:
    """A network's schedules, a block each; processor seconds that the search took."""

    schedules: tuple[Schedule, ...]
    predicted_s: float
    search_s: float

    @property
    def stages(self) -> int:
        """Of all blocks."""
        return sum(len(one.stages) for one in self.schedules if isinstance(one, StageSchedule))


class CostedNetwork:
    """A network's blocks with what they take on a device at a batch."""

    def __init__(self, graph: Graph, device: str, batch: int = 1) -> None:
        """`device`: a device of the twin, or a path to a device file."""
        offered = dict(graph.partitions)
        table = CostTable(rates=load_device(device).rates())
        artifact = digest_of([graph.name])
        self.blocks: list[tuple[CombinedGraph, StageCosts]] = []
        for block in split(graph, offered.get("paper", offered.get("base", ()))):
            costs = table.for_members([(artifact, graph, block)], batches=(batch,))
            self.blocks.append((combine([(graph, block)]), costs))

    def searched(self, name: str, limits: Limits = IOS_LIMITS, budget: Budget | None = None) -> Scheduled:
        """What a scheduler finds; isomorphic blocks are searched once."""
        search = Shared(scheduler(name)) if searches(name) else scheduler(name)
        began_s = time.process_time()
        found = tuple(search(graph, costs, limits, budget or Budget()) for graph, costs in self.blocks)
        search_s = time.process_time() - began_s
        return Scheduled(found, self.seconds(found), search_s)

    def seconds(self, schedules: Sequence[Schedule]) -> float:
        """What schedules take here, whatever they were made for."""
        return fsum(self.each_s(schedules))

    def each_s(self, schedules: Sequence[Schedule]) -> list[float]:
        """Seconds of each block."""
        return [
            schedule_s(one, graph, costs) for one, (graph, costs) in zip(schedules, self.blocks, strict=True)
        ]

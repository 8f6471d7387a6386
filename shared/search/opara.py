"""Opara: greedy streams, and a launch order that mixes what computes with what moves memory.

Chen et al. 2023, "Opara: Exploiting Operator Parallelism for Expediting DNN Inference on GPUs": algorithm 1
allocates streams, O(operators + edges); algorithm 2 orders the launches by what a profiler saw, here
O(operators * log operators + edges) by heaps. They do not depend on each other.

What the paper leaves open is done as in its released code (`OperatorLauncher.py`): the first turn is that of
the compute-intensive operators, and the turn changes with every launch, whether or not both lists held
something. Ours: equal demands go by the time they became ready, then by number; the demand is the largest
share of the three resources that the paper names, where the released code compares shared memory alone.
Without profiles all operators count as equal, so that the order is that in which they become ready.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Launch, StreamSchedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.stage_string import MAX_STREAMS


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """What a thread block of one operator needs, as shares of what a multiprocessor has."""

    shared_memory: float = 0.0
    threads: float = 0.0
    registers: float = 0.0
    memory_intensive: bool = False

    @property
    def demand(self) -> float:
        """The largest share."""
        return max(self.shared_memory, self.threads, self.registers)


def opara(
    graph: CombinedGraph,
    costs: StageCosts,
    limits: Limits,
    budget: Budget,
    *,
    profiles: Sequence[OperatorProfile] | None = None,
) -> StreamSchedule:
    """Both algorithms together; costs, limits and budget change nothing. `profiles` are per operator."""
    streams = allocate_streams(graph)
    order = launch_order(graph, profiles or [OperatorProfile()] * graph.size)
    return StreamSchedule(tuple(Launch(op, streams[op] % MAX_STREAMS) for op in order))


def allocate_streams(graph: CombinedGraph) -> list[int]:
    """Algorithm 1: the stream of the first predecessor that still has it to give, or a new one. [num_ops]"""
    given = 0  # the paper's SYNC flags
    streams: list[int] = []
    count = 0
    for before in graph.predecessors:
        first = before & ~given
        if first:
            first &= -first
            given |= first
            streams.append(streams[first.bit_length() - 1])
        else:
            streams.append(count)
            count += 1
    return streams


def launch_order(graph: CombinedGraph, profiles: Sequence[OperatorProfile]) -> list[int]:
    """Algorithm 2: by turns from the ready operators of either kind, the least demanding one first."""
    missing = [before.bit_count() for before in graph.predecessors]
    ready: tuple[list[tuple[float, int, int]], ...] = ([], [])  # compute-, memory-intensive
    arrived = 0

    def add(op: int) -> None:
        nonlocal arrived
        heappush(ready[profiles[op].memory_intensive], (profiles[op].demand, arrived, op))
        arrived += 1

    for op, count in enumerate(missing):
        if not count:
            add(op)
    order: list[int] = []
    while ready[0] or ready[1]:
        turn = len(order) & 1
        op = heappop(ready[turn] or ready[1 - turn])[2]
        order.append(op)
        for successor in bits(graph.successors[op]):
            missing[successor] -= 1
            if not missing[successor]:
                add(successor)
    return order

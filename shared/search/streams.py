"""Schedules of streams with few waits: Opara and Nimble."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from stageloom.shared.bitmask import bits, mask_of
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Launch, StreamSchedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.states import largest_matching
from stageloom.shared.stage_string import MAX_STREAMS


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """The demand of an operator's thread block, as shares of a multiprocessor."""

    shared_memory: float = 0.0
    threads: float = 0.0
    registers: float = 0.0
    memory_intensive: bool = False

    @property
    def demand(self) -> float:
        """The largest of the shares."""
        return max(self.shared_memory, self.threads, self.registers)


def opara(
    graph: CombinedGraph,
    costs: StageCosts,
    limits: Limits,
    budget: Budget,
    *,
    profiles: Sequence[OperatorProfile] | None = None,
) -> StreamSchedule:
    """Opara: greedy streams, and a launch order that mixes what computes with what moves memory.

    Chen et al. 2023, "Opara: Exploiting Operator Parallelism for Expediting DNN Inference on GPUs": algorithm
    1 allocates streams, O(operators + edges); algorithm 2 orders the launches by what a profiler saw, here
    O(operators * log operators + edges) by heaps. They do not depend on each other.

    What the paper leaves open is done as in its released code (`OperatorLauncher.py`): the first turn is that
    of the compute-intensive operators, and the turn changes with every launch, whether or not both lists held
    something. Ours: equal demands go by the time they became ready, then by number; the demand is the largest
    share of the three resources that the paper names, where the released code compares shared memory alone.
    Without profiles all operators count as equal, so that the order is that in which they become ready.

    Both algorithms together; costs, limits and budget change nothing. `profiles` are per operator.
    """
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


def nimble(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StreamSchedule:
    """Nimble: as few streams as allow every pair of independent operators to overlap, with the fewest waits.

    Kwon et al. 2020, "Nimble: Lightweight and Parallel GPU Task Scheduling for Deep Learning", section 4.2
    and algorithm 1: reduce the graph transitively to E', match operators to successors in the bipartite graph
    of E' as often as possible, and put matched operators on one stream. Then independent operators are on
    different streams, and of all assignments for which that holds this one needs the fewest waits: |E'| less
    the size of the matching. The released code (`autostream.cpp`) then lets chains share a stream where one
    must end before the other begins, by a second matching; both properties stay. Without it GoogLeNet would
    have 28 streams, with it 4, as Opara reports. Operators are launched in the graph's own order. O(operators
    * edges).

    Ours: masks instead of lists of Booleans, no recursion; and where several matchings are largest, the order
    in which augmenting paths are tried may choose another one.

    Costs, limits and budget change nothing.
    """
    streams = assign_streams(graph)
    return StreamSchedule(tuple(Launch(op, stream % MAX_STREAMS) for op, stream in enumerate(streams)))


def assign_streams(graph: CombinedGraph) -> list[int]:
    """Return the stream of each operator, numbered in the order of their first operators. [num_ops]"""
    chain_of = _numbered(largest_matching(transitive_reduction(graph)))
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for op, chain in enumerate(chain_of):
        first.setdefault(chain, op)
        last[chain] = op
    ends = mask_of(last.values())
    before = [  # the chains that end before this one begins: a closed relation, so one matching is enough
        mask_of(chain_of[end] for end in bits(graph.ancestors[begin] & ends)) for begin in first.values()
    ]
    stream_of = _numbered(largest_matching(before))
    return [stream_of[chain] for chain in chain_of]


def transitive_reduction(graph: CombinedGraph) -> list[int]:
    """Return the predecessors that no other predecessor depends on: the minimum equivalent graph."""
    reduced = []
    for before in graph.predecessors:
        implied = 0
        for op in bits(before):
            implied |= graph.ancestors[op]
        reduced.append(before & ~implied)
    return reduced


def _numbered(matched: Sequence[int]) -> list[int]:
    """Return the path of each vertex along matched pairs, in the order of their first vertices."""
    paths: list[int] = []
    count = 0
    for before in matched:
        if before < 0:
            paths.append(count)
            count += 1
        else:
            paths.append(paths[before])
    return paths

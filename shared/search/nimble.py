"""Nimble: as few streams as allow every pair of independent operators to overlap, with the fewest waits.

Kwon et al. 2020, "Nimble: Lightweight and Parallel GPU Task Scheduling for Deep Learning", section 4.2 and
algorithm 1: reduce the graph transitively to E', match operators to successors in the bipartite graph of E'
as often as possible, and put matched operators on one stream. Then independent operators are on different
streams, and of all assignments for which that holds this one needs the fewest waits: |E'| less the size of
the matching. The released code (`autostream.cpp`) then lets chains share a stream where one must end before
the other begins, by a second matching; both properties stay. Without it GoogLeNet would have 28 streams, with
it 4, as Opara reports. Operators are launched in the graph's own order. O(operators * edges).

Ours: masks instead of lists of Booleans, no recursion; and where several matchings are largest, the order in
which augmenting paths are tried may choose another one.
"""

from collections.abc import Sequence

from stageloom.shared.bitmask import bits, mask_of
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Launch, StreamSchedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.matching import largest_matching
from stageloom.shared.stage_string import MAX_STREAMS


def nimble(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StreamSchedule:
    """Every operator on its stream, in the graph's order; costs, limits and budget change nothing."""
    streams = assign_streams(graph)
    return StreamSchedule(tuple(Launch(op, stream % MAX_STREAMS) for op, stream in enumerate(streams)))


def assign_streams(graph: CombinedGraph) -> list[int]:
    """Per operator its stream, numbered in the order of their first operators. [num_ops]"""
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
    """Per operator the predecessors that no other predecessor depends on: the minimum equivalent graph."""
    found = []
    for before in graph.predecessors:
        implied = 0
        for op in bits(before):
            implied |= graph.ancestors[op]
        found.append(before & ~implied)
    return found


def _numbered(matched: Sequence[int]) -> list[int]:
    """Per vertex its path along matched pairs, paths in the order of their first vertices."""
    found: list[int] = []
    count = 0
    for before in matched:
        if before < 0:
            found.append(count)
            count += 1
        else:
            found.append(found[before])
    return found

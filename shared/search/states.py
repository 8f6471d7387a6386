"""The states of a search over endings.

A state is a set of operators that is left to schedule once the last stages are chosen: closed under
predecessors, not empty. A single last operator is an ending under every rule and limit, so all such sets are
reached whatever r and s are; they come here from small to large, as dynamic programming needs them.
"""

from collections.abc import Iterator, Sequence

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.search.endings import TooManyError


def largest_matching(before: Sequence[int]) -> list[int]:
    """A largest matching between the vertices of a graph and their predecessors.

    Every vertex is matched to at most one predecessor and is the partner of at most one follower, so the
    matched pairs form paths (Fulkerson 1956). By augmenting paths (Berge 1957), O(vertices * edges), without
    recursion.

    Per vertex the predecessor it is matched to, or -1; `before` are masks. [num_vertices]

    Deterministic: vertices in ascending order, each trying its predecessors in ascending order.
    """
    successor = [-1] * len(before)
    matched = [-1] * len(before)
    free = (1 << len(before)) - 1  # predecessors without a partner
    for start in range(len(before)):
        tried = 0
        path = [(start, before[start])]  # vertices to be matched, with the predecessors they may still try
        while path:
            vertex, candidates = path[-1]
            if open_ones := candidates & free:
                taken = (open_ones & -open_ones).bit_length() - 1
                free ^= 1 << taken
                for waiting, _ in reversed(path):  # each takes its choice and hands the old one on
                    successor[taken], matched[waiting], taken = waiting, taken, matched[waiting]
                break
            candidates &= ~tried
            if not candidates:
                path.pop()
                continue
            low = candidates & -candidates
            tried |= low
            other = successor[low.bit_length() - 1]
            path[-1] = (vertex, candidates ^ low)
            path.append((other, before[other]))
    return matched


def states_by_size(graph: CombinedGraph, limit: int | None = None) -> Iterator[list[int]]:
    """All states of one operator, then of two, and so on; each list ascending.

    Raises:
        TooManyError: more than `limit` states have the same size.
    """
    level = {0: _entries(graph, 0)}
    for _ in range(graph.size):
        following: dict[int, int] = {}
        for state, ready in level.items():
            rest = ready
            while rest:
                low = rest & -rest
                rest ^= low
                grown = state | low
                if grown not in following:
                    after = graph.successors[low.bit_length() - 1]
                    following[grown] = (ready ^ low) | _entries(graph, grown, after)
            if limit is not None and len(following) > limit:
                raise TooManyError(f"more than {limit} states")
        level = following
        yield sorted(level)


def width(graph: CombinedGraph) -> int:
    """The most operators of which none depends on another (IOS, definition 1).

    By Dilworth's theorem the number of operators less the size of a largest matching between operators and
    their ancestors. O(operators * dependent pairs).
    """
    return sum(before < 0 for before in largest_matching(graph.ancestors))


def _entries(graph: CombinedGraph, done: int, among: int | None = None) -> int:
    """Return the operators outside `done`, of those in `among`, whose predecessors are all in `done`."""
    candidates = range(graph.size) if among is None else bits(among)
    mask = 0
    for op in candidates:
        if not graph.predecessors[op] & ~done:
            mask |= 1 << op
    return mask & ~done

"""A largest matching between the vertices of a graph and their predecessors.

Every vertex is matched to at most one predecessor and is the partner of at most one follower, so the matched
pairs form paths (Fulkerson 1956). By augmenting paths (Berge 1957), O(vertices * edges), without recursion.
"""

from collections.abc import Sequence


def largest_matching(before: Sequence[int]) -> list[int]:
    """Per vertex the predecessor it is matched to, or -1; `before` are masks. [num_vertices]

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

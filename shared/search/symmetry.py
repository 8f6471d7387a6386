"""Members of a combined block that may be exchanged, and the states that are the same because of it.

Replicas of one model, and blocks of equal cells, have the same operators at the same costs. A state in which
one of them is further than another then costs what it costs with the two exchanged: of k such members up to
k! states are searched as one.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations, product

from stageloom.shared.bitmask import mask_of
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.search.costs import StageCosts


def by_operators_alone(costs: StageCosts) -> bool:
    """Whether stages cost what their operators and merges say: none is known as a whole, nor may be, and
    no model reads more of an operator than its seconds."""
    return type(costs) is StageCosts and not costs.measured and costs.interference is None


def exchangeable(graph: CombinedGraph, costs: StageCosts) -> list[list[int]]:
    """Members that have the same operators at the same costs, two or more together; may be none."""
    if graph.num_members == 1 or not by_operators_alone(costs):
        return []
    found: dict[object, list[int]] = {}
    for member in range(graph.num_members):
        start, stop = graph.offsets[member], graph.offsets[member + 1]
        merges = frozenset(
            (mask_of(ops) >> start, seconds) for ops, seconds in costs.merges if start <= min(ops) < stop
        )
        rows = tuple(before >> start for before in graph.predecessors[start:stop])
        seconds = costs.operators_s[start:stop], costs.work_s[start:stop]
        found.setdefault((rows, seconds, merges), []).append(member)
    return [members for members in found.values() if len(members) > 1]


def images(graph: CombinedGraph, classes: Sequence[Sequence[int]], state: int) -> Iterator[int]:
    """The state, and what it becomes when members of a class are exchanged; each once."""
    fixed = state
    choices = []
    for members in classes:
        parts = []
        for member in members:
            mask = graph.member_mask(member)
            parts.append((state & mask) >> graph.offsets[member])
            fixed &= ~mask
        choices.append(set(permutations(parts)))
    for chosen in product(*choices):
        image = fixed
        for members, parts_chosen in zip(classes, chosen, strict=True):
            for member, part in zip(members, parts_chosen, strict=True):
                image |= part << graph.offsets[member]
        yield image

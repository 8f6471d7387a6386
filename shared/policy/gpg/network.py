"""GPG's forward pass over plain arrays (TOP, equations 5 and 6); equal to torch's, without torch.

Equation 5 runs once per combined block, from top to bottom. Of equation 6 only the sum over the leaves and
what follows it depend on the state, so each operator's term of the sum is kept, too.

Ours: the raw state of equation 5 is projected to the embedding's width, since the two are added; heads read
the state's row of sums (`features.state_rows`) beside z; and beside the action there is a value, the share of
the block's seconds that a state will still take: `least + (rest - least) * head`, so that it starts out right
at both ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.matmul import matmul
from stageloom.shared.policy.gpg.features import (
    Floats,
    Measures,
    bit_rows,
    measures,
    operator_rows,
    state_rows,
)
from stageloom.shared.search.costs import StageCosts


@dataclass(frozen=True)
class GpgNetwork:
    """The trained numbers: `NAME.N.weight` [outputs, inputs] and `NAME.N.bias` [outputs] per layer."""

    arrays: Mapping[str, Floats]

    @cached_property
    def _layers(self) -> Mapping[str, list[tuple[Floats, Floats]]]:
        """Per part its layers in order, weights turned to [inputs, outputs]."""
        import numpy as np

        found: dict[str, list[tuple[Floats, Floats]]] = {}
        names = sorted({tuple(name.rsplit(".", 2)[:2]) for name in self.arrays})
        for part, number in names:
            weight = np.ascontiguousarray(self.arrays[f"{part}.{number}.weight"].T)
            found.setdefault(part, []).append((weight, self.arrays[f"{part}.{number}.bias"]))
        return found

    def part(self, name: str, rows: Floats) -> Floats:
        """One part's layers with a ReLU between them. [num_rows, inputs] -> [num_rows, outputs]"""
        import numpy as np

        layers = self._layers[name]
        for weight, bias in layers[:-1]:
            rows = np.maximum(matmul(rows, weight) + bias, 0.0)
        weight, bias = layers[-1]
        found: Floats = matmul(rows, weight) + bias
        return found

    def embed(self, graph: CombinedGraph, rows: Floats) -> Floats:
        """Equation 5 from top to bottom, one level of the graph at a time. [num_ops, width]"""
        import numpy as np

        own = self.part("raw", rows)
        found = np.zeros_like(own)
        passed = np.zeros_like(own)  # g1 of every embedding so far
        for level in levels(graph):
            above = np.stack([passed[list(bits(graph.predecessors[op]))].sum(axis=0) for op in level])
            found[level] = self.part("h1", above) + own[level]
            passed[level] = self.part("g1", found[level])
        return found


class EncodedBlock:
    """A combined block as the policy sees it; states are masks of the operators left."""

    def __init__(self, network: GpgNetwork, graph: CombinedGraph, costs: StageCosts) -> None:
        self._network = network
        self._size = graph.size
        self.found: Measures = measures(graph, costs)
        embedded = network.embed(graph, operator_rows(graph, self.found))
        self._terms = network.part("g2", embedded)  # [num_ops, width]
        self._successors = bit_rows(graph.successors, graph.size).T.copy()  # [op, before]

    @property
    def total_s(self) -> float:
        """Seconds of the block's operators one after another."""
        return self.found.total_s

    def states(self, masks: Sequence[int]) -> tuple[Floats, Floats]:
        """z of equation 6 with the state's row beside it, and that row. [num_states, ...]"""
        import numpy as np

        left = bit_rows(masks, self._size)
        leaves = left * (matmul(left, self._successors) == 0.0)
        rows = state_rows(self.found, left, leaves)
        z = self._network.part("h2", matmul(leaves, self._terms))
        return np.concatenate([z, rows], axis=1), rows

    def actions(self, masks: Sequence[int]) -> Floats:
        """The policy's action per state, 0 <= m < 1. [num_states]"""
        import numpy as np

        seen, _ = self.states(masks)
        found = 1.0 / (1.0 + np.exp(-self._network.part("actor", seen)[:, 0]))
        return np.minimum(found, np.float32(1.0 - 1e-6))

    def values(self, masks: Sequence[int]) -> Floats:
        """The share of `total_s` that each state will still take. [num_states]"""
        import numpy as np

        seen, rows = self.states(masks)
        rest, least = rows[:, 0], rows[:, 1]
        found: Floats = least + (rest - least) * self._network.part("value", seen)[:, 0]
        return np.where(rest > 0.0, found, np.float32(0.0))


def levels(graph: CombinedGraph) -> list[list[int]]:
    """Operators by the length of the longest chain above them."""
    depth: list[int] = []
    found: list[list[int]] = []
    for op, before in enumerate(graph.predecessors):
        depth.append(1 + max((depth[one] for one in bits(before)), default=-1))
        if depth[op] == len(found):
            found.append([])
        found[depth[op]].append(op)
    return found

"""GPG's features, and its forward pass over plain arrays (TOP, equations 5 and 6); equal to torch's, without
torch.

The policy sees a row per operator, once per combined block, and a row per state. The operator's row is TOP's
list (V-C.1): (i) type, (ii) input shape, (iii) output shape, (iv) strides, (v) kernel, (vi) padding, (vii)
groups of the convolution, (viii) activation, (ix) pooling type. Ours after it: what the operator costs, as
the cost model of the device at hand says; TOP's policy has to learn that from shapes, for one device. The
state's row is ours, too: sums over what is left, which a sum over leaves (equation 6) only approaches.

Equation 5 runs once per combined block, from top to bottom. Of equation 6 only the sum over the leaves and
what follows it depend on the state, so each operator's term of the sum is kept, too.

Ours: the raw state of equation 5 is projected to the embedding's width, since the two are added; heads read
the state's row of sums (`state_rows`) beside z; and beside the action there is a value, the share of the
block's seconds that a state will still take: `least + (rest - least) * head`, right at both ends untrained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log1p
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from stageloom.shared.attributes import ACTIVATIONS, POOLINGS, Attributes
from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.graph import Graph, Operator, Tensor
from stageloom.shared.matmul import matmul
from stageloom.shared.search.costs import StageCosts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Floats: TypeAlias = "NDArray[np.float32]"
"""Text at run time: numpy is imported only where arrays are touched."""

_TYPES: Final = {
    **dict.fromkeys(("Conv", "ConvTranspose", "QLinearConv", "ConvInteger"), 0),
    **dict.fromkeys(("Gemm", "MatMul", "QLinearMatMul", "Einsum"), 1),
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "LpPool"), 2),
    "Concat": 3,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Sum", "Mean", "Max", "Min"), 4),
    **dict.fromkeys(("Relu", "Clip", "Sigmoid", "Tanh", "Softmax", "LeakyRelu", "Gelu", "HardSwish"), 5),
    **dict.fromkeys(("BatchNormalization", "LayerNormalization", "InstanceNormalization", "LRN"), 6),
}
_OTHER: Final = 7
_LOG_SCALE: Final = 0.1  # logarithms of extents reach 10

PAPER_FEATURES: Final = 8 + 4 + 3 + 2 + 2 + 2 + 1 + len(ACTIVATIONS) + len(POOLINGS)
OPERATOR_FEATURES: Final = PAPER_FEATURES + 6
STATE_FEATURES: Final = 8


class Measures(NamedTuple):
    """Per operator, as shares of the block's seconds one operator after another; all [num_ops]."""

    seconds: Floats
    work: Floats  # what the whole device needs for it; 0 where that is not known
    path: Floats  # the longest chain that ends with the operator
    total_s: float
    contention: float  # at most 1
    barrier: float


_LEAST_S: Final = 1e-12
"""Blocks that take less have no proportions worth reading, and single precision none to divide by."""


def measures(graph: CombinedGraph, costs: StageCosts) -> Measures:
    """The costs of a block without their unit: a device twice as fast shows the same."""
    import numpy as np

    total_s = max(sum(costs.operators_s), _LEAST_S)
    path_s: list[float] = []
    for before, seconds in zip(graph.predecessors, costs.operators_s, strict=True):
        path_s.append(seconds + max((path_s[op] for op in bits(before)), default=0.0))
    work_s = costs.work_s or (0.0,) * graph.size
    return Measures(
        np.array(costs.operators_s, np.float32) / np.float32(total_s),
        np.array(work_s, np.float32) / np.float32(total_s),
        np.array(path_s, np.float32) / np.float32(total_s),
        total_s,
        min(costs.contention, 1.0),
        costs.barrier_s / total_s,
    )


def operator_rows(graph: CombinedGraph, found: Measures) -> Floats:
    """[num_ops, OPERATOR_FEATURES]; a graph without members shows its costs alone."""
    import numpy as np

    rows = np.zeros((graph.size, OPERATOR_FEATURES), np.float32)
    for index, (model, block) in enumerate(graph.members):
        start = graph.offsets[index]
        for place, op in enumerate(block.operators):
            rows[start + place, :PAPER_FEATURES] = _paper_row(model, model.operators[op])
    size = np.float32(graph.size)
    above = np.array([_sum_of(found.seconds, mask) for mask in graph.ancestors], np.float32)
    rows[:, PAPER_FEATURES:] = np.stack(
        [
            np.log1p(found.seconds * size),
            found.seconds,
            found.work / np.maximum(found.seconds, np.float32(1e-12)),
            found.path,
            above,
            np.full(graph.size, min(found.barrier * float(size), 4.0), np.float32),
        ],
        axis=1,
    )
    return rows


def state_rows(found: Measures, left: Floats, leaves: Floats) -> Floats:
    """[num_states, STATE_FEATURES]; `left` and `leaves` are 0 or 1 per state and operator.

    The first two are the seconds left and the least that they can take, as shares of the block's.
    """
    import numpy as np

    size = found.seconds.shape[0]
    rest = matmul(left, found.seconds)
    work = matmul(left, found.work)
    path = (leaves * found.path).max(axis=1, initial=0.0)
    contention = np.float32(found.contention)
    rows = np.empty((len(left), STATE_FEATURES), np.float32)
    rows[:, 0] = rest
    rows[:, 1] = np.minimum(np.maximum(path, work + contention * (rest - work)), rest)
    rows[:, 2] = path
    rows[:, 3] = work
    rows[:, 4] = left.sum(axis=1) / np.float32(size)
    rows[:, 5] = leaves.sum(axis=1) / np.float32(8.0)
    rows[:, 6] = min(found.barrier * size, 4.0)
    rows[:, 7] = contention
    return rows


def bit_rows(masks: Sequence[int], size: int) -> Floats:
    """Sets of operators as rows of 0 and 1. [len(masks), size]"""
    import numpy as np

    width = (size + 7) // 8
    raw = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), np.uint8)
    found = np.unpackbits(raw.reshape(len(masks), width), axis=1, count=size, bitorder="little")
    return found.astype(np.float32)


def _sum_of(values: Floats, mask: int) -> float:
    return float(sum(values[op] for op in bits(mask)))


def _paper_row(model: Graph, operator: Operator) -> list[float]:
    inputs = [model.tensors[tensor] for tensor in operator.inputs]
    outputs = [model.tensors[tensor] for tensor in operator.outputs]
    known: Attributes = operator.attributes
    return [
        *_one_hot(_TYPES.get(operator.kind, _OTHER), _OTHER + 1),
        *_shape(inputs),
        len(inputs) / 4.0,
        *_shape(outputs),
        *_two(known.strides),
        *_two(known.kernel),
        *_two(known.pads),
        _LOG_SCALE * log1p(known.groups),
        *_one_hot(ACTIVATIONS.index(known.activation), len(ACTIVATIONS)),
        *_one_hot(POOLINGS.index(known.pooling), len(POOLINGS)),
    ]


def _one_hot(index: int, size: int) -> list[float]:
    return [float(place == index) for place in range(size)]


def _shape(tensors: Sequence[Tensor]) -> list[float]:
    """Channels of all, rows and columns of the first, as logarithms."""
    if not tensors:
        return [0.0, 0.0, 0.0]
    channels = sum(tensor.shape[1] if len(tensor.shape) > 1 else 1 for tensor in tensors)
    rows, columns = (*tensors[0].shape[2:4], 1, 1)[:2]
    return [_LOG_SCALE * log1p(extent) for extent in (channels, rows, columns)]


def _two(values: Sequence[int]) -> list[float]:
    """The first two numbers, small ones as they are."""
    return [min(value, 16) / 8.0 for value in (*values, 0, 0)[:2]]


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
        head = self._network.part("actor", seen)[:, 0]
        found = 1.0 / (1.0 + np.exp(np.minimum(-head, np.float32(80.0))))  # exp of 89 overflows
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

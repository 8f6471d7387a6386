"""What GPG sees: a row per operator, once per combined block, and a row per state.

The operator's row is TOP's list (V-C.1): (i) type, (ii) input shape, (iii) output shape, (iv) strides,
(v) kernel, (vi) padding, (vii) groups of the convolution, (viii) activation, (ix) pooling type. Ours after
it: what the operator costs, as the cost model of the device at hand says; TOP's policy has to learn that from
shapes, for one device.

The state's row is ours, too: sums over what is left, which a sum over leaves (equation 6) only approaches.
"""

from collections.abc import Sequence
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
    least = np.maximum(path, work + contention * (rest - work))
    one = np.ones_like(rest)
    return np.stack(
        [
            rest,
            np.minimum(least, rest),
            path,
            work,
            left.sum(axis=1) / np.float32(size),
            leaves.sum(axis=1) / np.float32(8.0),
            one * np.float32(min(found.barrier * size, 4.0)),
            one * contention,
        ],
        axis=1,
    ).astype(np.float32)


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

"""Which operators of a model may run as one launch, and as what: IOS's operator merge. Pure.

Ding et al. 2021, section 3.2: operators of one type over one input, with different hyper-parameters; smaller
kernels are padded with zeros to the size of the largest, kernels are stacked, the output is split again.

Operators may merge exactly if their `merge_key` is the same; so that is an equivalence, and any two or more
of a class may merge, whatever the others do. The key demands of each

- a convolution over all channels (group 1) whose weights are constants, reading one tensor, making one;
- the same input tensor: then none depends on another;
- the same strides, dilations and extents of the output, and the same type of output;
- the same activation: pointwise, with no constant that differs from channel to channel;
- paddings that differ by whole dilations along each axis, so that the taps of a padded kernel are among those
  of the common one. A tap j of kernel i reads the input at `position * stride - before_i + dilation * j`; in
  the common kernel it is tap `j + (before - before_i) / dilation`, where `before` is the largest.

Kernels need not be odd, nor paddings symmetric; those of the usual "same" convolutions come out centred.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

from stageloom.shared.convolution import Convolution
from stageloom.shared.graph import ITEM_BYTES, Graph
from stageloom.shared.ids import OpId, TensorId


@dataclass(frozen=True, slots=True)
class MergedConvolution:
    """Several convolutions as one; `convolution` has their activation, too."""

    ops: tuple[OpId, ...]  # in the order in which their kernels are stacked [num_ops]
    input: TensorId
    outputs: tuple[TensorId, ...]  # [num_ops]
    convolution: Convolution
    filters: tuple[int, ...]  # output channels of each [num_ops]
    offsets: tuple[
        tuple[int, ...], ...
    ]  # where the padded kernel holds each one's first tap [num_ops][num_axes]


def merge_key(graph: Graph, op: OpId) -> Hashable:
    """What operators that may merge have in common; None: this one never merges."""
    operator = graph.operators[op]
    found = operator.convolution
    if found is None:
        return None
    output = graph.tensors[operator.outputs[0]]
    phases = tuple(before % step for before, step in zip(found.before, found.dilations, strict=True))
    return (
        operator.inputs[0],
        found.strides,
        found.dilations,
        phases,
        output.shape[2:],
        output.dtype,
        found.activation,
    )


def may_merge(graph: Graph, ops: Sequence[OpId]) -> bool:
    """Whether two or more different operators may run as one launch."""
    keys = {merge_key(graph, op) for op in ops}
    return len(set(ops)) == len(ops) >= 2 and len(keys) == 1 and None not in keys


def merged(graph: Graph, ops: Sequence[OpId]) -> MergedConvolution:
    """The convolution that computes what these operators do, which may merge, stacked in ascending order.

    Raises:
        ValueError: they may not.
    """
    if not may_merge(graph, ops):
        raise ValueError(f"operators {list(ops)} may not merge")
    ops = tuple(sorted(ops))
    parts = [_convolution(graph, op) for op in ops]
    first = parts[0]
    axes = range(len(first.kernel))
    before = tuple(max(part.before[axis] for part in parts) for axis in axes)
    offsets = tuple(
        tuple((before[axis] - part.before[axis]) // first.dilations[axis] for axis in axes) for part in parts
    )
    kernel = tuple(
        max(offset[axis] + part.kernel[axis] for offset, part in zip(offsets, parts, strict=True))
        for axis in axes
    )
    # With the padding that the first one needs behind, the output has the first one's extents: everybody's.
    behind = tuple(
        first.behind[axis] + first.dilations[axis] * (kernel[axis] - offsets[0][axis] - first.kernel[axis])
        for axis in axes
    )
    return MergedConvolution(
        ops=ops,
        input=graph.operators[ops[0]].inputs[0],
        outputs=tuple(graph.operators[op].outputs[0] for op in ops),
        convolution=Convolution(kernel, first.strides, first.dilations, (*before, *behind), first.activation),
        filters=tuple(graph.tensors[graph.operators[op].outputs[0]].shape[1] for op in ops),
        offsets=offsets,
    )


def padding(graph: Graph, one: MergedConvolution) -> tuple[int, int]:
    """(flop, bytes of weights) that a merged convolution has beyond those of its operators: zeros."""
    channels = graph.tensors[one.input].shape[1]
    item_bytes = ITEM_BYTES[graph.tensors[one.input].dtype]
    flop = nbytes = 0
    for op, filters, output in zip(one.ops, one.filters, one.outputs, strict=True):
        taps = prod(one.convolution.kernel) - prod(_convolution(graph, op).kernel)
        flop += 2 * prod(graph.tensors[output].shape) * channels * taps
        nbytes += item_bytes * filters * channels * taps
    return flop, nbytes


def _convolution(graph: Graph, op: OpId) -> Convolution:
    found = graph.operators[op].convolution
    if found is None:
        raise ValueError(f"operator {op} is no convolution that merges")
    return found

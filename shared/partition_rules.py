"""What each kind of ONNX node reads for a part of its output: the table behind `stageloom.shared.partition`.

A rule is given a node and the part [start, stop) of its output along one dimension, and says which part of
each input that needs, and which attributes and constants change. A kind without a rule is not split. Rows of
a convolution or pool: output [a, b) reads input [a s - p, (b - 1) s - p + d (k - 1) + 1), clipped to what
there is; only what is clipped is padding, so inner borders have none.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Final, TypeAlias

from stageloom.shared.errors import Unsplittable
from stageloom.shared.partition import AxisRange, NodeReads, NodeRun, OnnxNode

Rule: TypeAlias = Callable[[NodeRun, OnnxNode, AxisRange], NodeReads]

_STANDARD: Final = ("", "ai.onnx")


def reads_of(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    """What a node reads for the part `at` of its output.

    Raises:
        Unsplittable: there is no rule for its kind, or not along this dimension or from there to there.
    """
    rule = RULES.get(node.kind) if node.domain in _STANDARD else None
    if rule is None:
        raise Unsplittable("axis", f"{node.kind} is not split")
    return rule(run, node, at)


def _refuse(node: OnnxNode, at: AxisRange) -> Unsplittable:
    return Unsplittable("axis", f"{node.kind} is not split along dimension {at.dim} of its output")


def _same(at: AxisRange, dim: int) -> AxisRange:
    return AxisRange(dim, at.start, at.stop)


def _broadcast(at: AxisRange, rank: int, shape: Sequence[int]) -> AxisRange | None:
    """The part of an input that is broadcast to an output of `rank`; None where it is read as a whole."""
    dim = at.dim - (rank - len(shape))
    return None if dim < 0 or shape[dim] == 1 else _same(at, dim)


def _pointwise(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    """Arithmetic with broadcasting, activations, Where, Clip, PRelu, comparisons."""
    rank = len(run.shape(node.outputs[0]))
    return NodeReads(tuple(_broadcast(at, rank, run.shape(name)) if name else None for name in node.inputs))


def _first_input(dims: Callable[[NodeRun, OnnxNode, int], bool]) -> Rule:
    """The same part of the first input, and all of the others, along the dimensions that `dims` allows."""

    def rule(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
        if not dims(run, node, at.dim):
            raise _refuse(node, at)
        return NodeReads((at, *(None for _ in node.inputs[1:])))

    return rule


# Convolutions and pools


def _window(run: NodeRun, node: OnnxNode, kernel: Sequence[int], at: AxisRange, data: str) -> NodeReads:
    """The rows of a convolution or pool: the part of the data, and the padding that is left."""
    axis, spatial = at.dim - 2, len(kernel)
    extents = run.shape(data)[2:]
    strides = node.integers("strides") or (1,) * spatial
    dilations = node.integers("dilations") or (1,) * spatial
    pads = list(_pads(node, extents, kernel, strides, dilations))
    extent, stride = extents[axis], strides[axis]
    reach = dilations[axis] * (kernel[axis] - 1) + 1
    begin = at.start * stride - pads[axis]
    end = (at.stop - 1) * stride - pads[axis] + reach
    start, stop = max(0, begin), min(extent, end)
    changed: dict[str, int | str | tuple[int, ...]] = {}
    if at.stop == run.shape(node.outputs[0])[at.dim]:
        stop = extent  # what strides leave over stays, and so does how the last window is rounded
    else:
        pads[spatial + axis] = max(0, end - extent)
        if node.integer("ceil_mode", 0):
            changed["ceil_mode"] = 0
            _refuse_rounded(run, node, extents, kernel, pads, axis)
    pads[axis] = max(0, -begin)
    if start >= stop:
        raise Unsplittable("boundary", f"a half of {node.kind} would read nothing but padding")
    changed |= {"pads": tuple(pads), "auto_pad": "NOTSET"}
    return NodeReads((AxisRange(at.dim, start, stop),), attributes=MappingProxyType(changed))


def _refuse_rounded(
    run: NodeRun,
    node: OnnxNode,
    extents: Sequence[int],
    kernel: Sequence[int],
    pads: Sequence[int],
    axis: int,
) -> None:
    """Raises:
    Unsplittable: an output that is rounded up along another dimension, where the attribute goes for all.
    """
    strides = node.integers("strides") or (1,) * len(kernel)
    dilations = node.integers("dilations") or (1,) * len(kernel)
    made = run.shape(node.outputs[0])[2:]
    for other, size in enumerate(made):
        span = extents[other] + pads[other] + pads[len(kernel) + other]
        floor = (span - dilations[other] * (kernel[other] - 1) - 1) // strides[other] + 1
        if other != axis and floor != size:
            raise Unsplittable("axis", f"{node.kind} rounds its width up, which a half of its rows cannot")


def _pads(
    node: OnnxNode,
    extents: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[int, ...]:
    """ONNX's pads with `auto_pad` resolved: before each axis, then behind each."""
    rule = node.attributes.get("auto_pad", "NOTSET")
    if rule not in ("SAME_UPPER", "SAME_LOWER"):
        given = node.integers("pads") if rule == "NOTSET" else ()
        return given or (0,) * 2 * len(kernel)
    before, behind = [], []
    for extent, size, stride, dilation in zip(extents, kernel, strides, dilations, strict=True):
        total = max((-(-extent // stride) - 1) * stride + dilation * (size - 1) + 1 - extent, 0)
        small, large = total // 2, total - total // 2
        before.append(small if rule == "SAME_UPPER" else large)
        behind.append(large if rule == "SAME_UPPER" else small)
    return (*before, *behind)


def _pool(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    if len([name for name in node.outputs if name]) > 1:
        raise Unsplittable("axis", f"{node.kind} also makes indices")
    if at.dim < 2:
        return NodeReads((at,))
    return _window(run, node, node.integers("kernel_shape"), at, node.inputs[0])


def _convolution(data: int, weight: int, per_channel: Sequence[int]) -> Rule:
    """A convolution whose inputs lie at these positions; `per_channel` have an element per output channel."""

    def rule(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
        reads: list[AxisRange | None] = [None] * len(node.inputs)
        shape = run.shape(node.inputs[weight])
        if at.dim == 0:
            reads[data] = at
            return NodeReads(tuple(reads))
        if at.dim >= 2:
            rows = _window(run, node, shape[2:], at, node.inputs[data])
            reads[data] = rows.reads[0]
            return NodeReads(tuple(reads), attributes=rows.attributes)
        groups = node.integer("group", 1)
        reads[weight] = _same(at, 0)
        for position in per_channel:
            if position < len(node.inputs) and node.inputs[position]:
                reads[position] = _per_channel(run, node.inputs[position], at)
        if groups == 1:
            return NodeReads(tuple(reads))
        filters = shape[0] // groups
        if at.start % filters or at.stop % filters:
            raise Unsplittable("boundary", f"a group of {node.kind} has {filters} channels, and is not cut")
        first, last = at.start // filters, at.stop // filters
        reads[data] = AxisRange(1, first * shape[1], last * shape[1])
        return NodeReads(tuple(reads), attributes={"group": last - first})

    return rule


def _per_channel(run: NodeRun, name: str, at: AxisRange) -> AxisRange | None:
    shape = run.shape(name)
    return _same(at, 0) if len(shape) == 1 and shape[0] > 1 else None


def _transposed(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    """ConvTranspose: batch, and output channels where all are in one group."""
    if at.dim == 0:
        return NodeReads((at, *(None for _ in node.inputs[1:])))
    if at.dim > 1 or node.integer("group", 1) != 1:
        raise _refuse(node, at)
    return NodeReads((None, _same(at, 1), *(_same(at, 0) for _ in node.inputs[2:])))


# Matrix products


def _matmul(left: int, right: int, per_row: Sequence[int], per_column: Sequence[int]) -> Rule:
    """A product whose factors lie at these positions; others have an element per row, or per column."""

    def rule(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
        first, second = run.shape(node.inputs[left]), run.shape(node.inputs[right])
        rank = len(run.shape(node.outputs[0]))
        if min(len(first), len(second)) < 2:
            raise _refuse(node, at)
        reads: list[AxisRange | None] = [None] * len(node.inputs)
        beside: Sequence[int] = ()
        if at.dim == rank - 1:
            reads[right], beside = _same(at, len(second) - 1), per_column
        elif at.dim == rank - 2:
            reads[left], beside = _same(at, len(first) - 2), per_row
        else:
            reads[left], reads[right] = _broadcast(at, rank, first), _broadcast(at, rank, second)
        for position in beside:
            if position < len(node.inputs) and node.inputs[position]:
                reads[position] = _per_channel(run, node.inputs[position], at)
        return NodeReads(tuple(reads))

    return rule


def _gemm(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    reads: list[AxisRange | None] = [None] * len(node.inputs)
    if at.dim == 0:
        reads[0] = _same(at, 1 if node.integer("transA", 0) else 0)
    else:
        reads[1] = _same(at, 0 if node.integer("transB", 0) else 1)
    if len(node.inputs) > 2 and node.inputs[2]:
        reads[2] = _broadcast(at, 2, run.shape(node.inputs[2]))
    return NodeReads(tuple(reads))


# Normalisations and reductions


def _batch_normalisation(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    """Over constants: each channel has a scale, a bias, a mean and a variance of its own."""
    if len([name for name in node.outputs if name]) > 1:
        raise _refuse(node, at)
    own = _same(at, 0) if at.dim == 1 else None
    return NodeReads((at, *(own for _ in node.inputs[1:])))


def _instance_normalisation(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    if at.dim > 1:
        raise _refuse(node, at)
    return _batch_normalisation(run, node, at)


def _layer_normalisation(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    shape = run.shape(node.inputs[0])
    if at.dim >= node.integer("axis", -1) % len(shape) or any(node.outputs[1:]):
        raise _refuse(node, at)
    others = (_broadcast(at, len(shape), run.shape(name)) if name else None for name in node.inputs[1:])
    return NodeReads((at, *others))


_ONE_AXIS_SINCE = 13
"""From this version of the operator set a Softmax normalises one axis; before, all from there on."""


def _softmax(run: NodeRun, node: OnnxNode, dim: int) -> bool:
    rank, recent = len(run.shape(node.inputs[0])), run.opset >= _ONE_AXIS_SINCE
    axis = node.integer("axis", -1 if recent else 1) % rank
    return dim != axis if recent else dim < axis


def _reduction(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    """Reduce...: along what is left; ArgMax and ArgMin, which have one axis, too."""
    rank = len(run.shape(node.inputs[0]))
    if node.kind.startswith("Arg"):
        axes: tuple[int, ...] = (node.integer("axis", 0),)
    elif len(node.inputs) > 1 and node.inputs[1]:
        if node.inputs[1] not in run.numbers:
            raise _refuse(node, at)
        axes = run.numbers[node.inputs[1]]
    else:
        axes = node.integers("axes")
    reduced = {axis % rank for axis in axes}
    if not reduced:
        raise _refuse(node, at)
    left = list(range(rank)) if node.integer("keepdims", 1) else [d for d in range(rank) if d not in reduced]
    if left[at.dim] in reduced:
        raise _refuse(node, at)
    return NodeReads((_same(at, left[at.dim]), *(None for _ in node.inputs[1:])))


# What moves tensors


def _concat(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    rank = len(run.shape(node.outputs[0]))
    if at.dim != node.integer("axis", 0) % rank:
        return NodeReads((at,) * len(node.inputs))
    reads: list[AxisRange | None] = []
    kept, position = [], 0
    for index, name in enumerate(node.inputs):
        size = run.shape(name)[at.dim]
        start, stop = max(0, at.start - position), min(size, at.stop - position)
        reads.append(AxisRange(at.dim, start, stop) if start < stop else None)
        if start < stop:
            kept.append(index)
        position += size
    return NodeReads(tuple(reads), tuple(kept))


def _not_its_axis(default: int) -> Rule:
    """Split: along any dimension but its own."""
    return _first_input(
        lambda run, node, dim: dim != node.integer("axis", default) % len(run.shape(node.inputs[0]))
    )


def _transpose(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    rank = len(run.shape(node.inputs[0]))
    order = node.integers("perm") or tuple(range(rank - 1, -1, -1))
    return NodeReads((_same(at, order[at.dim]),))


def reshaped(source: Sequence[int], made: Sequence[int], at: AxisRange) -> AxisRange | None:
    """The part of a tensor that a part of its reshaped form is; None where it is none along one dimension."""
    before, size = prod(made[: at.dim]), made[at.dim]
    for dim, extent in enumerate(source):
        if prod(source[:dim]) != before or extent == 1:
            continue
        if extent % size == 0:  # the dimension was taken apart, and this is the outer part
            scale = extent // size
            return AxisRange(dim, at.start * scale, at.stop * scale)
        if size % extent == 0:  # dimensions were put together, and this is the outer one of them
            scale = size // extent
            if at.start % scale or at.stop % scale:
                raise Unsplittable("boundary", f"a boundary that is no multiple of {scale} cuts rows")
            return AxisRange(dim, at.start // scale, at.stop // scale)
    return None


def _reshape(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    """Reshape, Flatten, Squeeze, Unsqueeze, by shapes alone; a Reshape's sizes follow."""
    if node.kind == "Squeeze" and not _named_axes(run, node):
        raise _refuse(node, at)  # it would also remove that dimension of a half of extent 1
    made = run.shape(node.outputs[0])
    found = reshaped(run.shape(node.inputs[0]), made, at)
    if found is None:
        raise _refuse(node, at)
    numbers: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    if node.kind == "Reshape":
        sizes = run.numbers.get(node.inputs[1], ()) if len(node.inputs) > 1 else ()
        if len(sizes) != len(made):
            raise _refuse(node, at)
        if sizes[at.dim] > 0:
            numbers = {1: (*sizes[: at.dim], at.extent, *sizes[at.dim + 1 :])}
        elif sizes[at.dim] == 0 and found.extent != at.extent:
            raise _refuse(node, at)
    return NodeReads((found, *(None for _ in node.inputs[1:])), numbers=numbers)


def _named_axes(run: NodeRun, node: OnnxNode) -> bool:
    """Whether a Squeeze says which axes it removes; an empty list is none."""
    if len(node.inputs) > 1 and node.inputs[1]:
        return run.numbers.get(node.inputs[1]) != ()
    return bool(node.integers("axes"))


def _expand(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    rank = len(run.shape(node.outputs[0]))
    sizes = run.numbers.get(node.inputs[1])
    if sizes is None:
        raise _refuse(node, at)
    place = at.dim - (rank - len(sizes))
    numbers: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    if place >= 0 and sizes[place] > 1:
        numbers = {1: (*sizes[:place], at.extent, *sizes[place + 1 :])}
    return NodeReads((_broadcast(at, rank, run.shape(node.inputs[0])), None), numbers=numbers)


def _slice(run: NodeRun, node: OnnxNode, dim: int) -> bool:
    """Along the dimensions of which it takes all."""
    return run.shape(node.inputs[0])[dim] == run.shape(node.outputs[0])[dim] and _slices_forward(run, node)


def _slices_forward(run: NodeRun, node: OnnxNode) -> bool:
    """Whether no step is negative: such a one may turn a dimension round of which it takes all."""
    if len(node.inputs) < 5 or not node.inputs[4]:
        return True
    return min(run.numbers.get(node.inputs[4], (-1,))) > 0


def _unresized(run: NodeRun, node: OnnxNode, dim: int) -> bool:
    """Along dimensions that keep their extent, where scales are given and no sizes."""
    sizes = len(node.inputs) > 3 and node.inputs[3]
    region = node.attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    return not sizes and not region and run.shape(node.inputs[0])[dim] == run.shape(node.outputs[0])[dim]


def _pad(run: NodeRun, node: OnnxNode, dim: int) -> bool:
    """Along dimensions that keep their extent: padding on both sides may not cancel out."""
    pads = run.numbers.get(node.inputs[1], ()) if len(node.inputs) > 1 else node.integers("pads")
    rank = len(run.shape(node.inputs[0]))
    axes = len(node.inputs) > 3 and bool(node.inputs[3])
    return not axes and len(pads) == 2 * rank and pads[dim] == pads[rank + dim] == 0


def _gather(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    data, indices = run.shape(node.inputs[0]), run.shape(node.inputs[1])
    axis = node.integer("axis", 0) % len(data)
    if at.dim < axis:
        return NodeReads((at, None))
    if at.dim < axis + len(indices):
        return NodeReads((None, _same(at, at.dim - axis)))
    return NodeReads((_same(at, at.dim - len(indices) + 1), None))


def _quantise(run: NodeRun, node: OnnxNode, at: AxisRange) -> NodeReads:
    """QuantizeLinear and DequantizeLinear; a scale per element of one axis is cut with it."""
    if node.integer("block_size", 0):
        raise _refuse(node, at)
    axis = node.integer("axis", 1) % max(1, len(run.shape(node.inputs[0])))
    others = (_per_channel(run, name, at) if name and axis == at.dim else None for name in node.inputs[1:])
    return NodeReads((at, *others))


_POINTWISE: Final = (
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "Cast", "Ceil",
    "Celu", "Clip", "Cos", "Cosh", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater",
    "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow",
    "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt",
    "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor",
)  # fmt: skip
_REDUCTIONS: Final = (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare", "ArgMax", "ArgMin",
)  # fmt: skip

RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        **dict.fromkeys(_POINTWISE, _pointwise),
        **dict.fromkeys(_REDUCTIONS, _reduction),
        "Conv": _convolution(0, 1, (2,)),
        "ConvInteger": _convolution(0, 1, (3,)),
        "QLinearConv": _convolution(0, 3, (4, 5, 8)),
        "ConvTranspose": _transposed,
        "MaxPool": _pool,
        "AveragePool": _pool,
        "LpPool": _pool,
        **dict.fromkeys(
            ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"),
            _first_input(lambda run, node, dim: dim < 2),
        ),
        "MatMul": _matmul(0, 1, (), ()),
        "MatMulInteger": _matmul(0, 1, (2,), (3,)),
        "QLinearMatMul": _matmul(0, 3, (1, 2), (4, 5)),
        "Gemm": _gemm,
        "BatchNormalization": _batch_normalisation,
        "InstanceNormalization": _instance_normalisation,
        "LayerNormalization": _layer_normalisation,
        "RMSNormalization": _layer_normalisation,
        "GroupNormalization": _first_input(lambda run, node, dim: dim == 0),
        "LRN": _first_input(lambda run, node, dim: dim != 1),
        "Softmax": _first_input(_softmax),
        "LogSoftmax": _first_input(_softmax),
        "Concat": _concat,
        "Split": _not_its_axis(0),
        "Transpose": _transpose,
        **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
        "Expand": _expand,
        "Slice": _first_input(_slice),
        "Pad": _first_input(_pad),
        "Resize": _first_input(_unresized),
        "Upsample": _first_input(_unresized),
        "Gather": _gather,
        "QuantizeLinear": _quantise,
        "DequantizeLinear": _quantise,
        **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _first_input(lambda run, node, dim: dim == 0)),
    }
)
"""Per kind of node its rule."""

"""Operators that move, join, repeat or pad elements without computing."""

from collections.abc import Sequence
from math import ceil, inf, prod

import torch
import torch.nn.functional as functional
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import Unsupported, onnx_dtype, tensor_from_proto
from stageloom.edge_agent.lowering.node import Kernel, Lowered, Node, operator


def pad_list(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return the padding as `functional.pad` takes it: last dimension first."""
    return [p for pair in zip(reversed(before), reversed(after), strict=True) for p in pair]


@operator("Shape")
def shape(node: Node) -> Lowered:
    """Shapes are static: the answer is known while lowering."""
    dims = list(node.shape(0))
    start, end = node.integer("start", 0), node.attribute("end")
    return (torch.tensor(dims[start : None if end is None else int(end)], dtype=torch.int64),)


@operator("Size")
def size(node: Node) -> Lowered:
    return (torch.tensor(prod(node.shape(0)), dtype=torch.int64),)


@operator("Constant")
def constant(node: Node) -> Lowered:
    for name, dtype in (("value_float", torch.float32), ("value_floats", torch.float32),
                        ("value_int", torch.int64), ("value_ints", torch.int64)):  # fmt: skip
        if (value := node.attribute(name)) is not None:
            return (torch.tensor(value, dtype=dtype),)
    if (proto := node.attribute("value")) is not None:
        return (tensor_from_proto(proto),)
    raise Unsupported("Constant that holds no tensor")


@operator("Identity")
def identity(node: Node) -> Lowered:
    return Kernel(lambda x: x, reshapes=True)


@operator("Dropout")
def dropout(node: Node) -> Lowered:
    """Inference: the input, and a mask of ones. Training mode is random."""
    if node.opset >= 12 and node.has(2) and bool(node.scalar(2)):
        if (node.scalar(1) if node.has(1) else 0.5) > 0.0:
            raise Unsupported("Dropout in training mode")
    if node.wants(1):
        return lambda x, *_: (x, torch.ones_like(x, dtype=torch.bool))
    return Kernel(lambda x, *_: x, reshapes=True)


@operator("Reshape")
def reshape(node: Node) -> Lowered:
    wanted = node.integers("shape") if node.opset < 5 else node.constant_list(1)
    shape = resolved_shape(node.shape(0), wanted or [], allow_zero=bool(node.integer("allowzero", 0)))
    return Kernel(lambda x, _=None: x.reshape(shape), reshapes=True)


def resolved_shape(source: tuple[int, ...], wanted: list[int], *, allow_zero: bool) -> list[int]:
    """0 copies the source's dimension unless `allow_zero`; -1 is what is left."""
    shape = [source[i] if n == 0 and not allow_zero else n for i, n in enumerate(wanted)]
    if -1 in shape:
        known = prod(n for n in shape if n != -1)
        shape[shape.index(-1)] = prod(source) // known if known else 0
    return shape


@operator("Flatten")
def flatten(node: Node) -> Lowered:
    axis = node.integer("axis", 1)
    axis = axis + node.rank(0) if axis < 0 else axis
    rows, columns = prod(node.shape(0)[:axis]), prod(node.shape(0)[axis:])
    return Kernel(lambda x: x.reshape(rows, columns), reshapes=True)


@operator("Concat")
def concat(node: Node) -> Lowered:
    axis = node.axis("axis", 1)
    return Kernel(lambda *parts: torch.cat(parts, axis), lambda out, *parts: torch.cat(parts, axis, out=out))


@operator("Transpose")
def transpose(node: Node) -> Lowered:
    order = node.integers("perm")
    order = list(reversed(range(node.rank(0)))) if order is None else order
    return lambda x: x.permute(order)


@operator("Squeeze")
def squeeze(node: Node) -> Lowered:
    axes = node.integers("axes") if node.opset < 13 else node.constant_list(1)
    shape = node.shape(0)
    gone = {a % len(shape) for a in axes} if axes is not None else {i for i, n in enumerate(shape) if n == 1}
    kept = [n for i, n in enumerate(shape) if i not in gone]
    return Kernel(lambda x, _=None: x.reshape(kept), reshapes=True)


@operator("Unsqueeze")
def unsqueeze(node: Node) -> Lowered:
    axes = (node.integers("axes") if node.opset < 13 else node.constant_list(1)) or []
    rank = node.rank(0) + len(axes)
    shape = list(node.shape(0))
    for axis in sorted(a % rank for a in axes):
        shape.insert(axis, 1)
    return Kernel(lambda x, _=None: x.reshape(shape), reshapes=True)


@operator("ConstantOfShape")
def constant_of_shape(node: Node) -> Lowered:
    shape = node.constant_list(0) or []
    proto = node.attribute("value")
    fill = torch.zeros((1,)) if proto is None else tensor_from_proto(proto)
    return (fill.reshape(()).expand(shape).clone(),)


@operator("Range")
def arange(node: Node) -> Lowered:
    start, limit, step = (node.constant(i).reshape(()) for i in range(3))
    count = max(ceil((limit - start) / step), 0)
    places = torch.arange(count, dtype=torch.float64 if start.dtype.kind == "f" else torch.int64)
    values = (
        float(start) + places * float(step) if start.dtype.kind == "f" else int(start) + places * int(step)
    )
    return (values.to(node.dtype(0)),)


@operator("EyeLike")
def eye_like(node: Node) -> Lowered:
    rows, columns = node.shape(0)
    code = node.attribute("dtype")
    dtype = node.dtype(0) if code is None else node.real(int(code))
    diagonal = torch.ones((rows, columns)).triu(node.integer("k", 0)).tril(node.integer("k", 0))
    made = node.made(diagonal.to(dtype))
    return lambda x: made.clone()


@operator("Expand")
def expand(node: Node) -> Lowered:
    shape = broadcast_shape(node.shape(0), tuple(node.constant_list(1) or ()))
    return lambda x, _=None: x.expand(shape)


def broadcast_shape(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """numpy's rule, in both directions."""
    rank = max(len(left), len(right))
    pairs = zip((1,) * (rank - len(left)) + left, (1,) * (rank - len(right)) + right, strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)


@operator("Tile")
def tile(node: Node) -> Lowered:
    repeats = node.constant_list(1) or []
    return lambda x, _=None: x.repeat(repeats) if repeats else x


@operator("Slice")
def slice_(node: Node) -> Lowered:
    """Attributes up to opset 9, inputs since. A negative step walks backwards."""
    rank = node.rank(0)
    if node.opset < 10:
        starts, ends = node.integers("starts") or [], node.integers("ends") or []
        axes, steps = node.integers("axes"), None
    else:
        starts, ends = node.constant_list(1) or [], node.constant_list(2) or []
        axes, steps = node.constant_list(3), node.constant_list(4)
    axes = list(range(len(starts))) if axes is None else [a % rank for a in axes]
    steps = [1] * len(starts) if steps is None else steps
    chosen = [
        (axis, range(node.shape(0)[axis])[slice(*_bounds(start, end, step, node.shape(0)[axis]))])
        for axis, start, end, step in zip(axes, starts, ends, steps, strict=True)
    ]
    backwards = [(axis, node.made(torch.tensor(list(places)))) for axis, places in chosen if places.step < 0]
    forwards = [(axis, places) for axis, places in chosen if places.step > 0]

    def run(x: Tensor, *_: Tensor | None) -> Tensor:
        for axis, places in forwards:
            x = _forwards(x, axis, places)
        for axis, index in backwards:
            x = x.index_select(axis, index.to(torch.int64))
        return x

    return run


def _bounds(start: int, end: int, step: int, extent: int) -> tuple[int, int | None, int]:
    """What Python's slice makes of ONNX's bounds: an end before the first element walks to the first."""
    if step < 0 and end < -extent:
        return start, None, step
    return start, end, step


def _forwards(x: Tensor, axis: int, places: range) -> Tensor:
    if places.step == 1:
        return x.narrow(axis, places.start if places else 0, len(places))
    index = [slice(None)] * x.ndim
    index[axis] = slice(places.start, places.stop, places.step)
    return x[tuple(index)]


@operator("Split")
def split(node: Node) -> Lowered:
    """By sizes (attribute before opset 13, input since), or into equal parts, the last one smaller."""
    axis = node.axis("axis", 0)
    extent = node.shape(0)[axis]
    sizes = node.integers("split") if node.opset < 13 else node.constant_list(1)
    if sizes is None:
        parts = node.integer("num_outputs", len(node.outputs))
        size = -(-extent // parts)
        sizes = [min(size, max(extent - i * size, 0)) for i in range(parts)]
    return lambda x, _=None: tuple(torch.split(x, sizes, axis))


@operator("SpaceToDepth")
def space_to_depth(node: Node) -> Lowered:
    """DCR: the block leads the channels of the result; CRD: the channels lead the block."""
    block = node.integer("blocksize", 1)
    n, c, h, w = node.shape(0)
    order = (0, 1, 3, 5, 2, 4) if node.text("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)

    def run(x: Tensor) -> Tensor:
        cells = x.reshape(n, c, h // block, block, w // block, block).permute(order)
        return cells.reshape(n, c * block * block, h // block, w // block)

    return run


@operator("DepthToSpace")
def depth_to_space(node: Node) -> Lowered:
    """DCR: the block leads the channels; CRD: the channels lead the block."""
    block = node.integer("blocksize", 1)
    n, c, h, w = node.shape(0)
    kept = c // (block * block)
    if node.text("mode", "DCR") == "CRD":
        cells, order = (n, kept, block, block, h, w), (0, 1, 4, 2, 5, 3)
    else:
        cells, order = (n, block, block, kept, h, w), (0, 3, 4, 1, 5, 2)

    def run(x: Tensor) -> Tensor:
        return x.reshape(cells).permute(order).reshape(n, kept, h * block, w * block)

    return run


@operator("CenterCropPad")
def center_crop_pad(node: Node) -> Lowered:
    """What is too long loses both ends, what is too short gains zeros; the odd element falls to the end."""
    wanted = node.constant_list(1) or []
    axes = node.integers("axes")
    axes = list(range(node.rank(0))) if axes is None else [a % node.rank(0) for a in axes]
    before, after = [0] * node.rank(0), [0] * node.rank(0)
    for axis, size in zip(axes, wanted, strict=True):
        change = size - node.shape(0)[axis]
        before[axis] = int(change / 2)
        after[axis] = change - before[axis]
    borders = pad_list(before, after)
    return lambda x, _=None: functional.pad(x, borders)


@operator("BitCast")
def bit_cast(node: Node) -> Lowered:
    dtype = onnx_dtype(node.integer("to", 0))
    return lambda x: x.view(dtype)


@operator("Pad")
def pad(node: Node) -> Lowered:
    """Padding is attributes up to opset 10, inputs since; `axes` since 18."""
    if node.opset < 11:
        pads = node.integers("pads") or node.integers("paddings") or []
        fill: float = node.number("value", 0.0)
        axes = list(range(node.rank(0)))
    else:
        pads = node.constant_list(1) or []
        fill = node.constant(2).item() if node.has(2) and node.constant(2).size else 0
        axes = node.constant_list(3) if node.has(3) else None  # type: ignore[assignment]
        axes = list(range(node.rank(0))) if axes is None else [a % node.rank(0) for a in axes]
    before, after = [0] * node.rank(0), [0] * node.rank(0)
    for place, axis in enumerate(axes):
        before[axis], after[axis] = pads[place], pads[place + len(axes)]
    if node.dtype(0).is_floating_point and fill not in (inf, -inf):
        top = torch.finfo(node.dtype(0)).max  # float16 cannot hold what a float32 model may pad with
        fill = min(max(fill, -top), top)
    mode = node.text("mode", "constant")
    if mode == "constant":
        borders = pad_list(before, after)
        return lambda x, *_: functional.pad(x, borders, value=fill)
    if mode not in ("reflect", "edge", "wrap"):
        raise Unsupported(f"Pad with mode {mode}")
    places = [
        (axis, node.made(_places(n, before[axis], after[axis], mode)))
        for axis, n in enumerate(node.shape(0))
        if before[axis] or after[axis]
    ]

    def run(x: Tensor, *_: Tensor | None) -> Tensor:
        for axis, index in places:
            x = x.index_select(axis, index)
        return x

    return run


def _places(extent: int, before: int, after: int, mode: str) -> Tensor:
    """Which element stands at each position of the padded dimension. [before + extent + after]"""
    positions = torch.arange(-before, extent + after)
    if mode == "edge":
        return positions.clamp(0, extent - 1)
    if mode == "wrap":
        return positions.remainder(extent)
    period = max(2 * (extent - 1), 1)  # reflect: 0 1 .. n-1 n-2 .. 1 and again
    folded = positions.remainder(period)
    return torch.where(folded < extent, folded, period - folded)

"""Operators that move, join or repeat elements without computing."""

from math import prod

import torch

from edge_agent.lowering.dtypes import tensor_from_proto
from edge_agent.lowering.errors import Unsupported
from edge_agent.lowering.node import Kernel, Known, Node
from edge_agent.lowering.registry import Lowered, operator


@operator("Shape")
def shape(node: Node) -> Lowered:
    """Shapes are static: the answer is known while lowering."""
    dims = list(node.shape(0))
    start, end = node.integer("start", 0), node.attribute("end")
    return Known((torch.tensor(dims[start : None if end is None else int(end)], dtype=torch.int64),))


@operator("Size")
def size(node: Node) -> Lowered:
    return Known((torch.tensor(prod(node.shape(0)), dtype=torch.int64),))


@operator("Constant")
def constant(node: Node) -> Lowered:
    for name, dtype in (("value_float", torch.float32), ("value_floats", torch.float32),
                        ("value_int", torch.int64), ("value_ints", torch.int64)):  # fmt: skip
        if (found := node.attribute(name)) is not None:
            return Known((torch.tensor(found, dtype=dtype),))
    if (proto := node.attribute("value")) is not None:
        return Known((tensor_from_proto(proto),))
    raise Unsupported("Constant that holds no tensor")


@operator("Identity")
def identity(node: Node) -> Lowered:
    return lambda x: x


@operator("Dropout")
def dropout(node: Node) -> Lowered:
    """Inference: the input, and a mask of ones."""
    if node.wants(1):
        return lambda x, *_: (x, torch.ones_like(x, dtype=torch.bool))
    return lambda x, *_: x


@operator("Reshape")
def reshape(node: Node) -> Lowered:
    wanted = node.integers("shape") if node.opset < 5 else node.constant_list(1)
    shape = resolved_shape(node.shape(0), wanted or [], allow_zero=bool(node.integer("allowzero", 0)))
    return lambda x, _=None: x.reshape(shape)


def resolved_shape(source: tuple[int, ...], wanted: list[int], *, allow_zero: bool) -> list[int]:
    """0 copies the source's dimension unless `allow_zero`; -1 is what is left."""
    shape = [source[i] if n == 0 and not allow_zero else n for i, n in enumerate(wanted)]
    if -1 in shape:
        known = 1
        for n in shape:
            known *= n if n != -1 else 1
        total = 1
        for n in source:
            total *= n
        shape[shape.index(-1)] = total // known if known else 0
    return shape


@operator("Flatten")
def flatten(node: Node) -> Lowered:
    axis = node.integer("axis", 1)
    rank = node.rank(0)
    axis = axis + rank if axis < 0 else axis
    rows = 1
    for n in node.shape(0)[:axis]:
        rows *= n
    columns = 1
    for n in node.shape(0)[axis:]:
        columns *= n
    return lambda x: x.reshape(rows, columns)


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
    return lambda x, _=None: x.reshape(kept)


@operator("Unsqueeze")
def unsqueeze(node: Node) -> Lowered:
    axes = (node.integers("axes") if node.opset < 13 else node.constant_list(1)) or []
    rank = node.rank(0) + len(axes)
    shape = list(node.shape(0))
    for axis in sorted(a % rank for a in axes):
        shape.insert(axis, 1)
    return lambda x, _=None: x.reshape(shape)

"""Floating point work of one node: multiply and add counted as two, as the papers' GFLOP.

Only multiply-add kernels count (convolution, matrix product, recurrence). Pools, concats and pointwise work
are bound by the bytes they move and count zero.
"""

from collections.abc import Callable
from math import prod

import onnx

from stageloom.shared.importer.nodes import int_attribute

Shape = tuple[int, ...]
ShapeOf = Callable[[str], Shape]


def node_flop(node: onnx.NodeProto, shape_of: ShapeOf) -> int:
    """Flop of `node`; `shape_of` gives the shape of a value by name, () where it is unknown."""
    kind = node.op_type
    if kind in ("Conv", "ConvInteger", "DeformConv"):
        return 2 * prod(shape_of(node.output[0])) * prod(shape_of(node.input[1])[1:])
    if kind == "QLinearConv":
        return 2 * prod(shape_of(node.output[0])) * prod(shape_of(node.input[3])[1:])
    if kind == "ConvTranspose":
        return 2 * prod(shape_of(node.input[0])) * prod(shape_of(node.input[1])[1:])
    if kind in ("Gemm", "MatMul", "MatMulInteger", "QLinearMatMul"):
        left = shape_of(node.input[0])
        inner = 0 if kind == "Gemm" and int_attribute(node, "transA", 0) else -1
        return 2 * prod(shape_of(node.output[0])) * left[inner] if left else 0
    if kind in ("LSTM", "GRU", "RNN"):
        steps = prod(shape_of(node.input[0])[:2])
        return 2 * steps * (prod(shape_of(node.input[1])) + prod(shape_of(node.input[2])))
    return 0

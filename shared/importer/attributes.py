"""What an operator's ONNX nodes say of it: its work, its attributes, and whether it may merge with others."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final

import onnx
from onnx import helper, numpy_helper

from stageloom.shared.attributes import MAX_AXES, MAX_VALUE, Attributes
from stageloom.shared.convolution import MAX_ACTIVATION_TEXT, Convolution
from stageloom.shared.importer.nodes import int_attribute, ints_attribute
from stageloom.shared.importer.operators import ELEMENTWISE, POINTWISE
from stageloom.shared.importer.values import Value, weight_value


def node_flop(node: onnx.NodeProto, shape_of: Callable[[str], tuple[int, ...]]) -> int:
    """Return the floating point operations of `node`: multiply and add count as two, as in the papers' GFLOP.

    Only multiply-add kernels count (convolution, matrix product, attention, recurrence). Pools, concats and
    pointwise operators are bound by the bytes they move and count zero. `shape_of` gives the shape of a value
    by name, () where it is unknown.
    """
    kind = node.op_type
    if kind in ("Conv", "ConvInteger", "DeformConv", "QLinearConv", "ConvTranspose"):
        positions = node.input[0] if kind == "ConvTranspose" else node.output[0]
        weight = node.input[3 if kind == "QLinearConv" else 1]
        return 2 * prod(shape_of(positions)) * prod(shape_of(weight)[1:])
    if kind in ("Gemm", "MatMul", "MatMulInteger", "QLinearMatMul"):
        left = shape_of(node.input[0])
        inner = 0 if kind == "Gemm" and int_attribute(node, "transA", 0) else -1
        return 2 * prod(shape_of(node.output[0])) * left[inner] if left else 0
    if kind in ("LSTM", "GRU", "RNN"):
        steps = prod(shape_of(node.input[0])[:2])
        return 2 * steps * (prod(shape_of(node.input[1])) + prod(shape_of(node.input[2])))
    if kind == "Einsum" and not node.domain:
        return _einsum_flop(node, [shape_of(name) for name in node.input])
    if kind == "Attention" and not node.domain:
        # Each element of the query, and each of the output, meets all keys, those of the past included.
        keys = sum(sum(shape_of(name)[-2:-1]) for name in (node.input[1], *node.input[4:5]))
        return 2 * keys * (prod(shape_of(node.input[0])) + prod(shape_of(node.output[0])))
    return 0


def _einsum_flop(node: onnx.NodeProto, shapes: Sequence[tuple[int, ...]]) -> int:
    """Count the products over all labels, as one nest of loops; none where one operand is only rearranged."""
    equation = next((a.s.decode() for a in node.attribute if a.name == "equation"), "")
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if len(shapes) < 2 or len(terms) != len(shapes):
        return 0
    extents: dict[str | int, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        before, dots, behind = term.partition("...")
        free = len(shape) - len(before) - len(behind)
        if free < 0 or (free and not dots):
            return 0
        # The dimensions of an ellipsis are numbered from its end, as they broadcast.
        for label, extent in zip([*before, *range(-free, 0), *behind], shape, strict=True):
            extents[label] = max(extents.get(label, 1), extent)
    return 2 * prod(extents.values())


_POOLINGS: Final = {
    "MaxPool": "max",
    "AveragePool": "avg",
    "LpPool": "avg",
    "GlobalMaxPool": "global max",
    "GlobalAveragePool": "global avg",
    "GlobalLpPool": "global avg",
}
_ACTIVATIONS: Final = {
    "Relu": "relu",
    "Clip": "relu",
    "LeakyRelu": "relu",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
}


def attributes_of(
    nodes: Sequence[onnx.NodeProto], lead: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]
) -> Attributes:
    """Return the attributes of the operator of `nodes`; `lead` is the leading one.

    Numbers that exceed what a graph may hold count as absent.
    """
    kernel = _numbers(lead, "kernel_shape")
    if not kernel and lead.op_type == "Conv" and len(lead.input) > 1 and lead.input[1] in weights:
        kernel = tuple(weights[lead.input[1]].dims)[2:]
    attributes = Attributes(
        kernel=kernel,
        strides=_numbers(lead, "strides") or (1,) * len(kernel),
        pads=_numbers(lead, "pads") or (0,) * (2 * len(kernel)),
        groups=int_attribute(lead, "group", 1),
        activation=_activation([node.op_type for node in nodes if node is not lead], lead.op_type),
        pooling=_POOLINGS.get(lead.op_type, "none"),
    )
    return Attributes() if attributes.problem() else attributes


def _activation(tail: Sequence[str], lead: str) -> str:
    kinds = [kind for kind in (*tail, *([lead] if lead in POINTWISE else ())) if kind in POINTWISE]
    if not kinds:
        return "other" if any(kind in ELEMENTWISE for kind in tail) else "identity"
    return _ACTIVATIONS.get(kinds[-1], "other")


def _numbers(node: onnx.NodeProto, name: str) -> tuple[int, ...]:
    """Return a list attribute; empty where it is absent or exceeds what a graph may hold."""
    numbers = ints_attribute(node, name)
    return numbers if len(numbers) <= 2 * MAX_AXES and all(0 <= n < MAX_VALUE for n in numbers) else ()


_KINDS = (POINTWISE | ELEMENTWISE) - {"PRelu"}  # whose slope is a weight, most often one per channel


def convolution_of(
    nodes: Sequence[onnx.NodeProto],
    output: str,
    values: Mapping[str, Value],
    weights: Mapping[str, onnx.TensorProto],
) -> Convolution | None:
    """Return the operator's convolution for `stageloom.shared.merge`; None if the operator is anything else.

    `nodes` are in file order; `output` is their only value that is needed outside.
    """
    lead = nodes[0]
    if lead.op_type != "Conv" or lead.domain not in ("", "ai.onnx") or int_attribute(lead, "group", 1) != 1:
        return None
    if nodes[-1].output[0] != output or lead.input[0] in weights:
        return None
    if not all(name in weights for name in lead.input[1:] if name):
        return None
    data, made = values[lead.input[0]], values[lead.output[0]]
    activation = _activation_text(nodes, len(made.shape), weights)
    if activation is None or data.unfit or made.unfit:
        return None
    kernel = weight_value(weights[lead.input[1]]).shape[2:]
    ones = [1] * len(kernel)
    strides = ints_attribute(lead, "strides", ones)
    dilations = ints_attribute(lead, "dilations", ones)
    convolution = Convolution(
        kernel=kernel,
        strides=strides,
        dilations=dilations,
        pads=_pads(lead, data.shape[2:], made.shape[2:], kernel, strides, dilations),
        activation=activation,
    )
    return None if convolution.problem(data.shape, made.shape) else convolution


def _pads(
    node: onnx.NodeProto,
    extents: Sequence[int],
    made: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[int, ...]:
    """Return the padding, `auto_pad` resolved: SAME_UPPER pads an odd element behind, SAME_LOWER before."""
    automatic = next((a.s.decode() for a in node.attribute if a.name == "auto_pad"), "NOTSET")
    if automatic in ("NOTSET", "VALID"):
        none = [0] * (2 * len(kernel))
        return ints_attribute(node, "pads", none) if automatic == "NOTSET" else tuple(none)
    total = [
        max((out - 1) * stride + dilation * (size - 1) + 1 - extent, 0)
        for extent, out, size, stride, dilation in zip(extents, made, kernel, strides, dilations, strict=True)
    ]
    small, large = [pad // 2 for pad in total], [pad - pad // 2 for pad in total]
    return (*small, *large) if automatic == "SAME_UPPER" else (*large, *small)


def _activation_text(
    nodes: Sequence[onnx.NodeProto], rank: int, weights: Mapping[str, onnx.TensorProto]
) -> str | None:
    """Return the nodes behind the convolution as text; None if one treats channels apart or changes shapes.

    Values are numbered from the convolution's output, 0. Constants of one element are written out.
    """
    number = {nodes[0].output[0]: 0}
    parts = []
    for node in nodes[1:]:
        if node.op_type not in _KINDS or node.domain not in ("", "ai.onnx"):
            return None
        inputs = []
        for name in node.input:
            if name in number:
                inputs.append(f"#{number[name]}")
            elif not name:
                inputs.append("")
            elif name in weights and _is_scalar(weights[name], rank):
                inputs.append(_constant(weights[name]))
            else:
                return None
        number[node.output[0]] = len(number)
        attributes = [f"{a.name}={helper.get_attribute_value(a)}" for a in node.attribute]
        parts.append(f"{node.op_type}({','.join([*inputs, *sorted(attributes)])})")
    text = ";".join(parts)
    return text if len(text) <= MAX_ACTIVATION_TEXT else None


def _is_scalar(tensor: onnx.TensorProto, rank: int) -> bool:
    return all(extent == 1 for extent in tensor.dims) and len(tensor.dims) <= rank


def _constant(tensor: onnx.TensorProto) -> str:
    array = numpy_helper.to_array(tensor)
    return f"{array.dtype}:{array.reshape(()).tobytes().hex()}"

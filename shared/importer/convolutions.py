"""Convolutions that may merge with others, as `stageloom.shared.merge` wants to know them, read from ONNX
nodes."""

from collections.abc import Mapping, Sequence

import onnx
from onnx import helper, numpy_helper

from stageloom.shared.convolution import MAX_ACTIVATION_TEXT, Convolution
from stageloom.shared.importer.nodes import int_attribute
from stageloom.shared.importer.operators import ELEMENTWISE, POINTWISE
from stageloom.shared.importer.values import Value, weight_value

_KINDS = (POINTWISE | ELEMENTWISE) - {"PRelu"}  # whose slope is a weight, most often one per channel


def convolution_of(
    nodes: Sequence[onnx.NodeProto],
    output: str,
    values: Mapping[str, Value],
    weights: Mapping[str, onnx.TensorProto],
) -> Convolution | None:
    """The convolution that an operator's nodes are, in file order; None where they are not just that.

    `output` is the one value of theirs that is needed outside.
    """
    lead = nodes[0]
    if lead.op_type != "Conv" or lead.domain not in ("", "ai.onnx") or int_attribute(lead, "group", 1) != 1:
        return None
    if nodes[-1].output[0] != output or lead.input[0] in weights:
        return None
    if not all(name in weights for name in lead.input[1:] if name):
        return None
    data, made = values[lead.input[0]], values[lead.output[0]]
    activation = _activation(nodes, len(made.shape), weights)
    if activation is None or data.unfit or made.unfit:
        return None
    kernel = weight_value(weights[lead.input[1]]).shape[2:]
    ones = [1] * len(kernel)
    strides = _ints(lead, "strides", ones)
    dilations = _ints(lead, "dilations", ones)
    found = Convolution(
        kernel=kernel,
        strides=strides,
        dilations=dilations,
        pads=_pads(lead, data.shape[2:], made.shape[2:], kernel, strides, dilations),
        activation=activation,
    )
    return None if found.problem(data.shape, made.shape) else found


def _ints(node: onnx.NodeProto, name: str, default: Sequence[int]) -> tuple[int, ...]:
    found = next((attribute.ints for attribute in node.attribute if attribute.name == name), default)
    return tuple(int(value) for value in found)


def _pads(
    node: onnx.NodeProto,
    extents: Sequence[int],
    made: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[int, ...]:
    """`pads`, or what `auto_pad` comes to: SAME_UPPER puts an odd one behind, SAME_LOWER before."""
    automatic = next((a.s.decode() for a in node.attribute if a.name == "auto_pad"), "NOTSET")
    if automatic in ("NOTSET", "VALID"):
        none = [0] * (2 * len(kernel))
        return _ints(node, "pads", none) if automatic == "NOTSET" else tuple(none)
    total = [
        max((out - 1) * stride + dilation * (size - 1) + 1 - extent, 0)
        for extent, out, size, stride, dilation in zip(extents, made, kernel, strides, dilations, strict=True)
    ]
    small, large = [one // 2 for one in total], [one - one // 2 for one in total]
    return (*small, *large) if automatic == "SAME_UPPER" else (*large, *small)


def _activation(
    nodes: Sequence[onnx.NodeProto], rank: int, weights: Mapping[str, onnx.TensorProto]
) -> str | None:
    """The nodes behind the convolution as text; None if some treat channels apart or change shapes.

    Values are numbered: 0 is what the convolution makes. Constants of one element stand for themselves.
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

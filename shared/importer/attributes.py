"""Attributes of convolutions and pools, read from the ONNX nodes of one operator."""

from collections.abc import Mapping, Sequence
from typing import Final

import onnx

from stageloom.shared.attributes import MAX_AXES, MAX_VALUE, Attributes
from stageloom.shared.importer.operators import ELEMENTWISE, POINTWISE

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
    """The attributes of the operator that `nodes` make, of which `lead` is the leading one.

    Numbers that no graph may hold count as absent.
    """
    kernel = _numbers(lead, "kernel_shape")
    if not kernel and lead.op_type == "Conv" and len(lead.input) > 1 and lead.input[1] in weights:
        kernel = tuple(weights[lead.input[1]].dims)[2:]
    found = Attributes(
        kernel=kernel,
        strides=_numbers(lead, "strides") or (1,) * len(kernel),
        pads=_numbers(lead, "pads") or (0,) * (2 * len(kernel)),
        groups=next((int(one.i) for one in lead.attribute if one.name == "group"), 1),
        activation=_activation([node.op_type for node in nodes if node is not lead], lead.op_type),
        pooling=_POOLINGS.get(lead.op_type, "none"),
    )
    return Attributes() if found.problem() else found


def _activation(tail: Sequence[str], lead: str) -> str:
    kinds = [kind for kind in (*tail, *([lead] if lead in POINTWISE else ())) if kind in POINTWISE]
    if not kinds:
        return "other" if any(kind in ELEMENTWISE for kind in tail) else "identity"
    return _ACTIVATIONS.get(kinds[-1], "other")


def _numbers(node: onnx.NodeProto, name: str) -> tuple[int, ...]:
    """A list attribute; empty where it is absent or holds what no graph may hold."""
    found = next((tuple(map(int, one.ints)) for one in node.attribute if one.name == name), ())
    return found if len(found) <= 2 * MAX_AXES and all(0 <= n < MAX_VALUE for n in found) else ()

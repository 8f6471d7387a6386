"""The zoo's networks in JAX, which XLA compiles whole: channels last, weights as arguments.

Nothing of this repository's lowering is used. It needs the package `jax` (on a GPU `jax[cuda13]`).
"""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

Values = dict[str, Any]
_CHANNELS_LAST = {0: 0, 1: 3, 2: 1, 3: 2}
"""Where an axis of [batch, channels, height, width] lies."""


def jax_network(model: onnx.ModelProto, dtype: str) -> tuple[Callable[[Values, Any], Any], Values]:
    """A function of weights and image [batch, 3, side, side] to logits [batch, classes], and the weights.

    Raises:
        ValueError: the model has a node that the zoo's classical networks lack.
    """
    from jax import numpy as jnp

    weights = {weight.name: numpy_helper.to_array(weight) for weight in model.graph.initializer}
    kernels = {node.input[1] for node in model.graph.node if node.op_type == "Conv"}
    own: Values = {
        name: jnp.asarray(np.transpose(array, (2, 3, 1, 0)) if name in kernels else array, dtype)
        for name, array in weights.items()
        if array.dtype.kind == "f"
    }
    nodes = [
        (node, {field.name: onnx.helper.get_attribute_value(field) for field in node.attribute})
        for node in model.graph.node
    ]
    image_name, logits = model.graph.input[0].name, model.graph.output[0].name

    def forward(parameters: Values, image: Any) -> Any:
        values: Values = {**parameters, image_name: jnp.transpose(image, (0, 2, 3, 1))}
        for node, given in nodes:
            values[node.output[0]] = _node(node, given, values)
        return values[logits]

    return forward, own


def _node(node: onnx.NodeProto, given: Mapping[str, Any], values: Values) -> Any:
    from jax import lax
    from jax import numpy as jnp

    reads = [values[name] for name in node.input]
    match node.op_type:
        case "Conv":
            pads = given.get("pads", [0, 0, 0, 0])
            made = lax.conv_general_dilated(
                reads[0],
                reads[1],
                tuple(given.get("strides", [1, 1])),
                [(pads[0], pads[2]), (pads[1], pads[3])],
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=given.get("group", 1),
            )
            return made + reads[2] if len(reads) > 2 else made
        case "Relu":
            return jnp.maximum(reads[0], 0)
        case "Add":
            return reads[0] + reads[1]
        case "Concat":
            return jnp.concatenate(reads, _CHANNELS_LAST[given["axis"]])
        case "MaxPool":
            return _windows(reads[0], given, -jnp.inf, lax.max)
        case "AveragePool":
            total = _windows(reads[0], given, 0.0, lax.add)
            if given.get("count_include_pad", 0):
                return total / np.prod(given["kernel_shape"])
            return total / _windows(jnp.ones_like(reads[0]), given, 0.0, lax.add)
        case "GlobalAveragePool":
            return jnp.mean(reads[0], (1, 2), keepdims=True)
        case "Flatten":
            first = jnp.transpose(reads[0], (0, 3, 1, 2)) if reads[0].ndim == 4 else reads[0]
            return first.reshape(first.shape[0], -1)
        case "Gemm" if given.get("transB"):
            return reads[0] @ reads[1].T + reads[2]
        case other:
            raise ValueError(f"a {other} has no form in JAX here")


def _windows(x: Any, given: Mapping[str, Any], start: float, function: Any) -> Any:
    """Reduce windows; with `ceil_mode` the last one may reach beyond the padding."""
    from jax import lax
    from jax import numpy as jnp

    kernel, strides = given["kernel_shape"], given.get("strides", [1, 1])
    pads, padding = given.get("pads", [0, 0, 0, 0]), [(0, 0)]
    for axis in range(2):
        size, before, behind = x.shape[1 + axis], pads[axis], pads[2 + axis]
        if given.get("ceil_mode", 0):
            steps = ceil((size + before + behind - kernel[axis]) / strides[axis])
            if steps * strides[axis] >= size + before:  # it would begin behind the input
                steps -= 1
            behind = max(steps * strides[axis] + kernel[axis] - size - before, behind)
        padding.append((before, behind))
    return lax.reduce_window(
        x, jnp.asarray(start, x.dtype), function, (1, *kernel, 1), (1, *strides, 1), [*padding, (0, 0)]
    )

"""A merge stage as one ONNX model: one convolution over padded and stacked kernels, its activation, a split.

IOS, section 3.2; `stageloom.shared.merge` says which operators may merge and where each kernel lies in the
common one.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stageloom.shared.errors import ModelError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import OpId, TensorId
from stageloom.shared.importer.values import ELEMENT_TYPES
from stageloom.shared.merge import MergedConvolution, merged

_SPLIT_SIZES_ARE_AN_INPUT = 13
"""Before this version of the operator set, Split has its sizes in an attribute."""


def merged_model(
    skeleton: onnx.ModelProto,
    graph: Graph,
    ops: Sequence[OpId],
    batch: int,
    weights: Mapping[str, memoryview],
) -> bytes:
    """The model of operators that may merge. `weights` are encoded tensors by name; a skeleton holds none.

    Raises:
        ModelError: the nodes are not the convolutions that the graph describes.
    """
    one = merged(graph, ops)
    nodes = [[skeleton.graph.node[i] for i in graph.operators[op].nodes] for op in one.ops]
    constants = {name for node in nodes[0][1:] for name in node.input if name in weights}
    names = [graph.tensors[tensor].name for tensor in (one.input, *one.outputs)]
    prefix = "merged"
    while any(name.startswith(prefix) for name in (*names, *constants)):
        prefix += "_"
    body = _body(one, nodes[0], names, prefix)
    stacked = _stacked(graph, one, nodes, weights)
    body.initializer.extend(
        numpy_helper.from_array(array, f"{prefix}.{name}") for name, array in stacked.items()
    )
    body.initializer.extend(onnx.TensorProto.FromString(bytes(weights[name])) for name in sorted(constants))
    if _opset(skeleton) >= _SPLIT_SIZES_ARE_AN_INPUT:
        sizes = np.array(one.filters, np.int64)
        body.initializer.append(numpy_helper.from_array(sizes, f"{prefix}.sizes"))
        body.node[-1].input.append(f"{prefix}.sizes")
    else:
        body.node[-1].attribute.append(helper.make_attribute("split", one.filters))
    body.input.append(_described(graph, one.input, batch))
    body.output.extend(_described(graph, tensor, batch) for tensor in sorted(one.outputs))
    model = onnx.ModelProto(ir_version=skeleton.ir_version, graph=body)
    model.opset_import.extend(skeleton.opset_import)
    return bytes(model.SerializeToString())


def _body(
    one: MergedConvolution, first: Sequence[onnx.NodeProto], names: Sequence[str], prefix: str
) -> onnx.GraphProto:
    """The convolution, what follows it in the first operator, as in all of them, and the split."""
    convolution = helper.make_node(
        "Conv",
        [names[0], f"{prefix}.kernels", f"{prefix}.biases"],
        [f"{prefix}.0"],
        kernel_shape=one.convolution.kernel,
        strides=one.convolution.strides,
        dilations=one.convolution.dilations,
        pads=one.convolution.pads,
    )
    renamed = {first[0].output[0]: f"{prefix}.0"}
    tail = []
    for number, node in enumerate(first[1:], 1):
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        renamed[node.output[0]] = f"{prefix}.{number}"
        copy.input[:] = [renamed.get(name, name) for name in node.input]
        copy.output[:] = [f"{prefix}.{number}"]
        tail.append(copy)
    split = helper.make_node("Split", [f"{prefix}.{len(tail)}"], names[1:], axis=1)
    return helper.make_graph([convolution, *tail, split], prefix, [], [])


def _stacked(
    graph: Graph,
    one: MergedConvolution,
    nodes: Sequence[Sequence[onnx.NodeProto]],
    weights: Mapping[str, memoryview],
) -> dict[str, np.ndarray]:
    """All kernels [sum of filters, channels, *kernel], zeros around the smaller ones, and all biases."""
    channels = graph.tensors[one.input].shape[1]
    kernels, biases = [], []
    for op, filters, offset, own in zip(one.ops, one.filters, one.offsets, nodes, strict=True):
        kernel, *bias = [_array(weights, name) for name in own[0].input[1:] if name]
        found = graph.operators[op].convolution
        if found is None or kernel.shape != (filters, channels, *found.kernel):
            raise ModelError(
                f"operator {op} of model {graph.name!r} has other weights than its graph says",
                remedy="import the model again",
            )
        padded = np.zeros((filters, channels, *one.convolution.kernel), kernel.dtype)
        taps = [slice(first, first + size) for first, size in zip(offset, found.kernel, strict=True)]
        padded[(slice(None), slice(None), *taps)] = kernel
        kernels.append(padded)
        biases.append(bias[0] if bias else np.zeros(filters, kernel.dtype))
    return {"kernels": np.concatenate(kernels), "biases": np.concatenate(biases)}


def _array(weights: Mapping[str, memoryview], name: str) -> np.ndarray:
    if name not in weights:
        raise ModelError(f"the weights {name[:80]!r} are not in the model", remedy="import the model again")
    array: np.ndarray = numpy_helper.to_array(onnx.TensorProto.FromString(bytes(weights[name])))
    return array


def _opset(model: onnx.ModelProto) -> int:
    return max((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), default=1)


def _described(graph: Graph, tensor: TensorId, batch: int) -> onnx.ValueInfoProto:
    found = graph.tensors[tensor]
    shape = found.shape if batch == 1 else (batch, *found.shape[1:])
    return helper.make_tensor_value_info(found.name, ELEMENT_TYPES[found.dtype], shape)

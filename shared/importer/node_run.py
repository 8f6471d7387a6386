"""Reads the ONNX nodes of operators as splitting wants them (`stageloom.shared.partition`)."""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import onnx
from onnx import AttributeProto, numpy_helper

from stageloom.shared.errors import Unsplittable
from stageloom.shared.graph import Graph
from stageloom.shared.ids import OpId
from stageloom.shared.importer.encoded import described_weight
from stageloom.shared.importer.nodes import opset_of, sub_graphs
from stageloom.shared.importer.values import ELEMENT_TYPES, infer_values
from stageloom.shared.partition import NodeRun, OnnxNode

_MOST_NUMBERS = 1 << 7
"""Integers of a constant that are read: more are no shape, and no axes."""


def node_run(
    model: onnx.ModelProto,
    graph: Graph,
    ops: Sequence[OpId],
    encoded: Mapping[str, memoryview],
) -> NodeRun:
    """The nodes of operators that follow each other, with the shapes of all values at batch 1.

    `model` does not hold its weights: `encoded` has them by name.

    Raises:
        Unsplittable: an operator is opaque.
    """
    for op in ops:
        if graph.operators[op].opaque:
            raise Unsplittable("axis", f"operator {op} is one piece: {graph.operators[op].opaque[:80]}")
    indices = sorted(i for op in ops for i in graph.operators[op].nodes)
    nodes = [model.graph.node[i] for i in indices]
    if any(next(sub_graphs(node), None) is not None for node in nodes):
        raise Unsplittable("axis", "an operator holds graphs of its own")
    made = {name for node in nodes for name in node.output if name}
    read = {name for node in nodes for name in node.input if name} - made
    weights = {name: described_weight(encoded[name]) for name in sorted(read & encoded.keys())}
    run_inputs = {t.name: t for t in graph.tensors if t.name in read and t.name not in weights}
    part = onnx.ModelProto(ir_version=model.ir_version)
    part.opset_import.extend(model.opset_import)
    part.functions.extend(model.functions)
    part.graph.name = graph.name
    part.graph.node.extend(nodes)
    for name, tensor in run_inputs.items():
        part.graph.input.append(
            onnx.helper.make_tensor_value_info(name, ELEMENT_TYPES[tensor.dtype], tensor.shape)
        )
    for name, found in weights.items():
        if _has_contents(found):
            part.graph.initializer.append(found)
        else:
            typed = onnx.helper.make_tensor_value_info(name, found.data_type, list(found.dims))
            part.graph.input.append(typed)
    shapes = {name: value.shape for name, value in infer_values(part).items() if not value.unfit}
    shapes |= {name: tuple(int(d) for d in found.dims) for name, found in weights.items()}
    shapes |= {tensor.name: tensor.shape for tensor in graph.tensors if tensor.name in made | read}
    last = ops[-1]
    crossing = {graph.tensors[t].name for op in ops if op != last for t in graph.operators[op].outputs}
    return NodeRun(
        nodes=tuple(map(_described, nodes)),
        shapes=shapes,
        weights=frozenset(weights),
        numbers={
            name: numbers for name, found in weights.items() if (numbers := _numbers(found)) is not None
        },
        outputs=tuple(graph.tensors[t].name for t in graph.operators[last].outputs),
        crossing=frozenset(crossing),
        opset=opset_of(model),
    )


def _has_contents(weight: onnx.TensorProto) -> bool:
    fields = (weight.raw_data, weight.float_data, weight.int32_data, weight.int64_data, weight.double_data)
    return any(fields) or bool(weight.uint64_data) or not prod(weight.dims)


def _numbers(weight: onnx.TensorProto) -> tuple[int, ...] | None:
    integers = weight.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    if not integers or prod(weight.dims) > _MOST_NUMBERS or not _has_contents(weight):
        return None
    return tuple(int(number) for number in np.atleast_1d(numpy_helper.to_array(weight)))


def _described(node: onnx.NodeProto) -> OnnxNode:
    attributes: dict[str, int | str | tuple[int, ...]] = {}
    for attribute in node.attribute:
        if attribute.type == AttributeProto.INT:
            attributes[attribute.name] = int(attribute.i)
        elif attribute.type == AttributeProto.INTS:
            attributes[attribute.name] = tuple(int(number) for number in attribute.ints)
        elif attribute.type == AttributeProto.STRING:
            attributes[attribute.name] = attribute.s.decode(errors="replace")
    return OnnxNode(node.op_type, tuple(node.input), tuple(node.output), attributes, node.domain)

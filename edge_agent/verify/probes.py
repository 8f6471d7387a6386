"""A model that also returns what its final heads read: the same operators, cuts and order, more outputs."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from stageloom.shared.graph import Graph, Tensor
from stageloom.shared.ids import OpId, TensorId
from stageloom.shared.importer.values import ELEMENT_TYPES, Value

if TYPE_CHECKING:
    import onnx


def with_probes(
    graph: Graph, model: "onnx.ModelProto", names: Iterable[str], values: Mapping[str, Value]
) -> Graph:
    """Return the named values too, where their shape is known; the model's outputs grow in place.

    A value inside an operator (between a Conv and its Sigmoid) becomes another output of that operator, which
    then no longer merges with its siblings. Identifiers of tensors and operators stay.
    """
    from onnx import helper

    for name in names:
        value = values.get(name)
        known = {tensor.name: TensorId(index) for index, tensor in enumerate(graph.tensors)}
        if name in known:
            graph = _returned(graph, known[name])
        elif value is not None and not value.unfit and (maker := _maker(graph, model, name)) is not None:
            graph = _shown(graph, maker, Tensor(name, value.dtype, value.shape))
        else:
            continue
        tensor = next(tensor for tensor in graph.tensors if tensor.name == name)
        if name not in {output.name for output in model.graph.output}:
            kind = ELEMENT_TYPES[tensor.dtype]
            model.graph.output.append(helper.make_tensor_value_info(name, kind, tensor.shape))
    return graph


def _returned(graph: Graph, tensor: TensorId) -> Graph:
    if tensor in graph.outputs or graph.producer[tensor] < 0:
        return graph
    return replace(graph, outputs=(*graph.outputs, tensor))


def _shown(graph: Graph, maker: OpId, tensor: Tensor) -> Graph:
    """`graph` with one more tensor, made by `maker`, as an output."""
    new = TensorId(len(graph.tensors))
    operators = list(graph.operators)
    operators[maker] = replace(operators[maker], outputs=(*operators[maker].outputs, new), convolution=None)
    return replace(
        graph,
        tensors=(*graph.tensors, tensor),
        operators=tuple(operators),
        outputs=(*graph.outputs, new),
        batchable=graph.batchable and tensor.shape[:1] == (1,),
    )


def _maker(graph: Graph, model: "onnx.ModelProto", name: str) -> OpId | None:
    node = next((i for i, node in enumerate(model.graph.node) if name in node.output), None)
    return next((OpId(op) for op, operator in enumerate(graph.operators) if node in operator.nodes), None)

"""A model in half precision: float16 within, float32 where tasks come and go.

onnxruntime computes in the types that its file has, so the file is converted, node by node. A node whose
kernels know float16 (`_HALF`) computes in it, every other one in float32 between two Casts. The graph keeps
its numbers: a Cast belongs to the operator of its node, and what crosses operators is float16, except the
model's own inputs and outputs. So cuts, masks and merges of a plan hold as they are, and slots take half the
memory.

Weights that float16 cannot hold become its largest finite value (a mask's -3.4e38 would be infinite, and a
Softmax over it not a number).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stageloom.shared.artifact import Artifact, open_artifact, write_artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.errors import ExecutorError
from stageloom.shared.graph import Graph
from stageloom.shared.importer.nodes import captured_names
from stageloom.shared.importer.values import element_types

FP16: Final = "fp16"

_HALF: Final = frozenset({
    "Abs", "Add", "AveragePool", "BatchNormalization", "Clip", "Concat", "Conv", "ConvTranspose",
    "DepthToSpace", "Div", "Elu", "Erf", "Exp", "Expand", "Flatten", "Gather", "Gelu", "Gemm",
    "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish", "Identity", "LayerNormalization",
    "LeakyRelu", "LogSoftmax", "MatMul", "Max", "MaxPool", "Min", "Mul", "Neg", "PRelu", "Pad", "Pow",
    "ReduceMax", "ReduceMean", "ReduceSum", "Relu", "Reshape", "Sigmoid", "Slice", "Softmax",
    "SpaceToDepth", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "Tile", "Transpose", "Unsqueeze",
    "Where",
})  # fmt: skip
"""Operator types that CUDA's provider computes in float16, with every floating point input in that type."""

_STANDARD: Final = ("", "ai.onnx")
_CAST: Final = "Cast"
_MADE_HERE: Final = "stageloom/half/"
"""How the names of Casts, and of what lies between them and their nodes, begin."""


def half_graph(graph: Graph) -> Graph:
    """The graph as `half_artifact` makes it, but for the numbers of nodes; known without the model."""
    ends = {*graph.inputs, *graph.outputs}
    tensors = tuple(
        replace(tensor, dtype="float16") if tensor.dtype == "float32" and number not in ends else tensor
        for number, tensor in enumerate(graph.tensors)
    )
    operators = tuple(
        replace(operator, weight_bytes=operator.weight_bytes // 2) if operator.kind in _HALF else operator
        for operator in graph.operators
    )
    return replace(graph, tensors=tensors, operators=operators)


def with_half_graphs(bound: BoundPlan) -> BoundPlan:
    """The plan with half graphs where it wants models in half precision."""
    if FP16 not in bound.precisions:
        return bound
    models = tuple(
        replace(model, graph=half_graph(model.graph)) if precision == FP16 else model
        for model, precision in zip(bound.models, bound.precisions, strict=True)
    )
    return replace(bound, models=models)


def half_artifact(artifact: Artifact, path: Path) -> Artifact:
    """The artifact in half precision, written to `path`.

    Raises:
        ExecutorError: the model has control flow or functions of its own.
    """
    model = onnx.ModelProto.FromString(artifact.onnx_bytes())
    if model.functions or any(captured_names(node) for node in model.graph.node):
        raise ExecutorError(
            f"model {artifact.graph.name!r} has control flow or functions, which are not converted to fp16",
            remedy="use fp32 or tf32",
        )
    conversion = _Conversion(model, artifact.graph)
    numbers = conversion.convert()
    graph = half_graph(artifact.graph)
    operators = tuple(
        replace(operator, nodes=tuple(number for node in operator.nodes for number in numbers[node]))
        for operator in graph.operators
    )
    write_artifact(path, replace(graph, operators=operators), model.SerializeToString(deterministic=True))
    return open_artifact(path)


@dataclass
class _Conversion:
    """Rewrites a model in place."""

    model: onnx.ModelProto
    graph: Graph

    def __post_init__(self) -> None:
        types = element_types(self.model)
        self._floats = {name for name, kind in types.items() if kind == TensorProto.FLOAT}
        self._floats |= {tensor.name for tensor in self.graph.tensors if tensor.dtype == "float32"}
        self._weights = {weight.name: weight for weight in self.model.graph.initializer}
        # The type that a float32 value has from now on; of values within an operator its maker's.
        self._types = {tensor.name: TensorProto.FLOAT16 for tensor in self.graph.tensors}
        for number in (*self.graph.inputs, *self.graph.outputs):
            self._types[self.graph.tensors[number].name] = TensorProto.FLOAT
        self._used: dict[str, TensorProto] = {}  # weights by name, as nodes read them

    def convert(self) -> list[range]:
        """Per node of the model before, the numbers of the nodes that stand for it now. [num_nodes]"""
        nodes: list[onnx.NodeProto] = []
        numbers = []
        for number, node in enumerate(self.model.graph.node):
            first = len(nodes)
            nodes += self._converted(number, node)
            numbers.append(range(first, len(nodes)))
        del self.model.graph.node[:], self.model.graph.value_info[:], self.model.graph.initializer[:]
        self.model.graph.node.extend(nodes)
        self.model.graph.initializer.extend(self._used[name] for name in sorted(self._used))
        return numbers

    def _converted(self, number: int, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The node in its type, with Casts of what it reads before it and of what it makes behind it."""
        wanted = TensorProto.FLOAT16 if _computes_in_half(node) else TensorProto.FLOAT
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        if node.op_type == _CAST and node.domain in _STANDARD:
            return [self._own_cast(copy)]
        before: dict[str, onnx.NodeProto] = {}
        for place, name in enumerate(node.input):
            if name in self._weights:
                copy.input[place] = self._weight(name, wanted)
            elif name in self._floats and self._types[name] != wanted:
                copy.input[place] = f"{_MADE_HERE}{number}.{name}"
                before[name] = _cast(name, copy.input[place], wanted)
        after = []
        for place, name in enumerate(node.output):
            if name not in self._floats:
                continue
            if self._types.setdefault(name, wanted) != wanted:
                copy.output[place] = f"{_MADE_HERE}{number}.{name}"
                after.append(_cast(copy.output[place], name, self._types[name]))
        return [*before.values(), copy, *after]

    def _own_cast(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """A Cast of the model's own: it reads any type, and makes the one that its result has now."""
        for place, name in enumerate(node.input):
            if name in self._weights:
                node.input[place] = self._weight(name, TensorProto.FLOAT)
        (name,) = node.output
        if name in self._floats:
            (to,) = [attribute for attribute in node.attribute if attribute.name == "to"]
            to.i = self._types.setdefault(name, TensorProto.FLOAT)
        return node

    def _weight(self, name: str, wanted: int) -> str:
        """The name of a weight in the wanted type; others than float32 are left alone."""
        weight = self._weights[name]
        if weight.data_type != TensorProto.FLOAT or wanted == TensorProto.FLOAT:
            self._used[name] = weight
            return name
        made = f"{_MADE_HERE}{name}"
        if made not in self._used:
            limit = np.finfo(np.float16).max
            values = np.clip(numpy_helper.to_array(weight), -limit, limit)
            self._used[made] = numpy_helper.from_array(values.astype(np.float16), made)
        return made


def _computes_in_half(node: onnx.NodeProto) -> bool:
    """Whether all that the node reads and makes may be float16; a LayerNormalization's statistics may not."""
    if node.op_type == "LayerNormalization" and len(node.output) > 1:
        return False
    return node.op_type in _HALF and node.domain in _STANDARD


def _cast(source: str, target: str, to: int) -> onnx.NodeProto:
    return helper.make_node(_CAST, [source], [target], name=f"{_MADE_HERE}{target}", to=to)


def without_casts(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes of an operator without the Casts around them, reading and making what these did."""
    nodes = list(nodes)
    renamed: dict[str, str] = {}
    for node in filter(_is_ours, nodes):
        (source,), (target,) = node.input, node.output
        renamed |= {target: source} if target.startswith(_MADE_HERE) else {source: target}
    kept = []
    for node in nodes:
        if not _is_ours(node):
            kept.append(onnx.NodeProto())
            kept[-1].CopyFrom(node)
            kept[-1].input[:] = [renamed.get(name, name) for name in node.input]
            kept[-1].output[:] = [renamed.get(name, name) for name in node.output]
    return kept


def _is_ours(node: onnx.NodeProto) -> bool:
    return bool(node.op_type == _CAST and node.name.startswith(_MADE_HERE))

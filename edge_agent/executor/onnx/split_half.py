"""One half of a split operator as a model: weights are sliced, inputs parts, padding at true borders only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stageloom.shared.errors import ModelError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import OpId, TensorId
from stageloom.shared.importer.node_run import node_run
from stageloom.shared.importer.nodes import opset_of
from stageloom.shared.importer.values import ELEMENT_TYPES
from stageloom.shared.operator_parts import OperatorPart, halves_of
from stageloom.shared.partition import AxisRange, NodeRun, OnnxNode

SLICE_TAKES_INPUTS = 10
"""Before this version of the operator set, Slice has its positions in attributes."""


@dataclass(frozen=True)
class HalfModel:
    """A half as a model. Its graph has the artifact's tensors, with the shapes that they have here."""

    model: onnx.ModelProto  # without the weights of `whole_weights`
    whole_weights: tuple[str, ...]  # which it has unchanged
    graph: Graph
    reads: tuple[tuple[TensorId, AxisRange | None], ...]
    """Per tensor that it reads the part that it is fed; None: all."""


def half_model(
    skeleton: onnx.ModelProto,
    graph: Graph,
    ops: Sequence[OpId],
    half: tuple[int, int, bool],
    batch: int,
    weights: Mapping[str, memoryview],
) -> HalfModel:
    """The first or the second half of operators that are split; `half` is (dimension, boundary, second).

    `weights` are encoded tensors by name; the skeleton holds none.

    Raises:
        Unsplittable: the operators cannot be split so.
        ModelError: the model is not batchable.
    """
    dim, boundary, second = half
    if batch != 1 and (not graph.batchable or dim == 0):
        raise ModelError(f"model {graph.name!r} is split with batch 1 only", remedy="plan it with batch 1")
    run = node_run(skeleton, graph, ops, weights)
    part = halves_of(run, dim, boundary)[second]
    return _Writer(skeleton, graph, run, part, batch, weights).model(
        [graph.operators[op].nodes for op in ops]
    )


class _Writer:
    """Collects the nodes and weights of one half."""

    def __init__(
        self,
        skeleton: onnx.ModelProto,
        graph: Graph,
        run: NodeRun,
        part: OperatorPart,
        batch: int,
        weights: Mapping[str, memoryview],
    ) -> None:
        self._skeleton, self._graph, self._run, self._part = skeleton, graph, run, part
        self._batch, self._weights = batch, weights
        self._opset = opset_of(skeleton)
        self._body = onnx.GraphProto(name=graph.name)
        self._own: dict[str, None] = {}  # names of sliced weights and of constants
        self._whole: dict[str, None] = {}

    def model(self, operators: Sequence[Sequence[int]]) -> HalfModel:
        sources = sorted(index for nodes in operators for index in nodes)
        for part in self._part.nodes:
            described = self._run.nodes[part.node]
            node = onnx.NodeProto()
            node.CopyFrom(self._skeleton.graph.node[sources[part.node]])
            names = [
                self._input(described, part.node, position, part.reads[position], part.numbers.get(position))
                for position in part.kept
            ]
            node.input[:] = names
            for name, value in part.attributes.items():
                kept = [one for one in node.attribute if one.name != name]
                del node.attribute[:]
                node.attribute.extend([*kept, helper.make_attribute(name, value)])
            self._body.node.append(node)
        return self._finished()

    def _input(
        self,
        node: OnnxNode,
        index: int,
        position: int,
        wanted: AxisRange | None,
        numbers: tuple[int, ...] | None,
    ) -> str:
        """The name under which a node finds one of its inputs."""
        name = node.inputs[position]
        if numbers is not None:
            return self._constant(f"{name}/{index}.{position}", np.array(numbers, np.int64))
        if not name:
            return name
        if name in self._run.weights:
            if wanted is None:
                self._whole[name] = None
                return name
            sliced = f"{name}/{wanted.dim}:{wanted.start}:{wanted.stop}"
            if sliced not in self._own:
                array = numpy_helper.to_array(onnx.TensorProto.FromString(bytes(self._weights[name])))
                self._constant(sliced, array[_index(wanted, array.ndim)])
            return sliced
        held = self._part.held[name]
        if wanted is None or wanted == held or _is_all(wanted, self._run.shape(name)):
            return name
        return self._sliced(name, f"{name}/{index}.{position}", wanted, held)

    def _sliced(self, name: str, made: str, wanted: AxisRange, held: AxisRange | None) -> str:
        """A part of a value of which the half has more."""
        begin = held.start if held is not None and held.dim == wanted.dim else 0
        bounds = {"starts": wanted.start - begin, "ends": wanted.stop - begin, "axes": wanted.dim}
        if self._opset < SLICE_TAKES_INPUTS:
            lists = {key: [value] for key, value in bounds.items()}
            self._body.node.append(helper.make_node("Slice", [name], [made], **lists))
            return made
        inputs = [
            self._constant(f"{made}.{key}", np.array([value], np.int64)) for key, value in bounds.items()
        ]
        self._body.node.append(helper.make_node("Slice", [name, *inputs], [made]))
        return made

    def _constant(self, name: str, array: np.ndarray) -> str:
        if name not in self._own:
            self._own[name] = None
            self._body.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def _finished(self) -> HalfModel:
        held = self._part.held
        tensors = list(self._graph.tensors)
        known = {tensor.name: number for number, tensor in enumerate(tensors)}
        made = {name for node in self._run.nodes for name in node.outputs}
        reads = sorted((known[name], held[name]) for name in held if name not in made)
        for number, part in [*reads, *((known[name], held[name]) for name in self._run.outputs)]:
            tensors[number] = replace(tensors[number], shape=_cut(tensors[number].shape, part))
        graph = replace(self._graph, tensors=tuple(tensors))
        self._body.input.extend(self._info(graph, number) for number, _ in reads)
        self._body.output.extend(self._info(graph, known[name]) for name in self._run.outputs)
        model = onnx.ModelProto(ir_version=self._skeleton.ir_version, graph=self._body)
        model.opset_import.extend(self._skeleton.opset_import)
        feeds = tuple((TensorId(number), part) for number, part in reads)
        return HalfModel(model, tuple(self._whole), graph, feeds)

    def _info(self, graph: Graph, number: int) -> onnx.ValueInfoProto:
        tensor = graph.tensors[number]
        return helper.make_tensor_value_info(
            tensor.name, ELEMENT_TYPES[tensor.dtype], tensor.batched(self._batch)
        )


def _cut(shape: tuple[int, ...], part: AxisRange | None) -> tuple[int, ...]:
    return shape if part is None else (*shape[: part.dim], part.extent, *shape[part.dim + 1 :])


def _is_all(part: AxisRange, shape: tuple[int, ...]) -> bool:
    return part.start == 0 and part.stop == shape[part.dim]


def _index(part: AxisRange, rank: int) -> tuple[slice, ...]:
    return tuple(slice(part.start, part.stop) if dim == part.dim else slice(None) for dim in range(rank))

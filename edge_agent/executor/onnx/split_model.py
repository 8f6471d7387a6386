"""A model whose operators are split as a model of its own: for executors that lower whole models.

Each half is nodes on sliced weights behind slices of what the operators read, each join a Concat. The graph
is the plan's derived one, with the operators' nodes in this file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import helper

from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx.split_half import SLICE_TAKES_INPUTS
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundModel
from stageloom.shared.errors import ExecutorError, ModelError, Unsplittable
from stageloom.shared.importer.nodes import captured_names, opset_of
from stageloom.shared.partition import AxisRange
from stageloom.shared.split_graph import SplitOrigin, SplitRole


def split_artifact(model: BoundModel, artifact: Artifact, file: Path) -> Artifact:
    """Write the model as the plan splits it to `file`; an artifact of the graph that the plan runs.

    Raises:
        ExecutorError: an operator cannot be split so.
    """
    try:
        writer = _SplitWriter(model, ModelParts(artifact))
        operators = [
            replace(operator, nodes=tuple(writer.add(operator.outputs, origin)))
            for operator, origin in zip(model.graph.operators, model.origins, strict=True)
        ]
    except (ModelError, Unsplittable) as error:
        raise ExecutorError(str(error)) from error
    with file.open("wb") as out:
        out.writelines(writer.pieces())
    graph = replace(model.graph, operators=tuple(operators))
    return Artifact(model.graph_key, graph, file, 0, file.stat().st_size)


class _SplitWriter:
    """Collects the nodes of the derived model, operator by operator."""

    def __init__(self, model: BoundModel, parts: ModelParts) -> None:
        self._model, self._parts = model, parts
        self._source = parts.skeleton.model
        self._made = onnx.ModelProto()
        self._made.CopyFrom(self._source)
        del self._made.graph.node[:]
        self._whole: dict[str, None] = {}  # weights that are there as they were

    def add(self, outputs: tuple[int, ...], origin: SplitOrigin) -> Iterator[int]:
        """Add an operator's nodes; yields their numbers."""
        before = len(self._made.graph.node)
        if origin.role is SplitRole.WHOLE:
            own = [
                self._source.graph.node[i]
                for op in origin.ops
                for i in self._model.source.operators[op].nodes
            ]
            self._whole |= dict.fromkeys(
                name for node in own for name in (*node.input, *captured_names(node))
            )
            self._made.graph.node.extend(own)
        elif origin.role is SplitRole.JOIN:
            names = [[self._model.graph.tensors[t].name for t in row] for row in origin.halves]
            self._made.graph.node.extend(
                helper.make_node("Concat", halves, [joined], axis=origin.dim) for joined, *halves in names
            )
        else:
            self._add_half(origin)
        yield from range(before, len(self._made.graph.node))

    def _add_half(self, origin: SplitOrigin) -> None:
        half = self._parts.half(tuple(origin.ops), 1, (origin.dim, origin.boundary, origin.second))
        tensors, prefix = self._model.graph.tensors, f"{origin.ops[-1]}.{origin.role.value}"
        body = half.model.graph
        outputs = {
            tensors[row[0]].name: tensors[row[2 if origin.second else 1]].name for row in origin.halves
        }
        own = {name: f"{prefix}/{name}" for node in body.node for name in node.output if name}
        own |= {weight.name: f"{prefix}/{weight.name}" for weight in body.initializer}
        own |= outputs
        for tensor, part in half.reads:
            if part is not None:
                name = tensors[tensor].name
                own[name] = f"{prefix}/{name}/part"
                self._made.graph.node.append(self._slice(name, own[name], part))
        for node in body.node:
            renamed = onnx.NodeProto()
            renamed.CopyFrom(node)
            renamed.input[:] = [own.get(name, name) for name in node.input]
            renamed.output[:] = [own.get(name, name) for name in node.output]
            self._made.graph.node.append(renamed)
        for weight in body.initializer:
            kept = self._made.graph.initializer.add()
            kept.CopyFrom(weight)
            kept.name = own[weight.name]
        self._whole |= dict.fromkeys(half.whole_weights)

    def _slice(self, name: str, made: str, part: AxisRange) -> onnx.NodeProto:
        bounds: Mapping[str, int] = {"starts": part.start, "ends": part.stop, "axes": part.dim}
        if opset_of(self._source) < SLICE_TAKES_INPUTS:
            return helper.make_node("Slice", [name], [made], **{key: [at] for key, at in bounds.items()})
        names = [f"{made}.{key}" for key in bounds]
        self._made.graph.initializer.extend(
            helper.make_tensor(at, onnx.TensorProto.INT64, [1], [value])
            for at, value in zip(names, bounds.values(), strict=True)
        )
        return helper.make_node("Slice", [name, *names], [made])

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The file: the model without the artifact's weights, then those that it reads."""
        yield self._made.SerializeToString()
        yield from self._parts.encoded(name for name in self._whole if self._parts.has(name))

"""Lower a whole ONNX file without an import, for conformance tests.

The lowering functions, constants and shapes are those of a model's units; no node runs in onnxruntime. An
input that decides a shape (Reshape's second) must be known beforehand, so it is pinned to its value, as in a
file with static shapes; `pinned` names these inputs.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import torch
from torch import Tensor

from stageloom.edge_agent.lowering.batch import ways
from stageloom.edge_agent.lowering.dtypes import (
    NeedsConstant,
    Precision,
    Unsupported,
    numpy_from_tensor,
    tensor_from_numpy,
)
from stageloom.edge_agent.lowering.node import Spec, WeightStore, known_constant, stored_constant
from stageloom.edge_agent.lowering.program import Alternative, KernelProgram
from stageloom.edge_agent.lowering.trace import NodeTracer
from stageloom.shared.importer.nodes import opset_of

_CPU = torch.device("cpu")


class WholeModel:
    """A model lowered for the shapes, types and pinned values of one set of inputs."""

    def __init__(self, model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> None:
        """
        Raises:
            Unsupported: a node of it is not lowered.
        """
        self.model = model
        self._feeds = {name: tensor_from_numpy(array) for name, array in feeds.items()}
        self.pinned: set[str] = set()
        self._program = self._lowered()

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that are read while running."""
        return tuple(name for name in self._feeds if name not in self.pinned)

    def run(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return the outputs in the file's order."""
        made = self._program.run([tensor_from_numpy(feeds[name]) for name in self.inputs])
        return [numpy_from_tensor(value) for value in made]

    def ways(self) -> tuple[Alternative, ...]:
        """Return every way to compute the model."""
        return self._ways

    def _lowered(self) -> KernelProgram:
        try:
            return self._with_pinned()
        except NeedsConstant as error:
            sources = self._sources(error.value) - self.pinned
            if not sources:
                raise
        self.pinned |= sources
        return self._lowered()

    def _with_pinned(self) -> KernelProgram:
        graph = self.model.graph
        constants = {proto.name: stored_constant(proto) for proto in graph.initializer}
        constants |= {name: known_constant(("pinned", name), self._feeds[name]) for name in self.pinned}
        store = WeightStore(_CPU, Precision.FP32)
        trace = NodeTracer(store, constants, opset=opset_of(self.model), batch=1, channels_last=False)
        for name in self.inputs:
            value = self._feeds[name]
            trace.add_input(name, Spec(tuple(value.shape), value.dtype))
        traced = [t for node in graph.node if (t := trace.visit(node)) is not None]

        def output(name: str) -> str | Tensor:
            known = trace.constant(name)
            return name if known is None else store.tensor(known)

        outputs = [output(o.name) for o in graph.output]
        program = KernelProgram(traced, self.inputs, outputs, trace)
        self._ways, _ = ways(program, traced, self.inputs, outputs, trace)
        return program

    def _sources(self, value: str) -> set[str]:
        """Return the inputs that a value is computed from."""
        maker = {name: node for node in self.model.graph.node for name in node.output if name}
        sources, waiting, seen = set(), [value], set()
        while waiting:
            name = waiting.pop()
            if name in self._feeds:
                sources.add(name)
            elif name in maker and name not in seen:
                waiting.extend(maker[name].input)
            seen.add(name)
        return sources


def lower_whole(model: onnx.ModelProto, feeds: Sequence[np.ndarray]) -> WholeModel:
    """Lower a model for inputs in the file's order.

    Raises:
        Unsupported: a node of it is not lowered, or an input is no tensor.
    """
    stored = {proto.name for proto in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in stored]
    named: dict[str, np.ndarray] = {}
    for name, value in zip(names, feeds, strict=False):
        if not isinstance(value, np.ndarray | np.generic):
            raise Unsupported("inputs that are no tensors")
        named[name] = np.asarray(value)
    return WholeModel(model, named)

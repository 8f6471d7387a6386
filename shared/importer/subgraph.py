"""Sub-models of a normalised model: a file for the chosen operators, one convolution for a merge stage."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
from onnx import helper

from stageloom.shared.artifact import Artifact
from stageloom.shared.digest import digest_bytes, digest_of
from stageloom.shared.errors import ModelError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId, TensorId
from stageloom.shared.importer.nodes import captured_names, nodes_within
from stageloom.shared.importer.values import ELEMENT_TYPES
from stageloom.shared.merge import MergedConvolution


@dataclass(frozen=True)
class SubModel:
    """A runnable ONNX file; its inputs and outputs are the named tensors of the graph, in these orders."""

    onnx_bytes: bytes
    inputs: tuple[TensorId, ...]  # read from outside, ascending
    outputs: tuple[TensorId, ...]  # needed outside: by another operator or as a graph output; ascending
    digest: Digest


class ModelSource:
    """A normalised model, parsed once, from which any convex set of operators can be extracted."""

    def __init__(self, onnx_bytes: bytes, graph: Graph) -> None:
        self.graph = graph
        self.model = onnx.ModelProto()
        self.model.ParseFromString(onnx_bytes)
        self._weights = {weight.name: weight for weight in self.model.graph.initializer}
        self._onnx_digest = digest_bytes([onnx_bytes])
        # Of pinned inputs onnxruntime infers more, here a contradiction in a branch that never runs.
        self._open = any(
            not value.type.tensor_type.HasField("shape")
            or any(not dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)
            for value in self.model.graph.input
        )

    @classmethod
    def open(cls, artifact: Artifact) -> "ModelSource":
        """The source of an opened artifact."""
        return cls(artifact.onnx_bytes(), artifact.graph)

    @cached_property
    def _outputs(self) -> frozenset[TensorId]:
        return frozenset(self.graph.outputs)

    def borders(self, ops: Iterable[OpId]) -> tuple[tuple[TensorId, ...], tuple[TensorId, ...]]:
        """Tensors read from outside, and those made that are needed outside; both ascending."""
        inside = set(ops)
        made = {t for op in inside for t in self.graph.operators[op].outputs}
        read = {t for op in inside for t in self.graph.operators[op].inputs}
        needed = {
            t for t in made if t in self._outputs or any(r not in inside for r in self.graph.consumers[t])
        }
        return tuple(sorted(read - made)), tuple(sorted(needed))

    def sub_digest(self, ops: Iterable[OpId], *, batch: int = 1) -> Digest:
        """Digest that equal sub-models of this model share, whatever plan asks for them; cheap."""
        return digest_of([self._onnx_digest, sorted({int(op) for op in ops}), batch])

    def extract(self, ops: Iterable[OpId], *, batch: int = 1) -> SubModel:
        """The sub-model of `ops`; `batch` becomes the leading dimension of its inputs and outputs.

        Raises:
            ModelError: the graph is not batchable, or `ops` is empty.
        """
        chosen = sorted(set(ops))
        if not chosen or batch < 1:
            raise ModelError("a sub-model needs an operator and a positive batch", remedy="name one")
        if batch != 1 and not self.graph.batchable:
            raise ModelError(
                f"model {self.graph.name!r} runs with batch 1 only", remedy="plan it with batch 1"
            )
        inputs, outputs = self.borders(chosen)
        part = onnx.ModelProto()
        part.ir_version = self.model.ir_version
        part.opset_import.extend(self.model.opset_import)
        part.graph.name = self.graph.name
        indices = sorted(i for op in chosen for i in self.graph.operators[op].nodes)
        nodes = [self.model.graph.node[i] for i in indices]
        part.graph.node.extend(nodes)
        used = {name for node in nodes for name in (*node.input, *captured_names(node))}
        part.graph.initializer.extend(self._weights[name] for name in sorted(used & self._weights.keys()))
        part.graph.input.extend(self._describe(t, batch) for t in inputs)
        part.graph.output.extend(self._describe(t, batch) for t in outputs)
        if self.model.functions and any(node.domain for node in nodes_within(part.graph)):
            part.functions.extend(self.model.functions)
        return SubModel(part.SerializeToString(), inputs, outputs, self.sub_digest(chosen, batch=batch))

    def _describe(self, tensor: TensorId, batch: int) -> onnx.ValueInfoProto:
        described = self.graph.tensors[tensor]
        shape: Sequence[int | None] = described.shape if batch == 1 else (batch, *described.shape[1:])
        if self._open:
            shape = [None] * len(shape)
        return helper.make_tensor_value_info(described.name, ELEMENT_TYPES[described.dtype], shape)


def extract(onnx_bytes: bytes, graph: Graph, ops: Iterable[OpId], *, batch: int = 1) -> SubModel:
    """One sub-model; for more than one of the same model keep a `ModelSource`."""
    return ModelSource(onnx_bytes, graph).extract(ops, batch=batch)


def merged_nodes(
    merge: MergedConvolution, first: Sequence[onnx.NodeProto], source: str, prefix: str
) -> list[onnx.NodeProto]:
    """A merge stage (IOS, section 3.2): one convolution, and what follows it in every one of its parts.

    It reads `source`, `PREFIX.kernels` and `PREFIX.biases`; the last node makes the result of all.
    """
    convolution = merge.convolution
    nodes = [
        helper.make_node(
            "Conv",
            [source, f"{prefix}.kernels", f"{prefix}.biases"],
            [f"{prefix}.0"],
            kernel_shape=convolution.kernel,
            strides=convolution.strides,
            dilations=convolution.dilations,
            pads=convolution.pads,
        )
    ]
    renamed = {first[0].output[0]: f"{prefix}.0"}
    for number, node in enumerate(first[1:], 1):
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        renamed[node.output[0]] = f"{prefix}.{number}"
        copy.input[:] = [renamed.get(name, name) for name in node.input]
        copy.output[:] = [f"{prefix}.{number}"]
        nodes.append(copy)
    return nodes


def stacked_weights(
    merge: MergedConvolution, kernels: Sequence[np.ndarray], biases: Sequence[np.ndarray | None]
) -> tuple[np.ndarray, np.ndarray]:
    """All kernels, zeros around the smaller ones [sum of filters, channels, *kernel], and all biases."""
    padded, added = [], []
    for offset, kernel, bias in zip(merge.offsets, kernels, biases, strict=True):
        common = np.zeros((*kernel.shape[:2], *merge.convolution.kernel), kernel.dtype)
        taps = [slice(first, first + size) for first, size in zip(offset, kernel.shape[2:], strict=True)]
        common[(slice(None), slice(None), *taps)] = kernel
        padded.append(common)
        added.append(np.zeros(len(kernel), kernel.dtype) if bias is None else bias)
    return np.concatenate(padded), np.concatenate(added)

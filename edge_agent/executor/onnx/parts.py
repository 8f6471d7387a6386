"""Sub-models of an artifact, written to a file without ever holding the weights as Python objects.

Parsing or writing a protobuf of 100 MB holds the interpreter lock for a tenth of a second, and every lane
with it. So weights are only located in the mapped artifact; what is left is a few kilobytes, which the
importer's extraction works on. In protobuf, fields of an embedded message that occurs twice are merged:
appending another `graph` that holds weights adds them to the first.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stageloom.edge_agent.executor.onnx.half import without_casts
from stageloom.edge_agent.executor.onnx.split_half import HalfModel, half_model
from stageloom.shared.artifact import Artifact
from stageloom.shared.digest import digest_of
from stageloom.shared.errors import ModelError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import OpId, TensorId
from stageloom.shared.importer.encoded import (
    GRAPH_INITIALIZER,
    MODEL_GRAPH,
    encoded_fields,
    encoded_head,
    take_apart,
    varint,
)
from stageloom.shared.importer.nodes import captured_names
from stageloom.shared.importer.subgraph import ModelSource, SubModel, merged_nodes, stacked_weights
from stageloom.shared.importer.values import DTYPES, ELEMENT_TYPES
from stageloom.shared.merge import MergedConvolution, merged

# Field numbers of onnx.proto.
_TENSOR_DATA_TYPE = 2
_TENSOR_RAW_DATA = 9

Half: TypeAlias = tuple[int, int, bool]
"""Of operators that are split: the dimension of the output, the boundary, whether it is the second half."""


class ModelParts:
    """An artifact's ONNX model in parts. Mapped while this lives; parsed when first cut."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        with artifact.path.open("rb") as file:
            # Private, not read-only: who takes views of it may insist on memory that could be written to.
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._model = memoryview(self._mapped)[artifact.onnx_offset :]
        self._source: ModelSource | None = None
        self._weights: dict[str, memoryview] = {}
        self._halves: dict[tuple[tuple[int, ...], int, Half], HalfModel] = {}

    def half(self, ops: tuple[int, ...], batch: int, half: Half) -> HalfModel:
        """One half of operators that are split; see `half_model`.

        Raises:
            Unsplittable, ModelError: it cannot be made.
        """
        known = self._halves.get((ops, batch, half))
        if known is None:
            chosen = [OpId(op) for op in ops]
            model, graph = self._parsed.model, self.artifact.graph
            known = half_model(model, graph, chosen, half, batch, self._weights)
            self._halves = {(ops, batch, half): known}  # the last one: it is asked for more than once
        return known

    def write(
        self, fd: int, ops: tuple[int, ...], batch: int, *, merge: bool = False, half: Half | None = None
    ) -> None:
        """Write the sub-model of some operators to a file; the whole one at batch 1 as it is.

        With `merge` the operators become one convolution, with `half` a half of them is computed.

        Raises:
            ModelError: the operators cannot be cut out, or the artifact's ONNX part is broken.
            Unsplittable: there is no such half of them.
        """
        if half is not None:
            found = self.half(ops, batch, half)
            for piece in (memoryview(found.model.SerializeToString()), *self.encoded(found.whole_weights)):
                _write(fd, piece)
            return
        chosen = [OpId(op) for op in ops]
        if merge:
            model = merged_model(self._parsed.model, self.artifact.graph, chosen, batch, self._weights)
            _write(fd, memoryview(model))
            return
        # A model with open dimensions is one operator: there is nothing to cut out.
        open_whole = self.artifact.graph.ranges is not None
        if (
            batch == 1
            and len(ops) == len(self.artifact.graph.operators)
            and (open_whole or self._reads_and_makes_all)
        ):
            _write(fd, self._model)
            return
        for piece in self._with_weights(self._parsed.extract(chosen, batch=batch).onnx_bytes):
            _write(fd, piece)

    def sub_model(self, ops: Sequence[int], batch: int) -> SubModel:
        """The sub-model of some operators with its weights, in memory.

        Raises:
            ModelError: the operators cannot be cut out, or the artifact's ONNX part is broken.
        """
        part = self._parsed.extract([OpId(op) for op in ops], batch=batch)
        return replace(
            part,
            onnx_bytes=b"".join(self._with_weights(part.onnx_bytes)),
            digest=digest_of([self.artifact.digest, sorted(int(op) for op in ops), batch]),
        )

    def _with_weights(self, part: bytes) -> Iterator[memoryview]:
        """The pieces of a file: a sub-model without weights, then what it reads of them."""
        yield memoryview(part)
        nodes = onnx.ModelProto.FromString(part).graph.node
        used = {name for node in nodes for name in (*node.input, *captured_names(node))}
        yield from self.encoded(sorted(used & self._weights.keys()))

    def has(self, name: str) -> bool:
        """Whether a value is a weight."""
        _ = self._parsed
        return name in self._weights

    def encoded(self, names: Iterable[str]) -> Iterator[memoryview]:
        """The pieces of a file that add weights to a model; see the module's text."""
        for name in names:
            weight = self._weights[name]
            head = encoded_head(GRAPH_INITIALIZER, len(weight))
            yield memoryview(encoded_head(MODEL_GRAPH, len(head) + len(weight)) + head)
            yield weight

    @property
    def skeleton(self) -> ModelSource:
        """The model without its weights."""
        return self._parsed

    def weights(self) -> Iterator[onnx.TensorProto]:
        """Every weight, parsed one at a time."""
        _ = self._parsed
        for name in self._weights:
            yield self.parsed_weight(name)

    def parsed_weight(self, name: str) -> onnx.TensorProto:
        """A weight of the artifact, parsed once more."""
        _ = self._parsed
        return onnx.TensorProto.FromString(bytes(self._weights[name]))

    def nodes(self, ops: Sequence[int]) -> list[onnx.NodeProto]:
        """The nodes of some operators."""
        nodes = self._parsed.model.graph.node
        return [nodes[index] for op in ops for index in self.artifact.graph.operators[op].nodes]

    def dtype(self, name: str) -> str:
        """The element type of a weight or of a tensor that crosses operators; empty for any other."""
        if name in self._dtypes:
            return self._dtypes[name]
        _ = self._parsed
        for number, whole, _ in encoded_fields(self._weights.get(name, memoryview(b""))):
            if number == _TENSOR_DATA_TYPE:
                return DTYPES.get(varint(whole, 1)[0], "")
        return ""

    @cached_property
    def _dtypes(self) -> dict[str, str]:
        return {tensor.name: tensor.dtype for tensor in self.artifact.graph.tensors}

    def array(self, name: str) -> np.ndarray | None:
        """A copy of a weight; None where the model computes what has that name.

        Raises:
            ModelError: the artifact's ONNX part is broken.
        """
        _ = self._parsed
        return _array(self._weights, name) if name in self._weights else None

    def weight(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray | None:
        """A weight of the artifact as a view of the mapped file, where it lies there as an array would.

        The view keeps the file mapped and is not to be written to. None for a weight that is not in the file,
        or that is not this array.
        """
        _ = self._parsed
        encoded = self._weights.get(name)
        if encoded is None:
            return None
        raw = next(
            (value for number, _, value in encoded_fields(encoded) if number == _TENSOR_RAW_DATA), None
        )
        if raw is None or len(raw) != dtype.itemsize * prod(shape):
            return None
        return np.frombuffer(raw, dtype).reshape(shape)

    def release_pages(self) -> None:
        """Give pages of the mapped file back that were read; they are read again when they are needed."""
        self._mapped.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def _reads_and_makes_all(self) -> bool:
        """Whether operators read every input and make every output; a file asks for all that it has."""
        graph = self.artifact.graph
        return all(graph.consumers[t] for t in graph.inputs) and all(
            graph.producer[t] >= 0 for t in graph.outputs
        )

    @property
    def _parsed(self) -> ModelSource:
        """The model without its weights, which are in `_weights` from here on."""
        if self._source is None:
            skeleton, self._weights = take_apart(self._model)
            self._source = ModelSource(skeleton, self.artifact.graph)
        return self._source


def _write(fd: int, content: memoryview) -> None:
    """All of it; the interpreter lock is free meanwhile."""
    while content:
        content = content[os.write(fd, content) :]


_SPLIT_SIZES_ARE_AN_INPUT = 13
"""Before this version of the operator set, Split has its sizes in an attribute."""


def merged_model(
    skeleton: onnx.ModelProto,
    graph: Graph,
    ops: Sequence[OpId],
    batch: int,
    weights: Mapping[str, memoryview],
) -> bytes:
    """A merge stage as one model: one convolution over padded and stacked kernels, its activation, a split.

    `weights` are encoded tensors by name; the skeleton holds none.

    Raises:
        ModelError: the nodes are not the convolutions that the graph describes.
    """
    convolution = merged(graph, ops)
    nodes = [
        without_casts(skeleton.graph.node[i] for i in graph.operators[op].nodes) for op in convolution.ops
    ]
    constants = {name for node in nodes[0][1:] for name in node.input if name in weights}
    names = [graph.tensors[tensor].name for tensor in (convolution.input, *convolution.outputs)]
    prefix = "merged"
    while any(name.startswith(prefix) for name in (*names, *constants)):
        prefix += "_"
    kernels, biases = _stacked(graph, convolution, nodes, weights)
    own = {
        tensor: f"{prefix}.as_{kernels.dtype}.{number}"  # ends of the model, where weights have another type
        for number, tensor in enumerate((convolution.input, *convolution.outputs))
        if graph.tensors[tensor].dtype != kernels.dtype.name
    }
    inside = [own.get(t, graph.tensors[t].name) for t in (convolution.input, *convolution.outputs)]
    body = helper.make_graph(merged_nodes(convolution, nodes[0], inside[0], prefix), prefix, [], [])
    body.node.append(helper.make_node("Split", [body.node[-1].output[0]], inside[1:], axis=1))
    body.initializer.append(numpy_helper.from_array(kernels, f"{prefix}.kernels"))
    body.initializer.append(numpy_helper.from_array(biases, f"{prefix}.biases"))
    body.initializer.extend(onnx.TensorProto.FromString(bytes(weights[name])) for name in sorted(constants))
    if _opset(skeleton) >= _SPLIT_SIZES_ARE_AN_INPUT:
        sizes = np.array(convolution.filters, np.int64)
        body.initializer.append(numpy_helper.from_array(sizes, f"{prefix}.sizes"))
        body.node[-1].input.append(f"{prefix}.sizes")
    else:
        body.node[-1].attribute.append(helper.make_attribute("split", convolution.filters))
    for tensor, name in own.items():
        outer, kind = graph.tensors[tensor].name, ELEMENT_TYPES[graph.tensors[tensor].dtype]
        if tensor == convolution.input:
            body.node.insert(
                0, helper.make_node("Cast", [outer], [name], to=ELEMENT_TYPES[kernels.dtype.name])
            )
        else:
            body.node.append(helper.make_node("Cast", [name], [outer], to=kind))
    body.input.append(_described(graph, convolution.input, batch))
    body.output.extend(_described(graph, tensor, batch) for tensor in sorted(convolution.outputs))
    model = onnx.ModelProto(ir_version=skeleton.ir_version, graph=body)
    model.opset_import.extend(skeleton.opset_import)
    return bytes(model.SerializeToString())


def _stacked(
    graph: Graph,
    merge: MergedConvolution,
    nodes: Sequence[Sequence[onnx.NodeProto]],
    weights: Mapping[str, memoryview],
) -> tuple[np.ndarray, np.ndarray]:
    channels = graph.tensors[merge.input].shape[1]
    kernels: list[np.ndarray] = []
    biases: list[np.ndarray | None] = []
    for op, filters, own in zip(merge.ops, merge.filters, nodes, strict=True):
        kernel, *bias = [_array(weights, name) for name in own[0].input[1:] if name]
        described = graph.operators[op].convolution
        if described is None or kernel.shape != (filters, channels, *described.kernel):
            raise ModelError(
                f"operator {op} of model {graph.name!r} has other weights than its graph says",
                remedy="import the model again",
            )
        kernels.append(kernel)
        biases.append(bias[0] if bias else None)
    return stacked_weights(merge, kernels, biases)


def _array(weights: Mapping[str, memoryview], name: str) -> np.ndarray:
    if name not in weights:
        raise ModelError(f"the weights {name[:80]!r} are not in the model", remedy="import the model again")
    array: np.ndarray = numpy_helper.to_array(onnx.TensorProto.FromString(bytes(weights[name])))
    return array


def _opset(model: onnx.ModelProto) -> int:
    return max((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), default=1)


def _described(graph: Graph, tensor: TensorId, batch: int) -> onnx.ValueInfoProto:
    described = graph.tensors[tensor]
    return helper.make_tensor_value_info(
        described.name, ELEMENT_TYPES[described.dtype], described.batched(batch)
    )

"""Small ONNX models for tests, and ways to run them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from shared.graph import Graph
from shared.ids import OpId
from shared.importer.borders import METADATA_KEY
from shared.importer.build import Built
from shared.importer.limits import ImportLimits
from shared.importer.pipeline import normalise_and_build
from shared.importer.subgraph import ModelSource

FLOAT = TensorProto.FLOAT


def info(name: str, shape: Sequence[int | str] | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    """An input or output of a graph."""
    return helper.make_tensor_value_info(name, dtype, shape)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Mapping[str, Any] | None = None,
    *,
    opset: int = 17,
    metadata: str | None = None,
    extra_domains: Sequence[str] = (),
) -> onnx.ModelProto:
    """A model of the given parts; weights are numpy arrays by name."""
    tensors = [numpy_helper.from_array(np.asarray(v), name) for name, v in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), tensors)
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in extra_domains)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 8
    if metadata is not None:
        entry = model.metadata_props.add()
        entry.key, entry.value = METADATA_KEY, metadata
    return model


def built_here(
    model: onnx.ModelProto, tmp_path: Path, shapes: Mapping[str, Sequence[int]] | None = None
) -> tuple[onnx.ModelProto, Built]:
    """Normalised model and graph, made in this process; the argument stays as it was."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return normalise_and_build(copy, shapes or {}, tmp_path, ImportLimits(), lambda line: None)


def run(model: bytes | onnx.ModelProto, feeds: Mapping[str, Any], optimise: bool = False) -> dict[str, Any]:
    """All outputs by name."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = model if isinstance(model, bytes) else model.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def feeds_for(graph: Graph, seed: int = 0, batch: int = 1) -> dict[str, Any]:
    """Seeded inputs of a graph."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for tensor_id in graph.inputs:
        tensor = graph.tensors[tensor_id]
        shape = tensor.shape if batch == 1 else (batch, *tensor.shape[1:])
        if tensor.dtype.startswith("float"):
            feeds[tensor.name] = rng.standard_normal(shape).astype(tensor.dtype)
        else:
            feeds[tensor.name] = rng.integers(0, 2, shape).astype(tensor.dtype)
    return feeds


def run_in_parts(
    source: ModelSource, parts: Sequence[Sequence[int]], feeds: Mapping[str, Any], batch: int = 1
) -> dict[str, Any]:
    """Run sub-models one after another, feeding each what the earlier ones made; returns every tensor."""
    known = dict(feeds)
    for part in parts:
        cut = source.extract([OpId(op) for op in part], batch=batch)
        names = [source.graph.tensors[t].name for t in cut.inputs]
        made = run(cut.onnx_bytes, {name: known[name] for name in names})
        assert list(made) == [source.graph.tensors[t].name for t in cut.outputs]
        known.update(made)
    return known

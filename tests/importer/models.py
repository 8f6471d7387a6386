"""Small ONNX models for tests, and ways to run them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from stageloom.shared.graph import Graph
from stageloom.shared.ids import OpId
from stageloom.shared.importer.build import Built
from stageloom.shared.importer.cuts import METADATA_KEY
from stageloom.shared.importer.pipeline import normalise_and_build
from stageloom.shared.importer.process import ImportLimits
from stageloom.shared.importer.subgraph import ModelSource

FLOAT = TensorProto.FLOAT


def info(name: str, shape: Sequence[int | str | None] | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
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


def allocating_2_gib() -> bytes:
    """66 bytes or so, whose one node makes 2^29 floats."""
    model = onnx.ModelProto(ir_version=8)
    model.opset_import.add(version=9)
    model.graph.name = "g"
    model.graph.node.add(op_type="ConstantOfShape", input=["s"], output=["y"])
    model.graph.initializer.add(name="s", data_type=TensorProto.INT64, dims=[1], int64_data=[1 << 29])
    model.graph.output.add(name="y").type.tensor_type.elem_type = TensorProto.FLOAT
    model.graph.output[0].type.tensor_type.shape.dim.add()
    return bytes(model.SerializeToString())


def chained_functions(count: int) -> onnx.ModelProto:
    """Each function calls the next; onnxruntime recurses into them until its stack ends."""
    model = model_of(
        [helper.make_node("f0", ["x"], ["y"], domain="d")],
        [info("x", [1])],
        [info("y", [1])],
        extra_domains=["d"],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
    for index in range(count):
        inner = (
            helper.make_node("Relu", ["a"], ["b"])
            if index == count - 1
            else helper.make_node(f"f{index + 1}", ["a"], ["b"], domain="d")
        )
        model.functions.append(helper.make_function("d", f"f{index}", ["a"], ["b"], [inner], opsets))
    return model


def varying_loop() -> onnx.ModelProto:
    """A loop that collects as many rows as its input says, at most two."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["c"], ["co"]),
            helper.make_node("Identity", ["a"], ["ao"]),
            helper.make_node("Identity", ["a"], ["row"]),
        ],
        "body",
        [info("i", [], TensorProto.INT64), info("c", [], TensorProto.BOOL), info("a", [])],
        [info("co", [], TensorProto.BOOL), info("ao", []), info("row", [])],
    )
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64),
        helper.make_node("Clip", ["i", "zero", "two"], ["n"]),
        helper.make_node("Loop", ["n", "t", "x"], ["last", "rows"], body=body),
    ]
    weights = {"zero": np.array(0), "two": np.array(2), "t": np.array(True)}
    return model_of(nodes, [info("x", [])], [info("rows", None)], weights)


def write_external(folder: Path, location: str, **entries: int | str) -> Path:
    """A model whose one weight [4, 4] claims to lie at `location`."""
    model = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], [info("x", [1, 4])], [info("y", [1, 4])]
    )
    weight = model.graph.initializer.add()
    weight.name, weight.data_type = "w", TensorProto.FLOAT
    weight.dims.extend([4, 4])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        entry = weight.external_data.add()
        entry.key, entry.value = key, str(value)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def built_here(
    model: onnx.ModelProto, tmp_path: Path, shapes: Mapping[str, Sequence[int]] | None = None
) -> tuple[onnx.ModelProto, Built]:
    """Normalised model and graph, made in this process; the argument stays as it was."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    found = normalise_and_build(copy, shapes or {}, tmp_path, ImportLimits(), lambda line: None)
    return found.model, found.built


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
            feeds[tensor.name] = np.asarray(rng.standard_normal(shape), tensor.dtype)
        else:
            feeds[tensor.name] = np.asarray(rng.integers(0, 2, shape), tensor.dtype)
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

"""Small ONNX models made for verification, as artifacts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits


def tensor(name: str, kind: int, *shape: int) -> onnx.ValueInfoProto:
    """An input or output."""
    return helper.make_tensor_value_info(name, kind, list(shape))


def image(name: str, *shape: int) -> onnx.ValueInfoProto:
    """A float32 input or output."""
    return tensor(name, TensorProto.FLOAT, *shape)


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Mapping[str, Any],
) -> onnx.ModelProto:
    """A checked model of opset 17; `weights` are arrays by name."""
    graph = helper.make_graph(
        list(nodes),
        "small",
        list(inputs),
        list(outputs),
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"node{index}"
    onnx.checker.check_model(model)
    return model


def imported(path: Path, folder: Path) -> Artifact:
    """An ONNX file as an artifact in `folder`, imported in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    import_here(path, {}, folder, ImportLimits(), lambda line: None)
    return open_artifact(folder / ARTIFACT_NAME)


def imported_model(model: onnx.ModelProto, folder: Path) -> Artifact:
    """The same for a model in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return imported(folder / "model.onnx", folder)


def constant_cnn(fill: float = 0.0) -> onnx.ModelProto:
    """Three convolutions with a shared bias, a pool and a classifier; every weight is `fill`."""
    conv = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b"], ["c0"], **conv),
        helper.make_node("Relu", ["c0"], ["r0"]),
        helper.make_node("Conv", ["r0", "w1", "b"], ["c1"], **conv),
        helper.make_node("Conv", ["r0", "w1", "b"], ["c2"], **conv),
        helper.make_node("Add", ["c1", "c2"], ["a"]),
        helper.make_node("Relu", ["a"], ["r1"]),
        helper.make_node("GlobalAveragePool", ["r1"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "wf", "bf"], ["logits"], transB=1),
        helper.make_node("Softmax", ["logits"], ["y"]),
    ]
    weights = {
        "w0": np.full((8, 3, 3, 3), fill, np.float32),
        "w1": np.full((8, 8, 3, 3), fill, np.float32),
        "b": np.full(8, fill, np.float32),
        "wf": np.full((10, 8), fill, np.float32),
        "bf": np.full(10, fill, np.float32),
    }
    return make_model(nodes, [image("x", 1, 3, 24, 24)], [image("y", 1, 10)], weights)


def text_model(rows: int = 100) -> onnx.ModelProto:
    """Token ids (int64), a mask (bool) and a temperature (float16) lead to two outputs."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["embedded"]),
        helper.make_node("Where", ["mask", "embedded", "nothing"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "axis"], ["summed"], keepdims=0),
        helper.make_node("MatMul", ["summed", "wm"], ["hidden"]),
        helper.make_node("Cast", ["temperature"], ["t"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["hidden", "t"], ["scaled"]),
        helper.make_node("Sigmoid", ["scaled"], ["score"]),
        helper.make_node("Cast", ["scaled"], ["half"], to=TensorProto.FLOAT16),
    ]
    weights = {
        "table": np.zeros((rows, 16), np.float32),
        "nothing": np.zeros((), np.float32),
        "axis": np.array([1], np.int64),
        "wm": np.full((16, 4), 0.02, np.float32),
    }
    inputs = [
        tensor("ids", TensorProto.INT64, 1, 6),
        tensor("mask", TensorProto.BOOL, 1, 6, 1),
        tensor("temperature", TensorProto.FLOAT16, 1),
    ]
    outputs = [image("score", 1, 4), tensor("half", TensorProto.FLOAT16, 1, 4)]
    return make_model(nodes, inputs, outputs, weights)

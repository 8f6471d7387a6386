"""Small networks for whole systems: a chain of convolutions with cuts, and one whose weights take a while."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

CHANNELS, LAYERS = 4, 6
ROW_SHAPE = (1, CHANNELS, 12, 12)


def write_chain(path: Path, seed: int) -> Path:
    """`input` to `output`, both 1x4x12x12: LAYERS times Conv, Relu. Every layer is a place to cut."""
    rng = np.random.default_rng(seed)
    nodes, weights, last = [], [], "input"
    for layer in range(LAYERS):
        kernel = rng.normal(size=(CHANNELS, CHANNELS, 3, 3)).astype(np.float32) / 4
        weights.append(numpy_helper.from_array(kernel, f"w{layer}"))
        made = "output" if layer == LAYERS - 1 else f"r{layer}"
        nodes += [
            helper.make_node("Conv", [last, f"w{layer}"], [f"c{layer}"], kernel_shape=[3, 3], pads=[1] * 4),
            helper.make_node("Relu", [f"c{layer}"], [made]),
        ]
        last = made
    return _save(path, nodes, weights, ROW_SHAPE)


def write_heavy(path: Path, seed: int, width: int = 3072) -> Path:
    """One matrix product of width^2 float32 weights (36 MiB): an artifact of well over a hundred chunks."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((width, width), dtype=np.float32) / np.float32(np.sqrt(width))
    node = helper.make_node("MatMul", ["input", "w"], ["output"])
    return _save(path, [node], [numpy_helper.from_array(weights, "w")], (1, width))


def _save(path: Path, nodes: list[Any], weights: list[Any], shape: tuple[int, ...]) -> Path:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("input", "output")]
    graph = helper.make_graph(nodes, path.stem, ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def reference(path: Path) -> onnxruntime.InferenceSession:
    """The file as onnxruntime runs it."""
    return onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])


def rows(count: int, seed: int = 1) -> Any:
    """Inputs that differ. [count, *ROW_SHAPE] float32"""
    return np.random.default_rng(seed).normal(size=(count, *ROW_SHAPE)).astype(np.float32)

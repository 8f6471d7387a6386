"""A model with open dimensions, small enough to import in every test."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LARGEST = {"x": (4, 3, 64, 64), "ids": (16,)}
SMALLEST = {"x": (1, 3, 8, 8), "ids": (1,)}


def write_spans(path: Path, *, channels: int | str = 3, passes: bool = False) -> Path:
    """A convolution of images of any size, their means, and rows picked from a table by `ids`.

    With `passes` an input is an output, too.
    """
    rng = np.random.default_rng(5)
    weights = {"w": rng.normal(size=(4, 3, 3, 3)), "table": rng.normal(size=(2, 5))}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], strides=[2, 2], pads=[1] * 4),
        helper.make_node("Sigmoid", ["c"], ["maps"]),
        helper.make_node("GlobalAveragePool", ["maps"], ["means"]),
        helper.make_node("Gather", ["table", "ids"], ["rows"], axis=0),
    ]
    made = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("maps", "means", "rows")
    ]
    images = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", channels, "h", "w"])
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["t"])
    graph = helper.make_graph(
        nodes,
        "spans",
        [images, ids],
        [*made, *([images] if passes else [])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def spans_inputs(shape: tuple[int, ...], ids: int, seed: int = 0) -> dict[str, np.ndarray]:
    """One task's inputs."""
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=shape).astype(np.float32), "ids": rng.integers(0, 2, ids)}

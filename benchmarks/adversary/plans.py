"""Small models and plans of them, given to a planner by its commands."""

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from benchmarks.adversary.ground import Ground


def add_plan(ground: Ground, name: str) -> str:
    """A small model and a plan of it, both under this name; returns the artifact's digest."""
    path = write_model(ground.folder / f"{name}.onnx", 4 + len(name))
    ground.ok("model", "add", str(path), "--name", name)
    ground.ok("plan", "create", "--model", name, "--name", name)
    return str(
        ground.query(f"select digest from model_versions where model = '{name}' order by number desc")[0][0]
    )


def write_model(path: Path, width: int) -> Path:
    """A few operators; another width makes another artifact."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, width]) for name in ("x", "y")]
    nodes = [helper.make_node("Sin", ["x"], ["a"]), helper.make_node("Cos", ["a"], ["y"])]
    graph = helper.make_graph(nodes, "small", value[:1], value[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(made, path)
    return path

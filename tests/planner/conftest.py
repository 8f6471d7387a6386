"""A running planner per test module: starting one costs most of a second."""

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.planner.processes import PlannerProcess


@pytest.fixture
def planner(tmp_path: Path) -> Iterator[PlannerProcess]:
    """`stageloom up` on an empty data directory."""
    process = PlannerProcess(tmp_path / "home")
    yield process
    if process.process.poll() is None:
        process.stop()


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three operators, two of them independent, with one open dimension."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Sigmoid", ["x"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "branches",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path_factory.mktemp("models") / "branches.onnx"
    onnx.save(model, path)
    return path

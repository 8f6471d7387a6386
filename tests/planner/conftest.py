"""A running planner per test module: starting one costs most of a second of a processor."""

import json
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from stageloom.shared.ids import Digest
from tests.planner.processes import PlannerProcess, ok


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlannerProcess]:
    """`stageloom up`, shared: tests name their own devices and plans, and leave it running."""
    process = PlannerProcess(tmp_path_factory.mktemp("shared") / "home")
    yield process
    process.stop()


@pytest.fixture
def own_planner(tmp_path: Path) -> Iterator[PlannerProcess]:
    """`stageloom up` with Ray on an empty data directory, for a test that ends it."""
    process = PlannerProcess(tmp_path / "home", search="ray")
    yield process
    if process.process.poll() is None:
        process.stop()


@pytest.fixture(scope="module")
def branches(planner: PlannerProcess, model_file: Path) -> Digest:
    """The model `branches` of the shared planner."""
    return add_model(planner, model_file)


def add_model(planner: PlannerProcess, file: Path) -> Digest:
    """Import `branches` with one row."""
    arguments = ("model", "add", str(file), "--name", "branches", "--shape", "x=1x8", "--json")
    return Digest(json.loads(ok(planner.home, *arguments))["digest"])


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

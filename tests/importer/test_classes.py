"""A small model of every class of published files: imported, cut, and run through the engine."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from stageloom.edge_agent.executor.executors import make_executor
from stageloom.edge_agent.verify.check import verify_artifact
from stageloom.edge_agent.verify.inputs import ValueRange
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.graph import Graph, graph_problem
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits
from stageloom.shared.importer.report import ImportReport
from stageloom.shared.importer.subgraph import ModelSource
from stageloom.shared.importer.values import own_size, stored_size
from tests.importer.classes import CLASSES, Sample
from tests.importer.models import feeds_for, info, model_of, run, run_in_parts, write_external

HALF_TOLERANCE = 2e-3  # float16 rounds to 5e-4, wherever it is cut


def _imported(path: Path, sample: Sample, folder: Path) -> tuple[ImportReport, Artifact]:
    scratch = folder / "scratch"
    scratch.mkdir()
    report = import_here(path, sample.shapes, scratch, ImportLimits(), lambda line: None)
    return report, open_artifact(scratch / ARTIFACT_NAME)


def _feeds(graph: Graph, sample: Sample) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    feeds = feeds_for(graph)
    for name, (low, high) in sample.ranges.items():
        feeds[name] = np.asarray(rng.integers(low, high, feeds[name].shape, endpoint=True), feeds[name].dtype)
    return feeds


def _runnable(model: onnx.ModelProto) -> onnx.ModelProto:
    """The file for onnxruntime, which refuses the IR version that today's onnx writes by itself."""
    model.ir_version = min(model.ir_version, 13)
    return model


@pytest.mark.promise("whatever-onnxruntime-runs-pinned")
@pytest.mark.parametrize("name", CLASSES)
def test_it_imports_and_every_cut_computes_what_the_file_does(name: str, tmp_path: Path) -> None:
    sample = CLASSES[name]()
    path = tmp_path / "m.onnx"
    path.write_bytes(sample.model.SerializeToString())
    report, artifact = _imported(path, sample, tmp_path)
    graph = artifact.graph
    assert graph_problem(graph) == ""
    assert tuple(found.why for found in report.opaque) == sample.opaque
    assert tuple(found.why for found in report.joined) == sample.joined
    feeds = _feeds(graph, sample)
    names = {value.name for value in sample.model.graph.input}
    expected = run(_runnable(sample.model), {n: a for n, a in feeds.items() if n in names}, optimise=True)
    source = ModelSource.open(artifact)
    found = {**feeds, **run_in_parts(source, [[op] for op in range(len(graph.operators))], feeds)}
    assert {graph.tensors[t].name for t in graph.outputs} == expected.keys()
    for output, array in expected.items():
        tolerance = HALF_TOLERANCE if array.dtype == np.float16 else 1e-5
        assert found[output].dtype == array.dtype
        np.testing.assert_allclose(found[output], array, rtol=tolerance, atol=tolerance)


@pytest.mark.promise("whatever-onnxruntime-runs-pinned")
@pytest.mark.parametrize("name", CLASSES)
def test_it_runs_through_the_engine(name: str, tmp_path: Path) -> None:
    """As `stageloom-agent verify` does; an output that no input reaches need not be sensitive to one."""
    sample = CLASSES[name]()
    path = tmp_path / "m.onnx"
    path.write_bytes(sample.model.SerializeToString())
    _, artifact = _imported(path, sample, tmp_path)
    ranges = {name: ValueRange(*ends) for name, ends in sample.ranges.items()}
    report = verify_artifact(artifact, "greedy", make_executor("onnx"), ranges=ranges, repeats=2)
    assert not report.failed_tasks, report.reason
    assert report.stable
    limit = HALF_TOLERANCE if name == "float16" else 1e-5
    assert report.difference <= limit
    assert report.sensitivity > 1e-2


@pytest.mark.promise("whatever-onnxruntime-runs-pinned")
def test_float16_stays_float16(tmp_path: Path) -> None:
    """Without such kernels onnxruntime casts and takes operators apart; the artifact must not."""
    sample = CLASSES["float16"]()
    path = tmp_path / "m.onnx"
    path.write_bytes(sample.model.SerializeToString())
    report, artifact = _imported(path, sample, tmp_path)
    assert {tensor.dtype for tensor in artifact.graph.tensors} == {"float16"}
    assert [operator.kind for operator in artifact.graph.operators] == ["Conv", "MatMul", "Softmax"]
    assert report.weight_bytes == 2 * (4 * 3 * 3 * 3 + 36 * 5) + 8 * 3  # and the target of the Reshape
    kinds = [node.op_type for node in onnx.load_from_string(artifact.onnx_bytes()).graph.node]
    assert "Cast" not in kinds and "Shape" not in kinds


@pytest.mark.promise("whatever-onnxruntime-runs-pinned")
def test_external_data_is_embedded_and_runs(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(np.arange(16, dtype=np.float32).tobytes())
    path = write_external(tmp_path, "w.bin")
    _, artifact = _imported(path, Sample(onnx.load(path)), tmp_path)
    feeds = {"x": np.array([[1, 0, 0, 2]], np.float32)}
    np.testing.assert_array_equal(run(artifact.onnx_bytes(), feeds)["y"], [[24, 27, 30, 33]])


@pytest.mark.promise("whatever-onnxruntime-runs-pinned")
@pytest.mark.parametrize("ir_version", range(3, onnx.IR_VERSION + 1))
def test_files_of_every_ir_version_import(ir_version: int, tmp_path: Path) -> None:
    sample = CLASSES["old_file" if ir_version == 3 else "dynamic_axes"]()
    sample.model.ir_version = ir_version
    path = tmp_path / "m.onnx"
    path.write_bytes(sample.model.SerializeToString())
    _, artifact = _imported(path, sample, tmp_path)
    assert 8 <= onnx.load_from_string(artifact.onnx_bytes()).ir_version <= 10
    assert len(artifact.graph.inputs) == 1


@pytest.mark.promise("whatever-onnxruntime-runs-pinned")
@pytest.mark.parametrize("opset", range(7, 27))
def test_files_of_every_opset_import(opset: int, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Relu", ["m"], ["y"])]
    weights = {"w": np.ones((4, 3), np.float32)}
    model = model_of(nodes, [info("x", ["n", 4])], [info("y", ["n", 3])], weights, opset=opset)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    report, _ = _imported(path, Sample(model, {"x": (2, 4)}), tmp_path)
    assert report.operators == 1 and report.opset == opset


@pytest.mark.promise("whatever-onnxruntime-runs-pinned")
def test_random_operators_are_ordinary_ones_and_forbid_a_batch(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["noise"], name="noise"),
        helper.make_node("Mul", ["noise", "scale"], ["small"]),
        helper.make_node("Add", ["x", "small"], ["y"]),
    ]
    model = model_of(nodes, [info("x", [1, 4]), info("scale", [1, 4])], [info("y", [1, 4])])
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    report, _ = _imported(path, Sample(model), tmp_path)
    assert not report.opaque and report.operators == 3
    assert report.batch_reason == "node 'noise' differs from run to run"


@pytest.mark.promise("whatever-onnxruntime-runs-pinned")
def test_weights_that_folding_adds_have_names_that_onnxruntime_does_not_give_again(tmp_path: Path) -> None:
    """It adds the shapes of a Gemm's reshapes; loading the file again, it would add them again and fail."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])]
    weights = {"w": np.ones((4, 3), np.float32), "b": np.ones(3, np.float32)}
    model = model_of(nodes, [info("x", ["n", 5, 4])], [info("y", ["n", 5, 3])], weights)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    _, artifact = _imported(path, Sample(model, {"x": (2, 5, 4)}), tmp_path)
    folded = onnx.load_from_string(artifact.onnx_bytes()).graph
    names = {weight.name for weight in folded.initializer}
    assert names > {"w", "b"} and all(name.startswith("folded/") for name in names - {"w", "b"})


def _tree_ensemble(leaves: int) -> onnx.ModelProto:
    """One tree that is a chain: every inner node has a leaf and the next inner node below it."""
    inner = leaves - 1
    count = inner + leaves
    leaf = [*range(inner, count)]
    node = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", n_targets=1,
        nodes_treeids=[0] * count, nodes_nodeids=[*range(count)], nodes_featureids=[0] * count,
        nodes_modes=["BRANCH_LEQ"] * inner + ["LEAF"] * leaves, nodes_values=[0.5] * count,
        nodes_truenodeids=leaf[:inner] + [0] * leaves,
        nodes_falsenodeids=[*range(1, inner), leaf[-1]] + [0] * leaves,
        target_treeids=[0] * leaves, target_nodeids=leaf, target_ids=[0] * leaves,
        target_weights=[1.0] * leaves,
    )  # fmt: skip
    model = model_of([node], [info("x", [1, 3])], [info("y", [1, 1])])
    model.opset_import.add(domain="ai.onnx.ml", version=3)
    return model


def _in_branches() -> onnx.ModelProto:
    """An If with a weight of 6 floats in one branch and 12 in the other, as Silero VAD has its networks."""
    branches = []
    for name, columns in (("then", 2), ("else", 4)):
        weight = numpy_helper.from_array(np.ones((3, columns), np.float32), f"{name}_w")
        nodes = [
            helper.make_node("MatMul", ["x", f"{name}_w"], [f"{name}_m"]),
            helper.make_node("ReduceSum", [f"{name}_m"], [f"{name}_o"], keepdims=1),
        ]
        branches.append(helper.make_graph(nodes, name, [], [info(f"{name}_o", [1, 1])], [weight]))
    node = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    return model_of([node], [info("x", [1, 3]), info("c", [], onnx.TensorProto.BOOL)], [info("y", [1, 1])])


def _int4_qdq() -> onnx.ModelProto:
    """A matrix of 8 x 5 int4 with one float scale, as weight-only quantisation of opset 21 stores it."""
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["f"]),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    model = model_of(nodes, [info("x", [1, 8])], [info("y", [1, 5])], {"s": np.float32(0.1)}, opset=21)
    model.ir_version = 10
    packed = np.arange(20, dtype=np.uint8).tobytes()
    model.graph.initializer.append(helper.make_tensor("w", onnx.TensorProto.INT4, [8, 5], packed, raw=True))
    return model


@pytest.mark.parametrize(
    ("model", "parameters", "weight_bytes"),
    [
        (_int4_qdq(), 40 + 1, 20 + 4),
        (_in_branches(), 6 + 12, 4 * (6 + 12)),
        # per node of the tree five lists of integers and one of floats, per leaf three and one
        (_tree_ensemble(100), 199 * 6 + 100 * 4, 199 * (5 * 8 + 4) + 100 * (3 * 8 + 4)),
    ],
    ids=["int4", "branches", "attributes"],
)
def test_weights_count_wherever_and_however_the_file_stores_them(
    model: onnx.ModelProto, parameters: int, weight_bytes: int, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    report, artifact = _imported(path, Sample(model), tmp_path)
    assert (report.parameters, report.weight_bytes) == (parameters, weight_bytes)
    assert sum(operator.weight_bytes for operator in artifact.graph.operators) == weight_bytes


@pytest.mark.parametrize(
    ("kind", "dims", "size"),
    [
        (onnx.TensorProto.INT4, [3, 3], (9, 5)),
        (onnx.TensorProto.UINT4, [4], (4, 2)),
        (onnx.TensorProto.FLOAT8E4M3FN, [7], (7, 7)),
        (onnx.TensorProto.COMPLEX64, [2], (2, 16)),
        (onnx.TensorProto.BFLOAT16, [2, 2], (4, 8)),
        (onnx.TensorProto.FLOAT, [], (1, 4)),
    ],
)
def test_a_stored_tensor_of_any_element_type_has_its_size(
    kind: int, dims: list[int], size: tuple[int, int]
) -> None:
    assert stored_size(onnx.TensorProto(data_type=kind, dims=dims)) == size


def test_short_lists_of_attributes_are_settings_and_no_weights() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    assert own_size(node) == (0, 0)

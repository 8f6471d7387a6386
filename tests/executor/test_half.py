"""Models in half precision: float16 within, near the model's own results, with the graph's own numbers."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from stageloom.edge_agent.executor.onnx.cache import SessionKey
from stageloom.edge_agent.executor.onnx.executor import open_session
from stageloom.edge_agent.executor.onnx.half import half_artifact, half_graph
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.errors import ExecutorError
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits
from tests.executor.models import artifact_of, difference, random_inputs, reference
from tests.executor.small_models import transformer
from tests.executor.test_merge import siblings_of

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT


def _ran(artifact: Artifact, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(artifact.onnx_bytes(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def _worst(artifact: Artifact, half: Artifact) -> float:
    inputs = random_inputs(artifact.graph, 3)
    made = _ran(half, inputs)
    wanted = reference(artifact, inputs, list(made))
    assert {array.dtype for array in made.values()} == {np.dtype(np.float32)}
    return max(difference(made[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["squeezenet_bypass", "googlenet", "resnet50", "transformer"])
def test_a_model_in_half_precision_is_near_and_takes_half_the_room(name: str, tmp_path: Path) -> None:
    artifact = transformer() if name == "transformer" else artifact_of(name)
    half = half_artifact(artifact, tmp_path / "half")
    # resnet50 of random weights sums up 16 residuals; onnxruntime's own converter is as far off (3.3 %).
    assert 1e-6 < _worst(artifact, half) < (5e-2 if name == "resnet50" else 2e-2)
    model = onnx.ModelProto.FromString(half.onnx_bytes())
    onnx.checker.check_model(model)
    large = {weight.data_type for weight in model.graph.initializer if len(weight.dims) > 1}
    assert large <= {HALF, TensorProto.INT64}
    assert half.size < 0.6 * artifact.size
    graph = half.graph
    ends = {*graph.inputs, *graph.outputs}
    assert {graph.tensors[t].dtype for t in ends} == {"float32"}
    assert {t.dtype for i, t in enumerate(graph.tensors) if i not in ends} <= {"float16", "int64"}


@pytest.mark.parametrize("name", ["googlenet", "transformer"])
def test_every_node_still_belongs_to_one_operator_and_the_graph_is_known_beforehand(
    name: str, tmp_path: Path
) -> None:
    """Cuts, masks and stated bytes go by the graph."""
    artifact = transformer() if name == "transformer" else artifact_of(name)
    half = half_artifact(artifact, tmp_path / "half")
    nodes = [node for operator in half.graph.operators for node in operator.nodes]
    assert sorted(nodes) == list(range(len(onnx.ModelProto.FromString(half.onnx_bytes()).graph.node)))
    known = half_graph(artifact.graph)
    assert known.tensors == half.graph.tensors
    assert [op.weight_bytes for op in known.operators] == [op.weight_bytes for op in half.graph.operators]
    assert [(op.inputs, op.outputs) for op in known.operators] == [
        (op.inputs, op.outputs) for op in artifact.graph.operators
    ]


def test_operators_cut_out_one_by_one_give_what_the_whole_gives(tmp_path: Path) -> None:
    artifact = artifact_of("squeezenet_bypass")
    half = half_artifact(artifact, tmp_path / "half")
    inputs, parts = random_inputs(artifact.graph, 3), ModelParts(half)
    values = {t: inputs[half.graph.tensors[t].name] for t in half.graph.inputs}
    for op in range(len(half.graph.operators)):
        open_session(SessionKey(half.digest, (op,), 1, 1), parts).run(values)
    for tensor, value in values.items():
        assert value.dtype.name == half.graph.tensors[tensor].dtype
    wanted = reference(artifact, inputs, [half.graph.tensors[t].name for t in half.graph.outputs])
    for tensor in half.graph.outputs:
        assert difference(values[tensor], wanted[half.graph.tensors[tensor].name]) < 2e-2


def _imported(folder: Path, nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray]) -> Artifact:
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", FLOAT, [1, 4, 6, 6])],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    import_here(folder / "model.onnx", {}, folder, ImportLimits(), lambda line: None)
    return open_artifact(folder / ARTIFACT_NAME)


def test_what_has_no_half_kernel_computes_in_float32_and_a_models_own_casts_are_kept(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Resize", ["a", "", "scales"], ["b"], mode="linear"),
        helper.make_node("Cast", ["b"], ["wide"], to=TensorProto.DOUBLE),
        helper.make_node("Cast", ["wide"], ["c"], to=FLOAT),
        helper.make_node("Add", ["b", "c"], ["d"]),
        helper.make_node("Add", ["d", "mask"], ["e"]),
        helper.make_node("Softmax", ["e"], ["y"], axis=1),
    ]
    mask = np.zeros((1, 4, 1, 1), np.float32)
    mask[0, 2] = -3.4e38
    scales = np.array([1, 1, 2, 2], np.float32)
    artifact = _imported(tmp_path, nodes, {"mask": mask, "scales": scales})
    half = half_artifact(artifact, tmp_path / "half")
    model = onnx.ModelProto.FromString(half.onnx_bytes())
    assert {w.name: w.data_type for w in model.graph.initializer}["scales"] == FLOAT
    made = _ran(half, random_inputs(artifact.graph, 3))["y"]
    assert np.isfinite(made).all() and not made[0, 2].any()
    assert _worst(artifact, half) < 2e-2


@pytest.mark.parametrize("tail", ["", "Relu", "silu"])
def test_convolutions_over_the_models_input_merge_in_half_precision_too(tail: str, tmp_path: Path) -> None:
    """Their Casts stand before and behind the one convolution that they become."""
    rows: list[dict[str, object]] = [
        {"kernel_shape": [1, 1], "pads": [0, 0, 0, 0]},
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]},
    ]
    artifact = siblings_of(tmp_path, rows, (9, 9), tail=tail)
    half = half_artifact(artifact, tmp_path / "half")
    inputs = random_inputs(artifact.graph, 3)
    values = {t: inputs[half.graph.tensors[t].name] for t in half.graph.inputs}
    open_session(SessionKey(half.digest, (0, 1), 1, 1, merge=True), ModelParts(half)).run(values)
    names = [half.graph.tensors[t].name for t in half.graph.outputs]
    wanted = reference(artifact, inputs, names)
    for tensor, name in zip(half.graph.outputs, names, strict=True):
        assert values[tensor].dtype == np.float32
        assert 1e-6 < difference(values[tensor], wanted[name]) < 2e-2


def test_what_has_its_size_only_while_running_changes_its_type_like_anything_else(tmp_path: Path) -> None:
    """Between nodes that compute in half precision and one that does not, values are cast."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Greater", ["r", "half"], ["above"]),
        helper.make_node("NonZero", ["above"], ["found"]),
        helper.make_node("Transpose", ["found"], ["places"], perm=[1, 0]),
        helper.make_node("GatherND", ["r", "places"], ["chosen"]),
        helper.make_node("Mul", ["chosen", "half"], ["scaled"]),
        helper.make_node("ReduceSum", ["scaled"], ["y"], keepdims=0),
    ]
    artifact = _imported(tmp_path, nodes, {"half": np.array(0.5, np.float32)})
    half = half_artifact(artifact, tmp_path / "half")
    assert _worst(artifact, half) < 2e-2


def test_a_model_with_control_flow_is_refused_by_name(tmp_path: Path) -> None:
    inner = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["z"])],
        "branch",
        [],
        [helper.make_tensor_value_info("z", FLOAT, None)],
    )
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
        helper.make_node("Cast", ["m"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner),
    ]
    artifact = _imported(tmp_path, nodes, {})
    with pytest.raises(ExecutorError, match=r"model 'small' has control flow.*use fp32"):
        half_artifact(artifact, tmp_path / "half")

"""Whole models through their units, every tensor against the whole model in onnxruntime."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnx.backend.test
import pytest
import torch
from onnx import numpy_helper

from benchmarks.zoo import ZOO
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.shared.artifact import Artifact
from tests.executor.models import artifact_of, difference, random_inputs, reference
from tests.executor.small_models import Builder, imported, recurrent, transformer
from tests.lowering.running import Execute, by_run, by_run_into, lowered, run_model

EVERY_DAY = ("googlenet", "resnet50", "inception_v3")
SMALL: dict[str, Callable[[], Artifact]] = {
    "transformer": transformer,
    "lstm": lambda: recurrent("LSTM"),
    "gru": lambda: recurrent("GRU", "forward"),
    "rnn": lambda: recurrent("RNN", "reverse"),
}


def worst(artifact: Artifact, found: dict[str, np.ndarray], inputs: dict[str, np.ndarray]) -> float:
    wanted = reference(artifact, inputs, list(found))
    return max(difference(found[name], wanted[name]) for name in found)


def agrees(artifact: Artifact, *, channels_last: bool, execute: Execute) -> None:
    _, model = lowered(artifact, channels_last=channels_last)
    assert model.foreign == ()
    inputs = random_inputs(artifact.graph, 3)
    found = run_model(artifact, model, inputs, execute)
    assert len(found) == len(artifact.graph.tensors)
    assert worst(artifact, found, inputs) < 1e-4


@pytest.mark.promise("lowered-models-equal-onnxruntime")
@pytest.mark.parametrize("name", EVERY_DAY)
def test_every_tensor_of_a_convolutional_network_agrees_with_onnxruntime(name: str) -> None:
    agrees(artifact_of(name), channels_last=True, execute=by_run_into)


@pytest.mark.parametrize("execute", [by_run, by_run_into])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "name", ["squeezenet", *(pytest.param(n, marks=pytest.mark.full) for n in ZOO if n != "squeezenet")]
)
def test_memory_order_and_way_of_running_do_not_matter(
    name: str, channels_last: bool, execute: Execute
) -> None:
    agrees(artifact_of(name), channels_last=channels_last, execute=execute)


@pytest.mark.promise("lowered-models-equal-onnxruntime")
@pytest.mark.parametrize("execute", [by_run, by_run_into])
@pytest.mark.parametrize("name", SMALL)
def test_every_tensor_of_a_transformer_and_of_recurrent_networks_agrees_with_onnxruntime(
    name: str, execute: Execute
) -> None:
    agrees(SMALL[name](), channels_last=True, execute=execute)


@pytest.mark.promise("lowered-models-equal-onnxruntime")
@pytest.mark.full
@pytest.mark.parametrize("name", ["densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet",
                                  "squeezenet"])  # fmt: skip
def test_the_light_models_of_the_onnx_package_are_lowered_whole_and_agree(name: str) -> None:
    from pathlib import Path

    from stageloom.edge_agent.verify.seeding import seed_weights

    path = Path(onnx.backend.test.__file__).parent / "data" / "light" / f"light_{name}.onnx"
    plain = imported(onnx.load(path))
    model = onnx.ModelProto.FromString(plain.onnx_bytes())
    inputs = [random_inputs(plain.graph, seed) for seed in (0, 1)]
    seed_weights(model, inputs, np.random.default_rng(0))
    agrees(imported(model), channels_last=True, execute=by_run_into)


@pytest.mark.promise("lowered-models-equal-onnxruntime")
def test_a_batch_gives_what_its_rows_give_alone() -> None:
    artifact = artifact_of("squeezenet")
    assert artifact.graph.batchable
    lowering, single = lowered(artifact)
    alone = lowering.weights.held_bytes
    both = lowering.at_batch(2)
    assert lowering.weights.held_bytes == alone, "weights belong to the model, not to a batch"
    rows = [random_inputs(artifact.graph, seed) for seed in (5, 6)]
    stacked = {n: np.concatenate([row[n] for row in rows]) for n in rows[0]}
    together = run_model(artifact, both, stacked)
    for place, row in enumerate(rows):
        for tensor in artifact.graph.outputs:
            output = artifact.graph.tensors[tensor].name
            want = run_model(artifact, single, row)[output]
            assert difference(together[output][place : place + 1], want) < 1e-5


@pytest.mark.parametrize("name", ["squeezenet", "transformer"])
def test_half_precision_stays_within_its_rounding(name: str) -> None:
    artifact = transformer() if name == "transformer" else artifact_of(name)
    _, model = lowered(artifact, precision=Precision.FP16)
    assert {spec.dtype for spec in model.specs} == {torch.float16}
    inputs = random_inputs(artifact.graph, 3)
    found = run_model(artifact, model, inputs, by_run_into)
    assert 1e-6 < worst(artifact, found, inputs) < 2e-2


def test_bounds_and_masks_beyond_half_precision_stay_finite() -> None:
    b = Builder()
    most, least = (b.constant(np.array(v, np.float32)) for v in (3.4e38, -3.4e38))
    y = b.node("Clip", b.node("Max", "x", "x"), b.constant(np.array(0.0, np.float32)), most)
    hidden = b.node("Softmax", b.node("Max", y, b.node("Min", "x", least)), axis=1)
    artifact = b.artifact({"x": (1, 8)}, {hidden: (1, 8)})
    _, model = lowered(artifact, precision=Precision.FP16)
    assert model.foreign == ()
    inputs = random_inputs(artifact.graph, 3)
    found = run_model(artifact, model, inputs)
    name = artifact.graph.tensors[artifact.graph.outputs[0]].name
    assert difference(found[name], reference(artifact, inputs, [name])[name]) < 2e-3


@pytest.mark.promise("units-write-wherever-they")
def test_units_that_run_on_several_threads_at_once_give_the_same_bits() -> None:
    artifact = artifact_of("googlenet")
    _, model = lowered(artifact)
    inputs = random_inputs(artifact.graph, 3)
    outputs = [artifact.graph.tensors[t].name for t in artifact.graph.outputs]
    wanted = run_model(artifact, model, inputs)
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(run_model, artifact, model, inputs, by_run_into) for _ in range(6)]
    for run in runs:
        assert all((run.result()[name] == wanted[name]).all() for name in outputs)


@pytest.mark.promise("node-test-onnx-package")
def test_what_is_not_lowered_runs_in_onnxruntime_and_is_reported() -> None:
    b = Builder()
    x = b.node("Relu", b.node("Conv", "x", b.weight(4, 3, 3, 3), pads=[1, 1, 1, 1]))
    rois = b.constant(np.array([[0, 0, 5, 5], [1, 2, 6, 7]], np.float32))
    picked = b.node("RoiAlign", x, rois, b.constant(np.array([0, 0])), output_height=3, output_width=3)
    y = b.node("Sigmoid", b.node("Sigmoid", picked))
    artifact = b.artifact({"x": (1, 3, 8, 8)}, {y: (2, 4, 3, 3)})
    _, model = lowered(artifact)
    (unit,) = model.foreign
    assert unit.foreign == "RoiAlign"
    assert [u.foreign for u in model.units].count("") == len(model.units) - 1
    inputs = random_inputs(artifact.graph, 3)
    for execute in (by_run, by_run_into):
        assert worst(artifact, run_model(artifact, model, inputs, execute), inputs) < 1e-5


def test_a_shape_that_is_computed_while_running_is_left_to_onnxruntime() -> None:
    b = Builder()
    rows = b.node("Cast", b.node("ReduceSum", "n", keepdims=0), to=onnx.TensorProto.INT64)
    shape = b.node(
        "Concat", b.node("Unsqueeze", rows, b.constant(np.array([0]))), b.constant(np.array([-1])), axis=0
    )
    shaped = b.node("Reshape", "x", shape)
    y = b.node("ReduceSum", shaped, keepdims=0)
    artifact = b.artifact({"x": (2, 6), "n": (1,)}, {y: ()})
    _, model = lowered(artifact)
    assert len(model.foreign) == 1
    inputs = {"x": np.arange(12, dtype=np.float32).reshape(2, 6), "n": np.array([3], np.float32)}
    name = artifact.graph.tensors[artifact.graph.outputs[0]].name
    assert run_model(artifact, model, inputs)[name] == 66


def test_a_reshape_alone_is_a_view_and_a_transpose_is_none() -> None:
    b = Builder()
    flat = b.node("Flatten", "x")
    b.nodes.append(helper_max(flat, "a"))
    b.nodes.append(helper_max(flat, "b"))
    turned = b.node("Transpose", "x", perm=[0, 2, 1])
    artifact = b.artifact({"x": (1, 2, 3)}, {"a": (1, 6), "b": (1, 6), turned: (1, 3, 2)})
    _, model = lowered(artifact)
    views = {artifact.graph.operators[u.ops[0]].kind: u.view for u in model.units}
    assert views["Flatten"] and not views["Transpose"]


def helper_max(source: str, made: str) -> onnx.NodeProto:
    """A node that is an operator of its own."""
    return onnx.helper.make_node("Max", [source, source], [made], name=made)


def test_a_lowered_model_keeps_no_parsed_file_with_its_weights() -> None:
    """On a Jetson what the processor holds is missing on the device."""
    lowering, _ = lowered(artifact_of("squeezenet"))
    parsed = lowering._parsed
    assert len(parsed.model.graph.initializer) == 0 and len(parsed.model.graph.node) > 0
    assert parsed.parts.skeleton.model is parsed.model


def test_a_large_weight_is_read_from_the_artifact_whenever_it_is_wanted_and_a_small_one_is_kept() -> None:
    artifact = artifact_of("squeezenet", width=1.0)
    lowering, _ = lowered(artifact)
    constants = lowering._parsed.constants
    whole = {
        w.name: numpy_helper.to_array(w)
        for w in onnx.ModelProto.FromString(artifact.onnx_bytes()).graph.initializer
    }
    kept = {name for name, constant in constants.items() if constant.value is constant.value}
    assert kept == {name for name, array in whole.items() if array.nbytes <= 64 << 10} != constants.keys()
    for name, constant in constants.items():
        assert constant.shape == whole[name].shape
        assert (constant.value.numpy() == whole[name]).all()

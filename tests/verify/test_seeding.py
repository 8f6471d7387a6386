"""Weights that say nothing are replaced so that outputs have about unit variance; all else stays."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from stageloom.edge_agent.verify.inputs import Feeds, draw_pair
from stageloom.edge_agent.verify.seeding import seed_weights
from stageloom.shared.graph import Tensor
from tests.verify.models import constant_cnn, image, make_model, tensor, text_model

X = Tensor("x", "float32", (1, 3, 24, 24))


def seeded(model: onnx.ModelProto, tensors: list[Tensor], seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    inputs = [feeds for attempt in range(2) for feeds in draw_pair(tensors, {}, attempt, rng)]
    return seed_weights(model, inputs[:3], rng)


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {stored.name: numpy_helper.to_array(stored) for stored in model.graph.initializer}


def run(model: onnx.ModelProto, feeds: Feeds, names: list[str]) -> dict[str, np.ndarray]:
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    have = {output.name for output in shown.graph.output}
    shown.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in have)
    session = onnxruntime.InferenceSession(shown.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize("fill", [0.0, 0.02, -3.0])
def test_every_operators_output_has_about_unit_variance_on_inputs_it_never_saw(fill: float) -> None:
    model = constant_cnn(fill)
    seeded(model, [X])
    rng = np.random.default_rng(99)
    fresh = [feeds["x"] for attempt in range(4) for feeds in draw_pair([X], {}, 0, rng)]
    names = ["c0", "c1", "c2", "logits"]
    results = [run(model, {"x": x}, names) for x in fresh]
    for name in names:
        values = np.stack([result[name] for result in results])
        assert 0.25 < values.var() < 4.0, name
        assert np.linalg.norm(values[0] - values[1]) > 0.05 * np.linalg.norm(values[0]), name


def test_shared_weights_are_separated_and_differ() -> None:
    model = constant_cnn()
    names = seeded(model, [X])
    assert len(names) == len(set(names)) == 8  # three convolutions and the classifier, weight and bias each
    second, third = model.graph.node[2], model.graph.node[3]
    stored = weights(model)
    assert second.input[1] != third.input[1]
    assert not np.array_equal(stored[second.input[1]], stored[third.input[1]])
    onnx.checker.check_model(model)


def test_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    models = [constant_cnn() for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        seeded(model, [X], seed)
    first, same, other = (model.SerializeToString(deterministic=True) for model in models)
    assert first == same != other


def test_weights_that_say_something_stay_bit_for_bit() -> None:
    model = constant_cnn()
    for stored in model.graph.initializer:
        shape = tuple(stored.dims)
        values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        stored.CopyFrom(numpy_helper.from_array(values, stored.name))
    before = model.SerializeToString(deterministic=True)
    assert seeded(model, [X]) == []
    assert model.SerializeToString(deterministic=True) == before


def test_kernel_that_is_constant_per_output_channel_says_nothing() -> None:
    model = constant_cnn()
    rows = np.arange(1, 9, dtype=np.float32).reshape(8, 1, 1, 1)
    model.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(np.broadcast_to(rows, (8, 3, 3, 3)).copy(), "w0")
    )
    assert "w0" in seeded(model, [X])


def test_what_is_no_weight_stays_though_its_elements_are_equal() -> None:
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["big"], mode="nearest"),
        helper.make_node("Add", ["big", "epsilon"], ["shifted"]),
        helper.make_node("Pow", ["shifted", "exponent"], ["powered"]),
        helper.make_node("Clip", ["powered", "low", "high"], ["clipped"]),
        helper.make_node("Reshape", ["clipped", "shape"], ["y"]),
    ]
    stored = {
        "scales": np.ones(4, np.float32),
        "epsilon": np.array(1e-5, np.float32),
        "exponent": np.full(24, 2.0, np.float32),
        "low": np.array(0.0, np.float32),
        "high": np.array(6.0, np.float32),
        "shape": np.array([-1], np.int64),
    }
    model = make_model(nodes, [image("x", 1, 3, 24, 24)], [image("y", 3 * 24 * 24)], stored)
    assert seeded(model, [X]) == []


def test_batch_normalisation_stays_valid_and_is_measured() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("BatchNormalization", ["r", "zero", "zero", "zero", "zero"], ["y"]),
    ]
    stored = {"w": np.zeros((6, 3, 3, 3), np.float32), "zero": np.zeros(6, np.float32)}
    model = make_model(nodes, [image("x", 1, 3, 24, 24)], [image("y", 1, 6, 22, 22)], stored)
    assert len(seeded(model, [X])) == 5
    found = weights(model)
    gain, shift, mean, variance = (found[name] for name in model.graph.node[2].input[1:])
    assert (variance > 0).all()
    assert (gain > 0.4).all()
    feeds = draw_pair([X], {}, 0, np.random.default_rng(5))[0]
    result = run(model, feeds, ["r", "y"])
    scale = (gain / np.sqrt(variance + 1e-5)).reshape(1, 6, 1, 1)
    by_hand = (result["r"] - mean.reshape(1, 6, 1, 1)) * scale + shift.reshape(1, 6, 1, 1)
    assert np.allclose(result["y"], by_hand, atol=1e-4)
    assert 0.2 < result["y"].var() < 5.0


def test_statistics_that_no_longer_fit_are_measured_again() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("BatchNormalization", ["r", "gain", "shift", "mean", "variance"], ["y"]),
    ]
    stored = {
        "w": np.zeros((4, 3, 1, 1), np.float32),
        "gain": np.array([0.7, 0.8, 0.9, 1.0], np.float32),
        "shift": np.array([0.1, 0.2, 0.3, 0.4], np.float32),
        "mean": np.array([10.0, 20.0, 30.0, 40.0], np.float32),
        "variance": np.array([1e-8, 2e-8, 3e-8, 4e-8], np.float32),
    }
    model = make_model(nodes, [image("x", 1, 3, 24, 24)], [image("y", 1, 4, 24, 24)], stored)
    assert set(seeded(model, [X])) == {"w", "mean", "variance"}
    found = weights(model)
    assert (abs(found["mean"]) < 5).all()
    assert (found["variance"] > 1e-3).all()


@pytest.mark.parametrize("kind", ["ConvTranspose", "MatMul", "Gemm"])
def test_other_linear_operators_get_unit_variance_too(kind: str) -> None:
    shapes = {"ConvTranspose": (3, 5, 2, 2), "MatMul": (24, 7), "Gemm": (24, 7)}
    if kind == "Gemm":
        nodes = [
            helper.make_node("Reshape", ["x", "shape"], ["flat"]),
            helper.make_node("Gemm", ["flat", "w"], ["y"]),
        ]
        out = [72, 7]
    elif kind == "MatMul":
        nodes, out = [helper.make_node("MatMul", ["x", "w"], ["y"])], [1, 3, 24, 7]
    else:
        nodes = [helper.make_node("ConvTranspose", ["x", "w"], ["y"], kernel_shape=[2, 2])]
        out = [1, 5, 25, 25]
    stored = {"w": np.zeros(shapes[kind], np.float32)}
    if kind == "Gemm":
        stored["shape"] = np.array([-1, 24], np.int64)
    model = make_model(nodes, [image("x", 1, 3, 24, 24)], [image("y", *out)], stored)
    assert seeded(model, [X]) == ["w"]
    feeds = draw_pair([X], {}, 0, np.random.default_rng(5))[0]
    assert 0.2 < run(model, feeds, ["y"])["y"].var() < 5.0


def test_tables_and_half_precision_weights_are_seeded_in_their_type() -> None:
    model = text_model()
    tensors = [
        Tensor("ids", "int64", (1, 6)),
        Tensor("mask", "bool", (1, 6, 1)),
        Tensor("temperature", "float16", (1,)),
    ]
    assert seeded(model, tensors) == ["table", "wm"]
    assert weights(model)["table"].std() == pytest.approx(1.0, rel=0.2)
    half = make_model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [tensor("x", TensorProto.FLOAT16, 2, 8)],
        [tensor("y", TensorProto.FLOAT16, 2, 4)],
        {"w": np.zeros((8, 4), np.float16)},
    )
    assert seeded(half, [Tensor("x", "float16", (2, 8))]) == ["w"]
    assert weights(half)["w"].dtype == np.float16
    assert weights(half)["w"].std() > 0.1


def test_node_that_cannot_run_alone_leaves_its_readers_weights_drawn_but_unscaled() -> None:
    nodes = [
        helper.make_node("Absent", ["x"], ["odd"], domain="nowhere"),
        helper.make_node("Conv", ["odd", "w"], ["y"], kernel_shape=[3, 3]),
    ]
    stored = [numpy_helper.from_array(np.zeros((8, 3, 3, 3), np.float32), "w")]
    graph = helper.make_graph(nodes, "odd", [image("x", 1, 3, 24, 24)], [image("y", 1, 8, 22, 22)], stored)
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("nowhere", 1)]
    model = helper.make_model(graph, opset_imports=domains)
    assert seeded(model, [X]) == ["w"]
    assert weights(model)["w"].std() == pytest.approx(1 / np.sqrt(27), rel=0.3)


def test_bias_of_one_channel_stays_beside_weights_that_say_something() -> None:
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["y"], kernel_shape=[1, 1])]
    stored = {
        "w": np.random.default_rng(1).standard_normal((1, 3, 1, 1)).astype(np.float32),
        "b": np.array([-40.0], np.float32),
    }
    model = make_model(nodes, [image("x", 1, 3, 24, 24)], [image("y", 1, 1, 24, 24)], stored)
    assert seeded(model, [X]) == []

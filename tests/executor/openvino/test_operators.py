"""Operators that OpenVINO computes as onnxruntime does, and those that it misreads and that are refused."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.openvino.misread import COMPARED, misread
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import ExecutorError
from tests.executor.models import artifact_of, difference
from tests.executor.openvino.small import artifact_from, both, one_node, opened
from tests.importer.models import info, model_of

Node = tuple[str, dict[str, np.ndarray], dict[str, Any], dict[str, Any]]
"""Type, inputs, weights, and what else `one_node` takes."""

OWN = {"domain": "com.microsoft"}
RNG = np.random.default_rng(0)
SCALE, ZERO = np.float32(0.03), np.uint8(128)


def f(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def whole_numbers(dtype: str, *shape: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def quantised(kind: str, count: int = 1, **given: Any) -> Node:
    """One of onnxruntime's operators on `count` tensors of 8 bits, with a scale and a zero point each."""
    inputs = {f"x{place}": whole_numbers("uint8", 1, 2, 4, 4) for place in range(count)}
    reads = [name for place in range(count) for name in (f"x{place}", "s", "z")] + ["ys", "yz"]
    if kind == "QLinearConcat":
        reads = [*reads[-2:], *reads[:-2]]
    weights = {"s": SCALE, "z": ZERO, "ys": np.float32(0.01), "yz": np.uint8(30)}
    return kind, inputs, weights, {**OWN, "reads": reads, **given}


AGREEING: list[Node] = [
    ("Attention", {"x": f(1, 4, 16)}, {"w": f(16, 48), "b": f(48)}, {**OWN, "num_heads": 2}),
    ("Attention", {"x": f(1, 4, 16)}, {"w": f(16, 48), "b": f(48)},
     {**OWN, "num_heads": 2, "unidirectional": 1}),
    ("BiasGelu", {"x": f(2, 16)}, {"b": f(16)}, OWN),
    ("DequantizeLinear", {"x": whole_numbers("uint8", 2, 16)}, {"s": SCALE, "z": ZERO}, OWN),
    ("FastGelu", {"x": f(2, 16)}, {"b": f(16)}, OWN),
    *[("FusedConv", {"x": f(1, 3, 8, 8)}, {"w": f(4, 3, 3, 3), "b": f(4)},
       {**OWN, "activation": name, "activation_params": parameters})
      for name, parameters in (("Relu", [0.0]), ("LeakyRelu", [0.1]), ("Clip", [-0.5, 0.5]),
                               ("HardSigmoid", [0.3, 0.4]), ("Sigmoid", [0.0]), ("Tanh", [0.0]))],
    ("FusedConv", {"x": f(1, 3, 8, 8), "z": f(1, 4, 6, 6)}, {"w": f(4, 3, 3, 3), "b": f(4)},
     {**OWN, "reads": ["x", "w", "b", "z"], "activation": "Relu"}),
    ("FusedGemm", {"x": f(2, 16)}, {"w": f(16, 5), "b": f(5)},
     {**OWN, "activation": "LeakyRelu", "activation_alpha": 0.3}),
    ("FusedMatMul", {"x": f(2, 16)}, {"w": f(16, 5)}, {**OWN, "alpha": 2.0}),
    ("FusedMatMul", {"x": f(16, 2)}, {"w": f(16, 5)}, {**OWN, "transA": 1}),
    ("GatherND", {"x": f(3, 3)}, {"i": np.array([[0, 1]])}, OWN),
    ("Gelu", {"x": f(2, 16)}, {}, OWN),
    # Weights of seven bits: without VNNI onnxruntime adds pairs of products in 16 bits, which may saturate.
    ("MatMulIntegerToFloat", {"x": whole_numbers("uint8", 2, 16)},
     {"w": whole_numbers("int8", 16, 5) // 2, "xs": SCALE, "ws": SCALE, "xz": ZERO, "wz": np.int8(0)}, OWN),
    ("MatMulNBits", {"x": f(2, 64)}, {"w": whole_numbers("uint8", 5, 2, 16), "s": f(10)},
     {**OWN, "K": 64, "N": 5, "bits": 4, "block_size": 32}),
    ("MultiHeadAttention", {"q": f(1, 4, 16), "k": f(1, 4, 16), "v": f(1, 4, 16)}, {},
     {**OWN, "num_heads": 2}),
    ("Pad", {"x": f(1, 4)}, {"p": np.array([0, 1, 0, 2]), "v": np.float32(0.5)}, OWN),
    quantised("QLinearSigmoid"),
    ("QuantizeLinear", {"x": f(2, 16)}, {"s": SCALE, "z": ZERO}, OWN),
    ("QuickGelu", {"x": f(2, 16)}, {}, {**OWN, "alpha": 1.702}),
    *[("RotaryEmbedding", {"x": f(1, 2, 4, 8)}, {"p": np.arange(4)[None], "c": f(8, 4), "s": f(8, 4)},
       {**OWN, "interleaved": interleaved}) for interleaved in (0, 1)],
    ("SkipLayerNormalization", {"x": f(2, 3, 16), "k": f(2, 3, 16)}, {"g": f(16), "b": f(16), "c": f(16)},
     {**OWN, "epsilon": 1e-5}),
    ("SkipSimplifiedLayerNormalization", {"x": f(2, 3, 16), "k": f(2, 3, 16)}, {"g": f(16)},
     {**OWN, "epsilon": 1e-5}),
    ("Trilu", {"x": f(3, 3)}, {}, OWN),
    *[("Resize", {"x": f(1, 2, 8, 8)}, {"scales": np.array([1, 1, 2, 2], np.float32)},
       {"reads": ["x", "", "scales"], "mode": mode, "coordinate_transformation_mode": "align_corners"})
      for mode in ("linear", "cubic")],
    # What hands its input on.
    *[(kind, {"x": f(3, 4)}, {}, {}) for kind in ("Dropout", "Identity", "Flatten")],
    ("Tile", {"x": f(3, 4)}, {"r": np.array([1, 1])}, {}),
    ("Reshape", {"x": f(3, 4)}, {"r": np.array([3, 4])}, {}),
    *[("Add", {"x": whole_numbers("int32", 16) // 2}, {"b": whole_numbers("int32", 16) // 2}, {})],
]  # fmt: skip

MISREAD: list[Node] = [
    *[(kind, {"x": whole_numbers(dtype, 64)}, {"b": whole_numbers(dtype, 64)}, {})
      for kind in ("Add", "Sub", "Mul") for dtype in ("int8", "uint8")],
    quantised("QLinearAveragePool", kernel_shape=[2, 2]),
    quantised("QLinearConcat", 2, axis=1),
    quantised("QLinearLeakyRelu", alpha=0.1),
    quantised("QLinearMul", 2),
    quantised("QLinearAdd", 2),
    ("DynamicQuantizeMatMul", {"x": f(2, 16)}, {"w": whole_numbers("int8", 16, 5), "s": SCALE}, OWN),
    ("Resize", {"x": f(1, 1, 8, 8)}, {"scales": np.array([1, 1, 0.5, 0.5], np.float32)},
     {"opset": 18, "reads": ["x", "", "scales"], "mode": "linear", "antialias": 1}),
    ("Resize", {"x": f(1, 1, 8, 8)}, {"scales": np.array([1, 1, 2, 2], np.float32)},
     {"opset": 18, "reads": ["x", "", "scales"], "mode": "cubic", "exclude_outside": 1}),
]  # fmt: skip


def names(nodes: Sequence[Node]) -> list[str]:
    return [kind for kind, _, _, _ in nodes]


def imported(node: Node, folder: Path) -> Artifact:
    kind, inputs, weights, given = node
    described = {name: (array.dtype.name, array.shape) for name, array in inputs.items()}
    return artifact_from(one_node(kind, described, weights=weights, **given), folder)


@pytest.mark.promise("openvino-refuses-at-load")
@pytest.mark.parametrize("node", AGREEING, ids=names(AGREEING))
def test_it_computes_what_onnxruntime_does(node: Node, tmp_path: Path) -> None:
    (found,), (wanted,) = both(imported(node, tmp_path), node[1])
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert not any(np.shares_memory(found, array) for array in node[1].values())
    if found.dtype.kind == "f":
        assert difference(found, wanted) < 1e-5
    else:
        assert np.abs(found.astype(np.int64) - wanted.astype(np.int64)).max() <= (found.dtype.itemsize == 1)


@pytest.mark.parametrize("first", ["Relu", "Dropout"])
@pytest.mark.parametrize("order", list(itertools.permutations("yzwv")))
def test_tensors_that_are_one_to_openvino_are_all_returned(
    first: str, order: tuple[str, ...], tmp_path: Path
) -> None:
    """Operators that hand a tensor on give several outputs, and an input, one and the same tensor."""
    nodes = [
        helper.make_node(first, ["x"], ["y"]),
        helper.make_node("Dropout", ["y"], ["z"]),
        helper.make_node("Identity", ["y"], ["w"]),
        helper.make_node("Dropout", ["x"], ["v"]),
    ]
    outputs = [info(name, (2, 3)) for name in order]
    model = artifact_from(model_of(nodes, [info("x", (2, 3))], outputs), tmp_path)
    found, wanted = both(model, {"x": f(2, 3)})
    for got, expected in zip(found, wanted, strict=True):
        assert np.array_equal(got, expected)


def test_every_operator_of_onnxruntime_that_is_taken_was_compared() -> None:
    assert {kind for kind, _, _, given in AGREEING if "domain" in given} == COMPARED


@pytest.mark.promise("openvino-refuses-at-load")
@pytest.mark.parametrize("node", MISREAD, ids=names(MISREAD))
def test_what_it_would_compute_differently_is_refused(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without the refusal it does: once it does not any more, the entry can go."""
    model = imported(node, tmp_path)
    with pytest.raises(ExecutorError, match=f"openvino computes {node[0]} of model .* than onnxruntime"):
        opened(model)
    monkeypatch.setattr("stageloom.edge_agent.executor.openvino.executor.misread", lambda *given: "")
    (found,), (wanted,) = both(model, node[1])
    assert difference(found.astype(float), wanted.astype(float)) > 1e-3


@pytest.mark.parametrize(
    ("kind", "count", "given", "outputs"),
    [
        ("LSTM", 3, {"layout": 1}, 1),
        ("LSTM", 8, {}, 1),
        ("GRU", 3, {"layout": 1}, 1),
        ("Resize", 1, {"exclude_outside": 1}, 1),
        ("Resize", 1, {"keep_aspect_ratio_policy": "not_larger"}, 1),
        ("Attention", 3, {"left_window_size": 2}, 1),
        ("Attention", 3, {}, 4),
        ("DFT", 1, {}, 1),
        ("RoiAlign", 3, {"mode": "max"}, 1),
        ("SpaceToDepth", 1, {"mode": "CRD"}, 1),
    ],
)
def test_attributes_that_it_does_not_look_at_are_known(
    kind: str, count: int, given: dict[str, Any], outputs: int
) -> None:
    read = [f"i{place}" for place in range(count)]
    plain = helper.make_node(kind, read[:3], ["y"])
    node = helper.make_node(kind, read, [f"o{place}" for place in range(outputs)], **given)
    source = ModelParts(artifact_of("squeezenet"))
    assert misread([plain, node], source) == kind
    assert kind == "DFT" or misread([plain], source) == ""
    body = helper.make_graph([node], "body", [], [])
    inside = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    assert misread([inside], source) == kind


def test_corners_are_not_aligned_where_the_scale_gives_a_broken_number_of_pixels(tmp_path: Path) -> None:
    scales = np.array([1, 1, 0.6, 0.6], np.float32)
    given = {
        "reads": ["x", "", "scales"],
        "mode": "linear",
        "coordinate_transformation_mode": "align_corners",
    }
    model = imported(("Resize", {"x": f(1, 2, 8, 8)}, {"scales": scales}, given), tmp_path)
    with pytest.raises(ExecutorError, match="computes Resize"):
        opened(model)

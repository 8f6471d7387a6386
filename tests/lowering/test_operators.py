"""Operators one by one: today's forms by the onnx package's own node tests, older forms by onnxruntime."""

import importlib
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.backend.test.case import node as cases

from benchmarks.onnx_conformance import Verdict, figures, node_tests, run_test
from benchmarks.whole_model import lower_whole
from stageloom.edge_agent.lowering.dtypes import NeedsConstant, Precision, Unsupported
from stageloom.edge_agent.lowering.node import Lowered, Node, Spec, WeightStore, operator, operators
from stageloom.edge_agent.lowering.trace import NodeTracer

MODULES = (
    "argmax", "attention", "cast", "clip", "concat", "conv", "convtranspose", "cumsum", "dequantizelinear",
    "einsum", "equal", "expand", "flatten", "gather", "gathernd", "gelu", "gemm", "groupnormalization", "gru",
    "layernormalization", "lstm", "matmul", "mod", "onehot", "pad", "pow", "quantizelinear", "reducemean",
    "reshape", "resize", "rnn", "scatternd", "softmax", "split", "tile", "topk", "transpose", "where",
)  # fmt: skip
"""Loading all node tests takes 12 s; `test_no_node_test_fails` does, in the full suite."""


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about overflows provoked on purpose
def test_node_tests_of_the_onnx_package_pass(module: str) -> None:
    before = len(cases._NodeTestCases)
    importlib.import_module(f"onnx.backend.test.case.node.{module}")
    tests = cases._NodeTestCases[before:] or [
        t for t in cases._NodeTestCases if t.name.startswith(f"test_{module}")
    ]
    chosen = random.Random(module).sample(tests, min(len(tests), 8))
    outcomes = [run_test(test) for test in chosen]
    assert [o for o in outcomes if o.verdict is Verdict.FAILED] == []
    assert any(o.verdict is Verdict.PASSED for o in outcomes)


@pytest.mark.promise("node-test-onnx-package")
@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_node_test_fails_and_most_pass() -> None:
    outcomes = [run_test(test) for test in node_tests()]
    found = figures(outcomes)
    assert [o for o in outcomes if o.verdict is Verdict.FAILED] == []
    assert found["passed"] >= 1600
    assert found["undecided"] <= 5


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def integers(*shape: int, kind: type) -> np.ndarray:
    limits = np.iinfo(np.int8 if kind is np.int32 else kind)
    return np.random.default_rng(0).integers(limits.min, limits.max, shape, dtype=kind, endpoint=True)


def whole(*values: int | list[int]) -> np.ndarray:
    return np.array(values, np.int64)


Older = tuple[str, int, Sequence[np.ndarray], Mapping[str, np.ndarray], Mapping[str, object]]

OLDER: list[Older] = [  # operator, opset, inputs, constants behind them by name, attributes
    ("Softmax", 11, [floats(2, 3, 4)], {}, {"axis": 1}),
    ("Softmax", 11, [floats(2, 3, 4)], {}, {}),
    ("LogSoftmax", 12, [floats(2, 3, 4)], {}, {"axis": 2}),
    ("Hardmax", 11, [floats(2, 3, 4)], {}, {"axis": 1}),
    ("Clip", 6, [floats(3, 4)], {}, {"min": -0.5, "max": 0.25}),
    ("Clip", 13, [floats(3, 4)], {"low": np.array(-0.5, np.float32)}, {}),
    ("Slice", 9, [floats(4, 5)], {}, {"starts": [1, -4], "ends": [3, 9], "axes": [0, 1]}),
    ("Slice", 13, [floats(4, 5)],
     {"s": whole(-1, 4), "e": whole(-9, 0), "a": whole(0, 1), "t": whole(-2, -1)}, {}),
    ("Squeeze", 11, [floats(1, 3, 1)], {}, {"axes": [0]}),
    ("Squeeze", 13, [floats(1, 3, 1)], {}, {}),
    ("Unsqueeze", 11, [floats(3, 4)], {}, {"axes": [0, 3]}),
    ("ReduceSum", 11, [floats(2, 3, 4)], {}, {"axes": [1, -1], "keepdims": 0}),
    ("ReduceMean", 13, [floats(2, 3, 4)], {}, {"axes": [-1]}),
    ("ReduceMax", 18, [floats(2, 3, 4)], {"axes": whole(0, 2)}, {"keepdims": 0}),
    ("Split", 11, [floats(2, 6)], {}, {"axis": 1, "split": [1, 2, 3], "outputs": 3}),
    ("Split", 13, [floats(2, 6)], {}, {"axis": 1, "outputs": 2}),
    ("Pad", 10, [floats(2, 3)], {}, {"pads": [0, 1, 2, 0], "value": 1.5}),
    ("Pad", 13, [floats(4, 5)], {"pads": whole(1, 2, 0, 3)}, {"mode": "reflect"}),
    ("Pad", 13, [floats(4, 5)], {"pads": whole(0, -1, 0, 2)}, {}),
    ("Upsample", 9, [floats(1, 2, 3, 4)], {"scales": np.array([1, 1, 2, 2], np.float32)}, {}),
    ("Upsample", 9, [floats(1, 2, 3, 4)], {"scales": np.array([1, 1, 2, 3], np.float32)}, {"mode": "linear"}),
    ("Resize", 10, [floats(1, 2, 4, 4)], {"scales": np.array([1, 1, 0.5, 2], np.float32)}, {}),
    ("TopK", 9, [floats(3, 7)], {}, {"k": 2, "axis": 1, "outputs": 2}),
    ("Dropout", 10, [floats(3, 4)], {}, {"ratio": 0.4}),
    ("BatchNormalization", 9, [floats(2, 3, 4, 4)],
     {"s": floats(3, seed=1), "b": floats(3, seed=2), "m": floats(3, seed=3), "v": np.square(floats(3))}, {}),
    ("MaxPool", 12, [floats(1, 2, 7, 7)], {}, {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    ("MaxPool", 12, [floats(1, 2, 7, 8)], {},
     {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1], "strides": [2, 2]}),
    ("AveragePool", 11, [floats(1, 2, 7, 7)], {},
     {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "count_include_pad": 0}),
    ("AveragePool", 11, [floats(1, 2, 6, 7)], {}, {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("Conv", 11, [floats(1, 4, 6, 6)], {"w": floats(6, 2, 3, 3)},
     {"group": 2, "auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    ("ConvTranspose", 11, [floats(1, 3, 4, 4)], {"w": floats(3, 2, 3, 3), "b": floats(2)},
     {"strides": [2, 2], "pads": [1, 0, 1, 1], "output_padding": [1, 0]}),
    ("Gather", 13, [floats(4, 5)], {"i": whole(-1, 0, 2)}, {"axis": 1}),
    ("LRN", 13, [floats(1, 8, 3, 3)], {}, {"size": 5, "alpha": 0.01}),
    ("InstanceNormalization", 6, [floats(2, 3, 4, 4)], {"s": floats(3, seed=1), "b": floats(3, seed=2)}, {}),
    ("Gemm", 13, [floats(4, 3)], {"w": floats(5, 4), "c": floats(1, 5)},
     {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("DepthToSpace", 13, [floats(1, 8, 2, 3)], {}, {"blocksize": 2, "mode": "CRD"}),
    ("QuantizeLinear", 13, [floats(2, 3, 4)],
     {"s": np.array([0.1, 0.2, 0.05], np.float32), "z": np.array([3, 0, 250], np.uint8)}, {"axis": 1}),
]  # fmt: skip


def of_gates(gates: int, directions: int) -> list[np.ndarray]:
    """X, W and R of a recurrent network of two states over three steps."""
    return [
        floats(3, 2, 4),
        floats(directions, gates * 2, 4, seed=1),
        floats(directions, gates * 2, 2, seed=2),
    ]


SELDOM: list[Older] = [
    # onnxruntime rounds up where a nearest Resize of opset 10 shrinks, and down where it grows
    ("Resize", 10, [floats(1, 1, 2, 4)], {"scales": np.array([1, 1, 0.6, 0.6], np.float32)}, {}),
    ("Resize", 10, [floats(1, 1, 4, 4)], {"scales": np.array([1, 1, 0.75, 0.75], np.float32)}, {}),
    ("Resize", 10, [floats(1, 2, 6, 4)], {"scales": np.array([1, 1, 0.4, 2.5], np.float32)}, {}),
    ("Upsample", 9, [floats(1, 2, 3, 4)], {"scales": np.array([1, 1, 1.5, 2.5], np.float32)}, {}),
    # sizes are the products of float32: 10 * 0.7 is 7 there, and 6.99 in float64
    *(("Resize", 13, [floats(1, 2, 10, 10)],
       {"roi": np.array([], np.float32), "scales": np.array([1, 1, scale, scale], np.float32)},
       {"mode": mode, "coordinate_transformation_mode": place})
      for scale in (0.7, 0.9, 0.35)
      for mode, place in (("nearest", "asymmetric"), ("linear", "half_pixel"), ("linear", "align_corners"))),
    # onnxruntime cuts fractions of integers off
    *(("Resize", 13, [integers(1, 2, 5, 7, kind=kind)],
       {"roi": np.array([], np.float32), "scales": np.array([1, 1, *scales], np.float32)},
       {"mode": "linear", "coordinate_transformation_mode": place})
      for kind in (np.uint8, np.int8, np.int32)
      for scales in ((2, 4), (0.5, 2))
      for place in ("half_pixel", "asymmetric")),
    # to one pixel onnxruntime takes the first, and a crop's pixels are whole: neither follows from the scale
    *(("Resize", 13, [floats(1, 1, extent, extent)],
       {"roi": np.array([], np.float32), "s": np.array([], np.float32), "n": whole(1, 1, 1, 1)},
       {"mode": mode, "coordinate_transformation_mode": "pytorch_half_pixel"})
      for mode, extent in (("linear", 49), ("cubic", 4))),
    ("Resize", 13, [floats(1, 1, 4, 4)],
     {"roi": np.array([0, 0, 0.1, 0.2, 1, 1, 0.8, 0.9], np.float32),
      "s": np.array([1, 1, 0.8, 0.8], np.float32)},
     {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}),
    # onnxruntime extends a result to its output_shape alone, and at the end alone
    *(("ConvTranspose", 11, [floats(1, 3, 8, 4)], {"w": floats(3, 2, 1, 2), "b": floats(2)},
       {"strides": [2, 4], "auto_pad": pad, **shape})
      for pad in ("NOTSET", "SAME_UPPER", "SAME_LOWER")
      for shape in ({"output_shape": [16, 16]}, {})),
    # alpha and beta are given to the activations that use one
    ("LSTM", 14, of_gates(4, 1), {},
     {"hidden_size": 2, "activations": ["Sigmoid", "LeakyRelu", "Tanh"], "activation_alpha": [0.3]}),
    ("GRU", 14, of_gates(3, 2), {},
     {"hidden_size": 2, "direction": "bidirectional", "activations": ["HardSigmoid", "Tanh"] * 2,
      "activation_alpha": [1 / 6, 0.3], "activation_beta": [0.4, 0.6]}),
    ("RNN", 14, of_gates(1, 1), {},
     {"hidden_size": 2, "activations": ["ScaledTanh"], "activation_alpha": [0.7], "activation_beta": [1.3]}),
    ("Pow", 13, [np.abs(floats(2, 3))], {"e": np.array([1, 0.5, 2.2], np.float32)}, {}),
    ("Max", 13, [floats(1, 1, 4, 5), floats(1, 1, 4, 5, seed=1), floats(1, 3, 4, 5, seed=2)], {}, {}),
    ("Sum", 13, [floats(1, 4, 1), floats(1, 1, 5, seed=1), floats(2, 4, 5, seed=2)], {}, {}),
    ("DynamicQuantizeLinear", 11, [np.zeros((2, 3), np.float32)], {}, {"outputs": 3}),
    # onnxruntime looks at no more of a condition than there are places
    *(("Compress", 11, [floats(2, 3)], {"c": np.array([0, 1, 1, 0, 0, 1, 0, 1], bool)[:length]}, axis)
      for length in (2, 8)
      for axis in ({}, {"axis": 0}, {"axis": -1})),
]  # fmt: skip


FORMS = [*OLDER, *SELDOM]


@pytest.mark.parametrize(("kind", "opset", "inputs", "constants", "attributes"), FORMS,
                         ids=[f"{case[0]}-{case[1]}-{i}" for i, case in enumerate(FORMS)])  # fmt: skip
def test_older_and_seldom_forms_of_operators_agree_with_onnxruntime(
    kind: str,
    opset: int,
    inputs: Sequence[np.ndarray],
    constants: Mapping[str, np.ndarray],
    attributes: Mapping[str, object],
) -> None:
    own = dict(attributes)
    count = own.pop("outputs", 1)
    assert isinstance(count, int)
    names = [f"x{i}" for i in range(len(inputs))]
    model = single(kind, opset, names, inputs, constants, [f"y{i}" for i in range(count)], own)
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(
        None, dict(zip(names, inputs, strict=True))
    )
    lowered = lower_whole(model, inputs)
    assert not lowered.pinned
    found = lowered.run(dict(zip(names, inputs, strict=True)))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert got.dtype == want.dtype


@pytest.mark.parametrize("kind", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
def test_the_place_of_an_extreme_lies_on_its_axis_whatever_is_compared(kind: str, last: int) -> None:
    """What is read from there must exist: a GPU ends all that runs on it otherwise."""
    x = np.array([[np.nan, 1.0, 2.0], [1.0, np.nan, 0.0], [np.nan] * 3, [3.0, 1.0, 3.0]], np.float32)
    model = single(kind, 13, ["x"], [x], {}, ["y"], {"axis": 1, "select_last_index": last})
    (found,) = lower_whole(model, [x]).run({"x": x})
    assert 0 <= found.min() <= found.max() <= 2
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_array_equal(found[3:], wanted[3:])


SQUARED: list[tuple[str, int, float, Mapping[str, object]]] = [  # operator, opset, size of inputs, attributes
    ("LRN", 13, 300.0, {"size": 5, "alpha": 1e-3}),
    ("LpPool", 18, 300.0, {"kernel_shape": [2, 2]}),
    ("GlobalLpPool", 2, 300.0, {}),
    ("MeanVarianceNormalization", 13, 300.0, {}),
    ("ReduceSumSquare", 13, 1e-4, {}),
]
"""Their squares are beyond the largest number of half precision, or below the smallest."""


@pytest.mark.parametrize(("kind", "opset", "size", "attributes"), SQUARED, ids=[case[0] for case in SQUARED])
def test_in_half_precision_squares_are_made_in_float32(
    kind: str, opset: int, size: float, attributes: Mapping[str, object]
) -> None:
    x = (size * floats(1, 64, 8, 8)).astype(np.float16)
    model = single(kind, opset, ["x"], [x.astype(np.float32)], {}, ["y"], attributes)
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x.astype(np.float32)})
    half = single(kind, opset, ["x"], [x], {}, ["y"], attributes)
    (found,) = lower_whole(half, [x]).run({"x": x})
    assert found.dtype == np.float16
    np.testing.assert_allclose(found.astype(np.float32), wanted, rtol=2e-3, atol=1e-3 * np.abs(wanted).max())


def single(
    kind: str,
    opset: int,
    names: Sequence[str],
    inputs: Sequence[np.ndarray],
    constants: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    attributes: Mapping[str, object],
) -> onnx.ModelProto:
    """A model of one node."""
    types = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, inputs, strict=True)
    ]
    node = helper.make_node(kind, [*names, *constants], list(outputs), **attributes)
    weights = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph([node], kind, types, results, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8
    return model


def test_what_nothing_lowers_is_named() -> None:
    model = single("NonZero", 13, ["x0"], [floats(3)], {}, ["y"], {})
    with pytest.raises(Unsupported, match=r"^NonZero$"):
        lower_whole(model, [floats(3)])


@pytest.mark.parametrize(
    ("scale", "attributes"),
    [(2, {"mode": "cubic"}), (3, {"mode": "linear"}), (2, {"mode": "linear", "antialias": 1})],
)
def test_a_resize_of_integers_that_depends_on_rounding_is_not_lowered(
    scale: int, attributes: Mapping[str, object]
) -> None:
    scales = {"roi": np.array([], np.float32), "scales": np.array([1, 1, scale, scale], np.float32)}
    x = integers(1, 1, 4, 4, kind=np.uint8)
    with pytest.raises(Unsupported, match="rounding decides"):
        lower_whole(single("Resize", 18, ["x"], [x], scales, ["y"], attributes), [x])


def test_a_shape_from_a_value_that_is_computed_is_named() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["n"], to=onnx.TensorProto.INT64),
        helper.make_node("Reshape", ["x", "n"], ["y"]),
    ]
    store = WeightStore(torch.device("cpu"), Precision.FP32)
    trace = NodeTracer(store, {}, opset=17, batch=1, channels_last=False)
    trace.add_input("x", Spec((4,), torch.float32))
    assert trace.visit(nodes[0]) is not None
    with pytest.raises(NeedsConstant, match="'n' decides a shape"):
        trace.visit(nodes[1])


def test_an_operator_is_registered_once() -> None:
    assert "Conv" in operators() and len(operators()) > 150

    def again(node: Node) -> Lowered:
        return torch.neg

    register: Callable[[Callable[[Node], Lowered]], object] = operator("Conv")
    with pytest.raises(ValueError, match="twice"):
        register(again)


Outside = tuple[str, int, Sequence[np.ndarray], int, np.ndarray, Mapping[str, object]]

OUTSIDE: list[Outside] = [  # operator, opset, inputs, which are places, the nearest ones, attributes
    ("Gather", 13, [floats(4, 5), whole(1, 4, -9)], 1, whole(1, 3, 0), {}),
    ("GatherElements", 13, [floats(2, 3), whole([0, 3, -4])], 1, whole([0, 1, 0]), {}),
    ("GatherND", 13, [floats(3, 4), whole([0, 9], [2, 1])], 1, whole([0, 3], [2, 1]), {}),
    ("GatherND", 13, [floats(2, 3, 4), whole([3], [0])], 1, whole([2], [0]), {"batch_dims": 1}),
    ("ScatterElements", 18, [floats(4), whole(1, 7), floats(2)], 1, whole(1, 3), {}),
    ("ScatterElements", 18, [floats(4), whole(1, 7), floats(2)], 1, whole(1, 3), {"reduction": "add"}),
    ("ScatterND", 18, [floats(3, 4), whole([0, 5], [2, 1]), floats(2)], 1, whole([0, 3], [2, 1]), {}),
    ("TensorScatter", 24, [floats(1, 4, 2), floats(1, 1, 2), whole(9)], 2, whole(3), {}),
    ("RotaryEmbedding", 23, [floats(1, 2, 3, 4), floats(5, 2), floats(5, 2), whole([0, -2, 4])], 3,
     whole([0, 0, 4]), {}),
    ("ReverseSequence", 10, [floats(4, 2), whole(3, 9)], 1, whole(3, 4), {}),
    ("NegativeLogLikelihoodLoss", 13, [floats(2, 3), whole(1, 5)], 1, whole(1, 2), {}),
]  # fmt: skip
"""Places that are not there, and those that a GPU takes for them."""
OUTSIDE_IDS = [f"{case[0]}-{i}" for i, case in enumerate(OUTSIDE)]


def run_alone(
    kind: str, opset: int, inputs: Sequence[np.ndarray], attributes: Mapping[str, object], device: str
) -> np.ndarray:
    """The only output of one node whose inputs are all computed."""
    names = [f"x{i}" for i in range(len(inputs))]
    trace = NodeTracer(
        WeightStore(torch.device(device), Precision.FP32), {}, opset=opset, batch=1, channels_last=False
    )
    values = [torch.from_numpy(value) for value in inputs]
    for name, value in zip(names, values, strict=True):
        trace.add_input(name, Spec(tuple(value.shape), value.dtype))
    traced = trace.visit(helper.make_node(kind, names, ["y"], **attributes))
    assert traced is not None
    made = traced.kernel.run(*(value.to(device) for value in values))
    assert isinstance(made, torch.Tensor)
    return made.cpu().numpy()


@pytest.mark.parametrize(
    ("kind", "opset", "inputs", "which", "taken", "attributes"), OUTSIDE, ids=OUTSIDE_IDS
)
def test_a_place_that_is_not_there_fails_on_the_processor(
    kind: str,
    opset: int,
    inputs: Sequence[np.ndarray],
    which: int,
    taken: np.ndarray,
    attributes: Mapping[str, object],
) -> None:
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        run_alone(kind, opset, inputs, attributes, "cpu")
    run_alone(kind, opset, [*inputs[:which], taken, *inputs[which + 1 :]], attributes, "cpu")


@pytest.mark.parametrize("places", [np.array(7), whole(0, 4), whole(-5)])
def test_a_gather_of_constant_places_that_are_not_there_is_not_lowered(places: np.ndarray) -> None:
    """A GPU would end with the first task; and a single place must not be counted round."""
    model = single("Gather", 13, ["x"], [floats(4, 5)], {"i": places}, ["y"], {})
    with pytest.raises(Unsupported, match="not there"):
        lower_whole(model, [floats(4, 5)])

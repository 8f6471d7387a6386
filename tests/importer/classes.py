"""One small model of every class that published files fall into; made in code, the same on every run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.importer.models import info, model_of

HALF, DOUBLE, INT64, BOOL = TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL
node = helper.make_node


@dataclass(frozen=True)
class Sample:
    """A model, the shapes that its open inputs are pinned to, and what its operators should be."""

    model: onnx.ModelProto
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    opaque: tuple[str, ...] = ()  # the reasons, in order
    joined: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def _weights(seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def dynamic_axes() -> Sample:
    """A detector's head: every dimension of the outputs is a symbol, one is an expression."""
    nodes = [
        node("Conv", ["images", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("Shape", ["r"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axis"], ["n1"]),
        node("Concat", ["n1", "rest"], ["target"], axis=0),
        node("Reshape", ["r", "target"], ["flat"]),
        node("Sigmoid", ["flat"], ["scores"]),
    ]
    weights = {"w": _weights(0, 4, 3, 3, 3), "zero": np.array(0), "axis": np.array([0]),
               "rest": np.array([4, -1])}  # fmt: skip
    inputs = [info("images", ["batch", 3, "height", "width"])]
    outputs = [info("scores", ["batch", 4, "floor(height*width)"]), info("r", ["batch", "c", "h", "w"])]
    return Sample(model_of(nodes, inputs, outputs, weights), {"images": (1, 3, 8, 6)})


def inputs_of_every_rank() -> Sample:
    """Rank 0 to 5."""
    inputs = [info(f"x{rank}", [2] * rank) for rank in range(6)]
    nodes = [
        node("Mul", ["x0", "x1"], ["m1"]),
        *(node("Add", [f"m{rank - 1}", f"x{rank}"], [f"m{rank}"]) for rank in range(2, 6)),
        node("MaxPool", ["m5"], ["y"], kernel_shape=[1, 1, 2]),
    ]
    return Sample(model_of(nodes, inputs, [info("y", None), info("m2", ["?", "?"])]))


def _quantised(name: str, array: Any, weights: dict[str, Any]) -> list[onnx.NodeProto]:
    weights.update({name: np.clip(np.round(array / 0.05), -127, 127).astype(np.int8),
                    f"{name}_s": np.float32(0.05), f"{name}_z": np.int8(0)})  # fmt: skip
    return [node("DequantizeLinear", [name, f"{name}_s", f"{name}_z"], [f"{name}_f"])]


def int8_qdq() -> Sample:
    """Quantise and dequantise around ordinary operators."""
    weights: dict[str, Any] = {"s": np.float32(0.03), "z": np.uint8(128)}
    nodes = [
        *_quantised("w", _weights(1, 4, 3, 3, 3), weights),
        node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        node("DequantizeLinear", ["xq", "s", "z"], ["xf"]),
        node("Conv", ["xf", "w_f"], ["c"]),
        node("Relu", ["c"], ["r"]),
        node("QuantizeLinear", ["r", "s", "z"], ["rq"]),
        node("DequantizeLinear", ["rq", "s", "z"], ["rf"]),
        node("GlobalAveragePool", ["rf"], ["y"]),
    ]
    return Sample(
        model_of(nodes, [info("x", ["n", 3, 8, 8])], [info("y", ["n", 4, 1, 1])], weights),
        {"x": (1, 3, 8, 8)},
    )


def int8_qoperator() -> Sample:
    """Integer operators, one of them onnxruntime's own."""
    weights = {"s": np.float32(0.03), "z": np.uint8(128), "ws": np.float32(0.02), "wz": np.int8(0),
               "w": np.random.default_rng(2).integers(-100, 100, (4, 3, 3, 3)).astype(np.int8)}  # fmt: skip
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("QLinearConv", ["q", "s", "z", "w", "ws", "wz", "s", "z"], ["c"]),
        node("QLinearAdd", ["c", "s", "z", "c", "s", "z", "s", "z"], ["a"], domain="com.microsoft"),
        node("MaxPool", ["a"], ["p"], kernel_shape=[2, 2]),
        node("DequantizeLinear", ["p", "s", "z"], ["y"]),
    ]
    model = model_of(nodes, [info("x", [1, 3, 8, 8])], [info("y", [1, 4, "h", "w"])], weights,
                     extra_domains=["com.microsoft"])  # fmt: skip
    return Sample(model, opaque=("custom operator: com.microsoft.QLinearAdd",))


def int8_dynamic() -> Sample:
    """Quantised while running, as language models are."""
    weights = {"w": np.random.default_rng(3).integers(-100, 100, (16, 8)).astype(np.int8), "wz": np.int8(0)}
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        node("MatMulInteger", ["q", "w", "z", "wz"], ["i"]),
        node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        node("Mul", ["f", "s"], ["m"]),
        node("Softmax", ["m"], ["y"]),
    ]
    return Sample(
        model_of(nodes, [info("x", ["b", "t", 16])], [info("y", ["b", "t", 8])], weights), {"x": (1, 5, 16)}
    )


def float16() -> Sample:
    """Weights and activations of 16 bits."""
    weights = {"w": _weights(4, 4, 3, 3, 3, dtype=np.float16), "m": _weights(5, 36, 5, dtype=np.float16)}
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Relu", ["c"], ["r"]),
        node("Shape", ["r"], ["s"]),
        node("Slice", ["s", "from", "to"], ["head"]),
        node("Concat", ["head", "last"], ["target"], axis=0),
        node("Reshape", ["r", "target"], ["f"]),
        node("MatMul", ["f", "m"], ["l"]),
        node("Softmax", ["l"], ["y"]),
    ]
    weights.update({"from": np.array([0]), "to": np.array([2]), "last": np.array([36])})
    return Sample(
        model_of(nodes, [info("x", ["n", 3, 8, 8], HALF)], [info("y", ["n", 4, 5], HALF)], weights),
        {"x": (1, 3, 8, 8)},
    )


def float64() -> Sample:
    """Twice the precision."""
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Tanh", ["m"], ["y"])]
    inputs, outputs = [info("x", ["n", 6], DOUBLE)], [info("y", ["n", 3], DOUBLE)]
    return Sample(model_of(nodes, inputs, outputs, {"w": _weights(6, 6, 3, dtype=np.float64)}), {"x": (2, 6)})


def states() -> Sample:
    """A recurrent network that takes its states and returns them, beside an input that it only hands on."""
    weights = {"w": _weights(7, 1, 16, 3), "r": _weights(8, 1, 16, 4)}
    nodes = [
        node("LSTM", ["x", "w", "r", "", "", "h", "c"], ["seq", "hn", "cn"], hidden_size=4),
        node("Squeeze", ["seq", "one"], ["y"]),
    ]
    inputs = [info("x", ["t", 1, 3]), *(info(n, [1, "b", 4]) for n in ("h", "c")), info("clock", [], INT64)]
    outputs = [
        info("y", None),
        info("hn", [1, "b", 4]),
        info("cn", ["?", "?", "?"]),
        info("clock", [], INT64),
    ]
    return Sample(
        model_of(nodes, inputs, outputs, {**weights, "one": np.array([1])}),
        {"x": (5, 1, 3), "h": (1, 1, 4), "c": (1, 1, 4)},
    )


def no_past_yet() -> Sample:
    """A decoder's first step: the past that it is given has no element."""
    nodes = [node("Concat", ["past", "x"], ["present"], axis=1), node("MatMul", ["present", "w"], ["y"])]
    inputs = [info("past", ["b", "p", 4]), info("x", ["b", "t", 4])]
    outputs = [info("present", ["b", "p + t", 4]), info("y", ["b", "p + t", 2])]
    return Sample(
        model_of(nodes, inputs, outputs, {"w": _weights(9, 4, 2)}), {"past": (1, 0, 4), "x": (1, 3, 4)}
    )


def _graph(nodes: Sequence[onnx.NodeProto], name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    return helper.make_graph(list(nodes), name, list(inputs), list(outputs))


def branches() -> Sample:
    """An If that the input decides; its branches read outer values, and tell no shape."""
    then, other = (
        _graph([node(kind, ["r"], [f"{kind}_o"])], kind, [], [info(f"{kind}_o", None)])
        for kind in ("Neg", "Exp")
    )
    nodes = [
        node("Relu", ["x"], ["r"]),
        node("If", ["flag"], ["i"], then_branch=then, else_branch=other),
        node("MatMul", ["i", "w"], ["y"]),
    ]
    inputs = [info("x", ["n", 4]), info("flag", [], BOOL)]
    return Sample(
        model_of(nodes, inputs, [info("y", ["n", 2])], {"w": _weights(10, 4, 2)}),
        {"x": (1, 4)},
        opaque=("control flow: If",),
    )


def branch_that_never_runs() -> Sample:
    """With the pinned sizes one branch contradicts itself, which onnxruntime says when it loads the file."""
    inner_then = _graph([node("Identity", ["x3"], ["a"])], "keep", [], [info("a", None)])
    inner_else = _graph([node("Squeeze", ["x3", "axes"], ["b"])], "drop", [], [info("b", None)])
    slow = [
        node("Unsqueeze", ["x", "axes"], ["x3"]),
        node("Shape", ["x3"], ["s"]),
        node("Gather", ["s", "two"], ["last"]),
        node("Equal", ["last", "other_rate"], ["fits"]),
        node("If", ["fits"], ["p"], then_branch=inner_then, else_branch=inner_else),
        node("LSTM", ["p", "w", "r"], ["slow_s"], hidden_size=2),
        node("ReduceMean", ["slow_s"], ["slow_o"], keepdims=0),
    ]
    fast = [node("ReduceMean", ["x"], ["fast_o"], keepdims=0)]
    nodes = [
        node("Equal", ["rate", "known_rate"], ["is_fast"]),
        node(
            "If",
            ["is_fast"],
            ["m"],
            then_branch=_graph(fast, "fast", [], [info("fast_o", None)]),
            else_branch=_graph(slow, "slow", [], [info("slow_o", None)]),
        ),
        node("Mul", ["x", "m"], ["y"]),
    ]
    weights = {"known_rate": np.array(16000), "other_rate": np.array(7), "axes": np.array([0]),
               "two": np.array(2), "w": _weights(11, 1, 8, 7), "r": _weights(12, 1, 8, 2)}  # fmt: skip
    return Sample(
        model_of(nodes, [info("x", ["b", "n"]), info("rate", [], INT64)], [info("y", ["b", "n"])], weights),
        {"x": (1, 16)},
        opaque=("control flow: If",),
        ranges={"rate": (16000, 16000)},
    )


def loop() -> Sample:
    """A traced loop of three rounds that collects a row each time."""
    body = _graph(
        [
            node("Identity", ["c"], ["co"]),
            node("MatMul", ["a", "w"], ["ao"]),
            node("Tanh", ["ao"], ["row"]),
        ],
        "body",
        [info("i", [], INT64), info("c", [], BOOL), info("a", None)],
        [info("co", [], BOOL), info("ao", None), info("row", None)],
    )
    nodes = [node("Loop", ["n", "t", "x"], ["last", "rows"], body=body), node("Softmax", ["rows"], ["y"])]
    weights = {"n": np.array(3), "t": np.array(True), "w": _weights(13, 4, 4)}
    return Sample(
        model_of(nodes, [info("x", ["b", 4])], [info("y", None), info("last", ["b", 4])], weights),
        {"x": (1, 4)},
        opaque=("control flow: Loop",),
    )


def scan() -> Sample:
    """A running sum, and what is computed from it."""
    body = _graph(
        [node("Add", ["sum", "e"], ["next"]), node("Identity", ["next"], ["out"])],
        "body",
        [info("sum", [3]), info("e", [3])],
        [info("next", [3]), info("out", [3])],
    )
    nodes = [
        node("Scan", ["zero", "x"], ["total", "sums"], body=body, num_scan_inputs=1),
        node("Sigmoid", ["sums"], ["y"]),
    ]
    return Sample(
        model_of(nodes, [info("x", ["t", 3])], [info("y", ["t", 3]), info("total", [3])],
                 {"zero": np.zeros(3, np.float32)}),
        {"x": (6, 3)},
        opaque=("control flow: Scan",),
    )  # fmt: skip


def contrib() -> Sample:
    """onnxruntime's operators; behind one of them a shape is measured and used."""
    nodes = [
        node("FastGelu", ["x"], ["g"], domain="com.microsoft"),
        node("Shape", ["g"], ["s"]),
        node("Slice", ["s", "zero", "one"], ["head"]),
        node("Concat", ["head", "rest"], ["target"], axis=0),
        node("Reshape", ["g", "target"], ["f"]),
        node("MatMul", ["f", "w"], ["y"]),
    ]
    weights = {"zero": np.array([0]), "one": np.array([1]), "rest": np.array([-1]), "w": _weights(14, 8, 3)}
    model = model_of(nodes, [info("x", ["n", 2, 4])], [info("y", ["n", 3])], weights,
                     extra_domains=["com.microsoft"])  # fmt: skip
    return Sample(model, {"x": (1, 2, 4)}, opaque=("custom operator: com.microsoft.FastGelu",))


def functions() -> Sample:
    """Functions that call functions, as the dynamo exporter writes them."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("pkg.torch", 1)]
    inner = helper.make_function(
        "pkg.torch", "gelu", ["a"], ["b"],
        [node("Sigmoid", ["a"], ["s"]), node("Mul", ["a", "s"], ["b"])], opsets,
    )  # fmt: skip
    outer = helper.make_function(
        "pkg.torch", "linear", ["a", "k"], ["b"],
        [node("MatMul", ["a", "k"], ["m"]), node("gelu", ["m"], ["b"], domain="pkg.torch")], opsets,
    )  # fmt: skip
    nodes = [
        node("linear", ["x", "w"], ["l"], domain="pkg.torch"),
        node("Softmax", ["l"], ["y"]),
    ]
    model = model_of(nodes, [info("x", ["n", 6])], [info("y", ["n", 3])], {"w": _weights(15, 6, 3)},
                     opset=18, extra_domains=["pkg.torch"])  # fmt: skip
    model.functions.extend([inner, outer])
    return Sample(model, {"x": (1, 6)})


def trees() -> Sample:
    """A regressor of ai.onnx.ml, of which no inference knows the output's shape, behind a scaler."""
    nodes = [
        node("Scaler", ["X"], ["s"], domain="ai.onnx.ml", offset=[0.1] * 3, scale=[2.0] * 3),
        node(
            "TreeEnsembleRegressor", ["s"], ["variable"], domain="ai.onnx.ml", n_targets=1,
            nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2], nodes_featureids=[1, 0, 0],
            nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_values=[0.0, 0.0, 0.0],
            nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0],
            target_treeids=[0, 0], target_nodeids=[1, 2], target_ids=[0, 0], target_weights=[-1.5, 2.5],
        ),
    ]  # fmt: skip
    model = model_of(nodes, [info("X", [None, 3])], [info("variable", [None, 1])])
    model.opset_import.add(domain="ai.onnx.ml", version=3)
    return Sample(model, {"X": (4, 3)})


def sequences() -> Sample:
    """Split into a sequence, one taken from it."""
    nodes = [
        node("Relu", ["x"], ["r"]),
        node("SplitToSequence", ["r"], ["parts"], axis=1, keepdims=1),
        node("SequenceAt", ["parts", "one"], ["p"]),
        node("Softmax", ["p"], ["y"], axis=0),
    ]
    return Sample(
        model_of(nodes, [info("x", ["n", 3])], [info("y", ["n", 1])], {"one": np.array(1)}),
        {"x": (4, 3)},
        opaque=("sequence values cannot be cut",),
    )


def strings() -> Sample:
    """Class numbers become words and numbers again."""
    nodes = [
        node("ArgMax", ["x"], ["i"], axis=1, keepdims=0),
        node("LabelEncoder", ["i"], ["word"], domain="ai.onnx.ml", keys_int64s=[0, 1, 2],
             values_strings=["a", "b", "c"]),
        node("LabelEncoder", ["word"], ["number"], domain="ai.onnx.ml", keys_strings=["a", "b", "c"],
             values_floats=[0.5, 1.5, -3.0]),
        node("Mul", ["number", "x0"], ["y"]),
    ]  # fmt: skip
    model = model_of(nodes, [info("x", ["n", 3]), info("x0", ["n"])], [info("y", ["n"])])
    model.opset_import.add(domain="ai.onnx.ml", version=3)
    return Sample(model, {"x": (5, 3), "x0": (5,)}, opaque=("string tensors cannot be cut",))


def ids_and_masks() -> Sample:
    """Token ids, a mask of integers, a flag, and an input that nothing reads."""
    nodes = [
        node("Gather", ["table", "input_ids"], ["e"]),
        node("Cast", ["attention_mask"], ["m"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["m", "last"], ["m1"]),
        node("Mul", ["e", "m1"], ["masked"]),
        node("Where", ["flag", "masked", "e"], ["chosen"]),
        node("ReduceMean", ["chosen"], ["pooled"], axes=[1], keepdims=0),
        node("MatMul", ["pooled", "w"], ["y"]),
    ]
    weights = {"table": _weights(16, 7, 8), "last": np.array([-1]), "w": _weights(17, 8, 3)}
    inputs = [
        *(info(n, ["b", "s"], INT64) for n in ("input_ids", "attention_mask", "token_type_ids")),
        info("flag", [], BOOL),
    ]
    shape = (1, 6)
    return Sample(
        model_of(nodes, inputs, [info("y", ["b", 3])], weights),
        {"input_ids": shape, "attention_mask": shape, "token_type_ids": shape},
        ranges={"input_ids": (0, 6), "flag": (1, 1)},
    )


def optional_inputs_left_out() -> Sample:
    """Empty names in the middle of inputs, and outputs that nobody names."""
    nodes = [
        node("Clip", ["x", "", "top"], ["c"]),
        node("Resize", ["c", "", "", "sizes"], ["z"], mode="nearest"),
        node("Squeeze", ["z", "first"], ["q"]),
        node("LSTM", ["q", "w", "r"], ["", "", "y"], hidden_size=2),
    ]
    weights = {"top": np.float32(1), "sizes": np.array([1, 2, 6, 6]), "first": np.array([0]),
               "w": _weights(24, 1, 8, 6), "r": _weights(25, 1, 8, 2)}  # fmt: skip
    return Sample(model_of(nodes, [info("x", [1, 2, 3, 3])], [info("y", None)], weights))


def odd_outputs() -> Sample:
    """An output that is a weight, one that is computed without inputs, and one that is listed twice."""
    nodes = [
        node("Relu", ["x"], ["y"]),
        node("Add", ["anchors", "anchors"], ["double"]),
        node("Mul", ["y", "double"], ["z"]),
    ]
    outputs = [info("z", ["n", 3]), info("anchors", [3]), info("double", [3]), info("z", ["n", 3])]
    return Sample(
        model_of(nodes, [info("x", ["n", 3])], outputs, {"anchors": _weights(18, 3)}), {"x": (2, 3)}
    )


def odd_names() -> Sample:
    """Colons, slashes, spaces, equals signs, commas, and letters of other scripts."""
    x, y, z = "serving_default_x:0", "scope/a b=c,d", "выход;0"
    nodes = [node("Relu", [x], [y]), node("Exp", [y], [z])]
    return Sample(
        model_of(nodes, [info(x, ["unk__1", 4])], [info(z, ["unk__2", 4]), info(y, None)]), {x: (1, 4)}
    )


def sized_by_content() -> Sample:
    """How many values are positive is known only while running; what is made of them has a fixed shape."""
    nodes = [
        node("Relu", ["x"], ["r"]),
        node("NonZero", ["r"], ["where"]),
        node("Transpose", ["where"], ["pairs"]),
        node("GatherND", ["r", "pairs"], ["found"]),
        node("ReduceSum", ["found"], ["total"], keepdims=0),
        node("Mul", ["r", "total"], ["y"]),
    ]
    why = "its shape is known only while running"
    return Sample(model_of(nodes, [info("x", ["n", 4])], [info("y", ["n", 4])]), {"x": (3, 4)}, joined=(why,))


def short_time_fourier() -> Sample:
    """onnx infers all frequencies for STFT, a run gives the half of them that a real signal has."""
    nodes = [node("STFT", ["x", "step", "window"], ["f"]), node("ReduceSumSquare", ["f", "last"], ["y"])]
    weights = {"step": np.array(4), "window": np.hanning(8).astype(np.float32), "last": np.array([-1])}
    return Sample(
        model_of(nodes, [info("x", ["b", "n"])], [info("y", None)], weights, opset=18), {"x": (1, 32)}
    )


def old_file() -> Sample:
    """IR version 3, opset 4: weights are inputs too, the target of a Reshape is an attribute."""
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Reshape", ["c"], ["f"], shape=[1, 16]),
        node("Softmax", ["f"], ["y"]),
    ]
    inputs = [info("x", [1, 3, 4, 4]), info("w", [4, 3, 3, 3])]
    model = model_of(nodes, inputs, [info("y", [1, 16])], {"w": _weights(19, 4, 3, 3, 3)}, opset=4)
    model.ir_version = 3
    return Sample(model)


def unsorted_file() -> Sample:
    """Readers before makers, a graph without a name: onnxruntime does not mind."""
    nodes = [
        node("Softmax", ["b"], ["y"]),
        node("MatMul", ["a", "w"], ["b"]),
        node("MaxPool", ["x"], ["a"], kernel_shape=[1]),
    ]
    model = model_of(nodes, [info("x", ["n", 2, 4])], [info("y", None)], {"w": _weights(23, 4, 3)})
    model.graph.name = ""
    return Sample(model, {"x": (1, 2, 4)})


def new_file() -> Sample:
    """The IR version and the opset that today's onnx writes by itself."""
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Gelu", ["m"], ["y"])]
    model = model_of(nodes, [info("x", ["n", 6])], [info("y", ["n", 3])], {"w": _weights(21, 6, 3)}, opset=23)
    model.ir_version = onnx.IR_VERSION
    return Sample(model, {"x": (1, 6)})


def dead_nodes() -> Sample:
    """Most of the file is for nobody."""
    dead = [node("Sin", ["x" if i == 0 else f"d{i - 1}"], [f"d{i}"]) for i in range(200)]
    nodes = [*dead, node("Relu", ["x"], ["y"])]
    return Sample(
        model_of(nodes, [info("x", ["n", 3])], [info("y", ["n", 3])], extra_domains=["acme"]), {"x": (2, 3)}
    )


def constants_as_nodes() -> Sample:
    """Weights in Constant nodes of every form."""
    nodes = [
        node("Constant", [], ["w"], value=numpy_helper.from_array(_weights(22, 4, 3))),
        node("Constant", [], ["half"], value_float=0.5),
        node("Constant", [], ["target"], value_ints=[-1, 3]),
        node("MatMul", ["x", "w"], ["m"]),
        node("Add", ["m", "half"], ["a"]),
        node("Reshape", ["a", "target"], ["y"]),
    ]
    return Sample(model_of(nodes, [info("x", ["n", 4])], [info("y", ["?", 3])]), {"x": (2, 4)})


def standard_operators_by_their_long_name() -> Sample:
    """The imports say "ai.onnx" where the nodes say nothing."""
    nodes = [node("Relu", ["x"], ["r"]), node("MatMul", ["r", "w"], ["y"])]
    made = model_of(nodes, [info("x", [1, 4])], [info("y", [1, 3])], {"w": _weights(0, 4, 3)})
    made.opset_import[0].domain = "ai.onnx"
    return Sample(made)


CLASSES: dict[str, Callable[[], Sample]] = {
    make.__name__: make
    for make in (
        dynamic_axes, inputs_of_every_rank, int8_qdq, int8_qoperator, int8_dynamic, float16, float64, states,
        no_past_yet, branches, branch_that_never_runs, loop, scan, contrib, functions, trees, sequences,
        strings, ids_and_masks, optional_inputs_left_out, odd_outputs, odd_names, sized_by_content,
        short_time_fourier, old_file, new_file, unsorted_file, dead_nodes, constants_as_nodes,
        standard_operators_by_their_long_name,
    )
}  # fmt: skip

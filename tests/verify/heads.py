"""Small nets whose final operator hides what it reads, in float32, float16 and quantised to int8."""

import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from stageloom.shared.artifact import Artifact
from tests.scratch import scratch
from tests.verify.models import image, imported_model, make_model, tensor

SATURATED = ("sigmoid", "softmax", "joined", "argmax")
"""Final operators: a Sigmoid at 1e-8, a Softmax at one-hot, scores beside large boxes, an index."""

ROUNDED = ("float16", "int8", "int8 sigmoid")

SIDE, CHANNELS = 16, 8
_STEEP = 60.0  # standard deviations that the head's input is stretched by


@cache
def head_artifact(kind: str) -> Artifact:
    """One of `SATURATED` or `ROUNDED`, or `linear` without such an operator, as an artifact."""
    folder = scratch()
    if kind == "float16":
        return imported_model(_half(net("softmax", stretch=1.0)), folder)
    if kind.startswith("int8"):
        return imported_model(
            _quantised(net("sigmoid", stretch=1.0) if "sigmoid" in kind else net("linear"), folder), folder
        )
    return imported_model(net(kind), folder)


def net(head: str, *, stretch: float = _STEEP, seed: int = 7) -> onnx.ModelProto:
    """Two branches of equal shape between two convolutions, then a classifier and the head."""
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    nodes: list[onnx.NodeProto] = []

    def conv(name: str, reads: str, channels: int, *, relu: bool = True, gain: float = 1.0) -> str:
        drawn = rng.standard_normal((CHANNELS if channels else 1, channels or CHANNELS, 3, 3))
        weights[f"{name}.w"] = (drawn * gain / np.sqrt(9 * (channels or CHANNELS))).astype(np.float32)
        made = f"{name}.c" if relu else name
        conv = helper.make_node(
            "Conv", [reads, f"{name}.w"], [made], name=name, kernel_shape=[3, 3], pads=[1] * 4
        )
        nodes.append(conv)
        if relu:
            nodes.append(helper.make_node("Relu", [made], [name]))
        return name

    stem = conv("stem", "x", 3)
    left, right = conv("left", stem, CHANNELS), conv("right", stem, CHANNELS)
    nodes.append(helper.make_node("Sub", [left, right], ["apart"]))
    body = conv("body", "apart", CHANNELS)
    conv("map", body, 0, relu=False, gain=stretch if head != "linear" else 1.0)  # [1, 1, SIDE, SIDE]
    kind: int = TensorProto.FLOAT
    shape: tuple[int, ...] = (1, 1, SIDE, SIDE)
    if head == "linear":
        nodes.append(helper.make_node("Identity", ["map"], ["y"]))
    elif head == "sigmoid":
        weights["low"] = _low(rng, stretch)
        nodes.append(helper.make_node("Add", ["map", "low"], ["z"]))
        nodes.append(helper.make_node("Sigmoid", ["z"], ["y"]))
    elif head == "joined":
        weights["low"] = _low(rng, stretch)
        weights["large"] = np.full((1, 1, 1, 1), 1e6, np.float32)
        nodes.append(helper.make_node("Mul", ["body", "large"], ["boxes"]))
        nodes.append(helper.make_node("Add", ["map", "low"], ["z"]))
        nodes.append(helper.make_node("Sigmoid", ["z"], ["scores"]))
        nodes.append(helper.make_node("Concat", ["boxes", "scores"], ["y"], axis=1))
        shape = (1, CHANNELS + 1, SIDE, SIDE)
    else:
        weights["flat"] = np.array([1, SIDE * SIDE], np.int64)
        nodes.append(helper.make_node("Reshape", ["map", "flat"], ["z"]))
        shape = (1, SIDE * SIDE)
        if head == "softmax":
            nodes.append(helper.make_node("Softmax", ["z"], ["y"], axis=-1))
        else:
            nodes.append(helper.make_node("ArgMax", ["z"], ["y"], axis=-1, keepdims=0))
            kind, shape = TensorProto.INT64, (1,)
    return make_model(nodes, [image("x", 1, 3, SIDE, SIDE)], [tensor("y", kind, *shape)], weights)


def _low(rng: np.random.Generator, stretch: float) -> np.ndarray:
    """An offset that keeps a Sigmoid near zero; it varies, or it would be folded into the convolution."""
    return (-40.0 * stretch + rng.standard_normal((1, 1, SIDE, SIDE))).astype(np.float32)


def _half(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same net in half precision."""
    for weight in model.graph.initializer:
        if weight.data_type == TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(weight).astype(np.float16)
            weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.checker.check_model(model)
    return model


def _quantised(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The same net as onnxruntime quantises it: int8 weights and activations between QuantizeLinear pairs."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Inputs(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = self._draw()

        @staticmethod
        def _draw() -> "Iterator[dict[str, np.ndarray]]":
            rng = np.random.default_rng(3)
            for _ in range(4):
                yield {"x": rng.standard_normal((1, 3, SIDE, SIDE), dtype=np.float32)}

        def get_next(self) -> "dict[str, np.ndarray] | None":
            return next(self._left, None)

    source, target = folder / "float.onnx", folder / "int8.onnx"
    onnx.save(model, source)
    logging.disable(logging.WARNING)  # it recommends to preprocess
    try:
        quantize_static(source, target, Inputs(), weight_type=QuantType.QInt8, per_channel=True)
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load(target)

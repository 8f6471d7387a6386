"""What the importer says of a convolution: pads as they come out, activations, and what is none."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from stageloom.shared.convolution import Convolution
from stageloom.shared.importer.attributes import convolution_of
from stageloom.shared.importer.values import infer_values
from tests.importer.models import info, model_of

W = np.ones((4, 3, 3, 3), np.float32)
SCALAR, PER_CHANNEL = np.full((1,), 6.0, np.float32), np.ones((4, 1, 1), np.float32)


def described(
    nodes: Sequence[onnx.NodeProto], weights: Mapping[str, Any] | None = None, side: int = 8
) -> Convolution | None:
    """The importer's view of nodes that begin with a convolution of `x` by `w`."""
    named = {"w": W, "scalar": SCALAR, "channels": PER_CHANNEL, **(weights or {})}
    output = nodes[-1].output[0]
    model = model_of(nodes, [info("x", [1, 3, side, side])], [info(output, None)], named)
    tensors = {weight.name: weight for weight in model.graph.initializer}
    return convolution_of(model.graph.node, output, infer_values(model), tensors)


def conv(**attributes: Any) -> onnx.NodeProto:
    return helper.make_node("Conv", ["x", "w"], ["c"], **attributes)


def then(kind: str, *more: str, made: str = "y", read: str = "c", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, [read, *more], [made], **attributes)


def test_defaults_are_filled_in() -> None:
    assert described([conv()]) == Convolution((3, 3), (1, 1), (1, 1), (0, 0, 0, 0))
    found = described([conv(strides=[2, 1], dilations=[1, 2], pads=[1, 2, 0, 2])])
    assert found == Convolution((3, 3), (2, 1), (1, 2), (1, 2, 0, 2))


@pytest.mark.parametrize("automatic", ["VALID", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(("side", "stride", "dilation"), [(8, 1, 1), (8, 2, 1), (7, 2, 1), (9, 3, 1)])
def test_automatic_pads_come_to_what_onnxruntime_pads(
    automatic: str, side: int, stride: int, dilation: int
) -> None:
    """The convolution with the pads as resolved gives what the one without gives."""
    import onnxruntime

    given = {"strides": [stride] * 2, "dilations": [dilation] * 2}
    found = described([conv(auto_pad=automatic, **given)], side=side)
    assert found is not None
    rng = np.random.default_rng(side + stride)
    weight = rng.standard_normal(W.shape).astype(np.float32)
    image = rng.standard_normal((1, 3, side, side)).astype(np.float32)

    def run(node: onnx.NodeProto) -> np.ndarray:
        model = model_of([node], [info("x", [1, 3, side, side])], [info("c", None)], {"w": weight})
        session = onnxruntime.InferenceSession(model.SerializeToString())
        return np.asarray(session.run(None, {"x": image})[0])

    assert np.array_equal(run(conv(auto_pad=automatic, **given)), run(conv(pads=found.pads, **given)))


TAILS: dict[str, tuple[list[onnx.NodeProto], str]] = {
    "relu": ([then("Relu")], "Relu(#0)"),
    "clip": ([then("Clip", "", "scalar")], "Clip(#0,,float32:0000c040)"),
    "attributes": ([then("LeakyRelu", alpha=0.5)], "LeakyRelu(#0,alpha=0.5)"),
    "silu": (
        [then("Sigmoid", made="s"), then("Mul", "s")],
        "Sigmoid(#0);Mul(#0,#1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAILS)
def test_the_activation_is_text_that_tells_one_from_another(name: str) -> None:
    tail, text = TAILS[name]
    found = described([conv(), *tail])
    assert found is not None and found.activation == text


NONE: dict[str, list[onnx.NodeProto]] = {
    "a constant per channel": [conv(), then("Mul", "channels")],
    "a learned slope": [conv(), then("PRelu", "slope")],
    "another shape": [conv(), then("Flatten")],
    "another input": [conv(), then("Add", "z")],
    "no convolution": [then("MaxPool", read="x", made="c", kernel_shape=[1, 1])],
    "weights by the kernel": [helper.make_node("Conv", ["x", "v"], ["c"])],
    "an early output": [conv(), then("Relu", made="r"), then("Sigmoid", made="y", read="r")],
    "no end": [conv(), *[then("Relu", made=f"r{i + 1}", read=f"r{i}" if i else "c") for i in range(40)]],
}


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_plain_convolution_is_not_described(name: str) -> None:
    nodes = NONE[name]
    inputs = [info("x", [1, 3, 8, 8]), info("z", [1, 4, 6, 6]), info("v", [4, 3, 3, 3])]
    weights = {"w": W, "channels": PER_CHANNEL, "slope": SCALAR}
    model = model_of(nodes, inputs, [info(nodes[-1].output[0], None)], weights)
    tensors = {weight.name: weight for weight in model.graph.initializer}
    output = "r" if name == "an early output" else nodes[-1].output[0]
    assert convolution_of(model.graph.node, output, infer_values(model), tensors) is None


def test_a_grouped_convolution_is_not_described() -> None:
    grouped = {"w": np.ones((3, 1, 3, 3), np.float32)}
    assert described([conv(group=3)], grouped) is None
    assert described([conv(group=1)], {"w": np.ones((3, 3, 3, 3), np.float32)}) is not None

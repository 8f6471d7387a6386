"""Collects the nodes and seeded weights of one network and makes an ONNX model of them.

Weights are drawn per convolution with zero mean over the fan-in and the gain that keeps the variance before
a Relu at one (Brock et al. 2021, scaled weight standardisation). Without the zero mean the positive mean of
Relu outputs grows from layer to layer and the logits would hardly depend on the input.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
CLASSES = 1000
BLOCKS_KEY = "stageloom.blocks"

RELU_GAIN = math.sqrt(2.0 / (1.0 - 1.0 / math.pi))
"""1 / standard deviation of relu(z), z ~ N(0, 1)."""

_BIAS_SCALE = 0.1
_CHANNEL_STEP = 4
_DEPTHWISE_MEAN_REMOVED = 0.5


@dataclass
class Net:
    """Collects nodes and weights; every method returns the name of the tensor it makes."""

    name: str
    width: float
    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)
    channels: dict[str, int] = field(default_factory=dict)
    borders: list[list[str]] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    scope: str = "stem"
    side: int = 0  # of the image, pixels

    def scaled(self, channels: int) -> int:
        """`channels` times the width factor; unless that is 1, a multiple of 4 and at least 4."""
        if self.width == 1.0:
            return channels
        return max(_CHANNEL_STEP, round(channels * self.width / _CHANNEL_STEP) * _CHANNEL_STEP)

    def _node(self, op_type: str, inputs: Sequence[str], channels: int, **attributes: int | list[int]) -> str:
        name = f"{self.scope}.{op_type.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        self.channels[name] = channels
        return name

    def _weight(self, name: str, values: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def _kernel(self, owner: str, shape: tuple[int, ...], gain: float) -> list[str]:
        """Weight and bias of `owner`; `shape` leads with the output channels."""
        fan_in = math.prod(shape[1:])
        flat = self.rng.standard_normal((shape[0], fan_in), dtype=np.float32)
        flat -= flat.mean(axis=1, keepdims=True)
        bias = self.rng.standard_normal(shape[0], dtype=np.float32) * _BIAS_SCALE
        return [
            self._weight(f"{owner}.weight", (flat * (gain / math.sqrt(fan_in))).reshape(shape)),
            self._weight(f"{owner}.bias", bias),
        ]

    def conv(
        self,
        source: str,
        out_channels: int,
        kernel: int | tuple[int, int] = 1,
        *,
        stride: int = 1,
        pad: int | tuple[int, int] = 0,
        relu: bool = True,
        gain: float = RELU_GAIN,
        scale: bool = True,
    ) -> str:
        """Convolution with bias, by default with its Relu; `scale=False` leaves the channels as they are."""
        rows, columns = (kernel, kernel) if isinstance(kernel, int) else kernel
        pad_y, pad_x = (pad, pad) if isinstance(pad, int) else pad
        out = self.scaled(out_channels) if scale else out_channels
        owner = f"{self.scope}.conv{len(self.nodes)}"
        made = self._node(
            "Conv",
            [source, *self._kernel(owner, (out, self.channels[source], rows, columns), gain)],
            out,
            kernel_shape=[rows, columns],
            strides=[stride, stride],
            pads=[pad_y, pad_x, pad_y, pad_x],
        )
        return self.relu(made) if relu else made

    def separable(
        self,
        source: str,
        out_channels: int,
        kernel: int,
        *,
        stride: int = 1,
        pads: Sequence[int] | None = None,
        gain: float = RELU_GAIN,
    ) -> str:
        """Depthwise convolution without bias, then a pointwise one; `out_channels` are taken as they are.

        `pads` are top, left, bottom, right; by default those that keep the side. The depthwise kernels keep
        most of their mean: they see one channel only, whose neighbouring pixels are much alike, and without
        the mean they would let through nothing but the edges.
        """
        channels = self.channels[source]
        taps = self.rng.standard_normal((channels, 1, kernel, kernel), dtype=np.float32)
        taps -= _DEPTHWISE_MEAN_REMOVED * taps.mean(axis=(2, 3), keepdims=True)
        taps /= np.linalg.norm(taps, axis=(2, 3), keepdims=True)
        owner = f"{self.scope}.conv{len(self.nodes)}"
        deep = self._node(
            "Conv",
            [source, self._weight(f"{owner}.weight", taps * gain)],
            channels,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=list(pads or [kernel // 2] * 4),
            group=channels,
        )
        return self.conv(deep, out_channels, relu=False, gain=1.0, scale=False)

    def relu(self, source: str) -> str:
        return self._node("Relu", [source], self.channels[source])

    def add(self, left: str, right: str) -> str:
        return self._node("Add", [left, right], self.channels[left])

    def mean(self, *sources: str) -> str:
        return self._node("Mean", sources, self.channels[sources[0]])

    def weighted_sum(self, *sources: str) -> str:
        """Positive seeded weights whose squares sum to one: the variance stays. One source is itself."""
        if len(sources) == 1:
            return sources[0]
        weights = 1.0 / (1.0 + np.exp(-self.rng.standard_normal(len(sources))))  # sigmoid, as in RandWire
        weights /= np.linalg.norm(weights)
        scaled = []
        for source, weight in zip(sources, weights, strict=True):
            factor = self._weight(f"{self.scope}.mul{len(self.nodes)}.weight", np.array(weight))
            scaled.append(self._node("Mul", [source, factor], self.channels[source]))
        return self._node("Sum", scaled, self.channels[sources[0]])

    def shift(self, source: str) -> str:
        """One pixel up and to the left; zeros come in."""
        name = f"{self.scope}.pad{len(self.nodes)}.pads"
        self.weights.append(numpy_helper.from_array(np.array([0, 0, -1, -1, 0, 0, 1, 1]), name))
        return self._node("Pad", [source, name], self.channels[source])

    def concat(self, *sources: str) -> str:
        return self._node("Concat", sources, sum(self.channels[s] for s in sources), axis=1)

    def _pool(
        self, op_type: str, source: str, kernel: int, stride: int, pads: Sequence[int], **attributes: int
    ) -> str:
        """`pads` are top, left, bottom, right."""
        sizes = {"kernel_shape": [kernel, kernel], "strides": [stride, stride], "pads": list(pads)}
        return self._node(op_type, [source], self.channels[source], **sizes, **attributes)

    def max_pool(
        self,
        source: str,
        kernel: int,
        stride: int,
        *,
        pad: int = 0,
        pads: Sequence[int] | None = None,
        ceil: bool = False,
    ) -> str:
        return self._pool("MaxPool", source, kernel, stride, pads or [pad] * 4, ceil_mode=int(ceil))

    def average_pool(
        self,
        source: str,
        kernel: int = 3,
        stride: int = 1,
        *,
        pads: Sequence[int] | None = None,
        count_pads: bool = True,
    ) -> str:
        """By default with the pads that keep the side at stride 1."""
        chosen = pads or [kernel // 2] * 4
        return self._pool("AveragePool", source, kernel, stride, chosen, count_include_pad=int(count_pads))

    def global_pool(self, source: str) -> str:
        return self._node("GlobalAveragePool", [source], self.channels[source])

    def flatten(self, source: str) -> str:
        return self._node("Flatten", [source], self.channels[source], axis=1)

    def classifier(self, pooled: str) -> str:
        """Flatten and a fully connected layer; the papers do not count it."""
        self.body = [pooled]
        self.scope = "classifier"
        flat = self.flatten(pooled)
        owner = f"classifier.gemm{len(self.nodes)}"
        weights = self._kernel(owner, (CLASSES, self.channels[flat]), RELU_GAIN)
        return self._node("Gemm", [flat, *weights], CLASSES, transB=1)

    def border(self, *tensors: str) -> None:
        """A block of the papers ends here: what is needed for `tensors` lies before the border."""
        self.borders.append(list(tensors))

    def finish(self, logits: str) -> onnx.ModelProto:
        """The model, checked; its one output is renamed to `logits`."""
        for index, made in enumerate(self.nodes[-1].output):
            if made == logits:
                self.nodes[-1].output[index] = "logits"
        graph = helper.make_graph(
            self.nodes,
            self.name,
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, self.side, self.side])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, CLASSES])],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
        model.ir_version = IR_VERSION
        model.producer_name = "stageloom.zoo"
        entry = model.metadata_props.add()
        entry.key = BLOCKS_KEY
        entry.value = json.dumps({"version": 1, "borders": self.borders, "body": self.body})
        onnx.checker.check_model(model)
        return model

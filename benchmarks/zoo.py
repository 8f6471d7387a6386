"""Seeded ONNX files of the networks that the papers measure, made without any framework or download.

`python -m benchmarks.zoo OUT_DIR [--model NAME]... [--width 0.25] [--json]`

Architectures: Inception V3 (Szegedy et al. 2016), ResNet-50 (He et al. 2016, stride on the 3x3 convolution),
SqueezeNet 1.0 (Iandola et al. 2016) and GoogLeNet (Szegedy et al. 2015, 3x3 in place of the 5x5 branch) as
torchvision has them, ending in logits; `squeezenet_bypass` is the variant with complex bypass that IOS
(Ding et al. 2021) and TOP measure. BatchNorm is folded: every convolution carries a bias.

Weights are drawn per convolution with zero mean over the fan-in and the gain that keeps the variance before
a Relu at one (Brock et al. 2021, scaled weight standardisation). Without the zero mean the positive mean of
Relu outputs grows from layer to layer and the logits would hardly depend on the input.

Each file carries the borders of the papers' blocks as metadata `stageloom.blocks`; see
`shared.importer.borders` for the format.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
CLASSES = 1000
BLOCKS_KEY = "stageloom.blocks"

_RELU_GAIN = math.sqrt(2.0 / (1.0 - 1.0 / math.pi))  # 1 / standard deviation of relu(z), z ~ N(0, 1)
_RESIDUAL_GAIN = 0.5  # the residual branch adds a quarter of the variance, so 16 blocks do not explode
_BIAS_SCALE = 0.1
_CHANNEL_STEP = 4


@dataclass
class _Net:
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

    def scaled(self, channels: int) -> int:
        """`channels` times the width factor, a multiple of 4 and at least 4."""
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
        gain: float = _RELU_GAIN,
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

    def relu(self, source: str) -> str:
        return self._node("Relu", [source], self.channels[source])

    def add(self, left: str, right: str) -> str:
        return self._node("Add", [left, right], self.channels[left])

    def concat(self, *sources: str) -> str:
        return self._node("Concat", sources, sum(self.channels[s] for s in sources), axis=1)

    def max_pool(self, source: str, kernel: int, stride: int, *, pad: int = 0, ceil: bool = False) -> str:
        return self._node(
            "MaxPool",
            [source],
            self.channels[source],
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[pad] * 4,
            ceil_mode=int(ceil),
        )

    def average_pool(self, source: str, kernel: int = 3, *, pad: int = 1) -> str:
        return self._node(
            "AveragePool",
            [source],
            self.channels[source],
            kernel_shape=[kernel, kernel],
            strides=[1, 1],
            pads=[pad] * 4,
            count_include_pad=1,
        )

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
        weights = self._kernel(owner, (CLASSES, self.channels[flat]), _RELU_GAIN)
        return self._node("Gemm", [flat, *weights], CLASSES, transB=1)

    def border(self, *tensors: str) -> None:
        """A block of the papers ends here: what is needed for `tensors` lies before the border."""
        self.borders.append(list(tensors))

    def finish(self, logits: str, size: int) -> onnx.ModelProto:
        """The model, checked; its one output is renamed to `logits`."""
        for index, made in enumerate(self.nodes[-1].output):
            if made == logits:
                self.nodes[-1].output[index] = "logits"
        graph = helper.make_graph(
            self.nodes,
            self.name,
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, size, size])],
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


def _inception_a(net: _Net, x: str, pool_features: int) -> str:
    b1 = net.conv(x, 64)
    b5 = net.conv(net.conv(x, 48), 64, 5, pad=2)
    b3 = net.conv(net.conv(net.conv(x, 64), 96, 3, pad=1), 96, 3, pad=1)
    return net.concat(b1, b5, b3, net.conv(net.average_pool(x), pool_features))


def _inception_b(net: _Net, x: str) -> str:
    b3 = net.conv(x, 384, 3, stride=2)
    double = net.conv(net.conv(net.conv(x, 64), 96, 3, pad=1), 96, 3, stride=2)
    return net.concat(b3, double, net.max_pool(x, 3, 2))


def _inception_c(net: _Net, x: str, inner: int) -> str:
    b1 = net.conv(x, 192)
    b7 = net.conv(net.conv(x, inner), inner, (1, 7), pad=(0, 3))
    b7 = net.conv(b7, 192, (7, 1), pad=(3, 0))
    double = net.conv(net.conv(x, inner), inner, (7, 1), pad=(3, 0))
    double = net.conv(double, inner, (1, 7), pad=(0, 3))
    double = net.conv(double, inner, (7, 1), pad=(3, 0))
    double = net.conv(double, 192, (1, 7), pad=(0, 3))
    return net.concat(b1, b7, double, net.conv(net.average_pool(x), 192))


def _inception_d(net: _Net, x: str) -> str:
    b3 = net.conv(net.conv(x, 192), 320, 3, stride=2)
    b7 = net.conv(net.conv(x, 192), 192, (1, 7), pad=(0, 3))
    b7 = net.conv(net.conv(b7, 192, (7, 1), pad=(3, 0)), 192, 3, stride=2)
    return net.concat(b3, b7, net.max_pool(x, 3, 2))


def _inception_e(net: _Net, x: str) -> str:
    b1 = net.conv(x, 320)
    b3 = net.conv(x, 384)
    b3a, b3b = net.conv(b3, 384, (1, 3), pad=(0, 1)), net.conv(b3, 384, (3, 1), pad=(1, 0))
    double = net.conv(net.conv(x, 448), 384, 3, pad=1)
    da, db = net.conv(double, 384, (1, 3), pad=(0, 1)), net.conv(double, 384, (3, 1), pad=(1, 0))
    # One flat concat, as IOS has it; torchvision nests two, which the papers' count does not.
    return net.concat(b1, b3a, b3b, da, db, net.conv(net.average_pool(x), 192))


def _inception_v3(net: _Net, x: str) -> str:
    x = net.conv(net.conv(net.conv(x, 32, 3, stride=2), 32, 3), 64, 3, pad=1)
    x = net.conv(net.conv(net.max_pool(x, 3, 2), 80), 192, 3)
    x = net.max_pool(x, 3, 2)
    net.border(x)
    blocks: list[Callable[[str], str]] = [
        *(lambda y, p=p: _inception_a(net, y, p) for p in (32, 64, 64)),
        lambda y: _inception_b(net, y),
        *(lambda y, c=c: _inception_c(net, y, c) for c in (128, 160, 160, 192)),
        lambda y: _inception_d(net, y),
        lambda y: _inception_e(net, y),
        lambda y: _inception_e(net, y),
    ]
    for index, block in enumerate(blocks, start=1):
        net.scope = f"block{index}"
        x = block(x)
        net.border(x)
    net.scope = "head"
    return net.classifier(net.global_pool(x))


def _bottleneck(net: _Net, x: str, planes: int, stride: int, project: bool) -> str:
    skip = net.conv(x, 4 * planes, stride=stride, relu=False) if project else x
    inner = net.conv(net.conv(x, planes), planes, 3, stride=stride, pad=1)
    grown = net.conv(inner, 4 * planes, relu=False, gain=_RELU_GAIN * _RESIDUAL_GAIN)
    return net.relu(net.add(grown, skip))


def _resnet50(net: _Net, x: str) -> str:
    x = net.max_pool(net.conv(x, 64, 7, stride=2, pad=3), 3, 2, pad=1)
    for index, (planes, depth) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        net.border(x)
        for unit in range(depth):
            net.scope = f"layer{index + 1}.{unit}"
            x = _bottleneck(net, x, planes, 2 if index and not unit else 1, not unit)
    net.scope = "head"
    return net.classifier(net.global_pool(x))


def _fire(net: _Net, x: str, squeeze: int, expand: int) -> str:
    squeezed = net.conv(x, squeeze)
    return net.concat(net.conv(squeezed, expand), net.conv(squeezed, expand, 3, pad=1))


_FIRES = [(16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256)]
_POOL_AFTER_FIRE = {2, 6}


def _squeezenet(net: _Net, x: str) -> str:
    x = net.max_pool(net.conv(x, 96, 7, stride=2), 3, 2, ceil=True)
    for index, (squeeze, expand) in enumerate(_FIRES):
        net.border(x)
        net.scope = f"fire{index + 2}"
        x = _fire(net, x, squeeze, expand)
        if index in _POOL_AFTER_FIRE:
            net.border(x)
            x = net.max_pool(x, 3, 2, ceil=True)
    net.border(x)
    net.scope = "head"
    return net.flatten(net.global_pool(net.conv(x, CLASSES, scale=False)))


def _squeezenet_bypass(net: _Net, x: str) -> str:
    x = net.max_pool(net.conv(x, 96, 7, stride=2, pad=3), 3, 2)
    for index, (squeeze, expand) in enumerate(_FIRES):
        net.border(x)
        net.scope = f"fire{index + 2}"
        fire = _fire(net, x, squeeze, expand)
        same = net.channels[fire] == net.channels[x]
        x = net.add(fire, x if same else net.conv(x, 2 * expand))
        if index in _POOL_AFTER_FIRE:
            net.border(x)
            x = net.max_pool(x, 3, 2)
    net.border(x)
    net.scope = "head"
    return net.flatten(net.global_pool(net.conv(x, CLASSES, scale=False)))


# Channels per module: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection.
_GOOGLENET = {
    "3a": (64, 96, 128, 16, 32, 32), "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64), "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64), "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128), "5b": (384, 192, 384, 48, 128, 128),
}  # fmt: skip


def _googlenet(net: _Net, x: str) -> str:
    x = net.max_pool(net.conv(x, 64, 7, stride=2, pad=3), 3, 2, ceil=True)
    x = net.max_pool(net.conv(net.conv(x, 64), 192, 3, pad=1), 3, 2, ceil=True)
    for name, (c1, r3, c3, r5, c5, cp) in _GOOGLENET.items():
        net.border(x)
        net.scope = f"inception{name}"
        b3 = net.conv(net.conv(x, r3), c3, 3, pad=1)
        b5 = net.conv(net.conv(x, r5), c5, 3, pad=1)
        pooled = net.conv(net.max_pool(x, 3, 1, pad=1, ceil=True), cp)
        x = net.concat(net.conv(x, c1), b3, b5, pooled)
        if name in ("3b", "4e"):
            x = net.max_pool(x, *((3, 2) if name == "3b" else (2, 2)), ceil=True)
    net.scope = "head"
    return net.classifier(net.global_pool(x))


@dataclass(frozen=True)
class _Entry:
    make: Callable[[_Net, str], str]
    size: int = 224


ZOO: dict[str, _Entry] = {
    "inception_v3": _Entry(_inception_v3),
    "inception_v3_299": _Entry(_inception_v3, 299),
    "resnet50": _Entry(_resnet50),
    "squeezenet": _Entry(_squeezenet),
    "squeezenet_bypass": _Entry(_squeezenet_bypass),
    "googlenet": _Entry(_googlenet),
}
"""Models by name; iterate over the keys."""


def build(name: str, *, width: float = 1.0, size: int | None = None, seed: int = 0) -> onnx.ModelProto:
    """One model: input `image` [1, 3, size, size] float32, output `logits` [1, 1000] float32.

    `width` multiplies every channel count but those of the image and the classes; `size` is the side of the
    image in pixels, by default the network's own.

    Raises:
        KeyError: the zoo has no such model.
    """
    entry = ZOO[name]
    net = _Net(name, width, np.random.default_rng(seed))
    net.channels["image"] = 3
    return net.finish(entry.make(net, "image"), size or entry.size)


def write(
    name: str, path: Path, *, width: float = 1.0, size: int | None = None, seed: int = 0
) -> onnx.ModelProto:
    """Build a model and write it to `path`."""
    model = build(name, width=width, size=size, seed=seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return model


def parameters(model: onnx.ModelProto) -> int:
    """Elements of all weights."""
    return sum(math.prod(weight.dims) for weight in model.graph.initializer)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the chosen models; one line or one JSON object per run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--model", action="append", choices=sorted(ZOO), help="repeat; default all")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--size", type=int, default=None, help="side of the image in pixels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.model or ZOO:
        path = options.out_dir / f"{name}.onnx"
        model = write(name, path, width=options.width, size=options.size, seed=options.seed)
        rows.append({"model": name, "path": str(path), "parameters": parameters(model),
                     "size_bytes": path.stat().st_size})  # fmt: skip
        if not options.json:
            print(f"{name:18} {parameters(model) / 1e6:7.2f} M parameters  {path}")
    if options.json:
        print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

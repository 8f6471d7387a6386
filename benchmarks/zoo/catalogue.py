"""Every network by name, and how one becomes a file."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from benchmarks.zoo.googlenet import googlenet
from benchmarks.zoo.inception import inception_v3
from benchmarks.zoo.nasnet import nasnet_large
from benchmarks.zoo.net import Net
from benchmarks.zoo.randwire import randwire
from benchmarks.zoo.resnet import resnet50
from benchmarks.zoo.squeezenet import squeezenet, squeezenet_bypass


@dataclass(frozen=True)
class Entry:
    """How a network is made, and the side of its image in pixels."""

    make: Callable[[Net, str], str]
    size: int = 224


ZOO: dict[str, Entry] = {
    "inception_v3": Entry(inception_v3),
    "inception_v3_299": Entry(inception_v3, 299),
    "resnet50": Entry(resnet50),
    "squeezenet": Entry(squeezenet),
    "squeezenet_bypass": Entry(squeezenet_bypass),
    "googlenet": Entry(googlenet),
    "randwire": Entry(randwire),
    "nasnet_large": Entry(nasnet_large, 331),
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
    net = Net(name, width, np.random.default_rng(seed))
    net.channels["image"] = 3
    net.side = size or entry.size
    return net.finish(entry.make(net, "image"))


def write(
    name: str, path: Path, *, width: float = 1.0, size: int | None = None, seed: int = 0
) -> onnx.ModelProto:
    """Build a model and write it to `path`."""
    model = build(name, width=width, size=size, seed=seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return model


def parameters(model: onnx.ModelProto) -> int:
    """Elements of all weights; integers are no weights, but attributes that ONNX wants as tensors."""
    return sum(
        math.prod(weight.dims)
        for weight in model.graph.initializer
        if weight.data_type == onnx.TensorProto.FLOAT
    )

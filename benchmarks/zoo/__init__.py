"""Seeded ONNX files of the networks that the papers measure, made without any framework or download.

`python -m benchmarks.zoo OUT_DIR [--model NAME]... [--width 0.25] [--json]`

All end in logits. BatchNorm is folded: every convolution that has one carries a bias. Each file carries the
borders of the papers' blocks as metadata `stageloom.blocks`; see `stageloom.shared.importer.cuts` for the
format.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.zoo import networks
from benchmarks.zoo.net import Net
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.graph import Graph
from stageloom.shared.importer.process import ImportLimits


@dataclass(frozen=True)
class Entry:
    """How a network is made, and the side of its image in pixels."""

    make: Callable[[Net, str], str]
    size: int = 224


ZOO: dict[str, Entry] = {
    "inception_v3": Entry(networks.inception_v3),
    "inception_v3_299": Entry(networks.inception_v3, 299),
    "resnet50": Entry(networks.resnet50),
    "squeezenet": Entry(networks.squeezenet),
    "squeezenet_bypass": Entry(networks.squeezenet_bypass),
    "googlenet": Entry(networks.googlenet),
    "randwire": Entry(networks.randwire),
    "nasnet_large": Entry(networks.nasnet_large, 331),
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


def artifacts(
    names: Iterable[str], folder: Path, *, width: float = 1.0, size: int | None = None
) -> dict[str, Artifact]:
    """Models by name, imported as a planner does it; `folder` keeps their files while they are used."""
    from stageloom.shared.importer.api import (  # a GPU machine may lack onnxruntime
        artifact_path,
        import_model,
    )

    found = {}
    for name in names:
        path = folder / f"{name}.onnx"
        write(name, path, width=width, size=size)
        report = import_model(path, shapes={}, out_dir=folder)
        found[name] = open_artifact(artifact_path(folder, report.digest))
    return found


def graph_of(name: str, *, width: float = 1.0, size: int | None = None) -> Graph:
    """The operators of a model, imported in this process; its weights are forgotten."""
    from stageloom.shared.importer.pipeline import import_here
    from stageloom.shared.importer.process import ARTIFACT_NAME

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write(name, path / "model.onnx", width=width, size=size)
        import_here(path / "model.onnx", {}, path, ImportLimits(), lambda line: None)
        return open_artifact(path / ARTIFACT_NAME).graph


def graphs_of(names: Sequence[str]) -> dict[str, Graph]:
    """Models of the zoo, each from a process of its own: the importer limits the time of its process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        return dict(zip(names, pool.map(graph_of, names), strict=True))


def noise_for(artifact: Artifact) -> dict[str, "np.ndarray[Any, Any]"]:
    """Seeded noise for every input."""
    rng = np.random.default_rng(0)
    tensors = [artifact.graph.tensors[tensor] for tensor in artifact.graph.inputs]
    return {t.name: rng.standard_normal(t.shape).astype(t.dtype) for t in tensors}


def parameters(model: onnx.ModelProto) -> int:
    """Elements of all weights; integers are no weights, but attributes that ONNX wants as tensors."""
    return sum(
        math.prod(weight.dims)
        for weight in model.graph.initializer
        if weight.data_type == onnx.TensorProto.FLOAT
    )

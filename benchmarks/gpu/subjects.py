"""The models of the benchmark as artifacts, with inputs and references.

The artifact is made as the importer makes it, without onnxruntime: the zoo's files need no folding, and
whether rows of a batch equal single runs is tried in torch. `tests/benchmarks` holds both ways to be one.
"""

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import torch

from benchmarks.gpu.networks import Network, Subject, oracle
from benchmarks.zoo.catalogue import build
from stageloom.shared.artifact import open_artifact, write_artifact
from stageloom.shared.importer.build import build_graph
from stageloom.shared.importer.cuts import METADATA_KEY, parse_borders
from stageloom.shared.importer.values import infer_values

MODELS: Final = ("inception_v3", "resnet50", "squeezenet")
_BATCH_TOLERANCE: Final = 1e-4


def make_subject(
    name: str, folder: Path, *, width: float = 1.0, size: int | None = None, seed: int = 0
) -> Subject:
    """A zoo model with seeded weights, a seeded image and the logits that torch gives on the CPU."""
    model = build(name, width=width, size=size, seed=seed)
    shape = [one.dim_value for one in model.graph.input[0].type.tensor_type.shape.dim]
    image = np.random.default_rng(seed + 1).standard_normal(shape, dtype=np.float32)
    carried = next(one.value for one in model.metadata_props if one.key == METADATA_KEY)
    del model.metadata_props[:]
    model.graph.initializer.sort(key=lambda weight: weight.name)
    graph = build_graph(model, infer_values(model), parse_borders(carried)).graph
    graph = replace(graph, batchable=_rows_are_single_runs(model, image))
    path = folder / f"{name}.artifact"
    digest = write_artifact(path, graph, model.SerializeToString(deterministic=True))
    return Subject(name, open_artifact(path, digest), image, oracle(model, image))


def _rows_are_single_runs(model: onnx.ModelProto, image: np.ndarray) -> bool:
    both = np.concatenate([image, image[..., ::-1]])
    network = Network(model)
    with torch.inference_mode():
        together = network(torch.from_numpy(both)).numpy()
        single = np.concatenate([network(torch.from_numpy(one[None].copy())).numpy() for one in both])
    return bool(np.linalg.norm(together - single) <= _BATCH_TOLERANCE * np.linalg.norm(single))

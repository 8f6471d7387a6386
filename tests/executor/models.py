"""Small real models for executor and engine tests: imported once per run of the tests."""

from functools import cache
from typing import Any

import numpy as np
import onnxruntime

from benchmarks import zoo
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.graph import Graph
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits
from tests.scratch import scratch

SIDE = 75  # pixels; the least that Inception V3 takes


@cache
def artifact_of(name: str, width: float = 0.25, side: int = SIDE, seed: int = 0) -> Artifact:
    """A zoo model of a quarter of its width, as an artifact on disk."""
    folder = scratch()
    zoo.write(name, folder / "model.onnx", width=width, size=side, seed=seed)
    import_here(folder / "model.onnx", {}, folder, ImportLimits(), lambda line: None)
    return open_artifact(folder / ARTIFACT_NAME)


def random_inputs(graph: Graph, seed: int) -> dict[str, np.ndarray]:
    """Seeded inputs of batch 1 by name."""
    rng = np.random.default_rng(seed)
    return {
        graph.tensors[t].name: rng.standard_normal(graph.tensors[t].shape).astype(graph.tensors[t].dtype)
        for t in graph.inputs
    }


@cache
def _whole(artifact: Artifact, names: tuple[str, ...]) -> Any:
    """One session over the whole model that also returns the named tensors."""
    import onnx

    model = onnx.ModelProto.FromString(artifact.onnx_bytes())
    types = {t.name: t for t in artifact.graph.tensors}
    have = {output.name for output in model.graph.output}
    for name in names:
        if name not in have:
            kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(types[name].dtype))
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, types[name].shape))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def reference(artifact: Artifact, inputs: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    """The named tensors as the whole model in onnxruntime computes them."""
    inside = [name for name in names if name not in inputs]
    made = _whole(artifact, tuple(sorted(inside))).run(inside, inputs)
    return {**dict(zip(inside, made, strict=True)), **{n: inputs[n] for n in names if n in inputs}}


def difference(got: np.ndarray, wanted: np.ndarray) -> float:
    """Norm of the difference over norm of the reference."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))

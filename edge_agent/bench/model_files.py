"""Models to be compared: their files with pinned shapes, their inputs, how long one of them takes alone."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from stageloom.edge_agent.verify.inputs import ValueRange, draw_pair
from stageloom.shared.artifact import open_artifact
from stageloom.shared.graph import Tensor
from stageloom.shared.ids import Digest

Feeds: TypeAlias = "dict[str, np.ndarray[Any, Any]]"
"""Input tensors by name."""

_SEED: Final = 20
_LEAST_RUNS: Final = 5


@dataclass(frozen=True)
class ModelUnderTest:
    """One model, prepared by `prepare`."""

    name: str  # what applications call it
    path: Path  # the ONNX file with its open dimensions pinned, otherwise as it was given
    artifact: Path  # the same, imported
    digest: Digest  # of the artifact
    inputs: tuple[Tensor, ...]
    ranges: Mapping[str, ValueRange] = field(default_factory=dict)

    def feeds(self, count: int) -> list[Feeds]:
        """Inputs for some tasks, of each element type and with its valid values; always the same ones."""
        rng = np.random.default_rng(_SEED)
        drawn: list[Feeds] = []
        while len(drawn) < count:
            drawn += draw_pair(self.inputs, self.ranges, len(drawn) // 2, rng)
        return drawn[:count]


def prepare(
    name: str,
    file: Path,
    shapes: Mapping[str, Sequence[int]],
    folder: Path,
    ranges: Mapping[str, ValueRange] | None = None,
) -> ModelUnderTest:
    """Pin the open dimensions of an ONNX file and import it; what is written lies in `folder`.

    Raises:
        ModelError: the file cannot be imported, or leaves dimensions open.
        StorageError: nothing can be written to `folder`.
    """
    from stageloom.shared.importer.api import artifact_path, import_model

    folder.mkdir(parents=True, exist_ok=True)
    report = import_model(file, shapes={key: tuple(dims) for key, dims in shapes.items()}, out_dir=folder)
    artifact = open_artifact(artifact_path(folder, report.digest))
    inputs = tuple(artifact.graph.tensors[tensor] for tensor in artifact.graph.inputs)
    path = folder / f"{name}.onnx"
    _pin(file, {tensor.name: tensor.shape for tensor in inputs}, path)
    return ModelUnderTest(name, path, artifact.path, artifact.digest, inputs, ranges or {})


def _pin(file: Path, shapes: Mapping[str, Sequence[int]], target: Path) -> None:
    """The same file with numbers for its inputs' dimensions, so that no runtime has to expect others."""
    import onnx

    model = onnx.load(file)
    for value in model.graph.input:
        if value.name in shapes:
            dims = value.type.tensor_type.shape
            del dims.dim[:]
            for size in shapes[value.name]:
                dims.dim.add().dim_value = size
    onnx.save(model, target)


def median_s(
    call: Callable[[Feeds], object],
    feeds: Sequence[Feeds],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of one call: the median over `seconds` of calls in a row, at least five, after a first one.

    Where the first one takes longer than that, one more is enough.
    """
    began_s = clock()
    call(feeds[0])
    first_s = clock() - began_s
    least = _LEAST_RUNS if first_s <= seconds else 1
    end_s = clock() + seconds
    taken: list[float] = []
    while len(taken) < least or clock() < end_s:
        given = feeds[len(taken) % len(feeds)]
        began_s = clock()
        call(given)
        taken.append(clock() - began_s)
    return statistics.median(taken)

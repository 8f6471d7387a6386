"""Models to compare with: weights that say something, two inputs, and what the whole model makes of them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx.backend.test

from benchmarks import zoo
from stageloom.edge_agent.verify.pairs import Pair, find_pair, seed_model
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits

LIGHT = Path(onnx.backend.test.__file__).parent / "data" / "light"
LARGE = ("light_bvlc_alexnet", "light_vgg19", "light_zfnet512")
"""Light models of 230 to 550 MB once their weights are folded."""

_SEED = 17


@dataclass(frozen=True)
class Subject:
    """One model; `pair.expected` has every tensor that crosses one of its base cuts, and its outputs."""

    name: str
    artifact: Artifact
    pair: Pair

    @property
    def cuts(self) -> tuple[int, ...]:
        """The cuts of the papers where the file has them, else all base cuts."""
        offered = dict(self.artifact.graph.partitions)
        return offered.get("paper", self.artifact.graph.base_cuts)

    @property
    def half(self) -> tuple[int, ...]:
        """One cut in the middle; none where there is none."""
        return self.cuts[len(self.cuts) // 2 :][:1]


def zoo_subject(name: str, folder: Path, *, width: float = 1.0, side: int | None = None) -> Subject:
    """A zoo model; `folder` keeps its files for as long as it is used."""
    folder.mkdir(parents=True, exist_ok=True)
    zoo.write(name, folder / "model.onnx", width=width, size=side)
    return onnx_subject(name, folder / "model.onnx", folder)


def onnx_subject(name: str, path: Path, folder: Path) -> Subject:
    """A model from a file, imported in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    import_here(path, {}, folder, ImportLimits(), lambda line: None)
    return artifact_subject(name, open_artifact(folder / ARTIFACT_NAME), folder)


def artifact_subject(name: str, artifact: Artifact, folder: Path) -> Subject:
    """A model that was imported; `folder` is as for `zoo_subject`."""
    rng = np.random.default_rng(_SEED)
    seeded = seed_model(artifact, {}, rng, folder)
    graph = seeded.artifact.graph
    crossing = {t for cut in graph.base_cuts for t in graph.live_at(cut)} | set(graph.outputs)
    pair = find_pair(seeded, [graph.tensors[t].name for t in sorted(crossing)], {}, rng, folder)
    return Subject(name, seeded.artifact, pair)

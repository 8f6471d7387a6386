"""What a comparison compares with: weights that say something, and two inputs that the outputs depend on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge_agent.verify.compare import MIN_SENSITIVITY, sensitivity
from edge_agent.verify.inputs import MAX_PAIRS, Feeds, ValueRange, check_ranges, draw_pair
from edge_agent.verify.reference import Reference, before_saturation
from edge_agent.verify.seeding import seed_weights
from shared.artifact import Artifact, open_artifact, write_artifact
from shared.graph import Graph
from shared.ids import TensorId

if TYPE_CHECKING:
    import numpy as np
    import onnx

_CALIBRATION_INPUTS = 3


@dataclass(slots=True)
class Seeded:
    """A model whose weights say something."""

    artifact: Artifact
    model: "onnx.ModelProto"  # what the artifact holds, parsed
    names: list[str]  # of the replaced weights


def seed_model(
    artifact: Artifact, ranges: Mapping[str, ValueRange], rng: "np.random.Generator", folder: Path
) -> Seeded:
    """Seed the weights that say nothing; the artifact is written anew, to `folder`, only if there were any.

    Raises:
        InputError: a range does not fit an input.
    """
    import onnx

    tensors = [artifact.graph.tensors[t] for t in artifact.graph.inputs]
    check_ranges(tensors, ranges)
    model = onnx.ModelProto()
    model.ParseFromString(artifact.onnx_bytes())
    inputs = [feeds for attempt in range(2) for feeds in draw_pair(tensors, ranges, attempt, rng)]
    names = seed_weights(model, inputs[:_CALIBRATION_INPUTS], rng)
    if not names:
        return Seeded(artifact, model, names)
    path = folder / "seeded.artifact"
    write_artifact(path, artifact.graph, model.SerializeToString())
    return Seeded(open_artifact(path), model, names)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two inputs and what the whole model makes of them."""

    feeds: tuple[Feeds, Feeds]
    expected: "tuple[dict[str, np.ndarray], dict[str, np.ndarray]]"  # by tensor name
    sensitivity: float
    drawn: int


def find_pair(
    seeded: Seeded,
    names: Sequence[str],
    ranges: Mapping[str, ValueRange],
    rng: "np.random.Generator",
    folder: Path,
) -> Pair:
    """The first pair of inputs that the outputs depend on enough, or the best of all attempts.

    `names` are the tensors to be compared.
    """
    graph = seeded.artifact.graph
    judged = [before_saturation(seeded.model, graph.tensors[t].name) for t in _told_by_inputs(graph)]
    reference = Reference(seeded.model, [*names, *judged], folder)
    tensors = [graph.tensors[t] for t in graph.inputs]
    best: Pair | None = None
    for attempt in range(MAX_PAIRS):
        feeds = draw_pair(tensors, ranges, attempt, rng)
        expected = (reference.run(feeds[0]), reference.run(feeds[1]))
        found = sensitivity(expected[0], expected[1], judged)
        if best is None or found > best.sensitivity:
            best = Pair(feeds, expected, found, attempt + 1)
        if found > MIN_SENSITIVITY:
            break
    assert best is not None
    return replace(best, drawn=attempt + 1)


def _told_by_inputs(graph: Graph) -> list[TensorId]:
    """The outputs that some input reaches, as a constant is sensitive to none; all, if there is no other."""
    reached = set(graph.inputs)
    for operator in graph.operators:
        if not reached.isdisjoint(operator.inputs):
            reached.update(operator.outputs)
    return [t for t in graph.outputs if t in reached] or list(graph.outputs)

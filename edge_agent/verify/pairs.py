"""What a comparison compares with: weights that say something, and inputs that the outputs depend on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stageloom.edge_agent.verify.compare import MIN_SENSITIVITY, sensitivity
from stageloom.edge_agent.verify.heads import Ending, Head, ending_of, makers_of
from stageloom.edge_agent.verify.inputs import MAX_PAIRS, Feeds, ValueRange, check_ranges, draw_pair
from stageloom.edge_agent.verify.probes import with_probes
from stageloom.edge_agent.verify.reference import Reference
from stageloom.edge_agent.verify.rounding import Rounding, rounding_of
from stageloom.edge_agent.verify.seeding import seed_weights
from stageloom.edge_agent.verify.standards import Standard, standard_of
from stageloom.shared.artifact import Artifact, open_artifact, write_artifact
from stageloom.shared.graph import Graph
from stageloom.shared.importer.values import infer_values

if TYPE_CHECKING:
    import numpy as np
    import onnx

JUMPING_INPUTS = 8
"""Inputs where an element may jump: so many that two agree, however seldom or often rounding flips one."""

_CALIBRATION_INPUTS = 3


@dataclass(slots=True)
class Seeded:
    """A model whose weights say something, and that returns what its final heads read."""

    artifact: Artifact
    model: "onnx.ModelProto"  # what the artifact holds, parsed
    names: list[str]  # of the replaced weights
    outputs: tuple[str, ...]  # of the model as it was given
    endings: Mapping[str, Ending]  # of every tensor that crosses a base cut, and of the outputs
    rounding: Mapping[str, Rounding]


def seed_model(
    artifact: Artifact, ranges: Mapping[str, ValueRange], rng: "np.random.Generator", folder: Path
) -> Seeded:
    """Seed the weights that say nothing, and return what the heads behind any compared tensor read.

    The artifact is written anew, to `folder`, only if that changes anything.

    Raises:
        InputError: a range does not fit an input.
        ModelError: the operators contradict each other's shapes.
    """
    import onnx

    tensors = [artifact.graph.tensors[t] for t in artifact.graph.inputs]
    check_ranges(tensors, ranges)
    given = len(artifact.graph.outputs)
    model = onnx.ModelProto()
    model.ParseFromString(artifact.onnx_bytes())
    inputs = [feeds for attempt in range(2) for feeds in draw_pair(tensors, ranges, attempt, rng)]
    names = seed_weights(model, inputs[:_CALIBRATION_INPUTS], rng)
    values = infer_values(model)
    makers = makers_of(model)
    endings = {name: ending_of(makers, name) for name in _crossing(artifact.graph)}
    hidden = dict.fromkeys(head.reads for ending in endings.values() for head in ending.heads)
    graph = with_probes(artifact.graph, model, hidden, values)
    if names or graph is not artifact.graph:
        path = folder / "seeded.artifact"
        write_artifact(path, graph, model.SerializeToString())
        artifact = open_artifact(path)
    outputs = tuple(artifact.graph.tensors[t].name for t in artifact.graph.outputs[:given])
    return Seeded(artifact, model, names, outputs, endings, rounding_of(model, values))


def _crossing(graph: Graph) -> Iterable[str]:
    """Names of what may lie behind a block, and of the outputs."""
    cut = {t for position in graph.base_cuts for t in graph.live_at(position)}
    return [graph.tensors[t].name for t in sorted(cut | set(graph.outputs))]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two inputs, what the whole model makes of them, and what is held to that.

    More inputs follow the two where an element may jump.
    """

    feeds: tuple[Feeds, ...]
    expected: "tuple[dict[str, np.ndarray], ...]"  # per input, by tensor name
    sensitivity: float
    drawn: int
    standards: Mapping[str, Standard]  # by tensor name
    judged: tuple[str, ...]  # where the sensitivity was taken


def find_pair(
    seeded: Seeded,
    names: Sequence[str],
    ranges: Mapping[str, ValueRange],
    rng: "np.random.Generator",
    folder: Path,
) -> Pair:
    """The first pair of inputs that the outputs depend on enough, or the best of all attempts.

    `names` are the tensors to be compared.

    Raises:
        ExecutorError: onnxruntime cannot run the whole model.
    """
    tensors = [seeded.artifact.graph.tensors[t] for t in seeded.artifact.graph.inputs]
    judged = _judged(seeded)
    shown = dict.fromkeys([*names, *judged, *_around_heads(seeded, names)])
    reference = Reference(seeded.model, shown, folder)
    found = -1.0
    for attempt in range(MAX_PAIRS):
        feeds = draw_pair(tensors, ranges, attempt, rng)
        expected = (reference.run(feeds[0]), reference.run(feeds[1]))
        value = sensitivity(expected[0], expected[1], judged)
        if value > found:
            best, results, found, content = [*feeds], [*expected], value, attempt
        if value > MIN_SENSITIVITY:
            break
    if any(seeded.rounding[name].jumps for name in names):
        while len(best) < JUMPING_INPUTS:
            best += draw_pair(tensors, ranges, content, rng)
        results += [reference.run(feeds) for feeds in best[2:]]
    del reference  # one session at a time: each holds all weights
    plain = Reference(seeded.model, shown, folder, optimised=False)
    without = [plain.run(feeds) for feeds in best]
    return Pair(
        tuple(best),
        tuple(results),
        found,
        attempt + 1,
        _standards(seeded, names, results, without),
        tuple(judged),
    )


def _judged(seeded: Seeded) -> list[str]:
    """Where the outputs' dependence on the input is taken: before their heads, and at what has none."""
    found: dict[str, None] = {}
    for output in _told_by_inputs(seeded):
        ending = seeded.endings[output]
        found.update(dict.fromkeys(head.reads for head in ending.heads))
        if not ending.only_heads:
            found[output] = None
    return list(found)


def _told_by_inputs(seeded: Seeded) -> list[str]:
    """The outputs that some input reaches, as a constant is sensitive to none; all, if there is no other."""
    graph = seeded.artifact.graph
    reached = set(graph.inputs)
    for operator in graph.operators:
        if not reached.isdisjoint(operator.inputs):
            reached.update(operator.outputs)
    names = {graph.tensors[t].name for t in reached}
    return [output for output in seeded.outputs if output in names] or list(seeded.outputs)


def _around_heads(seeded: Seeded, names: Sequence[str]) -> Iterable[str]:
    heads = [head for name in names for head in _heads(seeded, name)]
    return [name for head in heads for name in (head.reads, head.makes)]


def _heads(seeded: Seeded, name: str) -> Sequence[Head]:
    """Heads behind a tensor that the engine shows the input of, or that read an input of the model."""
    graph = seeded.artifact.graph
    shown = {graph.tensors[t].name for t in (*graph.inputs, *graph.outputs)}
    ending = seeded.endings.get(name)
    return [head for head in ending.heads if head.reads in shown] if ending else ()


def _standards(
    seeded: Seeded,
    names: Sequence[str],
    expected: "Sequence[Mapping[str, np.ndarray]]",
    plain: "Sequence[Mapping[str, np.ndarray]]",
) -> dict[str, Standard]:
    """By tensor name; what heads read comes before what they make."""
    found: dict[str, Standard] = {}
    for name in sorted(names, key=lambda name: bool(_heads(seeded, name))):
        found[name] = standard_of(name, expected, plain, seeded.rounding[name], _heads(seeded, name), found)
    return found

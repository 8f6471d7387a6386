"""What a schedule is compared with: seeded weights, inputs, the results of the whole model.

The whole model runs in onnxruntime, with its inner tensors visible.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from stageloom.edge_agent.verify.analysis import (
    Ending,
    Head,
    Rounding,
    ending_of,
    makers_of,
    rounding_of,
    with_probes,
)
from stageloom.edge_agent.verify.inputs import MAX_PAIRS, Feeds, ValueRange, check_ranges, draw_pair
from stageloom.edge_agent.verify.reduced import to_bfloat16, with_rounded_weights
from stageloom.edge_agent.verify.seeding import quiet_session, seed_weights
from stageloom.edge_agent.verify.standards import (
    BFLOAT16,
    FLOAT32,
    MIN_SENSITIVITY,
    Allowance,
    Standard,
    sensitivity,
    standard_of,
)
from stageloom.shared.artifact import Artifact, open_artifact, write_artifact
from stageloom.shared.errors import ExecutorError
from stageloom.shared.graph import Graph
from stageloom.shared.importer.values import Value, infer_values

if TYPE_CHECKING:
    import numpy as np
    import onnx


class Reference:
    """An onnxruntime session over a whole normalised model."""

    def __init__(
        self, model: "onnx.ModelProto", names: Iterable[str], folder: Path, *, optimised: bool = True
    ) -> None:
        """`names` are the tensors to return; a copy of the model is written to `folder` while it is loaded.

        `optimised`: with onnxruntime's graph optimisations, or node by node.

        Raises:
            ExecutorError: onnxruntime cannot load the model.
        """
        from onnx import helper

        self._names = list(dict.fromkeys(names))
        inputs = {value.name for value in model.graph.input}
        outputs = len(model.graph.output)
        known = {value.name for value in model.graph.output}
        model.graph.output.extend(
            helper.make_empty_tensor_value_info(name) for name in self._names if name not in known | inputs
        )
        path = folder / "reference.onnx"
        path.write_bytes(model.SerializeToString())
        del model.graph.output[outputs:]
        try:
            self._session = quiet_session(str(path), optimised=optimised)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise ExecutorError(
                f"onnxruntime cannot load the whole model: {' '.join(str(error).split())[:300]}",
                remedy="import the model again",
            ) from error
        finally:
            path.unlink()
        self._computed = [name for name in self._names if name not in inputs]

    def run(self, feeds: Feeds) -> "dict[str, np.ndarray]":
        """Return the chosen tensors for these inputs; a chosen graph input is returned as it was fed.

        Raises:
            ExecutorError: onnxruntime fails on these inputs.
        """
        try:
            made = self._session.run(self._computed, feeds)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise ExecutorError(
                f"onnxruntime fails on the drawn inputs: {' '.join(str(error).split())[:300]}",
                remedy="give the valid values of an input with --range NAME=LO:HI",
            ) from error
        results = {**feeds, **dict(zip(self._computed, made, strict=True))}
        return {name: results[name] for name in self._names}


JUMPING_INPUTS = 8
"""Number of inputs where rounding may flip an element: enough that two agree, however often it does."""

_CALIBRATION_INPUTS = 3


@dataclass(slots=True)
class Seeded:
    """A model without uniform weights that also returns what its final heads read."""

    artifact: Artifact
    model: "onnx.ModelProto"  # what the artifact holds, parsed
    names: list[str]  # of the replaced weights
    outputs: tuple[str, ...]  # of the model as it was given
    endings: Mapping[str, Ending]  # of every tensor that crosses a base cut, and of the outputs
    rounding: Mapping[str, Rounding]


def seed_model(
    artifact: Artifact, ranges: Mapping[str, ValueRange], rng: "np.random.Generator", folder: Path
) -> Seeded:
    """Seed uniform weights, and let the model return what the heads behind compared tensors read.

    A new artifact is written to `folder` only if the model changes.

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
    # Inference does not know what custom operators make. Of open dimensions the graph has the largest sizes.
    fixed = () if artifact.graph.ranges else artifact.graph.tensors
    values = infer_values(model, {t.name: Value(t.dtype, t.shape) for t in fixed})
    makers = makers_of(model)
    endings = {name: ending_of(makers, name) for name in _crossing(artifact.graph)}
    hidden = dict.fromkeys(head.reads for ending in endings.values() for head in ending.heads)
    graph = with_probes(artifact.graph, model, hidden, values)
    shown = {graph.tensors[t].name for t in (*graph.inputs, *graph.outputs)}
    endings = {name: ending.of_shown(shown) for name, ending in endings.items()}
    if names or graph is not artifact.graph:
        path = folder / "seeded.artifact"
        write_artifact(path, graph, model.SerializeToString())
        artifact = open_artifact(path)
    outputs = tuple(artifact.graph.tensors[t].name for t in artifact.graph.outputs[:given])
    return Seeded(artifact, model, names, outputs, endings, rounding_of(model, values))


def _crossing(graph: Graph) -> Iterable[str]:
    """Return the names of tensors that cross a base cut, and of the outputs."""
    cut = {t for position in graph.base_cuts for t in graph.live_at(position)}
    return [graph.tensors[t].name for t in sorted(cut | set(graph.outputs))]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two inputs, the whole model's results for them, and the standards of the compared tensors.

    More inputs follow the two where rounding may flip an element.
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
    *,
    bfloat16: bool = False,
) -> Pair:
    """Find inputs that the outputs depend on: the first good pair, or the best of all attempts.

    `names` are the tensors to be compared. `bfloat16`: with what computes in it; there are more inputs then,
    so that it shows how often the largest output agrees.

    Raises:
        ExecutorError: onnxruntime cannot run the whole model.
    """
    tensors = [seeded.artifact.graph.tensors[t] for t in seeded.artifact.graph.inputs]
    judged = _judged(seeded)
    shown = dict.fromkeys([*names, *judged, *_around_heads(seeded, names)])
    reference = Reference(seeded.model, shown, folder)
    best_value = -1.0
    for attempt in range(MAX_PAIRS):
        feeds = draw_pair(tensors, ranges, attempt, rng)
        expected = (reference.run(feeds[0]), reference.run(feeds[1]))
        value = sensitivity(expected[0], expected[1], judged)
        if value > best_value:
            best, results, best_value, content = [*feeds], [*expected], value, attempt
        if value > MIN_SENSITIVITY:
            break
    if bfloat16 or any(seeded.rounding[name].jumps for name in names):
        while len(best) < JUMPING_INPUTS:
            best += draw_pair(tensors, ranges, content, rng)
        results += [reference.run(feeds) for feeds in best[2:]]
    del reference  # one session at a time: each holds all weights
    if bfloat16:
        rounded = Reference(with_rounded_weights(seeded.model), shown, folder)
        other = [rounded.run({name: to_bfloat16(given) for name, given in feeds.items()}) for feeds in best]
    else:
        plain = Reference(seeded.model, shown, folder, optimised=False)
        other = [plain.run(feeds) for feeds in best]
    return Pair(
        tuple(best),
        tuple(results),
        best_value,
        attempt + 1,
        _standards(seeded, names, results, other, BFLOAT16 if bfloat16 else FLOAT32),
        tuple(judged),
    )


def _judged(seeded: Seeded) -> list[str]:
    """Where the outputs' dependence on the input is taken: before their heads, and at what has none."""
    names: dict[str, None] = {}
    for output in _told_by_inputs(seeded):
        ending = seeded.endings[output]
        names.update(dict.fromkeys(head.reads for head in ending.heads))
        if not ending.only_heads:
            names[output] = None
    return list(names)


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
    return seeded.endings[name].heads if name in seeded.endings else ()


def _standards(
    seeded: Seeded,
    names: Sequence[str],
    expected: "Sequence[Mapping[str, np.ndarray]]",
    other: "Sequence[Mapping[str, np.ndarray]]",
    allowance: Allowance,
) -> dict[str, Standard]:
    """Return the standards by tensor name; those of tensors that heads read are made first."""
    standards: dict[str, Standard] = {}
    for name in sorted(names, key=lambda name: bool(_heads(seeded, name))):
        heads = _heads(seeded, name)
        standards[name] = standard_of(
            name, expected, other, seeded.rounding[name], heads, standards, allowance
        )
    return standards


P = TypeVar("P", bound=Hashable)


class Differences(Generic[P]):
    """The differences of one or several models' tensors; a value of `P` says where a tensor was seen."""

    def __init__(self) -> None:
        self._gaps: dict[tuple[P, str], dict[int, float]] = {}
        self._standards: dict[tuple[P, str], Standard] = {}

    def add(self, pair: Pair, place: P, name: str, which: int, actual: "np.ndarray | None") -> None:
        """Compare a result for input `which` with the whole model's; None: there is no result."""
        standard = pair.standards[name]
        gap = math.inf if actual is None else standard.difference(which, actual, pair.expected[which][name])
        self._standards[place, name] = standard
        gaps = self._gaps.setdefault((place, name), {})
        gaps[which] = max(gap, gaps.get(which, 0.0))

    def over_inputs(self) -> list[tuple[P, str, float, Standard]]:
        """Return place, name, difference and standard of every tensor, in the order in which they came."""
        return [
            (place, name, standard.over_inputs(list(self._gaps[place, name].values())), standard)
            for (place, name), standard in self._standards.items()
        ]

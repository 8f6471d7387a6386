"""From an ONNX file to an artifact, in this process; the child process calls this under limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import onnx

from stageloom.shared.artifact import require_room, write_artifact
from stageloom.shared.errors import ModelError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.importer import normalise
from stageloom.shared.importer.build import Built, build_graph, unit_views
from stageloom.shared.importer.cuts import METADATA_KEY, Borders, crossing_bytes, parse_borders
from stageloom.shared.importer.inputs import declared_inputs
from stageloom.shared.importer.normalise import optimise
from stageloom.shared.importer.open_dimensions import OPEN, build_open, require_ranges
from stageloom.shared.importer.operators import critical_path
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits, Progress, how_to_raise
from stageloom.shared.importer.report import ImportReport, PartitionReport, WholeReport
from stageloom.shared.importer.session import Draws
from stageloom.shared.importer.smoke_run import settle_values, smoke_run
from stageloom.shared.importer.source import read_model
from stageloom.shared.importer.values import (
    Value,
    claimed_values,
    infer_values,
    own_size,
    stored_size,
    with_claims,
)


def import_here(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    scratch: Path,
    limits: ImportLimits,
    progress: Progress,
    smallest: Mapping[str, Sequence[int]] | None = None,
) -> ImportReport:
    """Write the artifact to `scratch` as `ARTIFACT_NAME` and return the report.

    Inputs in `smallest` have open dimensions, up to those of `shapes`.

    Raises:
        ModelError, UnpinnedShape: as `stageloom.shared.importer.api.import_model`, which should be called
        instead.
    """
    progress("reading")
    model = read_model(path, limits)
    if smallest:
        require_ranges(model, smallest, shapes)
    normalised = normalise_and_build(model, shapes, scratch, limits, progress)
    if not smallest:  # otherwise the artifact holds a graph of one operator
        require_room(normalised.built.graph)
    whole = normalised.model.graph
    stored = [*map(stored_size, whole.initializer), *map(own_size, whole.node)]
    opset = next((o.version for o in normalised.model.opset_import if not o.domain), 0)
    file = scratch / "normalised.onnx"
    progress("trying it")
    at_largest = normalised.built
    if smallest:
        normalised.model.Clear()
        model = read_model(path, limits)
        built, problem = build_open(model, at_largest.graph, smallest, file, limits), OPEN
    else:
        built, problem = _try(normalised, file, scratch)
    progress("writing")
    artifact = scratch / ARTIFACT_NAME
    digest = write_artifact(artifact, built.graph, file.read_bytes())
    file.unlink()
    return report_of(
        built,
        digest=digest,
        size=artifact.stat().st_size,
        parameters=sum(numbers for numbers, _ in stored),
        weight_bytes=sum(nbytes for _, nbytes in stored),
        opset=opset,
        batch_reason=problem,
        at_largest=at_largest.graph if smallest else None,
    )


@dataclass(frozen=True)
class Normalised:
    """A normalised model, its graph, and the inputs of both."""

    model: onnx.ModelProto
    built: Built
    settled: Mapping[str, Value]  # inputs, and values that runs have shown
    claims: Mapping[str, Value]
    borders: Borders | None
    draws: Draws


def inputs_here(path: Path, limits: ImportLimits) -> str:
    """The model's inputs, for `stageloom.shared.importer.api.list_inputs`, which should be called instead.

    Raises:
        ModelError: the file cannot be read.
    """
    return declared_inputs(read_model(path, limits))


def normalise_and_build(
    model: onnx.ModelProto,
    shapes: Mapping[str, Sequence[int]],
    scratch: Path,
    limits: ImportLimits,
    progress: Progress,
) -> Normalised:
    """Normalise `model`, which is consumed, and build its graph.

    Raises:
        ModelError, UnpinnedShape: as `import_here`.
    """
    carried = next((entry.value for entry in model.metadata_props if entry.key == METADATA_KEY), None)
    borders = None if carried is None else parse_borders(carried)
    progress("checking")
    pinned, claimed_inputs = normalise.prepare(model, shapes, limits)
    positions = normalise.source_positions(model)
    claims = claimed_values(model)
    progress("folding constants")
    model = optimise(model, claimed_inputs, scratch)
    if len(model.graph.node) > limits.nodes:
        raise ModelError(
            f"the model has {len(model.graph.node)} nodes, the limit is {limits.nodes}",
            remedy=how_to_raise("nodes", limits, len(model.graph.node)),
        )
    normalise.canonicalise(model, positions, with_claims(infer_values(model, pinned), claims))
    progress("building the graph")
    draws = Draws(pinned, model)
    values = settle_values(model, pinned, claims, draws, scratch)
    normalise.pin_outputs(model.graph, values)
    return Normalised(model, build_graph(model, values, borders), pinned, claims, borders, draws)


def _try(normalised: Normalised, file: Path, scratch: Path) -> tuple[Built, str]:
    """Correct the graph until it agrees with the runs; write the model, which is consumed, to `file`.

    Each round corrects a value from inferred to seen, or from seen to unknown, so the rounds end. Returns
    also why the model takes no batch; empty if it does.
    """
    model, built, settled = normalised.model, normalised.built, dict(normalised.settled)
    while True:
        file.write_bytes(model.SerializeToString(deterministic=True))
        corrections, batch_problem = smoke_run(model, built.graph, normalised.draws, file)
        if not corrections:
            return replace(built, graph=replace(built.graph, batchable=not batch_problem)), batch_problem
        settled.update(corrections)
        model.ParseFromString(file.read_bytes())
        values = settle_values(model, settled, normalised.claims, normalised.draws, scratch)
        normalise.pin_outputs(model.graph, values)
        built = build_graph(model, values, normalised.borders)


def report_of(
    built: Built,
    *,
    digest: Digest,
    size: int,
    parameters: int,
    weight_bytes: int,
    opset: int,
    batch_reason: str,
    at_largest: Graph | None = None,
) -> ImportReport:
    """Report on a built graph and its artifact; `at_largest`: its graph at the largest shapes it takes."""
    graph = built.graph
    live = crossing_bytes(graph)
    peak = _peak_bytes(at_largest or graph)
    units = [operator.fused_unit for operator in graph.operators]

    def whole(op: int, why: str) -> WholeReport:
        operator = graph.operators[op]
        return WholeReport(op, operator.name, operator.kind, len(operator.nodes), why)

    return ImportReport(
        digest=digest,
        name=graph.name,
        operators=len(graph.operators),
        paper_operators=len(graph.operators) - built.classifier.bit_count(),
        fused_units=graph.fused_units,
        critical_path=critical_path(unit_views(graph), units),
        gflop=sum(operator.flop for operator in graph.operators) / 1e9,
        parameters=parameters,
        memory_bytes=weight_bytes + peak,
        weight_bytes=weight_bytes,
        activation_bytes=peak,
        base_cuts=graph.base_cuts,
        cut_bytes=tuple(live[cut] for cut in graph.base_cuts),
        partitions=tuple(_partition(name, cuts, built) for name, cuts in graph.partitions),
        opaque=tuple(
            whole(op, operator.opaque) for op, operator in enumerate(graph.operators) if operator.opaque
        ),
        joined=tuple(whole(op, why) for op, why in built.joined.items()),
        inputs=tuple(graph.tensors[t] for t in graph.inputs),
        outputs=tuple(graph.tensors[t] for t in graph.outputs),
        batchable=graph.batchable,
        batch_reason=batch_reason,
        size=size,
        opset=opset,
    )


def _peak_bytes(graph: Graph) -> int:
    """The most that is live at once, in sequence."""
    live = crossing_bytes(graph)
    return max(
        live[op] + sum(graph.tensors[t].nbytes for t in operator.outputs)
        for op, operator in enumerate(graph.operators)
    )


def _partition(name: str, cuts: tuple[int, ...], built: Built) -> PartitionReport:
    edges = (0, *cuts, len(built.graph.operators))
    counts = tuple(
        sum(1 for op in range(first, last) if not built.classifier >> op & 1)
        for first, last in pairwise(edges)
    )
    return PartitionReport(name, cuts, sum(1 for count in counts if count), counts)

"""The whole way from an ONNX file to an artifact, in this process; the child process runs it under limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from stageloom.shared.artifact import write_artifact
from stageloom.shared.errors import ModelError
from stageloom.shared.importer import normalise
from stageloom.shared.importer.borders import METADATA_KEY, Borders, parse_borders
from stageloom.shared.importer.build import Built, build_graph
from stageloom.shared.importer.draws import Draws
from stageloom.shared.importer.folding import optimise
from stageloom.shared.importer.inputs import declared_inputs
from stageloom.shared.importer.limits import ImportLimits
from stageloom.shared.importer.process import ARTIFACT_NAME, Progress
from stageloom.shared.importer.report import ImportReport
from stageloom.shared.importer.shapes import settle_values
from stageloom.shared.importer.source import read_model
from stageloom.shared.importer.summary import report_of
from stageloom.shared.importer.trial import try_model
from stageloom.shared.importer.values import Value, claimed_values, infer_values, weight_value, with_claims


def import_here(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    scratch: Path,
    limits: ImportLimits,
    progress: Progress,
) -> ImportReport:
    """Leave the artifact in `scratch` under `ARTIFACT_NAME` and report on it.

    Raises:
        ModelError, UnpinnedShape: as `stageloom.shared.importer.api.import_model`, which should be called
        instead.
    """
    progress("reading")
    model = read_model(path, limits)
    normalised = normalise_and_build(model, shapes, scratch, limits, progress)
    weights = [weight_value(weight) for weight in normalised.model.graph.initializer]
    opset = next((o.version for o in normalised.model.opset_import if not o.domain), 0)
    file = scratch / "normalised.onnx"
    progress("trying it")
    built, problem = _try(normalised, file, scratch)
    progress("writing")
    artifact = scratch / ARTIFACT_NAME
    digest = write_artifact(artifact, built.graph, file.read_bytes())
    file.unlink()
    return report_of(
        built,
        digest=digest,
        size=artifact.stat().st_size,
        parameters=sum(value.size for value in weights),
        weight_bytes=sum(value.nbytes for value in weights),
        opset=opset,
        batch_reason=problem,
    )


@dataclass(frozen=True)
class Normalised:
    """A model in its one form, the graph that it makes, and what went into it."""

    model: onnx.ModelProto
    built: Built
    settled: Mapping[str, Value]  # inputs, and values that runs have shown
    claims: Mapping[str, Value]
    borders: Borders | None
    draws: Draws


def inputs_here(path: Path, limits: ImportLimits) -> str:
    """The model's inputs, for `stageloom.shared.importer.inputs.list_inputs`, which should be called instead.

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
    """The normalised model and its graph; consumes `model`.

    Raises:
        ModelError, UnpinnedShape: as `import_here`.
    """
    carried = next((entry.value for entry in model.metadata_props if entry.key == METADATA_KEY), None)
    borders = None if carried is None else parse_borders(carried)
    progress("checking")
    inputs = normalise.prepare(model, shapes, limits)
    positions = normalise.source_positions(model)
    claims = claimed_values(model)
    progress("folding constants")
    model = optimise(model, inputs, scratch)
    if len(model.graph.node) > limits.nodes:
        raise ModelError(
            f"the model has {len(model.graph.node)} nodes, the limit is {limits.nodes}",
            remedy="raise the limit nodes if you trust the file",
        )
    normalise.canonicalise(model, positions, with_claims(infer_values(model, inputs.pinned), claims))
    progress("building the graph")
    draws = Draws(inputs.pinned, model)
    values = settle_values(model, inputs.pinned, claims, draws, scratch)
    normalise.pin_outputs(model.graph, values)
    return Normalised(model, build_graph(model, values, borders), inputs.pinned, claims, borders, draws)


def _try(normalised: Normalised, file: Path, scratch: Path) -> tuple[Built, str]:
    """Run the model until the graph says what the runs show; leaves it in `file`. Consumes it.

    Every round corrects a value from inferred to seen, or from seen to unknown, so the rounds end.
    """
    model, built, settled = normalised.model, normalised.built, dict(normalised.settled)
    while True:
        file.write_bytes(model.SerializeToString(deterministic=True))
        trial = try_model(model, built.graph, normalised.draws, file)
        if not trial.corrections:
            batchable = replace(built.graph, batchable=not trial.batch_problem)
            return replace(built, graph=batchable), trial.batch_problem
        settled.update(trial.corrections)
        model.ParseFromString(file.read_bytes())
        values = settle_values(model, settled, normalised.claims, normalised.draws, scratch)
        normalise.pin_outputs(model.graph, values)
        built = build_graph(model, values, normalised.borders)

"""The whole way from an ONNX file to an artifact, in this process; the child process runs it under limits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from shared.artifact import write_artifact
from shared.errors import ModelError
from shared.importer import normalise
from shared.importer.borders import METADATA_KEY, parse_borders
from shared.importer.build import Built, build_graph
from shared.importer.inputs import declared_inputs
from shared.importer.limits import ImportLimits
from shared.importer.process import ARTIFACT_NAME, Progress
from shared.importer.report import ImportReport
from shared.importer.source import read_model
from shared.importer.summary import report_of
from shared.importer.trial import try_model
from shared.importer.values import claimed_values, infer_values, weight_value, with_claims


def import_here(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    scratch: Path,
    limits: ImportLimits,
    progress: Progress,
) -> ImportReport:
    """Leave the artifact in `scratch` under `ARTIFACT_NAME` and report on it.

    Raises:
        ModelError, UnpinnedShape: as `shared.importer.api.import_model`, which should be called instead.
    """
    progress("reading")
    model = read_model(path, limits)
    model, built = normalise_and_build(model, shapes, scratch, limits, progress)
    weights = [weight_value(weight) for weight in model.graph.initializer]
    opset = next((o.version for o in model.opset_import if not o.domain), 0)
    normalised = scratch / "normalised.onnx"
    normalised.write_bytes(model.SerializeToString(deterministic=True))
    progress("trying it")
    problem = try_model(model, built.graph, normalised)
    built = replace(built, graph=replace(built.graph, batchable=not problem))
    progress("writing")
    artifact = scratch / ARTIFACT_NAME
    digest = write_artifact(artifact, built.graph, normalised.read_bytes())
    normalised.unlink()
    return report_of(
        built,
        digest=digest,
        size=artifact.stat().st_size,
        parameters=sum(value.size for value in weights),
        weight_bytes=sum(value.nbytes for value in weights),
        opset=opset,
        batch_reason=problem,
    )


def inputs_here(path: Path, limits: ImportLimits) -> str:
    """The model's inputs, for `shared.importer.inputs.list_inputs`, which should be called instead.

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
) -> tuple[onnx.ModelProto, Built]:
    """The normalised model and its graph; consumes `model`.

    Raises:
        ModelError, UnpinnedShape: as `import_here`.
    """
    carried = next((entry.value for entry in model.metadata_props if entry.key == METADATA_KEY), None)
    borders = None if carried is None else parse_borders(carried)
    progress("checking")
    normalise.prepare(model, shapes, limits)
    positions = normalise.source_positions(model)
    claims = claimed_values(model)
    progress("folding constants")
    model = normalise.optimise(model, scratch)
    if len(model.graph.node) > limits.nodes:
        raise ModelError(
            f"the model has {len(model.graph.node)} nodes, the limit is {limits.nodes}",
            remedy="raise the limit nodes if you trust the file",
        )
    normalise.canonicalise(model, positions, with_claims(infer_values(model), claims))
    progress("building the graph")
    values = with_claims(infer_values(model), claims)
    values.update(normalise.ask_onnxruntime(model, values, scratch))
    return model, build_graph(model, values, borders)

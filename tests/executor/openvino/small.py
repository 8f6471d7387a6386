"""Small models as sessions, and the same in onnxruntime."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from stageloom.edge_agent.executor.onnx.cache import SessionKey
from stageloom.edge_agent.executor.onnx.executor import open_session as open_reference
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.openvino.executor import open_session
from stageloom.edge_agent.executor.openvino.session import OpenvinoSession
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits
from tests.importer.models import info, model_of

Shape = Sequence[int]


def artifact_from(model: onnx.ModelProto, folder: Path) -> Artifact:
    """A model, imported in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    sizes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input
    }
    empty = {name: shape for name, shape in sizes.items() if 0 in shape}  # else a 0 counts as left open
    import_here(folder / "m.onnx", empty, folder, ImportLimits(), lambda line: None)
    return open_artifact(folder / ARTIFACT_NAME)


def one_node(
    kind: str,
    inputs: Mapping[str, tuple[str, Shape]],
    output: tuple[str, Shape] | None = None,
    weights: Mapping[str, Any] | None = None,
    *,
    reads: Sequence[str] = (),
    domain: str = "",
    opset: int = 17,
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one node, whose output is y; by default it reads its inputs and then its weights."""
    node = helper.make_node(
        kind, list(reads) or [*inputs, *(weights or {})], ["y"], domain=domain, **attributes
    )
    return model_of(
        [node],
        [info(name, shape, code_of(dtype)) for name, (dtype, shape) in inputs.items()],
        [info("y", output[1], code_of(output[0])) if output else onnx.ValueInfoProto(name="y")],
        weights,
        opset=opset,
        extra_domains=[domain] if domain else [],
    )


def code_of(dtype: str) -> int:
    """ONNX's number of an element type."""
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def whole(artifact: Artifact) -> SessionKey:
    return SessionKey(artifact.digest, tuple(range(len(artifact.graph.operators))), 1, 1)


def opened(artifact: Artifact) -> OpenvinoSession:
    """The whole model in OpenVINO."""
    return open_session(whole(artifact), ModelParts(artifact))


def both(artifact: Artifact, feeds: Mapping[str, np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The model's outputs from OpenVINO and from onnxruntime."""
    graph = artifact.graph
    given: Values = {t: feeds[graph.tensors[t].name] for t in graph.inputs}
    found, wanted = dict(given), dict(given)
    opened(artifact).run(found)
    open_reference(whole(artifact), ModelParts(artifact)).run(wanted)
    return [found[t] for t in graph.outputs], [wanted[t] for t in graph.outputs]

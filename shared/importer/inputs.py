"""The inputs of a model as its file declares them, for messages about inputs that do not fit."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stageloom.shared.importer.limits import ImportLimits
from stageloom.shared.importer.model_file import require_model_file
from stageloom.shared.importer.process import run_child

if TYPE_CHECKING:
    import onnx

_SHOWN = 32  # inputs
_NAME_CHARS = 80


def list_inputs(path: Path, limits: ImportLimits | None = None) -> str:
    """Names and dimensions, open ones by their names: `'ids' (batchx128), 'scale' (scalar)`.

    The file is read in the importing child process; nothing of it is checked beyond that.

    Raises:
        ModelError: the file cannot be read.
        ExecutorError: onnx is not installed.
    """
    limits = limits or ImportLimits()
    require_model_file(path, limits)
    with tempfile.TemporaryDirectory(prefix="stageloom-inputs-") as folder:
        found = run_child(path, {}, Path(folder), limits, lambda line: None, inputs_only=True)
    inputs: str = found["inputs"]
    return inputs


def declared_inputs(model: "onnx.ModelProto") -> str:
    """The same of a model that was read; older files repeat their weights as inputs, which are left out."""
    weights = {weight.name for weight in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    listed = [f"{value.name[:_NAME_CHARS]!r} ({_dims(value)})" for value in inputs[:_SHOWN]]
    more = len(inputs) - len(listed)
    return ", ".join([*listed, *([f"{more} more"] if more else [])]) or "none"


def _dims(value: "onnx.ValueInfoProto") -> str:
    """`nx3x?x?`: sizes that are fixed, names of those that are open."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return "no shape"
    dims = [dim.dim_param or (str(dim.dim_value) if dim.dim_value > 0 else "?") for dim in tensor.shape.dim]
    return "x".join(dims) or "scalar"

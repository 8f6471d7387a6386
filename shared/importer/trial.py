"""What only a run can tell: that the model runs, that its shapes are true, and whether a batch may be used.

A batch b > 1 is allowed only if, re-pinned to a batch of 2, the rows equal two single runs.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from shared.errors import ModelError
from shared.graph import Graph, Tensor
from shared.importer.normalise import one_line, quiet_options
from shared.importer.operators import ELEMENTWISE, WEIGHTED
from shared.importer.process import speaks_of_memory
from shared.importer.values import ELEMENT_TYPES

TOLERANCE = 1e-4  # norm of the difference over norm of the reference
_BATCH = 2
_SEED = 20260101
_SCALAR_BYTES = 4


def try_model(model: onnx.ModelProto, graph: Graph, path: Path) -> str:
    """Why a batch of b > 1 is not allowed; empty if it is. `path` is the normalised file on disk.

    Consumes `model`, the same file parsed. Every tensor that crosses operators is looked at, not only the
    outputs: slots hold them all.

    Raises:
        ModelError: the model does not run at all, or a tensor has another shape than the graph says.
        MemoryError: trying it needs more memory than this process may use.
    """
    problem = _static_problem(graph)
    inputs = {graph.tensors[t].name for t in graph.inputs}
    crossing = sorted({*graph.outputs, *(t for o in graph.operators for t in o.outputs)})
    made = [graph.tensors[t] for t in crossing if graph.tensors[t].name not in inputs]
    rows = _rows(graph)
    _expose(model, made, open_batch=not problem)
    _redraw_constant_weights(model, np.random.default_rng(_SEED))
    variant = path.with_suffix(".trial")
    variant.write_bytes(model.SerializeToString())
    model.Clear()
    try:
        session = _session(variant)
        single = [session.run([t.name for t in made], row) for row in (rows if not problem else rows[:1])]
    except Exception as error:  # onnxruntime's exceptions share no base class
        _require_memory(error)
        _require_runnable(path, rows[0])
        return problem or f"it does not run with an open batch: {one_line(error, path.parent)}"
    finally:
        variant.unlink()
    _require_shapes(made, single[0])
    if problem:
        return problem
    both = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    try:
        together = session.run([t.name for t in made], both)
    except Exception as error:
        _require_memory(error)
        return f"it does not run with a batch of {_BATCH}: {one_line(error, path.parent)}"
    return _row_problem(made, single, together) or _blind_problem(graph, made, single)


def _static_problem(graph: Graph) -> str:
    """Why a batch is out of the question without trying it."""
    for tensor in graph.tensors:
        if tensor.shape[:1] != (1,):
            return f"tensor {tensor.name[:80]!r} of shape {list(tensor.shape)} has no leading dimension of 1"
    if not graph.inputs:
        return "it has no input"
    if random := next((o.name for o in graph.operators if o.opaque.startswith("random")), ""):
        return f"operator {random[:80]!r} differs from run to run"
    return ""


def _session(path: Path) -> onnxruntime.InferenceSession:
    options = quiet_options(onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _require_memory(error: Exception) -> None:
    """The answer must not depend on the memory an import was given: too little is an error of its own."""
    if speaks_of_memory(f"{type(error).__name__} {error}"):
        raise MemoryError from error


def _require_runnable(path: Path, feeds: dict[str, Any]) -> None:
    """Run the normalised file as it is."""
    try:
        _session(path).run(None, feeds)
    except Exception as error:
        _require_memory(error)
        raise ModelError(
            f"unsupported: the model does not run: {one_line(error, path.parent)}",
            remedy="check that it runs in onnxruntime on zeros and ones, and export it again",
        ) from error


def _require_shapes(made: Sequence[Tensor], found: Sequence[Any]) -> None:
    for tensor, value in zip(made, found, strict=True):
        if value.shape != tensor.shape:
            raise ModelError(
                f"{tensor.name[:80]!r} should have shape {list(tensor.shape)},"
                f" a run gives {list(value.shape)}",
                remedy="export the model with shapes that are true, or with none",
            )


def _row_problem(made: Sequence[Tensor], single: Sequence[Sequence[Any]], together: Sequence[Any]) -> str:
    for index, tensor in enumerate(made):
        if together[index].shape != (_BATCH, *tensor.shape[1:]):
            return f"tensor {tensor.name[:80]!r} does not scale with the batch"
        for row in range(_BATCH):
            alone = single[row][index]
            if relative_difference(together[index][row : row + 1], alone) > TOLERANCE:
                return f"rows of {tensor.name[:80]!r} differ from single runs"
    return ""


def _blind_problem(graph: Graph, made: Sequence[Tensor], single: Sequence[Sequence[Any]]) -> str:
    """Mixed-up rows must not look equal: each output, or what its operator reads, tells them apart."""
    telling = {t.name for i, t in enumerate(made) if not np.array_equal(single[0][i], single[1][i])}
    for output in graph.outputs:
        maker = graph.producer[output]
        near = {output, *(graph.operators[maker].inputs if maker >= 0 else ())}
        if maker >= 0 and telling.isdisjoint(graph.tensors[t].name for t in near):
            name = graph.tensors[output].name
            return f"output {name[:80]!r} does not depend on the input, so a batch cannot be tried"
    return ""


def relative_difference(actual: Any, reference: Any) -> float:
    """Norm of the difference over norm of the reference; infinite where only one side is finite."""
    left, right = np.asarray(actual, np.float64).ravel(), np.asarray(reference, np.float64).ravel()
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    if same.all():
        return 0.0
    difference = np.linalg.norm(left[~same] - right[~same])
    scale = np.linalg.norm(right[np.isfinite(right)])
    return float(difference / scale) if scale and np.isfinite(difference) else float("inf")


def _expose(model: onnx.ModelProto, made: Iterable[Tensor], *, open_batch: bool) -> None:
    """Make every crossing tensor an output and, if asked, leave the leading dimension of inputs open."""
    if open_batch:
        for value in model.graph.input:
            value.type.tensor_type.shape.dim[0].Clear()
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.output[:]
    for tensor in made:
        kind = ELEMENT_TYPES[tensor.dtype]
        model.graph.output.append(onnx.helper.make_tensor_value_info(tensor.name, kind, None))


def _redraw_constant_weights(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Give float weights that hold one value everywhere random ones, else mixed-up rows would look equal.

    Only what arithmetic alone reads: a redrawn scale of a Resize would change shapes.
    """
    arithmetic = ELEMENTWISE | WEIGHTED
    other = {n for node in model.graph.node if node.op_type not in arithmetic for n in node.input}
    for weight in model.graph.initializer:
        plain = weight.data_type == onnx.TensorProto.FLOAT and weight.name not in other
        if not plain or len(weight.raw_data) <= _SCALAR_BYTES:
            continue
        values = np.frombuffer(weight.raw_data, np.float32)
        if values.min() != values.max():
            continue
        fan_in = values.size // weight.dims[0]
        if fan_in == 1:  # per channel: a scale, a shift or a variance, which must stay positive
            drawn = rng.uniform(0.5, 1.5, values.size).astype(np.float32)
        else:
            drawn = rng.standard_normal(values.size, dtype=np.float32) / np.float32(np.sqrt(fan_in))
        weight.raw_data = drawn.tobytes()


def _rows(graph: Graph) -> list[dict[str, Any]]:
    """Two seeded input rows."""
    rng = np.random.default_rng(_SEED + 1)
    return [
        {graph.tensors[t].name: _draw(graph.tensors[t], rng) for t in graph.inputs} for _ in range(_BATCH)
    ]


def _draw(tensor: Tensor, rng: np.random.Generator) -> Any:
    """Floats around 0; integers and booleans 0 or 1, which every index range allows."""
    if tensor.dtype.startswith("float"):
        return rng.standard_normal(tensor.shape).astype(tensor.dtype)
    if tensor.dtype == "bfloat16":
        raise ModelError(
            "unsupported: bfloat16 inputs", remedy="export the model with float16 or float32 inputs"
        )
    return rng.integers(0, 2, tensor.shape).astype(tensor.dtype)

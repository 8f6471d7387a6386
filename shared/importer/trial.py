"""What only a run can tell: that the model runs, that its shapes are true, and whether a batch may be used.

A batch b > 1 is allowed only if, re-pinned to a batch of 2, the rows equal two single runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from stageloom.shared.errors import ModelError
from stageloom.shared.graph import Graph, Tensor
from stageloom.shared.importer.draws import Draws, Feeds
from stageloom.shared.importer.nodes import RANDOM, nodes_within
from stageloom.shared.importer.operators import ELEMENTWISE, WEIGHTED
from stageloom.shared.importer.session import attempt, one_line, open_session, require_memory
from stageloom.shared.importer.values import ELEMENT_TYPES, VARIES, Value

TOLERANCE = 1e-4  # norm of the difference over norm of the reference
_BATCH = 2
_SEED = 20260101
_SCALAR_BYTES = 4


@dataclass(frozen=True)
class Trial:
    """What a few runs showed."""

    batch_problem: str  # why a batch of b > 1 is not allowed; empty if it is
    corrections: Mapping[str, Value]  # tensors that are not what the graph says


def try_model(model: onnx.ModelProto, graph: Graph, draws: Draws, path: Path) -> Trial:
    """Run the model; `path` is the normalised file on disk and `model` the same file parsed, consumed here.

    Every tensor that crosses operators is looked at, not only the outputs: slots hold them all.

    A model that runs on none of the contents that can be tried is taken as inference describes it: it may
    ask for values that only its users know.

    Raises:
        ModelError: onnxruntime cannot load the model with every crossing tensor visible.
        MemoryError: trying it needs more memory than this process may use.
    """
    problem = _static_problem(model, graph)
    inputs = {graph.tensors[t].name for t in graph.inputs}
    crossing = sorted({*graph.outputs, *(t for o in graph.operators for t in o.outputs)})
    made = [graph.tensors[t] for t in crossing if graph.tensors[t].name not in inputs]
    names = [tensor.name for tensor in made]
    session, first = None, None
    if not problem:
        try:
            session = _open(model, path, made, open_batch=True)
            first = draws.settle(session, names)
        except Exception as error:  # onnxruntime's exceptions share no base class
            require_memory(error)
            problem = f"it does not run with an open batch: {one_line(error, path.parent)}"
            model.ParseFromString(path.read_bytes())
    if session is None or first is None:
        session = _open_single(model, path, made)
        try:
            first = draws.settle(session, names)
        except Exception as error:  # contents that only its users know
            require_memory(error)
            return Trial(f"no run could be tried: {one_line(error, path.parent)}", {})
    single = [first]
    rows = draws.rows()[:_BATCH]
    second = attempt(session, names, rows[1])
    if isinstance(second, Exception):
        problem = problem or f"it does not run on every input: {one_line(second, path.parent)}"
    else:
        single.append(second)
    if corrections := _corrections(made, single):
        return Trial(problem, corrections)
    return Trial(problem or _batch_problem(graph, made, single, session, rows), {})


def _open(
    model: onnx.ModelProto, path: Path, made: Sequence[Tensor], *, open_batch: bool
) -> onnxruntime.InferenceSession:
    """A session that shows all crossing tensors; consumes `model`."""
    _expose(model, made, open_batch=open_batch)
    _redraw_constant_weights(model, np.random.default_rng(_SEED))
    variant = path.with_suffix(".trial")
    variant.write_bytes(model.SerializeToString())
    model.Clear()
    try:
        return open_session(variant, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC)
    finally:
        variant.unlink()


def _open_single(model: onnx.ModelProto, path: Path, made: Sequence[Tensor]) -> onnxruntime.InferenceSession:
    try:
        return _open(model, path, made, open_batch=False)
    except Exception as error:  # onnxruntime's exceptions share no base class
        require_memory(error)
        raise ModelError(
            f"unsupported: onnxruntime cannot load the folded model: {one_line(error, path.parent)}",
            remedy="check that onnxruntime runs the file with these shapes, and export it again",
        ) from error


def _batch_problem(
    graph: Graph,
    made: Sequence[Tensor],
    single: Sequence[Sequence[Any]],
    session: onnxruntime.InferenceSession,
    rows: Sequence[Feeds],
) -> str:
    """Why rows in a batch are not what they are alone; empty if they are."""
    both = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    together = attempt(session, [t.name for t in made], both)
    if isinstance(together, Exception):
        return f"it does not run with a batch of {_BATCH}: {one_line(together)}"
    return _row_problem(made, single, together) or _blind_problem(graph, made, single)


def _static_problem(model: onnx.ModelProto, graph: Graph) -> str:
    """Why a batch is out of the question without trying it."""
    for tensor in graph.tensors:
        if tensor.shape[:1] != (1,):
            return f"tensor {tensor.name[:80]!r} of shape {list(tensor.shape)} has no leading dimension of 1"
    if not graph.inputs:
        return "it has no input"
    if random := next((node.name for node in nodes_within(model.graph) if node.op_type in RANDOM), ""):
        return f"node {random[:80]!r} differs from run to run"
    return ""


def _corrections(made: Sequence[Tensor], runs: Sequence[Sequence[Any]]) -> dict[str, Value]:
    """Tensors that have another shape in the runs than the graph says."""
    found = {}
    for index, tensor in enumerate(made):
        shapes = {run[index].shape for run in runs}
        if shapes != {tensor.shape}:
            found[tensor.name] = Value(tensor.dtype, shapes.pop()) if len(shapes) == 1 else VARIES
    return found


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

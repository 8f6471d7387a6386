"""What only a run can tell: shapes that no inference knows, that the model runs, whether a batch may be used.

The type and shape of a value come from the cheapest source that knows them: onnx's shape inference, then
onnxruntime's (behind its own operators), then the file's claims. The outputs of sub-graphs, custom operators
and operators without inference are observed in a few runs with differing inputs, and inference goes on behind
them. Sizes that depend on the contents of an input stay unknown: a few runs could agree by chance.

A batch b > 1 is allowed only if, re-pinned to a batch of 2, the rows equal two single runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from stageloom.shared.errors import ModelError
from stageloom.shared.graph import ITEM_BYTES, Graph, Tensor
from stageloom.shared.importer.nodes import (
    RANDOM,
    captured_names,
    nodes_within,
    opaque_reason,
    sized_while_running,
)
from stageloom.shared.importer.operators import ELEMENTWISE, WEIGHTED
from stageloom.shared.importer.report import NEVER_RAN
from stageloom.shared.importer.session import Draws, Feeds, attempt, one_line, open_session, require_memory
from stageloom.shared.importer.values import ELEMENT_TYPES, UNKNOWN, VARIES, Value, infer_values, with_claims

_RUNTIME_TYPES = {"tensor(float)": "float32", "tensor(double)": "float64"} | {
    f"tensor({name})": name for name in ITEM_BYTES if name not in ("float32", "float64")
}
"""onnxruntime's names of element types."""

_MEASURING = {"Shape", "Size"}


def settle_values(
    model: onnx.ModelProto,
    settled: Mapping[str, Value],
    claims: Mapping[str, Value],
    draws: Draws,
    folder: Path,
) -> dict[str, Value]:
    """Return every value that can be known; `settled` holds the inputs and what runs have shown.

    Raises:
        MemoryError: a run needs more memory than this process may use.
    """
    known = dict(settled)
    while True:
        values = with_claims(infer_values(model, known), claims)
        values.update(_ask_onnxruntime(model, values, folder))
        seen = _observe(model, _observable(model, values), draws, folder)
        if not seen:
            return values
        known.update(seen)


def _ask_onnxruntime(model: onnx.ModelProto, values: Mapping[str, Value], folder: Path) -> dict[str, Value]:
    """Return types and shapes that only onnxruntime knows: those behind its own operators. Nothing runs."""
    unknown = [
        name
        for node in model.graph.node
        for name in node.output
        if name and values.get(name, UNKNOWN) == UNKNOWN
    ]
    if not unknown:
        return {}
    try:
        session = _session_with(model, unknown, folder)
    except Exception as error:  # onnxruntime's exceptions share no base class; then they stay unknown
        require_memory(error)
        return {}
    known = {}
    for output in session.get_outputs():
        kind = _RUNTIME_TYPES.get(output.type)
        # Of a scalar and of a value of unknown rank onnxruntime says the same: no dimension.
        pinned = output.shape and all(isinstance(size, int) for size in output.shape)
        if output.name in unknown and kind is not None and pinned:
            known[output.name] = Value(kind, tuple(output.shape))
    return known


def _observable(model: onnx.ModelProto, values: Mapping[str, Value]) -> list[str]:
    """Return unknown values that a run may tell: their node reads known values, and no content as a size."""
    content = {value.name for value in model.graph.input}
    weights = {weight.name for weight in model.graph.initializer}
    fixed = set(weights)
    observable = []
    for node in model.graph.node:
        reads = [name for name in (*node.input, *captured_names(node)) if name]
        sizes = [values.get(name, UNKNOWN) for name in reads]
        measured = node.op_type in _MEASURING and not node.domain and not any(s.unfit for s in sizes)
        if measured or content.isdisjoint(reads):
            fixed.update(node.output)
        else:
            content.update(node.output)
        unknown = [name for name in node.output if name and values.get(name, UNKNOWN) == UNKNOWN]
        if not unknown or UNKNOWN in sizes or sized_while_running(node, fixed):
            continue
        if VARIES in sizes and not opaque_reason(node):
            continue
        observable += unknown
    return observable


def _observe(model: onnx.ModelProto, names: Sequence[str], draws: Draws, folder: Path) -> dict[str, Value]:
    """Return what a few runs show of `names`; empty if onnxruntime does not run the model."""
    if not names:
        return {}
    try:
        session = _session_with(model, names, folder)
        runs = [draws.settle(session, names)]
    except Exception as error:  # onnxruntime's exceptions share no base class; the trial run says why
        require_memory(error)
        return {}
    later = [attempt(session, names, row) for row in draws.rows()[1:]]
    runs += [run for run in later if not isinstance(run, Exception)]
    return {name: _common([run[i] for run in runs]) for i, name in enumerate(names)}


def _common(examples: Sequence[Any]) -> Value:
    """Return the value that all examples share."""
    kinds = {_seen(example) for example in examples}
    return kinds.pop() if len(kinds) == 1 else VARIES


def _seen(example: Any) -> Value:
    if not isinstance(example, np.ndarray | np.generic):
        kind = {list: "sequence", dict: "map", type(None): "optional"}.get(type(example), "other")
        return Value(unfit=f"{kind} values cannot be cut", opaque=True)
    if example.dtype.kind in "OSU":
        return Value(unfit="string tensors cannot be cut", opaque=True)
    if example.dtype.name not in ITEM_BYTES:
        return Value(unfit=f"{example.dtype.name} tensors cannot be cut")
    return Value(example.dtype.name, tuple(example.shape))


def _session_with(model: onnx.ModelProto, names: Sequence[str], folder: Path) -> onnxruntime.InferenceSession:
    """Open a session over the model with `names` among its outputs."""
    path = folder / "asked.onnx"
    count = len(model.graph.output)
    known = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    path.write_bytes(model.SerializeToString())
    del model.graph.output[count:]
    try:
        return open_session(path, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
    finally:
        path.unlink()


TOLERANCE = 1e-4  # norm of the difference over norm of the reference
_BATCH = 2
_SEED = 20260101
_SCALAR_BYTES = 4


def smoke_run(model: onnx.ModelProto, graph: Graph, draws: Draws, path: Path) -> tuple[dict[str, Value], str]:
    """Run the model; return the tensors that the graph describes wrongly, and why it takes no batch, if so.

    `path` is the normalised file on disk and `model` the same file parsed, consumed here. Every tensor that
    crosses operators is compared, not only the outputs: slots hold them all.

    A model that runs on none of the tried contents is taken as inference describes it: it may ask for values
    that only its users know.

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
            return {}, f"{NEVER_RAN}: {one_line(error, path.parent)}"
    single = [first]
    rows = draws.rows()[:_BATCH]
    second = attempt(session, names, rows[1])
    if isinstance(second, Exception):
        problem = problem or f"it does not run on every input: {one_line(second, path.parent)}"
    else:
        single.append(second)
    if corrections := _corrections(made, single):
        return corrections, problem
    return {}, problem or _batch_problem(graph, made, single, session, rows)


def _open(
    model: onnx.ModelProto, path: Path, made: Sequence[Tensor], *, open_batch: bool
) -> onnxruntime.InferenceSession:
    """Open a session that returns all crossing tensors; consumes `model`."""
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
    """Return why rows differ in a batch; empty if they equal single runs."""
    both = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    together = attempt(session, [t.name for t in made], both)
    if isinstance(together, Exception):
        return f"it does not run with a batch of {_BATCH}: {one_line(together)}"
    return _row_problem(made, single, together) or _blind_problem(graph, made, single)


def _static_problem(model: onnx.ModelProto, graph: Graph) -> str:
    """Return why no batch is possible, as far as the graph tells."""
    for tensor in graph.tensors:
        if tensor.shape[:1] != (1,):
            return f"tensor {tensor.name[:80]!r} of shape {list(tensor.shape)} has no leading dimension of 1"
    if not graph.inputs:
        return "it has no input"
    if random := next((node.name for node in nodes_within(model.graph) if node.op_type in RANDOM), ""):
        return f"node {random[:80]!r} differs from run to run"
    return ""


def _corrections(made: Sequence[Tensor], runs: Sequence[Sequence[Any]]) -> dict[str, Value]:
    """Return the tensors that have another shape in the runs than in the graph."""
    corrections = {}
    for index, tensor in enumerate(made):
        shapes = {run[index].shape for run in runs}
        if shapes != {tensor.shape}:
            corrections[tensor.name] = Value(tensor.dtype, shapes.pop()) if len(shapes) == 1 else VARIES
    return corrections


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
    """Return which output cannot show mixed-up rows: it and the inputs of its operator are equal."""
    telling = {t.name for i, t in enumerate(made) if not np.array_equal(single[0][i], single[1][i])}
    for output in graph.outputs:
        maker = graph.producer[output]
        near = {output, *(graph.operators[maker].inputs if maker >= 0 else ())}
        if maker >= 0 and telling.isdisjoint(graph.tensors[t].name for t in near):
            name = graph.tensors[output].name
            return f"output {name[:80]!r} does not depend on the input, so a batch cannot be tried"
    return ""


def relative_difference(actual: Any, reference: Any) -> float:
    """Divide the norm of the difference by that of the reference; infinite where only one side is finite."""
    left, right = np.asarray(actual, np.float64).ravel(), np.asarray(reference, np.float64).ravel()
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    if same.all():
        return 0.0
    difference = np.linalg.norm(left[~same] - right[~same])
    scale = np.linalg.norm(right[np.isfinite(right)])
    return float(difference / scale) if scale and np.isfinite(difference) else float("inf")


def _expose(model: onnx.ModelProto, made: Iterable[Tensor], *, open_batch: bool) -> None:
    """Make every crossing tensor an output; with `open_batch` open the leading dimension of the inputs."""
    if open_batch:
        for value in model.graph.input:
            value.type.tensor_type.shape.dim[0].Clear()
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.output[:]
    for tensor in made:
        kind = ELEMENT_TYPES[tensor.dtype]
        model.graph.output.append(onnx.helper.make_tensor_value_info(tensor.name, kind, None))


def _redraw_constant_weights(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Give uniform float weights random values, else mixed-up rows would look equal.

    Only weights that arithmetic alone reads: another scale of a Resize would change shapes.
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

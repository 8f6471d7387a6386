"""Whether a model may run batched: re-pinned to a batch of 2, its rows must equal two single runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from shared.graph import Graph, Tensor
from shared.importer.values import ELEMENT_TYPES

TOLERANCE = 1e-4  # norm of the difference over norm of the reference
_BATCH = 2
_SEED = 20260101
_SCALAR_BYTES = 4


def batch_problem(model: onnx.ModelProto, graph: Graph, path: Path) -> str:
    """Why a batch of b > 1 is not allowed; empty if it is. Consumes `model`: its weights may be re-drawn.

    Every tensor that crosses operators is compared, not only the outputs: slots hold them all. `path` is
    scratch.
    """
    crossing = sorted({*graph.inputs, *graph.outputs, *(t for o in graph.operators for t in o.outputs)})
    tensors = [graph.tensors[t] for t in crossing]
    for tensor in tensors:
        if not tensor.shape or tensor.shape[0] != 1:
            return f"tensor {tensor.name[:80]!r} of shape {list(tensor.shape)} has no leading dimension of 1"
    if random := next((o.name for o in graph.operators if o.opaque.startswith("random")), ""):
        return f"operator {random[:80]!r} differs from run to run"
    if any(graph.tensors[t].dtype == "bfloat16" for t in graph.inputs):
        return "numpy has no bfloat16 to try a batch with"
    made = [t for t in tensors if t.name not in {graph.tensors[i].name for i in graph.inputs}]
    _open_batch(model, made)
    rng = np.random.default_rng(_SEED)
    _redraw_constant_weights(model, rng)
    path.write_bytes(model.SerializeToString())
    model.Clear()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    names = [tensor.name for tensor in made]
    rows = [
        {graph.tensors[t].name: _draw(graph.tensors[t], rng) for t in graph.inputs} for _ in range(_BATCH)
    ]
    both = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        single = [session.run(names, row) for row in rows]
        together = session.run(names, both)
    except Exception as error:  # onnxruntime's exceptions share no base class
        return f"it does not run with a batch of {_BATCH}: {' '.join(str(error).split())[:200]}"
    finally:
        path.unlink()
    return _difference(graph, made, single, together)


def _difference(
    graph: Graph, made: Sequence[Tensor], single: Sequence[Sequence[Any]], together: Sequence[Any]
) -> str:
    telling: set[str] = set()  # tensors that tell the rows apart
    for index, tensor in enumerate(made):
        wanted = [row[index] for row in single]
        if together[index].shape != (_BATCH, *tensor.shape[1:]):
            return f"tensor {tensor.name[:80]!r} does not scale with the batch"
        for row, alone in enumerate(wanted):
            if relative_difference(together[index][row : row + 1], alone) > TOLERANCE:
                return f"rows of {tensor.name[:80]!r} differ from single runs"
        if not np.array_equal(wanted[0], wanted[1]):
            telling.add(tensor.name)
    # A final Softmax may saturate; then what it reads must tell the rows apart.
    for tensor_id in graph.outputs:
        maker = graph.producer[tensor_id]
        near = {tensor_id, *(graph.operators[maker].inputs if maker >= 0 else ())}
        if telling.isdisjoint(graph.tensors[t].name for t in near):
            name = graph.tensors[tensor_id].name
            return f"output {name[:80]!r} does not depend on the input, so a batch cannot be tried"
    return ""


def relative_difference(actual: Any, reference: Any) -> float:
    """Norm of the difference over norm of the reference; infinite where only one side is finite."""
    left, right = np.asarray(actual, np.float64).ravel(), np.asarray(reference, np.float64).ravel()
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    difference = np.linalg.norm(np.where(same, 0.0, left - right))
    if difference == 0.0:
        return 0.0
    scale = np.linalg.norm(np.where(np.isfinite(right), right, 0.0))
    return float(difference / scale) if scale and np.isfinite(difference) else float("inf")


def _open_batch(model: onnx.ModelProto, made: Sequence[Tensor]) -> None:
    """Leave the leading dimension of inputs open and expose every crossing tensor, in place."""
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].Clear()
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.value_info[:]
    del model.graph.output[:]
    for tensor in made:
        shape = ["batch", *tensor.shape[1:]]
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(tensor.name, ELEMENT_TYPES[tensor.dtype], shape)
        )


def _redraw_constant_weights(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Give float weights that hold one value everywhere random ones, else mixed-up rows would look equal."""
    for weight in model.graph.initializer:
        if weight.data_type != onnx.TensorProto.FLOAT or len(weight.raw_data) <= _SCALAR_BYTES:
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


def _draw(tensor: Tensor, rng: np.random.Generator) -> Any:
    """One seeded input row: floats around 0, integers and booleans 0 or 1, which any index range allows."""
    if tensor.dtype.startswith("float"):
        return rng.standard_normal(tensor.shape).astype(tensor.dtype)
    return rng.integers(0, 2, tensor.shape).astype(tensor.dtype)

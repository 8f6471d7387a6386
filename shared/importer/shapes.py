"""The type and shape of every value of a normalised model, from the cheapest source that knows.

Shape inference of onnx knows most of them, onnxruntime's those behind its own operators, and the file
claims some. What a sub-graph, a custom operator or an operator without inference makes is looked at in a few
runs with differing inputs; with it known, inference goes on behind it. Sizes that depend on what an input
holds stay unknown: a few runs could agree by chance.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from stageloom.shared.graph import ITEM_BYTES
from stageloom.shared.importer.draws import Draws
from stageloom.shared.importer.nodes import captured_names, opaque_reason, sized_while_running
from stageloom.shared.importer.session import attempt, open_session, require_memory
from stageloom.shared.importer.values import UNKNOWN, VARIES, Value, infer_values, with_claims

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
    """Every value that can be known; `settled` holds the inputs and what runs have shown.

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
    """Types and shapes that only onnxruntime knows: those behind its own operators. Nothing runs."""
    unknown = [name for name in _made(model) if values.get(name, UNKNOWN) == UNKNOWN]
    if not unknown:
        return {}
    try:
        session = _session_with(model, unknown, folder)
    except Exception as error:  # onnxruntime's exceptions share no base class; then they stay unknown
        require_memory(error)
        return {}
    found = {}
    for output in session.get_outputs():
        kind = _RUNTIME_TYPES.get(output.type)
        # Of a scalar and of a value of unknown rank onnxruntime says the same: no dimension.
        pinned = output.shape and all(isinstance(size, int) for size in output.shape)
        if output.name in unknown and kind is not None and pinned:
            found[output.name] = Value(kind, tuple(output.shape))
    return found


def _observable(model: onnx.ModelProto, values: Mapping[str, Value]) -> list[str]:
    """Unknown values that a run may tell: what makes them reads known values, and no content as a size."""
    content = {value.name for value in model.graph.input}
    weights = {weight.name for weight in model.graph.initializer}
    fixed = set(weights)
    found = []
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
        found += unknown
    return found


def _observe(model: onnx.ModelProto, names: Sequence[str], draws: Draws, folder: Path) -> dict[str, Value]:
    """What a few runs make of `names`; nothing if onnxruntime does not run the model."""
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


def _common(found: Sequence[Any]) -> Value:
    """The value of which `found` are examples."""
    kinds = {_seen(example) for example in found}
    return kinds.pop() if len(kinds) == 1 else VARIES


def _seen(example: Any) -> Value:
    if not isinstance(example, np.ndarray | np.generic):
        what = {list: "sequence", dict: "map", type(None): "optional"}.get(type(example), "other")
        return Value(unfit=f"{what} values cannot be cut", opaque=True)
    if example.dtype.kind in "OSU":
        return Value(unfit="string tensors cannot be cut", opaque=True)
    if example.dtype.name not in ITEM_BYTES:
        return Value(unfit=f"{example.dtype.name} tensors cannot be cut")
    return Value(example.dtype.name, tuple(example.shape))


def _made(model: onnx.ModelProto) -> list[str]:
    return [name for node in model.graph.node for name in node.output if name]


def _session_with(model: onnx.ModelProto, names: Sequence[str], folder: Path) -> onnxruntime.InferenceSession:
    """A session over the model with `names` among its outputs."""
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

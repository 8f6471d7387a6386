"""The importer's own runs: onnxruntime sessions that live for a run or two, their errors and their inputs.

Input contents must be accepted by the model. Floats are drawn around 0. Integers and booleans are 0 or 1,
which most index ranges allow. A model may still refuse them (an axis or a sample rate that it does not know),
so they are also all 0, all 1 or, for single integers, one of the constants that the model compares a value
with.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from stageloom.shared.errors import ModelError
from stageloom.shared.importer.nodes import all_graphs, nodes_within
from stageloom.shared.importer.process import speaks_of_memory
from stageloom.shared.importer.values import Value

_ERROR_CHARS = 300


def one_line(error: Exception, scratch: Path | None = None) -> str:
    """Return a library's message on one line of bounded length, without the scratch folder's name."""
    text = " ".join(str(error).split())
    return (text if scratch is None else text.replace(f"{scratch}/", ""))[:_ERROR_CHARS]


def quiet_options(level: onnxruntime.GraphOptimizationLevel) -> onnxruntime.SessionOptions:
    """Return session options that take little memory and one thread."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def open_session(path: Path, level: onnxruntime.GraphOptimizationLevel) -> onnxruntime.InferenceSession:
    """Open a session on the CPU."""
    return onnxruntime.InferenceSession(str(path), quiet_options(level), providers=["CPUExecutionProvider"])


def require_memory(error: Exception) -> None:
    """Raise MemoryError if `error` reports too little memory: results must not depend on memory."""
    if speaks_of_memory(f"{type(error).__name__} {error}"):
        raise MemoryError from error


def attempt(
    session: onnxruntime.InferenceSession, names: Sequence[str], feeds: Mapping[str, Any]
) -> list[Any] | Exception:
    """Run the session; return the named outputs or onnxruntime's error.

    Raises:
        MemoryError: the run needs more memory than this process may use.
    """
    try:
        outputs: list[Any] = session.run(names, feeds)
        return outputs
    except Exception as error:  # onnxruntime's exceptions share no base class
        require_memory(error)
        return error


ROWS = 3
_SEED = 20260102
_MAX_INTEGERS = 16
_COMPARING = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}

Feeds = dict[str, Any]
"""Arrays by input name."""


class Draws:
    """Seeded rows of inputs; `settle` finds contents that the model accepts."""

    def __init__(self, inputs: Mapping[str, Value], model: onnx.ModelProto) -> None:
        """Raises:
        ModelError: an input has a type that cannot be fed.
        """
        self._inputs = inputs
        for name, value in inputs.items():
            if value.dtype == "bfloat16":
                raise ModelError(
                    f"unsupported: input {name[:80]!r}: bfloat16 inputs",
                    remedy="export the model with float16 or float32 inputs",
                )
        single = [n for n, v in inputs.items() if v.size == 1 and v.dtype.startswith(("int", "uint"))]
        self._single = frozenset(single)
        compared = _compared_integers(model) if single else ()
        # What integers are instead of drawn, if anything, and whether only single ones are.
        self._fills: list[tuple[int | None, bool]] = [
            (None, False),
            (0, False),
            (1, False),
            *((value, True) for value in compared),
        ]

    def rows(self) -> list[Feeds]:
        """Return rows of differing contents, the same on every call."""
        rng = np.random.default_rng(_SEED)
        return [{name: self._draw(name, rng) for name in self._inputs} for _ in range(ROWS)]

    def settle(self, session: onnxruntime.InferenceSession, names: Sequence[str]) -> list[Any]:
        """Run the first row, with other integers where the model refuses; later rows use the accepted ones.

        Raises:
            MemoryError: the run needs more memory than this process may use.
            Exception: onnxruntime's error of the first try, if no try succeeds.
        """
        refused = outputs = attempt(session, names, self.rows()[0])
        while isinstance(outputs, Exception):
            if len(self._fills) == 1:
                assert isinstance(refused, Exception)
                raise refused
            del self._fills[0]
            outputs = attempt(session, names, self.rows()[0])
        return outputs

    def _draw(self, name: str, rng: np.random.Generator) -> Any:
        value = self._inputs[name]
        if value.dtype.startswith("float"):
            return np.asarray(rng.standard_normal(value.shape), value.dtype)
        drawn = np.asarray(rng.integers(0, 2, value.shape))
        fill, only_single = self._fills[0]
        if fill is not None and (name in self._single or not only_single):
            drawn = np.full(value.shape, fill)
        return drawn.astype(value.dtype)


def _compared_integers(model: onnx.ModelProto) -> list[int]:
    """Return single integers that the model, or a graph nested in it, compares a value with."""
    stored = [(tensor.name, tensor) for graph in all_graphs(model) for tensor in graph.initializer]
    stored += [
        (node.output[0], node.attribute[0].t)
        for node in nodes_within(model.graph)
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t")
    ]
    known = {
        name: int(numpy_helper.to_array(tensor).reshape(()))
        for name, tensor in stored
        if tensor.data_type in (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
        and all(size == 1 for size in tensor.dims)
    }
    compared = [
        known[name]
        for node in nodes_within(model.graph)
        if node.op_type in _COMPARING
        for name in node.input
        if name in known
    ]
    return sorted(set(compared) - {0, 1})[:_MAX_INTEGERS]

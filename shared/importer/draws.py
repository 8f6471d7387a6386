"""Inputs for the importer's own runs: a few rows of contents that a model accepts.

Floats lie around 0. Integers and booleans are 0 or 1, which most ranges of indices allow; a model may still
refuse them (an axis, a sample rate that it does not know), so they are also all 0, all 1, or, where they are
single, one of the constants that the model compares something with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from stageloom.shared.errors import ModelError
from stageloom.shared.importer.nodes import all_graphs, nodes_within
from stageloom.shared.importer.session import attempt
from stageloom.shared.importer.values import Value

ROWS = 3
_SEED = 20260102
_MAX_INTEGERS = 16
_COMPARING = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}

Feeds = dict[str, Any]
"""Arrays by input name."""


@dataclass(frozen=True)
class _Fill:
    """What integers are instead of drawn, if anything; `single`: only those that come alone."""

    value: int | None = None
    single: bool = False


class Draws:
    """Seeded rows of inputs; `settle` finds contents on which the model runs."""

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
        self._fills = [
            _Fill(),
            _Fill(value=0),
            _Fill(value=1),
            *(_Fill(value=v, single=True) for v in compared),
        ]

    def rows(self) -> list[Feeds]:
        """The rows, each with other contents; the same ones on every call."""
        rng = np.random.default_rng(_SEED)
        return [{name: self._draw(name, rng) for name in self._inputs} for _ in range(ROWS)]

    def settle(self, session: onnxruntime.InferenceSession, names: Sequence[str]) -> list[Any]:
        """Run the first row, with other integers where the model refuses; later rows use what it took.

        Raises:
            MemoryError: the run needs more memory than this process may use.
            Exception: onnxruntime's own of the first try, if none succeeds.
        """
        refused = found = attempt(session, names, self.rows()[0])
        while isinstance(found, Exception):
            if len(self._fills) == 1:
                assert isinstance(refused, Exception)
                raise refused
            del self._fills[0]
            found = attempt(session, names, self.rows()[0])
        return found

    def _draw(self, name: str, rng: np.random.Generator) -> Any:
        value = self._inputs[name]
        if value.dtype.startswith("float"):
            return np.asarray(rng.standard_normal(value.shape), value.dtype)
        drawn = np.asarray(rng.integers(0, 2, value.shape))
        fill = self._fills[0]
        if fill.value is not None and (name in self._single or not fill.single):
            drawn = np.full(value.shape, fill.value)
        return drawn.astype(value.dtype)


def _compared_integers(model: onnx.ModelProto) -> list[int]:
    """Single integers that the model, or a graph nested in it, compares something with."""
    known: dict[str, int] = {}
    for graph in all_graphs(model):
        for tensor in graph.initializer:
            _note(tensor.name, tensor, known)
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
                _note(node.output[0], node.attribute[0].t, known)
    compared = [
        known[name]
        for node in nodes_within(model.graph)
        if node.op_type in _COMPARING
        for name in node.input
        if name in known
    ]
    return sorted(set(compared) - {0, 1})[:_MAX_INTEGERS]


def _note(name: str, tensor: onnx.TensorProto, known: dict[str, int]) -> None:
    whole = tensor.data_type in (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    if whole and all(size == 1 for size in tensor.dims):
        known[name] = int(numpy_helper.to_array(tensor).reshape(()))

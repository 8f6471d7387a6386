"""One sub-model on OpenVINO's processor plugin, run on the calling thread."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from stageloom.edge_agent.executor.onnx.cache import ValuesSession
from stageloom.edge_agent.executor.openvino.fewer_bits import Integers
from stageloom.edge_agent.executor.openvino.model import openvino
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import TensorId

_INT32: Final = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a compiled model, by its place there."""

    index: int
    tensor: TensorId
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fixed: bool = True  # OpenVINO knows the shape before it runs
    handed_on: TensorId | None = None  # the input that this output is


@dataclass(frozen=True, slots=True)
class OpenvinoSession:
    """A compiled model with its one request: callers take turns, as the compiled model has one graph."""

    request: Any
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    integers: Integers  # of the model
    exact: Callable[[], ValuesSession] | None = None  # takes runs whose integers are too large
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def run(self, values: Values) -> None:
        """Read inputs from `values` and put outputs there; arrays pass by reference both ways.

        Raises:
            ExecutorError: an output has another shape than the graph; or integers in it may be too large, and
                nothing takes such runs.
        """
        self.run_into(values, {})

    def run_into(self, values: Values, outs: Mapping[TensorId, np.ndarray]) -> None:
        """As `run`; the outputs that `outs` has are written there, into C-ordered arrays.

        Raises:
            ExecutorError: as `run`.
        """
        # A request keeps addresses and no references: these are held until it has ended.
        feeds = [_readable(values[port.tensor], port) for port in self.inputs]
        if beyond := self._beyond(feeds):
            self._run_exactly(beyond, values, outs)
            return
        outputs = [port for port in self.outputs if port.handed_on is None]
        made = [_output(port, outs) for port in outputs]
        with self._turn:
            for port, array in zip(self.inputs, feeds, strict=True):
                self.request.set_input_tensor(port.index, openvino.Tensor(array, shared_memory=True))
            for port, out in zip(outputs, made, strict=True):
                if out is not None:
                    self.request.set_output_tensor(port.index, openvino.Tensor(out, shared_memory=True))
            self.request.infer({}, share_outputs=True)
            for port, out in zip(outputs, made, strict=True):
                values[port.tensor] = self._copied(port) if out is None else out

        for port in self.outputs:
            if port.handed_on is not None:
                values[port.tensor] = values[port.handed_on].copy()
        for tensor, out in outs.items():
            if values[tensor] is not out:
                out[...] = values[tensor]

    def _beyond(self, feeds: Sequence[np.ndarray]) -> str:
        """What of these inputs, or of what follows from them, is too large; empty where nothing is."""
        ranges = {}
        for port, array in zip(self.inputs, feeds, strict=True):
            if array.size and (port.dtype == np.int64 or port.index in self.integers.reads):
                low, high = ranges[port.index] = int(array.min()), int(array.max())
                if low < _INT32.min or high > _INT32.max:
                    return f"{port.name!r} holds integers beyond 32 bits, in which openvino computes"
        kind = self.integers.inexact(ranges)
        return f"{kind} may have integers that openvino does not compute exactly" if kind else ""

    def _run_exactly(self, why: str, values: Values, outs: Mapping[TensorId, np.ndarray]) -> None:
        if self.exact is None:
            raise ExecutorError(why, remedy="use the executor onnx for this model")
        self.exact().run(values)
        for tensor, out in outs.items():
            out[...] = values[tensor]
            values[tensor] = out

    def _copied(self, port: Port) -> np.ndarray:
        array: np.ndarray = self.request.get_output_tensor(port.index).data
        if array.shape != port.shape:
            raise ExecutorError(
                f"openvino makes {port.name!r} as {list(array.shape)}, the model as {list(port.shape)}",
                remedy="use the executor onnx for this model",
            )
        return array.copy()


def _output(port: Port, outs: Mapping[TensorId, np.ndarray]) -> np.ndarray | None:
    if not port.fixed:
        return None
    return outs[port.tensor] if port.tensor in outs else np.empty(port.shape, port.dtype)


def _readable(array: np.ndarray, port: Port) -> np.ndarray:
    """The array as OpenVINO takes it without a copy: in C order, aligned and writeable; nothing writes to it.

    Raises:
        ExecutorError: it is of another shape or type.
    """
    if array.shape != port.shape or array.dtype != port.dtype:
        wanted = f"{port.dtype} {list(port.shape)}"
        raise ExecutorError(f"{port.name!r} is {array.dtype} {list(array.shape)}, not {wanted}")
    return array if array.flags.carray else array.copy(order="C")

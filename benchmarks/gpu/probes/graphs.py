"""Graphs within graphs, by cuda-bindings: do children run at once, and what does a condition cost?

A plan's programs could be captured once per member and composed, so that a new schedule is wired without a
capture; or one graph could hold every member under a condition, in place of one graph per mask.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

import torch

from benchmarks.gpu.ceilings import chain
from benchmarks.gpu.device import Captured, Device, per_run_s

_MEMBERS: Final = 4


class NoBindings(RuntimeError):
    """cuda-bindings are not installed, or the device is no GPU."""


def _runtime(device: Device) -> Any:
    if device.kind != "cuda":
        raise NoBindings("needs CUDA")
    try:
        return import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise NoBindings("cuda-bindings are not installed") from error


class Composed:
    """A graph made by hand from captured ones; instantiated, and freed by `close`."""

    def __init__(self, device: Device) -> None:
        """
        Raises:
            NoBindings: see there.
        """
        self._runtime = _runtime(device)
        self._graph = self._checked(self._runtime.cudaGraphCreate(0))
        self._run: Any = None

    def _checked(self, result: tuple[Any, ...]) -> Any:
        """What a call gave, behind its error code.

        Raises:
            RuntimeError: the call failed.
        """
        error, *found = result
        if error != self._runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"CUDA: {error}")
        return found[0] if found else None

    def child(self, captured: Captured, after: Sequence[Any] = (), inside: Any = None) -> Any:
        """Add a captured graph (kept when it was made) as one node; the node."""
        raw = self._runtime.cudaGraph_t(captured.graph.raw_cuda_graph())
        graph = self._graph if inside is None else inside
        before = list(after) or None
        return self._checked(self._runtime.cudaGraphAddChildGraphNode(graph, before, len(after), raw))

    def condition(self, captured: Captured, holds: bool) -> None:
        """Add a captured graph under a condition whose value is set anew at every launch."""
        cuda = self._runtime
        flags = int(cuda.cudaGraphConditionalHandleFlags.cudaGraphCondAssignDefault)
        handle = self._checked(cuda.cudaGraphConditionalHandleCreate(self._graph, int(holds), flags))
        node = cuda.cudaGraphNodeParams()
        node.type = cuda.cudaGraphNodeType.cudaGraphNodeTypeConditional
        node.conditional.handle = handle
        node.conditional.type = cuda.cudaGraphConditionalNodeType.cudaGraphCondTypeIf
        node.conditional.size = 1
        self._checked(cuda.cudaGraphAddNode(self._graph, None, None, 0, node))
        self.child(captured, inside=node.conditional.phGraph_out[0])

    def ready(self) -> None:
        """No more nodes."""
        self._run = self._checked(self._runtime.cudaGraphInstantiate(self._graph, 0))

    def replay(self) -> None:
        """Issue it on the current stream."""
        stream = self._runtime.cudaStream_t(torch.cuda.current_stream().cuda_stream)
        self._checked(self._runtime.cudaGraphLaunch(self._run, stream))

    def close(self) -> None:
        """Free it."""
        torch.cuda.synchronize()
        if self._run is not None:
            self._runtime.cudaGraphExecDestroy(self._run)
        self._runtime.cudaGraphDestroy(self._graph)


def _members(device: Device, precision: str, size: tuple[int, int]) -> list[Any]:
    """Dependent chains that take no room on the chip, captured each on a stream of its own."""
    return [
        device.capture(chain(device, precision, *size), stream=device.streams[index], keep=True)
        for index in range(_MEMBERS)
    ]


def _timed_us(device: Device, made: Composed, seconds: float) -> float:
    try:
        made.ready()
        made.replay()
        torch.cuda.synchronize()
        return per_run_s(device, made.replay, seconds=seconds) * 1e6
    finally:
        made.close()


def children(device: Device, precision: str, size: tuple[int, int], seconds: float) -> dict[str, float]:
    """Members as children side by side, one after another, and each launched by itself, in microseconds."""
    _runtime(device)
    members = _members(device, precision, size)
    beside, in_turn = Composed(device), Composed(device)
    last: list[Any] = []
    for member in members:
        beside.child(member)
        last = [in_turn.child(member, last)]

    def launched() -> None:
        for member in members:
            member.replay()

    return {
        "beside": _timed_us(device, beside, seconds),
        "in_turn": _timed_us(device, in_turn, seconds),
        "launched": per_run_s(device, launched, seconds=seconds) * 1e6,
    }


def conditions(device: Device, precision: str, size: tuple[int, int], seconds: float) -> dict[str, float]:
    """Members under conditions that hold, that do not, and without any, side by side, in microseconds."""
    _runtime(device)
    members = _members(device, precision, size)
    found = {}
    for name in ("plain", "holds", "skipped"):
        made = Composed(device)
        for member in members:
            if name == "plain":
                made.child(member)
            else:
                made.condition(member, name == "holds")
        found[name] = _timed_us(device, made, seconds)
    found["one"] = per_run_s(device, members[0].replay, seconds=seconds) * 1e6
    return found

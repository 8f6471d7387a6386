"""Sessions of a backend, each made once and shared by replicas, masks and plans.

A session computes a set of operators of one artifact at one batch. Nothing here imports a backend.
"""

import ctypes
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from stageloom.edge_agent.executor.base import SharedTable
from stageloom.edge_agent.executor.onnx.parts import Half, ModelParts
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.shared.artifact import Artifact
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId, TensorId
from stageloom.shared.merge import merged, padding

if TYPE_CHECKING:
    import numpy

_SESSION_BYTES = 128 << 10
"""What a session takes beside its weights and activations."""

MAX_IDLE_BYTES = 512 << 20
"""Weights that are kept for plans that may come back; memory that another plan needs is given up first."""

_LARGEST_TENSORS = 4
"""How many of a model's largest tensors a running session holds at once: input, output and two layouts or
scratch; for ResNet-50, Inception V3 and SqueezeNet 24 to 30 MiB were seen on two lanes."""


@dataclass(frozen=True, slots=True)
class SessionKey:
    """What makes two sub-graphs the same session."""

    artifact: Digest
    ops: tuple[int, ...]  # of the model, ascending
    batch: int
    intra_op_threads: int
    merge: bool = False  # the operators as one convolution
    stream: int | None = None  # on a device the stream that it belongs to; None on the processor
    precision: str = "fp32"  # in which a backend may compute; tensors keep the model's types
    copy: int = 0  # of several equal sessions, where one or its threads serve one caller at a time
    half: Half | None = None  # of operators that are split
    executor: str = ""  # that runs it, where it is another than the one that runs the rest of its block


class ValuesSession(Protocol):
    """A session on the processor."""

    def run(self, values: Values) -> None:
        """Read inputs from `values` and put outputs there; arrays pass by reference both ways."""


@runtime_checkable
class WritesInto(Protocol):
    """A session that can write its outputs where it is told to."""

    def run_into(self, values: Values, outs: Mapping[TensorId, "numpy.ndarray"]) -> None:
        """Read inputs from `values` and write all outputs into C-ordered arrays."""


SessionT = TypeVar("SessionT")
"""A backend's session."""


def weight_bytes(key: SessionKey, graph: Graph) -> int:
    """What a session keeps: its weights, once, in the layout that its kernels want."""
    weights = graph.weight_bytes(key.ops)
    if key.merge:
        _, zeros = padding(graph, merged(graph, [OpId(op) for op in key.ops]))
        weights += zeros
    if key.half is not None:
        weights = _half_of(weights, graph, key.ops, key.half)
    return _SESSION_BYTES + weights


def _half_of(weights: int, graph: Graph, ops: tuple[int, ...], half: Half) -> int:
    """Bytes of the weights of one half: channels have weights of their own, both halves of rows have all."""
    dim, boundary, second = half
    shape = graph.tensors[graph.operators[ops[-1]].outputs[0]].shape
    if dim not in (1, len(shape) - 1):
        return weights
    extent = shape[dim] - boundary if second else boundary
    return -(-weights * extent // shape[dim])


def activation_bytes(graph: Graph, batch: int) -> int:
    """What one run needs at most; runs one after another share it, as all sessions draw on one arena."""
    return _LARGEST_TENSORS * batch * graph.largest_tensor_bytes


class SessionCache(SharedTable[SessionKey, SessionT]):
    """Sessions by key, with the plans that hold them.

    Those that no plan holds any more stay for a while, up to `idle_bytes` of weights: plans come back, after
    a trial, a burst or a roll-back, and making their sessions again takes longer than the rest of a swap.
    """

    def __init__(
        self,
        make: Callable[[SessionKey, ModelParts], SessionT],
        weigh: Callable[[SessionKey, Graph], int] = weight_bytes,
        idle_bytes: int = MAX_IDLE_BYTES,
    ) -> None:
        """`make` opens a session, `weigh` says what it keeps in bytes."""
        super().__init__()
        self._max_idle_bytes = idle_bytes
        self._make = make
        self._weigh = weigh
        self._idle: dict[SessionKey, int] = {}  # bytes of their weights; the longest idle first
        self._weights: dict[SessionKey, int] = {}

    def ensure(self, key: SessionKey, holder: PlanKey, source: Callable[[], ModelParts]) -> SessionT:
        """The session, made from `source` now if need be, held for a plan until `release`.

        Raises:
            ExecutorError: the backend cannot build it.
        """

        def make() -> SessionT:
            parts = source()
            session = self._make(key, parts)
            self._weights[key] = self._weigh(key, parts.artifact.graph)
            return session

        return self.hold(holder, key, make)

    def hold_all(
        self,
        holder: PlanKey,
        keys: Collection[SessionKey],
        artifacts: Mapping[Digest, Artifact],
        made: Callable[[SessionKey, SessionT], None] | None = None,
    ) -> None:
        """Have these sessions for a plan; an artifact is parsed only if one is missing, and then once.

        `made` is called with every session that was not there before.

        Raises:
            ExecutorError: the backend cannot build one.
        """
        parsed: dict[Digest, ModelParts] = {}

        def parts(digest: Digest) -> ModelParts:
            if digest not in parsed:
                parsed[digest] = ModelParts(artifacts[digest])
            return parsed[digest]

        for key in sorted(keys, key=attrgetter("artifact", "batch", "ops", "stream", "copy")):
            new = self.get(key) is None
            session = self.ensure(key, holder, partial(parts, key.artifact))
            if new and made is not None:
                made(key, session)
        if parsed:
            parsed.clear()
            return_free_memory()

    def idle(self) -> dict[SessionKey, int]:
        """Sessions that no plan holds, with the bytes of their weights."""
        with self._lock:
            return dict(self._idle)

    def drop_idle(self) -> None:
        """Free the sessions that no plan holds."""
        with self._lock:
            if not self._idle:
                return
            self._shrink(0)
        return_free_memory()

    def _taken(self, key: SessionKey) -> None:
        self._idle.pop(key, None)

    def _left(self, key: SessionKey) -> None:
        self._idle[key] = self._weights[key]
        self._shrink(self._max_idle_bytes)

    def _shrink(self, nbytes: int) -> None:
        over = sum(self._idle.values()) - nbytes
        while over > 0:
            key = next(iter(self._idle))
            over -= self._idle.pop(key)
            del self._values[key], self._weights[key]


def session_borders(
    key: SessionKey, source: ModelParts
) -> tuple[Graph, tuple[TensorId, ...], tuple[TensorId, ...]]:
    """What a session reads and makes, and a graph that has these tensors in their shapes.

    Raises:
        Unsplittable, ModelError: it is half of operators that cannot be split so.
    """
    graph = source.artifact.graph
    if key.half is None:
        return graph, *borders(graph, key.ops)
    found = source.half(key.ops, key.batch, key.half)
    return found.graph, tuple(tensor for tensor, _ in found.reads), graph.operators[key.ops[-1]].outputs


def borders(graph: Graph, ops: tuple[int, ...]) -> tuple[tuple[TensorId, ...], tuple[TensorId, ...]]:
    """What the operators read from outside, and what of theirs is needed outside; ascending."""
    inside = set(ops)
    made = {t for op in ops for t in graph.operators[op].outputs}
    read = {t for op in ops for t in graph.operators[op].inputs}
    outputs = set(graph.outputs)
    needed = {t for t in made if t in outputs or any(r not in inside for r in graph.consumers[t])}
    return tuple(sorted(read - made)), tuple(sorted(needed))


def return_free_memory() -> None:
    """Give back to the system what loading took for a while: two to three times a model's weights.

    The C library keeps freed memory for later; only glibc can be asked to let it go.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

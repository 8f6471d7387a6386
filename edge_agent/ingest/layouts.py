"""Layouts on the application's side: places of a task's tensors, kept from task to task.

Tasks of one kind (models, types and shapes) take turns in the same places, so that their pages stay mapped,
their arrays stay made, and the agent need not be told again where anything lies.
"""

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from stageloom.edge_agent.ingest.arena import ArenaPool, ClientArena, Reservation
from stageloom.edge_agent.ingest.messages import (
    DeclareLayout,
    InputRef,
    ModelSignature,
    OutputRef,
    TensorInfo,
)
from stageloom.edge_agent.ingest.signature import tensor_bytes
from stageloom.shared.errors import TaskRefused

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Outputs: TypeAlias = dict[str, Array]
Kind: TypeAlias = tuple[Any, ...]
"""Models, and each input's name, type and shape: what tasks must share to take turns in one layout."""

_MAX_LAYOUTS = 2048  # of them idle ones go first; the agent allows more


class Agent(Protocol):
    """How the pool tells the agent; called in the order in which it must hear."""

    def attach(self, arena: ClientArena) -> None:
        """A new arena."""

    def declare(self, message: DeclareLayout) -> None:
        """A new layout."""

    def retract(self, layout: int) -> None:
        """A layout that is not used any more."""


def kind_of(names: tuple[str, ...], arrays: Mapping[str, Array]) -> Kind:
    """The kind of a task."""
    return (names, *((name, array.dtype, array.shape) for name, array in arrays.items()))


class TaskLayout:
    """One layout, used by one task at a time."""

    __slots__ = ("_outputs", "inputs", "kind", "made_for", "names", "number", "reservation")

    def __init__(
        self,
        number: int,
        kind: Kind,
        reservation: Reservation,
        inputs: tuple[Array, ...],
        names: tuple[str, ...],
        outputs: tuple[tuple[int, str, Array], ...],
        made_for: object,
    ) -> None:
        self.number = number
        self.kind = kind
        self.reservation = reservation
        self.inputs = inputs  # views to copy a task's inputs to, in the order of its kind
        self.names = names  # of the models
        self._outputs = outputs  # model, tensor, view
        self.made_for = made_for

    def outputs(self) -> Outputs | dict[str, Outputs]:
        """Copies of the outputs, so that the places can be used again."""
        if len(self.names) == 1:
            return {tensor: view.copy() for _, tensor, view in self._outputs}
        by_model: dict[str, Outputs] = {name: {} for name in self.names}
        for model, tensor, view in self._outputs:
            by_model[self.names[model]][tensor] = view.copy()
        return by_model


class LayoutPool:
    """All layouts of one connection, and the arenas that they lie in."""

    def __init__(self, arenas: ArenaPool, agent: Agent) -> None:
        self._arenas = arenas
        self._agent = agent
        self._lock = threading.Lock()
        self._idle: dict[Kind, list[TaskLayout]] = {}
        self._numbers = itertools.count()
        self._count = 0
        self._valid = object()  # layouts made for another one name outputs that are out of date

    def take(self, kind: Kind) -> TaskLayout | None:
        """An idle layout of this kind."""
        idle = self._idle.get(kind)
        try:
            return idle.pop() if idle else None
        except IndexError:  # another thread was faster
            return None

    def make(self, kind: Kind, infos: Sequence[ModelSignature], arrays: Mapping[str, Array]) -> TaskLayout:
        """A new layout, which the agent knows when this returns.

        Raises:
            TaskRefused: an array of a type that no model takes, or no room (code `arena_full`).
        """
        valid = self._valid
        natives = {name: _native(name, array) for name, array in arrays.items()}
        outputs = [(index, tensor) for index, info in enumerate(infos) for tensor in info.outputs]
        sizes = [array.nbytes for array in arrays.values()]
        sizes += [tensor_bytes(tensor.dtype, tensor.shape) for _, tensor in outputs]
        reservation = self._reserve(sizes)
        memory, arena = reservation.arena.memory, reservation.arena.number
        places = iter(reservation.offsets)
        refs, views = [], []
        for name, array in arrays.items():
            offset = next(places)
            refs.append(InputRef(name, arena, offset, natives[name].name, tuple(array.shape)))
            flat: Array = np.frombuffer(memory, natives[name], array.size, offset)
            views.append(flat.reshape(array.shape))
        targets, results = [], []
        for (index, tensor), offset in zip(outputs, places, strict=True):
            nbytes = tensor_bytes(tensor.dtype, tensor.shape)
            targets.append(OutputRef(index, tensor.name, arena, offset, nbytes))
            results.append((index, tensor.name, _output_view(memory, tensor, nbytes, offset)))
        names = tuple(info.name for info in infos)
        layout = TaskLayout(
            next(self._numbers), kind, reservation, tuple(views), names, tuple(results), valid
        )
        self._agent.declare(DeclareLayout(layout.number, names, tuple(refs), tuple(targets)))
        with self._lock:
            self._count += 1
        return layout

    def _reserve(self, sizes: list[int]) -> Reservation:
        if self._count >= _MAX_LAYOUTS:
            self._drop_idle()
        try:
            return self._arenas.reserve(sizes, self._agent.attach)
        except TaskRefused:
            self._drop_idle()  # places that tasks of other kinds have left
            return self._arenas.reserve(sizes, self._agent.attach)

    def give_back(self, layout: TaskLayout) -> None:
        """The task that used it has ended."""
        if layout.made_for is self._valid:
            self._idle.setdefault(layout.kind, []).append(layout)
        else:
            self.discard(layout)

    def discard(self, layout: TaskLayout) -> None:
        """Free its places; no task uses it."""
        self._agent.retract(layout.number)
        self._arenas.release(layout.reservation)
        with self._lock:
            self._count -= 1

    def invalidate(self) -> None:
        """The models have changed: every layout is made anew."""
        self._valid = object()
        self._drop_idle()

    def _drop_idle(self) -> None:
        for kind in list(self._idle):
            while (layout := self.take(kind)) is not None:
                self.discard(layout)

    def close(self) -> None:
        """The connection is gone."""
        self._idle.clear()
        self._arenas.close()


def _native(name: str, array: Array) -> "np.dtype[Any]":
    if array.dtype.hasobject or array.dtype.kind not in "fiub" + "V":
        raise TaskRefused(
            "wrong_dtype",
            f"input {name!r} has the type {array.dtype}, which no model takes",
            remedy="give numbers or booleans, of the type that `models()` names",
        )
    return array.dtype.newbyteorder("=")


def _output_view(memory: Any, tensor: TensorInfo, nbytes: int, offset: int) -> Array:
    """numpy has no bfloat16 of its own: without a package that adds one, its bits come as uint16."""
    try:
        dtype = np.dtype(tensor.dtype)
    except TypeError:
        dtype = np.dtype(np.uint16)
    view: Array = np.frombuffer(memory, dtype, nbytes // dtype.itemsize, offset)
    return view.reshape(tensor.shape)

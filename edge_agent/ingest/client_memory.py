"""The application's side of shared memory: arenas (sealed memfds), and layouts of tasks' tensors in them.

Tasks of one kind (models, types and shapes) take turns in the same layout, so that their pages stay mapped,
their arrays stay made, and the agent is told only once where the tensors lie.
"""

import contextlib
import fcntl
import itertools
import mmap
import os
import threading
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from stageloom.edge_agent.ingest.messages import (
    ALIGNMENT_BYTES,
    MAX_TENSORS,
    AttachArena,
    DeclareLayout,
    DetachArena,
    InputRef,
    ModelSignature,
    OutputRef,
    RetractLayout,
    TensorInfo,
    ToAgent,
    decode_to_agent,
    encode,
)
from stageloom.edge_agent.ingest.signature import tensor_bytes
from stageloom.shared.errors import DecodeError, TaskRefused, UnavailableError

_ARENA_BYTES = 64 << 20  # address space only: pages cost memory once they are touched


class ClientArena:
    """One memfd. First fit over a sorted free list, so that pages touched once are touched again."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("stageloom-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, nbytes)
        fcntl.fcntl(
            self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        self.memory = mmap.mmap(self.descriptor, nbytes)
        self._free: list[tuple[int, int]] = [(0, nbytes)]  # (offset, bytes), ascending, never adjacent

    @property
    def is_empty(self) -> bool:
        """No place in it is taken."""
        return self._free == [(0, self.nbytes)]

    def take(self, nbytes: int) -> int | None:
        """The offset of a free place, or None."""
        for index, (offset, room) in enumerate(self._free):
            if room >= nbytes:
                if room == nbytes:
                    del self._free[index]
                else:
                    self._free[index] = (offset + nbytes, room - nbytes)
                return offset
        return None

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free a place and join it with its neighbours."""
        insort(self._free, (offset, nbytes))
        joined: list[tuple[int, int]] = []
        for start, room in self._free:
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((start, room))
        self._free = joined

    def close(self) -> None:
        """Close the descriptor: it is for the agent alone, `memory` stays mapped without it."""
        os.close(self.descriptor)


class Reservation(NamedTuple):
    """Places of one task's tensors, one after the other in one arena."""

    arena: ClientArena
    offset: int
    nbytes: int
    offsets: tuple[int, ...]  # per tensor, in the arena


class ArenaPool:
    """All arenas of one connection; grows by whole arenas up to a limit, and gives up empty ones."""

    def __init__(self, max_bytes: int, max_arenas: int) -> None:
        self._max_bytes = max_bytes
        self._max_arenas = max_arenas
        self._arenas: list[ClientArena] = []
        self._numbers = itertools.count()  # none is used again
        self._lock = threading.Lock()
        self._growing = threading.Lock()

    def reserve(self, sizes: list[int], announce: Callable[[ClientArena], None]) -> Reservation:
        """Places for tensors of these sizes; `announce` is called first if they need a new arena.

        No other thread names the arena before that has returned.

        Raises:
            TaskRefused: the limit is reached (code `arena_full`).
            UnavailableError: by `announce`.
        """
        offsets, total = [], 0
        for size in sizes:
            offsets.append(total)
            total += max(_aligned(size), ALIGNMENT_BYTES)
        total = max(total, ALIGNMENT_BYTES)
        arena, start = self._take(total) or self._grow(total, announce)
        return Reservation(arena, start, total, tuple(start + o for o in offsets))

    def _take(self, nbytes: int) -> tuple[ClientArena, int] | None:
        with self._lock:
            for arena in self._arenas:
                if (start := arena.take(nbytes)) is not None:
                    return arena, start
        return None

    def _grow(self, nbytes: int, announce: Callable[[ClientArena], None]) -> tuple[ClientArena, int]:
        """A place in a new arena, or in one that another thread has made meanwhile."""
        with self._growing:
            if (found := self._take(nbytes)) is not None:
                return found
            made = self._made(nbytes)
            try:
                announce(made)
            finally:
                made.close()
            with self._lock:
                self._arenas.append(made)
                return made, made.take(nbytes) or 0

    def _made(self, least_bytes: int) -> ClientArena:
        room = self._max_bytes - sum(arena.nbytes for arena in self._arenas)
        if room < least_bytes or len(self._arenas) >= self._max_arenas:
            raise TaskRefused(
                "arena_full",
                f"{least_bytes} bytes do not fit beside the tasks that have not ended",
                remedy="wait for results before submitting more",
            )
        page = mmap.PAGESIZE
        nbytes = min(max(_ARENA_BYTES, -(-least_bytes // page) * page), room)
        return ClientArena(next(self._numbers), nbytes)

    def drop_empty(self, retire: Callable[[ClientArena], None]) -> None:
        """Give up the arenas in which no place is taken, so that larger ones may be made.

        `retire` is called with each before another is announced: the agent counts both against one limit.
        """
        with self._growing:
            with self._lock:
                empty = [arena for arena in self._arenas if arena.is_empty]
                self._arenas = [arena for arena in self._arenas if arena not in empty]
            for arena in empty:
                retire(arena)

    def release(self, reservation: Reservation) -> None:
        with self._lock:
            reservation.arena.give_back(reservation.offset, reservation.nbytes)

    def close(self) -> None:
        with self._lock:
            self._arenas.clear()  # unmapped with the last array that looks into them


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Outputs: TypeAlias = dict[str, Array]
Shapes: TypeAlias = Sequence[tuple[int, ...]]
Kind: TypeAlias = tuple[Any, ...]
"""Models, and each input's name, type and shape: what tasks must share to take turns in one layout."""

_MAX_LAYOUTS = 2048  # of them idle ones go first; the agent allows more


class InputSource(ABC):
    """An input that is no array yet, such as a part of a file: it is read into shared memory at once.

    Args:
        dtype: numpy's type of the elements.
        shape: as the model takes it.
    """

    def __init__(self, dtype: "np.dtype[Any]", shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape

    @abstractmethod
    def read_into(self, place: Array) -> None:
        """Fill `place`, which has this type and shape and lies in one piece; `submit` raises what it does."""


TaskInput: TypeAlias = "np.ndarray[Any, np.dtype[Any]] | InputSource"


def kind_of(names: tuple[str, ...], inputs: Mapping[str, TaskInput]) -> Kind:
    """The kind of a task."""
    return (names, *((name, given.dtype, given.shape) for name, given in inputs.items()))


@dataclass(slots=True, eq=False)
class TaskLayout:
    """One layout, used by one task at a time."""

    number: int
    kind: Kind
    reservation: Reservation
    inputs: tuple[Array, ...]  # views to copy a task's inputs to, in the order of its kind
    names: tuple[str, ...]  # of the models
    results: tuple[tuple[int, str, Array], ...]  # model, tensor, view
    made_for: object
    is_open: bool = False  # each task says what shapes its outputs have

    def outputs(self, shapes: Shapes = ()) -> Outputs | dict[str, Outputs]:
        """Copies of the outputs, so that the places can be used again; `shapes` as `TaskEnded` has them.

        Raises:
            DecodeError: shapes are missing; the layout is out of date (`fits`).
        """
        if len(self.names) == 1:
            return {tensor: view.copy() for tensor, view in self.output_views(shapes).items()}
        by_model: dict[str, Outputs] = {name: {} for name in self.names}
        for model, tensor, view in self._made(shapes):
            by_model[self.names[model]][tensor] = view.copy()
        return by_model

    def output_views(self, shapes: Shapes = ()) -> Outputs:
        """The outputs of the only model where they lie; the next task in this layout overwrites them."""
        return {tensor: view for _, tensor, view in self._made(shapes)}

    def fits(self, shapes: Shapes) -> bool:
        """Whether the models are as open as when the layout was made: shapes are told of those that are."""
        return self.is_open == bool(shapes) or not self.results

    def _made(self, shapes: Shapes) -> Sequence[tuple[int, str, Array]]:
        if not self.is_open and not shapes:
            return self.results
        if len(shapes) != len(self.results):
            raise DecodeError(
                "the agent has not said what shapes the outputs have",
                remedy="submit again: the plan may have changed meanwhile",
            )
        return [
            (model, tensor, view.reshape(-1)[: prod(shape)].reshape(shape))
            for (model, tensor, view), shape in zip(self.results, shapes, strict=True)
        ]


class LayoutPool:
    """All layouts of one connection, and the arenas that they lie in."""

    def __init__(self, arenas: ArenaPool, send: Callable[[ToAgent, int | None], None]) -> None:
        """`send`: to the agent, with a descriptor or None, before whatever is sent next; it never waits."""
        self._arenas = arenas
        self._send = send
        self._lock = threading.Lock()
        self._idle: dict[Kind, list[TaskLayout]] = {}  # no kind without one
        self._numbers = itertools.count()
        self._count = 0
        self._valid = object()  # layouts made for another one name outputs that are out of date

    def take(self, kind: Kind) -> TaskLayout | None:
        """An idle layout of this kind."""
        with self._lock:
            idle = self._idle.get(kind)
            if idle is None:
                return None
            layout = idle.pop()
            if not idle:  # with open dimensions there are as many kinds as shapes
                del self._idle[kind]
            return layout

    def make(self, kind: Kind, infos: Sequence[ModelSignature]) -> TaskLayout:
        """A new layout, which the agent knows before whatever is sent next.

        Raises:
            TaskRefused: inputs that no model takes, more tensors than a task may have, or no room (code
                `arena_full`).
            UnavailableError: the agent is gone.
        """
        valid = self._valid
        inputs = [(name, _native(name, dtype), shape) for name, dtype, shape in kind[1:]]
        outputs = [(index, tensor) for index, info in enumerate(infos) for tensor in info.outputs]
        if len(outputs) > MAX_TENSORS:
            raise TaskRefused(
                "too_many_tensors",
                f"the models have {len(outputs)} outputs together, more than {MAX_TENSORS}",
                remedy="submit a task for each of them",
            )
        # Tasks of other shapes want places of the same size: what one has left must do for the next.
        largest = {tensor.name: tensor.shape for info in infos if info.is_open for tensor in info.inputs}
        sizes = [
            dtype.itemsize * max(prod(shape), prod(largest.get(name, ()))) for name, dtype, shape in inputs
        ]
        sizes += [tensor_bytes(tensor.dtype, tensor.shape) for _, tensor in outputs]
        reservation = self._reserve(sizes)
        try:
            layout, declared = self._placed(kind, infos, inputs, outputs, reservation, valid)
            _require_readable(declared)
            self._send(declared, None)
        except BaseException:
            self._arenas.release(reservation)
            raise
        with self._lock:
            self._count += 1
        return layout

    def _placed(
        self,
        kind: Kind,
        infos: Sequence[ModelSignature],
        inputs: Sequence[tuple[str, "np.dtype[Any]", tuple[int, ...]]],
        outputs: Sequence[tuple[int, TensorInfo]],
        reservation: Reservation,
        valid: object,
    ) -> tuple[TaskLayout, DeclareLayout]:
        """A layout in the reserved places, and what tells the agent of it."""
        memory, arena = reservation.arena.memory, reservation.arena.number
        places = iter(reservation.offsets)
        refs, views = [], []
        for name, dtype, shape in inputs:
            offset = next(places)
            refs.append(InputRef(name, arena, offset, dtype.name, tuple(shape)))
            flat: Array = np.frombuffer(memory, dtype, prod(shape), offset)
            views.append(flat.reshape(shape))
        targets, results = [], []
        for (index, tensor), offset in zip(outputs, places, strict=True):
            nbytes = tensor_bytes(tensor.dtype, tensor.shape)
            targets.append(OutputRef(index, tensor.name, arena, offset, nbytes, tensor.dtype, tensor.shape))
            results.append((index, tensor.name, _output_view(memory, tensor, nbytes, offset)))
        names: tuple[str, ...] = kind[0]  # as the application calls them
        number = next(self._numbers)
        layout = TaskLayout(
            number,
            kind,
            reservation,
            tuple(views),
            names,
            tuple(results),
            valid,
            any(info.is_open for info in infos),
        )
        models = tuple(info.name for info in infos)
        return layout, DeclareLayout(number, models, tuple(refs), tuple(targets))

    def _reserve(self, sizes: list[int]) -> Reservation:
        if self._count >= _MAX_LAYOUTS:
            self._drop_idle()
        with contextlib.suppress(TaskRefused):
            return self._arenas.reserve(sizes, self._attach)
        self._drop_idle()  # places that tasks of other kinds have left
        with contextlib.suppress(TaskRefused):
            return self._arenas.reserve(sizes, self._attach)
        self._drop_empty_arenas()  # whose places are each too small
        return self._arenas.reserve(sizes, self._attach)

    def _attach(self, arena: ClientArena) -> None:
        self._send(AttachArena(arena.number, arena.nbytes), arena.descriptor)

    def _drop_empty_arenas(self) -> None:
        self._arenas.drop_empty(lambda arena: self._send(DetachArena(arena.number), None))

    def give_back(self, layout: TaskLayout) -> None:
        """The task that used it has ended."""
        with self._lock:
            if layout.made_for is self._valid:
                self._idle.setdefault(layout.kind, []).append(layout)
                return
        self.discard(layout)

    def discard(self, layout: TaskLayout) -> None:
        """Free its places; no task uses it."""
        with contextlib.suppress(UnavailableError):  # an agent that is gone has forgotten it
            self._send(RetractLayout(layout.number), None)
        self._arenas.release(layout.reservation)  # behind it: an arena is detached after its layouts
        with self._lock:
            self._count -= 1

    def invalidate(self) -> None:
        """The models have changed: every layout is made anew."""
        with self._lock:
            self._valid = object()
        self._drop_idle()

    def _drop_idle(self) -> None:
        for kind in list(self._idle):
            while (layout := self.take(kind)) is not None:
                self.discard(layout)

    def close(self) -> None:
        with self._lock:
            self._idle.clear()
        self._arenas.close()


def _require_readable(declared: DeclareLayout) -> None:
    """The agent ends the connection over what it cannot read, and with it every open task.

    Raises:
        TaskRefused: it cannot read this: an input whose name or rank no model has, or too much for a packet.
    """
    try:
        decode_to_agent(encode(declared))
    except DecodeError as error:
        raise TaskRefused(
            "wrong_input",
            f"the agent cannot be told where the tensors of such a task lie: {error.cause}",
            remedy="give the inputs that `models()` names, to fewer models at once",
        ) from error


def _native(name: str, dtype: "np.dtype[Any]") -> "np.dtype[Any]":
    if dtype.hasobject or dtype.kind not in "fiub" + "V":
        raise TaskRefused(
            "wrong_dtype",
            f"input {name!r} has the type {dtype}, which no model takes",
            remedy="give numbers or booleans, of the type that `models()` names",
        )
    return dtype.newbyteorder("=")


def _output_view(memory: Any, tensor: TensorInfo, nbytes: int, offset: int) -> Array:
    """numpy has no bfloat16 of its own: without a package that adds one, its bits come as uint16."""
    try:
        dtype = np.dtype(tensor.dtype)
    except TypeError:
        dtype = np.dtype(np.uint16)
    view: Array = np.frombuffer(memory, dtype, nbytes // dtype.itemsize, offset)
    return view.reshape(tensor.shape)

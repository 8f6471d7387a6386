"""Tasks whose tensors lie in clients' arenas: found, checked, read in place and answered in place.

A client can write to its arena while the engine reads it. Of numbers that are only computed with, that spoils
the client's own results. Indices, sizes and masks are different: backends check them once and read them again
when they address memory, so the engine works on a copy of those that it takes when the task comes.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec import structs

from stageloom.edge_agent.ingest.messages import MAX_REASON_CHARS, TaskEnded
from stageloom.edge_agent.ingest.messages import encode as encode_packet
from stageloom.edge_agent.worker.messages import (
    AddApplication,
    AddArena,
    AddLayout,
    ArenaRefused,
    CancelTask,
    DropApplication,
    DropArena,
    DropLayout,
    Handlers,
    Report,
    RunTask,
    TaskDone,
)
from stageloom.edge_agent.worker.runtime import EngineRuntime
from stageloom.edge_agent.worker.tasks import EngineTask
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import Code, Outcome
from stageloom.shared.errors import RefusedError, TaskRefused
from stageloom.shared.graph import ITEM_BYTES, Graph, Tensor
from stageloom.shared.ids import TaskId, TensorId
from stageloom.shared.shape_ranges import range_text, shape_text

if TYPE_CHECKING:
    import numpy

BAD_INPUT = "bad_input"
UNKNOWN_ARENA = "unknown_arena"
ADDRESSING = ("int32", "int64", "bool")
"""Types that ONNX's operators take indices, sizes and masks in."""


class ArenaTasks:
    """Used by the receiving thread; `answer` of a task runs on any."""

    def __init__(
        self,
        report: Callable[[Report], None],
        report_end: "Callable[[TaskDone, Application | None, bytes], None]",
        driver: Callable[[], EngineRuntime | None],
    ) -> None:
        self.report = report
        self.report_end = report_end
        self._driver = driver
        self.applications: dict[int, Application] = {}
        self._arenas: dict[int, _MappedArena] = {}
        self.tasks_in: dict[int, set[TaskId]] = {}  # by arena
        self._layouts: dict[int, _Layout] = {}
        self.handlers: Handlers = {
            RunTask: self._run,
            CancelTask: lambda command, fds: self._cancel(command.task),
            AddApplication: self._add_application,
            DropApplication: self._drop_application,
            AddLayout: self._add_layout,
            DropLayout: self._drop_layout,
            AddArena: self._add_arena,
            DropArena: self._drop_arena,
        }

    def _add_application(self, command: AddApplication, fds: list[int]) -> None:
        if len(fds) != 1:
            raise ValueError(f"application {command.application} came without its socket")
        self.applications[command.application] = Application(command.application, fds[0])

    def _drop_application(self, command: DropApplication, fds: list[int]) -> None:
        self.applications.pop(command.application, None)

    def _add_arena(self, command: AddArena, fds: list[int]) -> None:
        """Map an arena; a refused one is reported, and tasks that name it are refused."""
        try:
            if len(fds) != 1 or command.arena in self._arenas:
                raise RefusedError(f"arena {command.arena} is known, or came without its memory file")
            self._arenas[command.arena] = _MappedArena(fds[0], command.size_bytes)
            self.tasks_in[command.arena] = set()
        except RefusedError as error:
            self.report(ArenaRefused(command.arena, str(error)))

    def _drop_arena(self, command: DropArena, fds: list[int]) -> None:
        """Cancel the tasks that lie in an arena; it is unmapped once nothing reads it any more."""
        arena = command.arena
        if self._arenas.pop(arena, None) is None:
            return
        for layout in self._layouts.values():
            if arena in layout.arenas:
                layout.bound = None
        for task in sorted(self.tasks_in.pop(arena)):
            self._cancel(task)

    def _add_layout(self, command: AddLayout, fds: list[int]) -> None:
        """Keep a layout; its tensors are mapped when its first task comes."""
        self._layouts[command.layout] = _Layout(command)

    def _drop_layout(self, command: DropLayout, fds: list[int]) -> None:
        """Forget a layout; tasks that lie in it end as they would have."""
        self._layouts.pop(command.layout, None)

    def _cancel(self, task: TaskId) -> None:
        """End a task if it has not ended."""
        driver = self._driver()
        if driver is not None:
            driver.cancel(task)

    def _run(self, command: RunTask, fds: list[int]) -> None:
        """Hand a task to the engine, or answer at once what is wrong with it."""
        driver = self._driver()
        try:
            if driver is None or driver.served is None:
                raise TaskRefused(Code.UNKNOWN_MODEL, "no plan is active", remedy="try again in a moment")
            layout = self._layouts.get(command.layout)
            if layout is None:
                raise TaskRefused(BAD_INPUT, f"layout {command.layout} is not known")
            if layout.bound is not driver.served:
                self._locate(layout, driver.served)
            driver.submit(_ArenaTask(self, layout, command))
        except TaskRefused as error:
            self._refuse(command.task, error.code, str(error))
        except (RefusedError, ValueError, TypeError, OverflowError) as error:
            self._refuse(command.task, BAD_INPUT, str(error))

    def _refuse(self, task: TaskId, code: str, reason: str) -> None:
        now = time.monotonic()
        self.report(TaskDone(task, Outcome.REFUSED, code, reason, now, None, now))

    def _locate(self, layout: "_Layout", bound: BoundPlan) -> None:
        """Make a view of every tensor as this plan knows it. The agent has checked that the layout fits.

        Raises:
            RefusedError, ValueError: it does not: an arena is unknown, a tensor lies outside it or is not
                aligned, or an input has no place.
        """
        declared = layout.declared
        several = len(declared.models) > 1
        sources = {name: (arena, offset) for name, arena, offset in declared.inputs}
        targets = {name: (arena, offset) for name, arena, offset in declared.outputs}
        shapes = dict(zip(sources, declared.shapes, strict=bool(declared.shapes)))
        models = [bound.models[bound.model_index[m]] for m in declared.models if m in bound.model_index]
        # New dictionaries: tasks in flight go on with what they have, a layout that does not fit stays whole.
        inputs: dict[str, dict[str, numpy.ndarray]] = {}
        outputs: dict[str, dict[str, numpy.ndarray]] = {}
        for model in models:
            graph, name = model.graph, model.plan.name
            inputs[name] = {
                tensor.name: self._view(
                    tensor, sources.get(f"{name}/{tensor.name}") or sources.get(tensor.name), name
                )
                for tensor in (
                    _as_declared(graph, t, shapes.get(graph.tensors[t].name)) for t in graph.inputs
                )
            }
            outputs[name] = {
                tensor.name: self._view(tensor, place, name)
                for tensor in (graph.tensors[t] for t in graph.outputs)
                if (place := targets.get(f"{name}/{tensor.name}" if several else tensor.name))
            }
        layout.inputs, layout.outputs = inputs, outputs
        layout.open_models = frozenset(model.plan.name for model in models if model.graph.ranges is not None)
        layout.addressing = {
            name: tuple(key for key, view in views.items() if view.dtype.name in ADDRESSING)
            for name, views in inputs.items()
            if any(view.dtype.name in ADDRESSING for view in views.values())
        }
        layout.input_bytes = models[0].input_bytes if models else 0
        used = {arena for _, arena, _ in (*declared.inputs, *declared.outputs)}
        layout.arenas = tuple(used & self.tasks_in.keys())
        layout.bound = bound

    def _view(self, tensor: Tensor, place: tuple[int, int] | None, model: str) -> "numpy.ndarray":
        if place is None:
            raise RefusedError(
                f"model {model!r} needs the input {tensor.name!r}, which the task does not have"
            )
        arena = self._arenas.get(place[0])
        if arena is None:
            raise TaskRefused(UNKNOWN_ARENA, f"arena {place[0]} is not known", remedy="add it first")
        return arena.view(tensor, place[1])


def _as_declared(graph: Graph, number: TensorId, shape: "tuple[int, ...] | None") -> Tensor:
    """An input with the shape that tasks of a layout have: the graph's, or one within its ranges.

    Raises:
        RefusedError: it lies outside them.
    """
    tensor = graph.tensors[number]
    if graph.ranges is None or shape is None:
        return tensor
    if not graph.takes(number, shape):
        wanted = range_text(graph.smallest(number), tensor.shape)
        raise RefusedError(f"input {tensor.name!r} is {wanted}, not {shape_text(shape)}")
    return Tensor(tensor.name, tensor.dtype, shape)


def write_at_start(place: "numpy.ndarray", made: "numpy.ndarray", name: str) -> None:
    """Write an output at the beginning of a place that holds the largest.

    Raises:
        RefusedError: it is larger.
    """
    if made.dtype.itemsize != place.dtype.itemsize or made.size > place.size:
        raise RefusedError(
            f"output {name!r} is {shape_text(made.shape)}, more than {shape_text(place.shape)} elements",
            remedy="import the model with the range in which its outputs are largest",
        )
    place.reshape(-1)[: made.size].reshape(made.shape)[...] = made


class Application:
    """An application's socket, open for as long as any thread may write to it."""

    def __init__(self, id: int, fd: int) -> None:
        """Keep a copy of `fd`."""
        self.id = id
        self._fd = os.dup(fd)
        os.set_blocking(self._fd, False)

    def take(self, packet: bytes) -> bool:
        """Send a packet; False if the application does not take it now, or is gone."""
        try:
            os.write(self._fd, packet)
        except OSError:
            return False
        return True

    def __del__(self) -> None:
        os.close(self._fd)


class _MappedArena:
    """A client's memory file, mapped into this process."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map `size_bytes` of `fd`; the descriptor may be closed afterwards.

        Raises:
            RefusedError: the file can still shrink, which would kill whoever reads it, or is too small.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if not seals & fcntl.F_SEAL_SHRINK:
            raise RefusedError(
                "the arena can be made shorter while it is in use",
                remedy="seal the memory file with F_SEAL_SHRINK",
            )
        if not 0 < size_bytes <= os.fstat(fd).st_size:
            raise RefusedError(f"the arena does not have {size_bytes} bytes")
        try:
            self._memory = mmap.mmap(fd, size_bytes)
        except OSError as error:
            raise RefusedError(f"the arena cannot be mapped: {error.strerror}") from error

    def view(self, tensor: Tensor, offset: int) -> "numpy.ndarray":
        """A tensor of batch 1 in place. The mapping lives as long as any view of it.

        Raises:
            RefusedError: the tensor is not aligned to its items.
            ValueError, OverflowError: it does not lie inside the arena.
        """
        import numpy

        item_bytes = ITEM_BYTES[tensor.dtype]
        if offset % item_bytes:
            raise RefusedError(f"tensor {tensor.name!r} at {offset} is not aligned to {item_bytes} bytes")
        flat = numpy.frombuffer(self._memory, tensor.dtype, tensor.nbytes // item_bytes, offset)
        return flat.reshape(tensor.shape)


class _Layout:
    """A layout, and what it comes to under the plan that it was last used with."""

    __slots__ = (
        "addressing",
        "arenas",
        "bound",
        "declared",
        "input_bytes",
        "inputs",
        "open_models",
        "outputs",
    )

    def __init__(self, declared: AddLayout) -> None:
        self.declared = declared
        self.bound: BoundPlan | None = None
        self.inputs: dict[str, dict[str, numpy.ndarray]] = {}  # by model and tensor
        self.outputs: dict[str, dict[str, numpy.ndarray]] = {}
        self.addressing: dict[str, tuple[str, ...]] = {}  # inputs that are copied, by model
        self.open_models: frozenset[str] = frozenset()  # whose tensors have shapes of their own in each task
        self.arenas: tuple[int, ...] = ()
        self.input_bytes = 0

    def settled_inputs(self) -> "dict[str, dict[str, numpy.ndarray]]":
        """The inputs; those that may address memory are copied, as they are now."""
        settled = dict(self.inputs)
        for model, names in self.addressing.items():
            settled[model] = self.inputs[model] | {name: self.inputs[model][name].copy() for name in names}
        return settled


class _ArenaTask(EngineTask):
    """One task in place."""

    __slots__ = (
        "_application",
        "_arenas",
        "_command",
        "_declared",
        "_inputs",
        "_made",
        "_open_models",
        "_outputs",
        "_owner",
    )

    def __init__(self, owner: ArenaTasks, layout: _Layout, command: RunTask) -> None:
        super().__init__(
            id=command.task,
            models=layout.declared.models,
            nbytes=layout.input_bytes,
            priority=command.priority,
            deadline_s=command.deadline_s,
        )
        self._owner = owner
        self._application = layout.declared.application
        self._command = command
        self._inputs = layout.inputs if not layout.addressing else layout.settled_inputs()
        self._outputs = layout.outputs
        self._open_models = layout.open_models  # of this plan: the layout may be located for the next one
        self._declared = layout.declared.outputs
        self._made: dict[str, tuple[int, ...]] = {}  # shapes of what models with open dimensions made
        self._arenas = layout.arenas
        for arena in layout.arenas:
            owner.tasks_in[arena].add(self.id)

    def inputs(self, model: str) -> "Mapping[str, numpy.ndarray]":
        """Views into the arena, and copies of what may address memory."""
        return self._inputs[model]

    def deliver(self, model: str, outputs: "Mapping[str, numpy.ndarray]") -> None:
        """Write the outputs that the client has named a place for."""
        if model not in self._open_models:
            for name, place in self._outputs[model].items():
                place[...] = outputs[name]
            return
        for name, place in self._outputs[model].items():
            write_at_start(place, outputs[name], name)
            self._made[f"{model}/{name}" if self.shared else name] = outputs[name].shape

    def answer(self, done: TaskDone) -> None:
        """Report the end, with what the application is told."""
        for arena in self._arenas:
            if (tasks := self._owner.tasks_in.get(arena)) is not None:
                tasks.discard(self.id)
        if self._made and done.outcome is Outcome.COMPLETED:
            done = structs.replace(done, shapes=self._shapes())
        command = self._command
        ended = TaskEnded(
            command.owner_task,
            done.outcome.value,
            done.code,
            done.reason[:MAX_REASON_CHARS],
            command.received_at_s,
            done.queued_s,
            done.started_s or 0.0,
            done.ended_s,
            done.shapes,
        )
        self._inputs = self._outputs = {}  # queues may remember the task, and shall not keep arenas mapped
        application = self._owner.applications.get(self._application)
        self._owner.report_end(done, application, encode_packet(ended))

    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of every output, in the layout's order."""
        pinned = {
            (f"{model}/{name}" if self.shared else name): view.shape
            for model, views in self._outputs.items()
            for name, view in views.items()
        }
        known = pinned | self._made
        return tuple(known[name] for name, _, _ in self._declared)

"""Tasks whose tensors lie in clients' arenas: found, checked, read in place and answered in place.

A client can write to its arena while the engine reads it. Of numbers that are only computed with, that spoils
the client's own results. Indices, sizes and masks are different: backends check them once and read them again
when they address memory, so the engine works on a copy of those that it takes when the task comes.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from stageloom.edge_agent.worker.arenas import Arena
from stageloom.edge_agent.worker.driver import EngineDriver
from stageloom.edge_agent.worker.messages import AddArena, ArenaRefused, Declare, Report, Submit, TaskDone
from stageloom.edge_agent.worker.tasks import TaskEnd, TaskIO
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import Code, Outcome, Task
from stageloom.shared.errors import RefusedError, TaskRefused
from stageloom.shared.graph import Tensor
from stageloom.shared.ids import TaskId

if TYPE_CHECKING:
    import numpy

BAD_INPUT = "bad_input"
UNKNOWN_ARENA = "unknown_arena"
ADDRESSING = ("int32", "int64", "bool")
"""Types that ONNX's operators take indices, sizes and masks in."""


class ArenaTasks:
    """Used by the receiving thread; `ended` of a task runs on any."""

    def __init__(self, report: Callable[[Report], None], driver: Callable[[], EngineDriver | None]) -> None:
        self._report = report
        self._driver = driver
        self._arenas: dict[int, Arena] = {}
        self._in_arena: dict[int, set[TaskId]] = {}
        self._layouts: dict[int, _Layout] = {}

    def add_arena(self, command: AddArena, fds: list[int]) -> None:
        """Map an arena; a refused one is reported, and tasks that name it are refused."""
        try:
            if len(fds) != 1 or command.arena in self._arenas:
                raise RefusedError(f"arena {command.arena} is known, or came without its memory file")
            self._arenas[command.arena] = Arena(fds[0], command.size_bytes)
            self._in_arena[command.arena] = set()
        except RefusedError as error:
            self._report(ArenaRefused(command.arena, str(error)))

    def drop_arena(self, arena: int) -> None:
        """Cancel the tasks that lie in it and unmap it once nothing reads it any more."""
        if self._arenas.pop(arena, None) is None:
            return
        for layout in self._layouts.values():
            if arena in layout.arenas:
                layout.bound = None
        for task in sorted(self._in_arena.pop(arena)):
            self.cancel(task)

    def declare(self, command: Declare) -> None:
        """Keep a layout; it is looked at when its first task comes."""
        self._layouts[command.layout] = _Layout(command)

    def retract(self, layout: int) -> None:
        """Forget a layout."""
        self._layouts.pop(layout, None)

    def cancel(self, task: int) -> None:
        """End a task if it has not ended."""
        driver = self._driver()
        if driver is not None:
            driver.cancel(TaskId(task))

    def submit(self, command: Submit) -> None:
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
            task = Task(
                id=TaskId(command.task),
                models=layout.declared.models,
                nbytes=layout.input_bytes,
                priority=command.priority,
                deadline_s=command.deadline_s,
            )
            driver.submit(task, _ArenaTask(self, task.id, layout))
        except TaskRefused as error:
            self._refuse(command.task, error.code, str(error))
        except (RefusedError, ValueError, TypeError, OverflowError) as error:
            self._refuse(command.task, BAD_INPUT, str(error))

    def _refuse(self, task: int, code: str, reason: str) -> None:
        now = time.monotonic()
        self._report(TaskDone(task, Outcome.REFUSED.value, code, reason, now, None, now))

    def _locate(self, layout: "_Layout", bound: BoundPlan) -> None:
        """Make views of every tensor, as this plan knows them.

        Raises:
            RefusedError: an arena is unknown, a tensor does not fit, or an input has no place.
        """
        declared = layout.declared
        several = len(declared.models) > 1
        sources = {name: (arena, offset) for name, arena, offset in declared.inputs}
        targets = {name: (arena, offset) for name, arena, offset in declared.outputs}
        models = [bound.models[bound.model_index[m]] for m in declared.models if m in bound.model_index]
        # New ones: tasks in flight go on with what they have.
        layout.inputs, layout.outputs = {}, {}
        for model in models:
            graph, name = model.graph, model.plan.name
            layout.inputs[name] = {
                tensor.name: self._view(tensor, _required(sources, name, tensor))
                for tensor in (graph.tensors[t] for t in graph.inputs)
            }
            layout.outputs[name] = {
                tensor.name: self._view(tensor, place)
                for tensor in (graph.tensors[t] for t in graph.outputs)
                if (place := targets.get(f"{name}/{tensor.name}" if several else tensor.name))
            }
        layout.addressing = {
            name: tuple(key for key, view in views.items() if view.dtype.name in ADDRESSING)
            for name, views in layout.inputs.items()
            if any(view.dtype.name in ADDRESSING for view in views.values())
        }
        layout.input_bytes = models[0].input_bytes if models else 0
        used = {arena for _, arena, _ in (*declared.inputs, *declared.outputs)}
        layout.arenas = tuple(used & self._in_arena.keys())
        layout.bound = bound

    def _view(self, tensor: Tensor, place: tuple[int, int]) -> "numpy.ndarray":
        arena = self._arenas.get(place[0])
        if arena is None:
            raise TaskRefused(UNKNOWN_ARENA, f"arena {place[0]} is not known", remedy="add it first")
        return arena.view(tensor, place[1])

    def hold(self, task: TaskId, arenas: tuple[int, ...]) -> None:
        """Remember that a task lies in these arenas."""
        for arena in arenas:
            self._in_arena[arena].add(task)

    def finish(self, end: TaskEnd, arenas: tuple[int, ...]) -> None:
        """Answer a task."""
        for arena in arenas:
            held = self._in_arena.get(arena)
            if held is not None:
                held.discard(end.task)
        parts = tuple((model, outcome.value) for model, outcome in end.parts)
        self._report(
            TaskDone(
                end.task,
                end.outcome.value,
                end.code,
                end.reason,
                end.queued_s,
                end.started_s,
                end.ended_s,
                parts,
                end.plan,
            )
        )


class _Layout:
    """A layout, and what it comes to under the plan that it was last used with."""

    __slots__ = ("addressing", "arenas", "bound", "declared", "input_bytes", "inputs", "outputs")

    def __init__(self, declared: Declare) -> None:
        self.declared = declared
        self.bound: BoundPlan | None = None
        self.inputs: dict[str, dict[str, numpy.ndarray]] = {}  # by model and tensor
        self.outputs: dict[str, dict[str, numpy.ndarray]] = {}
        self.addressing: dict[str, tuple[str, ...]] = {}  # inputs that are copied, by model
        self.arenas: tuple[int, ...] = ()
        self.input_bytes = 0

    def settled_inputs(self) -> "dict[str, dict[str, numpy.ndarray]]":
        """The inputs, those that may address memory as they are now."""
        settled = dict(self.inputs)
        for model, names in self.addressing.items():
            settled[model] = self.inputs[model] | {name: self.inputs[model][name].copy() for name in names}
        return settled


class _ArenaTask(TaskIO):
    """One task in place."""

    def __init__(self, owner: ArenaTasks, task: TaskId, layout: _Layout) -> None:
        self._owner = owner
        self._inputs = layout.inputs if not layout.addressing else layout.settled_inputs()
        self._outputs = layout.outputs
        self._arenas = layout.arenas
        owner.hold(task, layout.arenas)

    def inputs(self, model: str) -> "Mapping[str, numpy.ndarray]":
        """Views into the arena, and copies of what may address memory."""
        return self._inputs[model]

    def deliver(self, model: str, outputs: "Mapping[str, numpy.ndarray]") -> None:
        """Write what the client has named a place for."""
        for name, place in self._outputs[model].items():
            place[...] = outputs[name]

    def ended(self, end: TaskEnd) -> None:
        """Report it."""
        self._owner.finish(end, self._arenas)


def _required(sources: Mapping[str, tuple[int, int]], model: str, tensor: Tensor) -> tuple[int, int]:
    place = sources.get(f"{model}/{tensor.name}") or sources.get(tensor.name)
    if place is None:
        raise RefusedError(f"model {model!r} needs the input {tensor.name!r}, which the task does not have")
    return place

"""The tasks that the engine has taken and not answered, and who watches them; the driver's lock guards it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from stageloom.edge_agent.executor.base import Rows, StepResult
from stageloom.edge_agent.worker.recorder import Recorder
from stageloom.edge_agent.worker.records import Ends, Entry, zero_inputs
from stageloom.edge_agent.worker.tasks import TaskEnd, TaskIO
from stageloom.edge_agent.worker.window import Window
from stageloom.shared.bound import BoundModel
from stageloom.shared.engine.steps import FinishTask, Outcome, Step, StepMember, Task
from stageloom.shared.ids import TaskId

if TYPE_CHECKING:
    import numpy

_Write: TypeAlias = "tuple[Entry, str, Mapping[str, numpy.ndarray]]"
"""Outputs of one task in one model, to be written with the lock released."""


class TaskBook:
    """Where a task's tensors are, when it began, and how it is answered."""

    def __init__(self) -> None:
        self.tasks: dict[TaskId, Entry] = {}
        self.window: Window | None = None  # that is being measured
        self.recorder: Recorder | None = None

    def add(self, task: Task, io: TaskIO, now: float) -> None:
        """A task came.

        Raises:
            ValueError: one of this id has not ended.
        """
        if task.id in self.tasks:
            raise ValueError(f"task {task.id} is here already")
        self.tasks[task.id] = Entry(io, task.models, now)

    def forget(self, task: TaskId) -> None:
        """It was not taken."""
        del self.tasks[task]

    def rows(self, model: BoundModel, member: StepMember) -> Rows:
        """The inputs of an instance's tasks; a task that ended before its first step leaves a copy's row."""
        name = model.plan.name
        rows = [entry.io.inputs(name) if (entry := self.tasks.get(t)) else None for t in member.tasks]
        spare = next((row for row in rows if row is not None), None)
        if spare is None:
            spare = zero_inputs(model)
        return [row if row is not None else spare for row in rows]

    def note_start(self, step: Step, started_s: float) -> None:
        """A step has run: its tasks have begun then, where it was their first."""
        for member in step.members:
            if member.member.block == 0 or member.last:
                for task in member.tasks:
                    entry = self.tasks.get(task)
                    if entry is not None and entry.started_s is None:
                        entry.started_s = started_s

    def note_window(
        self, window: Window, step: Step, result: StepResult, models: Sequence[BoundModel], now: float
    ) -> None:
        """A step has ended while this window is measured."""
        names = [models[member.member.model].plan.name for member in step.members]
        window.step_ended(names, result.ended_s - result.started_s)
        for member, name in zip(step.members, names, strict=True):
            entries = [self.tasks.get(task) for task in member.tasks if member.last]
            begun = [entry.started_s for entry in entries if entry and entry.started_s is not None]
            if begun:
                window.instance_ended(name, now - min(begun))

    def begin_writing(self, step: Step, result: StepResult, models: Sequence[BoundModel]) -> list[_Write]:
        """What is to be written for a step's tasks; one that ends meanwhile is answered after the writing."""
        writes = []
        for member in step.members:
            if not member.last:
                continue
            name = models[member.member.model].plan.name
            for task, row in zip(member.tasks, result.outputs[member.instance], strict=True):
                entry = self.tasks.get(task)
                if entry is not None and entry.finish is None:
                    entry.delivering += 1
                    writes.append((entry, name, row))
        return writes

    def end_writing(self, writes: Sequence[_Write], clock: Callable[[], float], ends: Ends) -> None:
        """It is written; answer those that have ended."""
        for entry, _, _ in writes:
            entry.delivering -= 1
            if entry.finish is not None and not entry.delivering:
                ends.append(self._end_of(entry, entry.finish, clock()))

    def finish(self, action: FinishTask, now: float, ends: Ends) -> None:
        """A task has ended; it is answered once nobody writes its outputs."""
        entry = self.tasks[action.task]
        entry.finish = action
        if not entry.delivering:
            ends.append(self._end_of(entry, action, now))

    def _end_of(self, entry: Entry, finish: FinishTask, now: float) -> tuple[TaskIO, TaskEnd]:
        del self.tasks[finish.task]
        outcome, code, reason = finish.outcome, finish.code, finish.reason
        if outcome is Outcome.COMPLETED and entry.problem:
            outcome, code, reason = Outcome.FAILED, "output", entry.problem
        if self.window is not None:
            self.window.task_ended(outcome, now - entry.queued_s)
        if self.recorder is not None:
            times_s = entry.queued_s, entry.started_s, now
            self.recorder.task(finish.task, entry.models, times_s, outcome)
        end = TaskEnd(
            finish.task,
            outcome,
            code,
            reason,
            entry.queued_s,
            entry.started_s,
            now,
            finish.parts,
            finish.plan,
        )
        return entry.io, end

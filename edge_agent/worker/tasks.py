"""The tasks that the engine process has taken and not answered. The runtime's lock guards the table."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from stageloom.edge_agent.executor.base import Rows, StepResult
from stageloom.edge_agent.worker.accounting import WindowCounter
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.edge_agent.worker.recorder import Recorder
from stageloom.shared.bound import BoundModel
from stageloom.shared.engine.steps import FinishTask, Outcome, Step, StepMember, Task
from stageloom.shared.ids import TaskId

if TYPE_CHECKING:
    import numpy


class EngineTask(Task):
    """A task with its tensors and its owner. Subclasses say where the tensors lie."""

    __slots__ = ("finish", "problem", "reached_s", "started_s", "writing")

    def __init__(
        self,
        *,
        id: TaskId,
        models: tuple[str, ...],
        nbytes: int,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> None:
        super().__init__(id=id, models=models, nbytes=nbytes, priority=priority, deadline_s=deadline_s)
        self.reached_s: float | None = None  # when a lane came to its first step
        self.started_s: float | None = None  # when that began to run, by the step that has ended
        self.writing = 0  # lanes that are writing its outputs: the answer waits for them
        self.problem = ""  # why its outputs could not be written
        self.finish: FinishTask | None = None

    def inputs(self, model: str) -> "Mapping[str, numpy.ndarray]":
        """The model's inputs by the graph's names, each with its batch-1 shape."""
        raise NotImplementedError

    def deliver(self, model: str, outputs: "Mapping[str, numpy.ndarray]") -> None:
        """Take the model's outputs, before `answer` says that the task completed; on a lane's thread."""
        raise NotImplementedError

    def answer(self, done: TaskDone) -> None:
        """The task has ended. Called once; nothing is delivered afterwards."""
        raise NotImplementedError


Answers: TypeAlias = list[tuple[EngineTask, TaskDone]]
"""To give once the lock is released."""

_Write: TypeAlias = "tuple[EngineTask, str, Mapping[str, numpy.ndarray]]"
"""Outputs of one task in one model, to be written with the lock released."""


class TaskTable:
    """Where the tensors of a task are, when it began, and how it is answered."""

    def __init__(self) -> None:
        self.tasks: dict[TaskId, EngineTask] = {}
        self.window: WindowCounter | None = None  # that is being measured
        self.recorder: Recorder | None = None

    def rows(self, model: BoundModel, member: StepMember) -> Rows:
        """The inputs of an instance's tasks; a task that ended before its first step leaves a copy's row."""
        name = model.plan.name
        rows = [task.inputs(name) if (task := self.tasks.get(t)) else None for t in member.tasks]
        spare = next((row for row in rows if row is not None), None)
        if spare is None:
            spare = _zero_inputs(model)
        return [row if row is not None else spare for row in rows]

    def note_reached(self, step: Step, now: float) -> None:
        """A lane has come to a step: that is when those of its tasks began that end before the step does.

        Without the lock, which every step would pay for: a task that ends at this very moment is passed over.
        """
        for member in step.members:
            if member.member.block == 0:
                for number in member.tasks:
                    task = self.tasks.get(number)
                    if task is not None and task.reached_s is None:
                        task.reached_s = now

    def note_start(self, step: Step, started_s: float) -> None:
        """A step has run: its tasks have begun then, where it was their first."""
        for member in step.members:
            if member.member.block == 0 or member.last:
                for number in member.tasks:
                    task = self.tasks.get(number)
                    if task is not None and task.started_s is None:
                        task.started_s = started_s

    def note_window(
        self, window: WindowCounter, step: Step, result: StepResult, models: Sequence[BoundModel], now: float
    ) -> None:
        """A step has ended while this window is measured."""
        names = [models[member.member.model].plan.name for member in step.members]
        window.step_ended(names, result.ended_s - result.started_s)
        for member, name in zip(step.members, names, strict=True):
            tasks = [self.tasks.get(number) for number in member.tasks if member.last]
            begun = [task.started_s for task in tasks if task and task.started_s is not None]
            if begun:
                window.instance_ended(name, now - min(begun))

    def begin_writing(self, step: Step, result: StepResult, models: Sequence[BoundModel]) -> list[_Write]:
        """What is to be written for a step's tasks; one that ends meanwhile is answered after the writing."""
        writes = []
        for member in step.members:
            if not member.last:
                continue
            name = models[member.member.model].plan.name
            for number, row in zip(member.tasks, result.outputs[member.instance], strict=True):
                task = self.tasks.get(number)
                if task is not None and task.finish is None:
                    task.writing += 1
                    writes.append((task, name, row))
        return writes

    def end_writing(self, writes: Sequence[_Write], clock: Callable[[], float], answers: Answers) -> None:
        """The outputs are written; answer the tasks that have ended."""
        for task, _, _ in writes:
            task.writing -= 1
            if task.finish is not None and not task.writing:
                answers.append((task, self._done(task, task.finish, clock())))

    def finish(self, action: FinishTask, now: float, answers: Answers) -> None:
        """A task has ended; it is answered once no lane writes its outputs."""
        task = self.tasks[action.task]
        task.finish = action
        if not task.writing:
            answers.append((task, self._done(task, action, now)))

    def _done(self, task: EngineTask, finish: FinishTask, now: float) -> TaskDone:
        del self.tasks[finish.task]
        outcome, code, reason = finish.outcome, finish.code, finish.reason
        if outcome is Outcome.COMPLETED and task.problem:
            outcome, code, reason = Outcome.FAILED, "output", task.problem
        started_s = task.started_s
        if started_s is None and task.reached_s is not None:
            started_s = min(task.reached_s, now)  # noted without the lock, so perhaps later than `now`
        if self.window is not None:
            self.window.task_ended(task, outcome, now)
        if self.recorder is not None:
            self.recorder.task(task.id, task.models, (task.arrived_s, started_s, now), outcome)
        return TaskDone(
            task.id, outcome, code, reason, task.arrived_s, started_s, now, finish.parts, finish.plan
        )


def _zero_inputs(model: BoundModel) -> "Mapping[str, numpy.ndarray]":
    """Inputs for an instance whose tasks have all ended and that travels on."""
    import numpy

    graph = model.graph
    return {
        graph.tensors[t].name: numpy.zeros(graph.smallest(t), graph.tensors[t].dtype) for t in graph.inputs
    }

"""An engine core and a device that obeys: the tests decide when each step ends."""

from collections.abc import Sequence

from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.steps import (
    Action,
    DropInstance,
    FinishTask,
    MoveInstance,
    PlanKey,
    PrepareProgram,
    ProgramKey,
    ReleasePlan,
    Step,
    Task,
)
from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.plan import Member


class Driver:
    """One core under test. Programs are ready at once unless `prepare` is off."""

    def __init__(self, bound: BoundPlan, *, prepare: bool = True, max_preparing: int = 2) -> None:
        self.core = EngineCore(max_preparing=max_preparing)
        self.prepare = prepare
        self.now = 0.0
        self.steps: list[Step] = []  # in flight, in issue order
        self.issued: list[Step] = []  # ever
        self.answers: dict[TaskId, FinishTask] = {}
        self.asked: list[ProgramKey] = []
        self.moves: list[MoveInstance] = []
        self.drops: list[DropInstance] = []
        self.released: list[PlanKey] = []
        self._next_task = 0
        self.load(0, bound)
        self.do(self.core.activate(PlanKey(0), self.now))

    def do(self, actions: Sequence[Action]) -> None:
        """Take note of what the core wants."""
        for action in actions:
            match action:
                case Step() as step:
                    self.steps.append(step)
                    self.issued.append(step)
                case FinishTask():
                    assert action.task not in self.answers
                    self.answers[action.task] = action
                case PrepareProgram(program):
                    self.asked.append(program)
                    if self.prepare:
                        self.do(self.core.program_ready(program, self.now))
                case MoveInstance():
                    self.moves.append(action)
                case DropInstance():
                    self.drops.append(action)
                case ReleasePlan(plan):
                    self.released.append(plan)

    def load(self, key: int, bound: BoundPlan) -> None:
        """Load a plan."""
        self.do(self.core.load(PlanKey(key), bound, self.now))

    def activate(self, key: int) -> None:
        """Swap to a plan."""
        self.do(self.core.activate(PlanKey(key), self.now))

    def submit(
        self, *models: str, nbytes: int = 1, priority: int = 0, deadline_s: float | None = None
    ) -> TaskId:
        """Submit a task."""
        task = TaskId(self._next_task)
        self._next_task += 1
        self.do(
            self.core.submit(
                Task(id=task, models=models, nbytes=nbytes, priority=priority, deadline_s=deadline_s),
                self.now,
            )
        )
        return task

    def at(self, now: float) -> None:
        """Let time pass."""
        self.now = now
        self.do(self.core.tick(now))

    def end(self, step: StepId | None = None, error: str | None = None) -> Step:
        """End a step in flight, the oldest by default."""
        found = self.steps[0] if step is None else next(s for s in self.steps if s.id == step)
        self.steps.remove(found)
        self.do(self.core.step_done(found.id, self.now, error))
        return found

    def end_all(self) -> None:
        """End steps until none is in flight."""
        while self.steps:
            self.end()

    def outcome(self, task: TaskId) -> str:
        """How a task ended; empty while it has not."""
        return self.answers[task].outcome.value if task in self.answers else ""

    def ran(self) -> list[list[Member]]:
        """Per issued step its members as (model, replica, block), ascending."""
        return [sorted(m.member for m in step.members) for step in self.issued]

    def order(self) -> list[int]:
        """The tasks of first blocks, in issue order."""
        return [task for s in self.issued for m in s.members if m.member.block == 0 for task in m.tasks]

"""Every task from submission to its one end: admission, deadlines, refusals, counters and answers."""

import math
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from stageloom.shared.engine.queues import Launcher, SharedLine
from stageloom.shared.engine.records import Instance
from stageloom.shared.engine.slots import PlanState
from stageloom.shared.engine.steps import Action, Code, FinishTask, Outcome, PlanKey, Task
from stageloom.shared.engine.swap import takes_tasks_of
from stageloom.shared.ids import TaskId

_SLACK = 64  # deadlines of ended tasks remembered beyond the live ones before they are swept out


class TaskRegistry:
    """The tasks that have not ended, and the launchers in whose queues some of them wait.

    Answers go to `out`. `drop_row` is told of each task that ends while an instance carries it.
    """

    __slots__ = (
        "_drop_row",
        "closed",
        "deadlines",
        "ended",
        "launchers",
        "line",
        "lingering",
        "out",
        "patience_s",
        "submitted",
        "tasks",
    )

    def __init__(self, drop_row: Callable[[Instance, Task], None], patience_s: float) -> None:
        self._drop_row = drop_row
        self.patience_s = patience_s
        self.deadlines: list[tuple[float, int, Task]] = []  # a heap; some have ended
        self.closed = False  # shutting down: every task that comes is refused
        self.ended = dict.fromkeys(Outcome, 0)
        self.launchers: dict[str, Launcher] = {}
        self.line = SharedLine()
        self.lingering = False  # launchers of models that no plan serves and a task still names
        self.out: list[Action] = []
        self.submitted = 0
        self.tasks: dict[TaskId, Task] = {}

    def submit(self, task: Task, now: float) -> None:
        """Take a task into the queues of its models, or refuse it."""
        self.submitted += 1
        task.seq, task.arrived_s = self.submitted, now
        task.patient_until_s = now + self.patience_s
        self.tasks[task.id] = task
        if now >= task.deadline_s:
            self.finish(task, Outcome.EXPIRED, Code.EXPIRED, "its deadline had passed when it came")
        elif self._admit(task) and task.deadline_s != math.inf:
            heappush(self.deadlines, (task.deadline_s, task.seq, task))
            for name in task.models:
                launcher = self.launchers[name]
                launcher.tightest_s = min(launcher.tightest_s, task.deadline_s - now)

    def expire(self, now: float) -> None:
        """End every task whose deadline has come."""
        deadlines = self.deadlines
        while deadlines and deadlines[0][0] <= now:
            task = heappop(deadlines)[2]
            if not task.ended:
                self.finish(task, Outcome.EXPIRED, Code.EXPIRED, "its deadline passed before its result")
        if len(deadlines) > 2 * len(self.tasks) + _SLACK:
            self.deadlines = [item for item in deadlines if not item[2].ended]
            heapify(self.deadlines)

    @property
    def next_deadline_s(self) -> float:
        """The earliest deadline of a task that has not ended; infinity without one."""
        deadlines = self.deadlines
        while deadlines and deadlines[0][2].ended:
            heappop(deadlines)
        return deadlines[0][0] if deadlines else math.inf

    def _admit(self, task: Task) -> bool:
        if self.closed:
            return self._refuse(task, Code.DRAINING, "the engine is shutting down")
        launchers = []
        for name in task.models:
            launcher = self.launchers.get(name)
            if launcher is None or not launcher.served:
                return self._refuse(
                    task, Code.UNKNOWN_MODEL, f"no active plan serves model {name!r}; add it to the plan"
                )
            launchers.append(launcher)
            launcher.arrived += 1
        losers: dict[int, Task] = {}
        for launcher in launchers:
            found = launcher.queue.losers(task)
            if found is None:
                return self._refuse_full(task, launcher)
            losers.update((loser.seq, loser) for loser in found)
        for loser in losers.values():
            self.finish(loser, Outcome.REFUSED, Code.QUEUE_FULL, "it lost its place in a full queue")
        for launcher in launchers:
            launcher.queue.add(task)
        if task.shared:
            self.line.add(task)
            self.line.enter(self.launchers)
        return True

    def _refuse(self, task: Task, code: Code, reason: str) -> bool:
        self.finish(task, Outcome.REFUSED, code, reason)
        return False

    def _refuse_full(self, task: Task, launcher: Launcher) -> bool:
        bounds = launcher.queue.plan
        if task.nbytes > bounds.max_bytes:
            reason = f"its {task.nbytes} bytes exceed the queue of model {launcher.name!r}"
            return self._refuse(task, Code.TOO_LARGE, f"{reason}, {bounds.max_bytes} bytes")
        reason = f"the queue of model {launcher.name!r} is full"
        return self._refuse(task, Code.QUEUE_FULL, f"{reason}; submit again later, or at a lower rate")

    def refuse_queued(self, launcher: Launcher, task: Task, code: Code, reason: str) -> None:
        """Refuse a queued task; of a shared one that other models may have begun, only this model's part."""
        if task.buffered:
            launcher.queue.discard(task)
            self.end_part(task, launcher.name, Outcome.REFUSED, reason)
            self.line.enter(self.launchers)
        else:
            self.finish(task, Outcome.REFUSED, code, reason)

    def refuse_all(self, launcher: Launcher, code: Code, reason: str) -> None:
        for task in list(launcher.queue.entries()):
            self.refuse_queued(launcher, task, code, reason)

    def follow(self, plan: PlanState, *, shrink: bool = True) -> None:
        """Serve another plan: queues take its rules, tasks that it cannot run are refused.

        Without `shrink` no bound of a queue becomes smaller.
        """
        for model in plan.models:
            launcher = self.launchers.get(model.name)
            if launcher is None:
                launcher = self.launchers[model.name] = Launcher(model)
            elif not takes_tasks_of(model.bound.graph, launcher.graph):
                self.refuse_all(
                    launcher, Code.MODEL_CHANGED, "the new plan's model has other inputs or outputs"
                )
            for loser in launcher.follow(model, shrink=shrink):
                self.finish(loser, Outcome.REFUSED, Code.QUEUE_FULL, "the new plan's queue is smaller")
        for name, launcher in self.launchers.items():
            if name not in plan.bound.model_index:
                launcher.served = False
                launcher.target = None
                self.refuse_all(launcher, Code.MODEL_REMOVED, f"the new plan lacks model {name!r}")

    def forget_unserved(self, plans: Iterable[PlanState]) -> None:
        """Drop launchers of models that no plan of these has; those that a task names are `lingering`."""
        gone = {name for name, launcher in self.launchers.items() if not launcher.served}
        for plan in plans:
            gone.difference_update(plan.bound.model_index)
        named = {name for task in self.tasks.values() for name in task.models} if gone else set()
        for name in gone - named:
            del self.launchers[name]
        self.lingering = bool(gone & named)

    def end_part(
        self, task: Task, model: str, outcome: Outcome, reason: str, plan: PlanKey | None = None
    ) -> None:
        """A task ended in one of its models, in a step of `plan`; it is answered when it has ended in all."""
        if outcome is Outcome.FAILED or not task.trouble:
            task.plan = plan
        if not task.shared:
            code = "" if outcome is Outcome.COMPLETED else Code.EXECUTOR_FAILED
            self.finish(task, outcome, code, reason)
            return
        task.parts[model] = outcome
        self.launchers[model].ended[outcome] += 1
        if outcome is not Outcome.COMPLETED:
            task.trouble = f"model {model!r}: {reason}"
        if len(task.parts) == len(task.models):
            if task.trouble:
                self.finish(task, Outcome.FAILED, Code.SHARED_PART, task.trouble)
            else:
                self.finish(task, Outcome.COMPLETED, "", "")

    def finish(self, task: Task, outcome: Outcome, code: Code | str, reason: str) -> None:
        """Answer a task, wherever it is; its one end."""
        del self.tasks[task.id]
        task.ended = True
        self.ended[outcome] += 1
        parts: tuple[tuple[str, Outcome], ...] = ()
        for name in task.models:
            launcher = self.launchers.get(name)
            if launcher is not None:
                launcher.queue.discard(task)
                if name not in task.parts:
                    launcher.ended[outcome] += 1
        if task.shared:
            parts = tuple(task.parts.items())
            self.line.discard(task)
            self.line.enter(self.launchers)
        self.out.append(
            FinishTask(
                task.id, outcome, code.value if isinstance(code, Code) else code, reason, parts, task.plan
            )
        )
        for instance in task.instances:
            self._drop_row(instance, task)
        task.instances = []  # an instance holds its tasks: a cycle would keep their tensors

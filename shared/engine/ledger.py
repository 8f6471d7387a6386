"""Every task from submission to its one end: admission, deadlines, refusals, counters and answers."""

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from stageloom.shared.engine.launcher import Launcher, SharedLine
from stageloom.shared.engine.records import Instance, TaskRecord
from stageloom.shared.engine.slots import PlanState
from stageloom.shared.engine.steps import Action, Code, FinishTask, Outcome, PlanKey, Task
from stageloom.shared.engine.swap import same_signature
from stageloom.shared.ids import TaskId

_SLACK = 64  # deadlines of ended tasks remembered beyond the live ones before they are swept out


class Ledger:
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
        "out",
        "submitted",
        "tasks",
        "tightest_s",
    )

    def __init__(self, drop_row: Callable[[Instance, TaskRecord], None]) -> None:
        self._drop_row = drop_row
        self.deadlines: list[tuple[float, int, TaskRecord]] = []  # a heap; some have ended
        self.closed = False  # shutting down: every task that comes is refused
        self.ended = dict.fromkeys(Outcome, 0)
        self.launchers: dict[str, Launcher] = {}
        self.line = SharedLine()
        self.out: list[Action] = []
        self.submitted = 0
        self.tasks: dict[TaskId, TaskRecord] = {}
        self.tightest_s = math.inf  # from arrival to deadline, of the tasks since it was last taken

    def submit(self, task: Task, now: float) -> None:
        """Take a task into the queues of its models, or refuse it."""
        self.submitted += 1
        entry = TaskRecord(task, self.submitted, now)
        self.tasks[task.id] = entry
        if now >= entry.deadline_s:
            self.finish(entry, Outcome.EXPIRED, Code.EXPIRED, "its deadline had passed when it came")
        elif self._admit(entry) and entry.deadline_s != math.inf:
            heappush(self.deadlines, (entry.deadline_s, entry.seq, entry))
            self.tightest_s = min(self.tightest_s, entry.deadline_s - now)

    def expire(self, now: float) -> None:
        """End every task whose deadline has come."""
        deadlines = self.deadlines
        while deadlines and deadlines[0][0] <= now:
            entry = heappop(deadlines)[2]
            if not entry.ended:
                self.finish(entry, Outcome.EXPIRED, Code.EXPIRED, "its deadline passed before its result")
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

    def _admit(self, entry: TaskRecord) -> bool:
        if self.closed:
            return self._refuse(entry, Code.DRAINING, "the engine is shutting down")
        launchers = []
        for name in entry.task.models:
            launcher = self.launchers.get(name)
            if launcher is None or not launcher.served:
                return self._refuse(
                    entry, Code.UNKNOWN_MODEL, f"no active plan serves model {name!r}; add it to the plan"
                )
            launchers.append(launcher)
            launcher.arrived += 1
        losers: dict[int, TaskRecord] = {}
        for launcher in launchers:
            found = launcher.queue.losers(entry)
            if found is None:
                return self._refuse_full(entry, launcher)
            losers.update((loser.seq, loser) for loser in found)
        for loser in losers.values():
            self.finish(loser, Outcome.REFUSED, Code.QUEUE_FULL, "it lost its place in a full queue")
        for launcher in launchers:
            launcher.queue.add(entry)
        if entry.shared:
            self.line.add(entry)
            self.line.enter(self.launchers)
        return True

    def _refuse(self, entry: TaskRecord, code: Code, reason: str) -> bool:
        self.finish(entry, Outcome.REFUSED, code, reason)
        return False

    def _refuse_full(self, entry: TaskRecord, launcher: Launcher) -> bool:
        bounds = launcher.queue.plan
        if entry.task.nbytes > bounds.max_bytes:
            reason = f"its {entry.task.nbytes} bytes exceed the queue of model {launcher.name!r}"
            return self._refuse(entry, Code.TOO_LARGE, f"{reason}, {bounds.max_bytes} bytes")
        reason = f"the queue of model {launcher.name!r} is full"
        return self._refuse(entry, Code.QUEUE_FULL, f"{reason}; submit again later, or at a lower rate")

    def refuse_queued(self, launcher: Launcher, entry: TaskRecord, code: Code, reason: str) -> None:
        """Refuse a queued task; of a shared one that other models may have begun, only this model's part."""
        if entry.buffered:
            launcher.queue.discard(entry)
            self.end_part(entry, launcher.name, Outcome.REFUSED, reason)
            self.line.enter(self.launchers)
        else:
            self.finish(entry, Outcome.REFUSED, code, reason)

    def refuse_all(self, launcher: Launcher, code: Code, reason: str) -> None:
        """Empty a queue."""
        for entry in list(launcher.queue.entries()):
            self.refuse_queued(launcher, entry, code, reason)

    def follow(self, plan: PlanState, *, shrink: bool = True) -> None:
        """Serve another plan: queues take its rules, tasks that it cannot run are refused.

        Without `shrink` no bound of a queue becomes smaller.
        """
        for model in plan.models:
            launcher = self.launchers.get(model.name)
            if launcher is None:
                launcher = self.launchers[model.name] = Launcher(model)
            elif not same_signature(launcher.graph, model.bound.graph):
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

    def end_part(
        self, entry: TaskRecord, model: str, outcome: Outcome, reason: str, plan: PlanKey | None = None
    ) -> None:
        """A task ended in one of its models, in a step of `plan`; it is answered when it has ended in all."""
        if outcome is Outcome.FAILED or not entry.trouble:
            entry.plan = plan
        if not entry.shared:
            code = "" if outcome is Outcome.COMPLETED else Code.EXECUTOR_FAILED
            self.finish(entry, outcome, code, reason)
            return
        entry.parts[model] = outcome
        self.launchers[model].ended[outcome] += 1
        if outcome is not Outcome.COMPLETED:
            entry.trouble = f"model {model!r}: {reason}"
        if len(entry.parts) == len(entry.task.models):
            if entry.trouble:
                self.finish(entry, Outcome.FAILED, Code.SHARED_PART, entry.trouble)
            else:
                self.finish(entry, Outcome.COMPLETED, "", "")

    def finish(self, entry: TaskRecord, outcome: Outcome, code: Code | str, reason: str) -> None:
        """Answer a task, wherever it is; its one end."""
        task = entry.task
        del self.tasks[task.id]
        entry.ended = True
        self.ended[outcome] += 1
        parts: tuple[tuple[str, Outcome], ...] = ()
        for name in task.models:
            launcher = self.launchers.get(name)
            if launcher is not None:
                launcher.queue.discard(entry)
                if name not in entry.parts:
                    launcher.ended[outcome] += 1
        if entry.shared:
            parts = tuple(entry.parts.items())
            self.line.discard(entry)
            self.line.enter(self.launchers)
        self.out.append(
            FinishTask(
                task.id, outcome, code.value if isinstance(code, Code) else code, reason, parts, entry.plan
            )
        )
        for instance in entry.instances:
            self._drop_row(instance, entry)

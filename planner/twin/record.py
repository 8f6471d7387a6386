"""What a twin notes of a window while it runs."""

from collections.abc import Sequence

from stageloom.planner.twin.lanes import Lanes
from stageloom.planner.twin.overlap import added_up
from stageloom.planner.twin.window import ModelWindow, StepsWindow, Window, counts_between
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.stats import Counts, EngineStats, QueueSnapshot
from stageloom.shared.engine.steps import FinishTask, Outcome, PlanKey, Step, Task
from stageloom.shared.ids import TaskId


class Record:
    """The window that has begun, and the tasks that have not ended."""

    def __init__(self) -> None:
        self._open: dict[TaskId, tuple[tuple[str, ...], float]] = {}
        self._before: EngineStats | None = None
        self._latencies_s: dict[str, list[float]] = {}
        self._submitted: dict[str, int] = {}
        self._busy_s: dict[str, float] = {}
        self._steps: dict[tuple[PlanKey, int, int], list[float]] = {}
        self._glances: list[QueueSnapshot] = []
        self._busy_before_s = 0.0
        self._used_before_s = 0.0

    def begin(self, core: EngineCore, now: float, lanes: Lanes) -> None:
        """Count anew from this instant."""
        self._before = core.snapshot(now)
        self._latencies_s, self._submitted, self._busy_s = {}, {}, {}
        self._steps, self._glances = {}, []
        self._busy_before_s, self._used_before_s = lanes.busy_s, lanes.used_s

    def arrived(self, task: Task, now: float) -> None:
        """A task was submitted."""
        self._open[task.id] = (task.models, now)
        for name in task.models:
            self._submitted[name] = self._submitted.get(name, 0) + 1

    def finished(self, action: FinishTask, now: float) -> None:
        """A task was answered at `now`."""
        models, arrived_s = self._open.pop(action.task)
        if action.outcome is Outcome.COMPLETED:
            for name in models:
                self._latencies_s.setdefault(name, []).append(now - arrived_s)

    def step(self, step: Step, names: Sequence[str], taken_s: float) -> None:
        """A step ended."""
        for name in names:
            self._busy_s[name] = self._busy_s.get(name, 0.0) + taken_s / len(names)
        program = step.program
        self._steps.setdefault((program.plan, program.combined, program.mask), []).append(taken_s)

    def look(self, core: EngineCore, now: float) -> None:
        """Note the queues."""
        self._glances.append(core.sample(now))

    def end(self, core: EngineCore, now: float, lanes: Lanes, bound: BoundPlan) -> Window:
        """The window up to this instant."""
        before, after = self._before, core.snapshot(now)
        assert before is not None
        earlier = {model.name: model.ended for model in before.models}
        models = tuple(
            ModelWindow(
                name=model.name,
                submitted=self._submitted.get(model.name, 0),
                ended=counts_between(earlier.get(model.name, Counts()), model.ended),
                queued=model.queued,
                busy_s=self._busy_s.get(model.name, 0.0),
                latencies_s=tuple(self._latencies_s.get(model.name, ())),
            )
            for model in after.models
        )
        return Window(
            plan=bound.plan.digest,
            began_s=before.now_s,
            seconds=now - before.now_s,
            busy_s=lanes.busy_s - self._busy_before_s,
            used_s=lanes.used_s - self._used_before_s,
            models=models,
            steps=self._steps_of(after.active),
            glances=tuple(self._glances),
            open_before=before.open_tasks,
            open_after=after.open_tasks,
        )

    def _steps_of(self, active: PlanKey | None) -> tuple[StepsWindow, ...]:
        """Of the active plan alone, as an agent reports them."""
        return tuple(
            StepsWindow(
                combined=combined, mask=mask, count=len(taken), sum_s=added_up(taken), max_s=max(taken)
            )
            for (key, combined, mask), taken in sorted(self._steps.items())
            if key == active
        )

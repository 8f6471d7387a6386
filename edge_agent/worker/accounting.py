"""What the engine's steps took and what happened in a window of a trial, counted where it happens.

All but `WindowTimer` are guarded by the runtime's lock. The figures of a window are cut at its two instants
themselves: a step or a task counts where it ended, busy time where it was spent.

Latencies alone count where the task *arrived*: it speaks of the plan that it met, and not of the one
before, for which it may have waited. A task that has not ended counts with the age
that it has when the window ends, so that a plan cannot hide those that it leaves; none that came in the
last tenth counts, as an age near nothing says nothing. A task that expired, was refused or was given up
counts as twice the time that it had; one without a deadline by the time after which it was given up, and
not at all where it failed or was refused. p99 is that of those that completed, and of those that have not
ended by their age: else a plan whose queue grows would have the p99 of the few that overtake it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from stageloom.edge_agent.executor.base import StepResult
from stageloom.edge_agent.worker.messages import ModelFigures, OpenWindow, StepStats, WindowMeasured
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.steps import Outcome, PlanKey, Step, Task

if TYPE_CHECKING:
    from stageloom.edge_agent.worker.runtime import EngineRuntime

MAX_COMBINED = 512
"""So that a report of statistics stays below the size of a message."""


class StepCounter:
    """Guarded by the runtime's lock."""

    def __init__(self) -> None:
        self._sums: dict[tuple[PlanKey, int, int], StepStats] = {}  # by plan, combined block and mask
        self._busy_s = 0.0
        self._in_flight = 0
        self._since_s = 0.0

    def step_issued(self, now: float) -> None:
        """A step was handed to a lane."""
        if not self._in_flight:
            self._since_s = now
        self._in_flight += 1

    def step_ended(self, step: Step, result: StepResult | None, now: float) -> None:
        """It ended; one that failed counts as busy time only."""
        self._in_flight -= 1
        if not self._in_flight:
            self._busy_s += now - self._since_s
        if result is None:
            return
        program = step.program
        place = (program.plan, program.combined, program.mask)
        total = self._sums.get(place)
        if total is None:
            total = self._sums[place] = StepStats(*place)
        taken_s = result.ended_s - result.started_s
        total.steps += 1
        for member in step.members:
            total.tasks += len(member.tasks)
        total.busy_s += taken_s
        if taken_s < total.shortest_s:
            total.shortest_s = taken_s
        if taken_s > total.longest_s:
            total.longest_s = taken_s

    def busy_s(self, now: float) -> float:
        """Seconds in which at least one step was in flight."""
        return self._busy_s + (now - self._since_s if self._in_flight else 0.0)

    def take(self) -> tuple[StepStats, ...]:
        """The sums since the last call, at most MAX_COMBINED of them; the others go on and come later.

        Those that began first come first: by their numbers the same ones would always be left.
        """
        return tuple(self._sums.pop(place) for place in list(islice(self._sums, MAX_COMBINED)))


_JUDGED = 0.9
"""Of a window's measured time: whose arrivals' latencies count."""

_SHORTEST_S = 1e-6
"""Below it the clock tells nothing."""

MAX_LATENCIES = 100_000
"""Latencies kept of one window; beyond them p99 is that of the first ones."""


@dataclass(slots=True)
class WindowCounter:
    """One window that has begun. Guarded by the runtime's lock."""

    key: PlanKey | None  # of the active plan
    began_s: float
    busy_before_s: float
    failed_before: int
    saturated: bool
    oldest_age_s: float
    completed_before: dict[str, int]  # tasks, by model
    closes_s: float = math.inf  # the last arrival whose latency counts
    models: dict[str, ModelFigures] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)  # of tasks that completed or wait: p99's
    due: int = 0  # of the tasks that arrived until `closes_s`, those that have ended
    in_time: int = 0  # and completed

    @classmethod
    def begin(
        cls, core: EngineCore, key: PlanKey | None, busy_s: float, now: float, to_s: float
    ) -> "WindowCounter":
        """Cut here, to be cut again at `to_s`. `busy_s` is the tally's figure at this instant."""
        completed, closes_s = dict(core.completed()), now + _JUDGED * (to_s - now)
        return cls(key, now, busy_s, core.failed, core.waiting, core.oldest_age_s(now), completed, closes_s)

    def sample(self, core: EngineCore, now: float) -> None:
        """Look at the queues, now and then and after every event."""
        self.saturated = self.saturated and core.waiting
        self.oldest_age_s = max(self.oldest_age_s, core.oldest_age_s(now))

    def step_ended(self, names: list[str], taken_s: float) -> None:
        """Members of these models ran in one step: its time is shared equally between them."""
        for name in names:
            self._model(name).busy_s += taken_s / len(names)

    def instance_ended(self, model: str, taken_s: float) -> None:
        """An instance came to its end, so long after it began to run."""
        figures = self._model(model)
        figures.instances += 1
        figures.instance_s += taken_s

    def task_ended(self, task: Task, outcome: Outcome, now: float) -> None:
        """A task was answered."""
        latency_s, completed = now - task.arrived_s, outcome is Outcome.COMPLETED
        for name in task.models:
            self._model(name).ended += 1
        allowed_s = task.deadline_s - task.arrived_s
        if allowed_s <= 0.0 or not self.began_s <= task.arrived_s <= self.closes_s:
            return
        self.due += 1
        self.in_time += completed
        if completed:
            self._keep(latency_s)
        if not completed and allowed_s < math.inf:
            latency_s = 2 * allowed_s
        if completed or allowed_s < math.inf or outcome is Outcome.CANCELLED:
            self._judge(task, latency_s)

    def _keep(self, latency_s: float) -> None:
        if len(self.latencies_s) < MAX_LATENCIES:
            self.latencies_s.append(latency_s)

    def _judge(self, task: Task, latency_s: float) -> None:
        log_latency = math.log(max(latency_s, _SHORTEST_S))
        for name in task.models:
            model = self._model(name)
            model.judged += 1
            model.log_latency += log_latency

    def end(
        self, number: int, core: EngineCore, busy_s: float, now: float, waiting: Iterable[Task]
    ) -> WindowMeasured:
        """Cut again; the figures between the two instants. `waiting`: tasks that have not ended."""
        self.sample(core, now)
        for task in waiting:
            if self.began_s <= task.arrived_s <= self.closes_s:
                self._judge(task, now - task.arrived_s)
                self._keep(now - task.arrived_s)
        figures = []
        for name, total in core.completed().items():
            model = self._model(name)
            model.completed = total - self.completed_before.get(name, 0)
            figures.append(model)
        return WindowMeasured(
            number,
            None if self.key is None else int(self.key),
            now - self.began_s,
            busy_s - self.busy_before_s,
            self.saturated,
            core.failed - self.failed_before,
            self._p99_s(),
            self.oldest_age_s,
            tuple(figures),
            self.due,
            self.in_time,
        )

    def _p99_s(self) -> float:
        """The smallest latency that at most one in a hundred exceeds; 0 without one."""
        ordered = sorted(self.latencies_s)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0

    def _model(self, name: str) -> ModelFigures:
        return self.models.setdefault(name, ModelFigures(name))


_LOOK_S = 0.01
"""How often the queues' ages are looked at: differences below this are equal to every user."""


class WindowTimer:
    """At most one window at a time; a newer order takes an older one's place, which is never answered."""

    def __init__(
        self, driver: "Callable[[], EngineRuntime | None]", report: Callable[[WindowMeasured], None]
    ) -> None:
        self._driver = driver
        self._report = report
        self._order: OpenWindow | None = None
        self._began = False
        self.due_s = math.inf  # when `advance` has something to do

    @property
    def busy(self) -> bool:
        """A window is ordered or open."""
        return self._order is not None

    def order(self, window: OpenWindow, fds: Sequence[int] = ()) -> None:
        self._order, self._began, self.due_s = window, False, window.from_s

    def advance(self, now: float) -> None:
        """Begin, look or end, if it is time."""
        order, driver = self._order, self._driver()
        if order is None or now < self.due_s:
            return
        if driver is None:  # nothing runs, so there is nothing to report
            self._order, self.due_s = None, math.inf
            return
        if not self._began:
            driver.begin_window(order.to_s)
            self._began = True
        oldest_age_s = driver.sample_window()
        if now < order.to_s and oldest_age_s <= order.brake_age_s:
            self.due_s = min(now + _LOOK_S, order.to_s)
            return
        self._order, self.due_s = None, math.inf
        measured = driver.end_window(order.number)
        if measured is not None:
            self._report(measured)

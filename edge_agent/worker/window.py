"""What happens between two instants, for a trial: counted in the engine process, where it happens.

The figures are cut at the instants themselves, under the driver's lock, so that a step or a task counts where
it ended and busy time where it was spent.
"""

import math
from dataclasses import dataclass, field

from stageloom.edge_agent.worker.messages import ModelFigures, WindowMeasured
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.steps import Outcome, PlanKey

MAX_LATENCIES = 100_000
"""Latencies kept of one window; beyond them p99 is that of the first ones."""


@dataclass(slots=True)
class _Model:
    """One model's tasks in the window."""

    completed_before: int = 0
    busy_s: float = 0.0  # its share of the steps that it ran in
    instances: int = 0
    instance_s: float = 0.0  # summed, begin to end


@dataclass(slots=True)
class Window:
    """One window that has begun. Guarded by the driver's lock."""

    key: PlanKey | None  # of the active plan
    began_s: float
    busy_before_s: float
    failed_before: int
    saturated: bool
    oldest_age_s: float
    models: dict[str, _Model]
    latencies_s: list[float] = field(default_factory=list)  # of completed tasks, arrival to answer

    @classmethod
    def begin(cls, core: EngineCore, key: PlanKey | None, busy_s: float, now: float) -> "Window":
        """Cut here. `busy_s` is the tally's figure at this instant."""
        models = {name: _Model(completed_before=count) for name, count in core.completed().items()}
        return cls(key, now, busy_s, core.failed, core.waiting, core.oldest_age_s(now), models)

    def looked(self, core: EngineCore, now: float) -> None:
        """Look at the queues, now and then and after every event."""
        self.saturated = self.saturated and core.waiting
        self.oldest_age_s = max(self.oldest_age_s, core.oldest_age_s(now))

    def step_ended(self, names: list[str], taken_s: float) -> None:
        """Members of these models ran in one step: its time is shared equally between them."""
        for name in names:
            self._model(name).busy_s += taken_s / len(names)

    def instance_ended(self, model: str, taken_s: float) -> None:
        """An instance came to its end, so long after it began to run."""
        found = self._model(model)
        found.instances += 1
        found.instance_s += taken_s

    def task_ended(self, outcome: Outcome, latency_s: float) -> None:
        """A task was answered, so long after it had arrived."""
        if outcome is Outcome.COMPLETED and len(self.latencies_s) < MAX_LATENCIES:
            self.latencies_s.append(latency_s)

    def end(self, number: int, core: EngineCore, busy_s: float, now: float) -> WindowMeasured:
        """Cut again; the figures between the two instants."""
        self.looked(core, now)
        figures = []
        for name, total in core.completed().items():
            model = self._model(name)
            figures.append(
                ModelFigures(
                    name, total - model.completed_before, model.busy_s, model.instances, model.instance_s
                )
            )
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
        )

    def _p99_s(self) -> float:
        """The smallest latency that at most one in a hundred exceeds; 0 without a completed task."""
        ordered = sorted(self.latencies_s)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0

    def _model(self, name: str) -> _Model:
        return self.models.setdefault(name, _Model())

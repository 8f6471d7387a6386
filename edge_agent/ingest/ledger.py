"""Counts tasks: every task that arrives is opened once and ends once, whatever happens to its owner.

Pure: it decides nothing, it only refuses to end a task twice and counts. At all times, per model,
submitted = completed + refused + failed + cancelled + expired + open.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Final, Protocol

from msgspec import Struct

from stageloom.edge_agent.ingest.connection import Arena
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.ids import TaskId
from stageloom.shared.messages.telemetry import LatencyHistogram, latency_bucket

UNKNOWN_MODEL = "unknown"
"""Under which tasks are counted that name no model of the plan."""

OTHER_MODELS = "(others)"
"""Under which the totals of models are added up that gave their place up; no model is called so."""

MOST_MODELS: Final = 96
"""Models with totals of their own: a plan has 64 at most, and the agent's status is one packet."""


@dataclass(slots=True)
class OpenTask:
    """A task from its arrival to its end, as the agent's main process knows it."""

    id: TaskId
    owner: int  # the connection that submitted it
    owner_task: int  # its number there
    model: str  # the first of its models
    received_at_s: float
    arenas: tuple[Arena, ...] = ()  # in which its tensors lie, once it is handed to the engine process


class TaskTotals(Struct, kw_only=True):
    """One model's tasks: how many arrived, and what became of them. `submitted` = the sum of the others."""

    model: str
    submitted: int = 0
    completed: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    open: int = 0

    @property
    def ended(self) -> int:
        """Tasks that ended, in whatever way."""
        return self.completed + self.refused + self.failed + self.cancelled + self.expired

    def begin(self) -> None:
        """A task arrived."""
        self.submitted += 1
        self.open += 1

    def end(self, outcome: Outcome) -> None:
        """A task ended."""
        if outcome is Outcome.COMPLETED:
            self.completed += 1
        else:
            name = outcome.value
            setattr(self, name, getattr(self, name) + 1)
        self.open -= 1


@dataclass(slots=True)
class Interval:
    """What happened to one model's tasks since the last reading."""

    counts: TaskTotals  # `open` is their change
    latency_buckets: dict[int, int] = field(default_factory=dict)  # of completed tasks
    latency_sum_us: int = 0
    latency_max_us: int = 0

    def add_latency(self, latency_us: int) -> None:
        """One completed task's time from the agent reading it to its end."""
        bucket = latency_bucket(latency_us)
        self.latency_buckets[bucket] = self.latency_buckets.get(bucket, 0) + 1
        self.latency_sum_us += latency_us
        self.latency_max_us = max(self.latency_max_us, latency_us)

    def histogram(self, model: str) -> LatencyHistogram:
        return LatencyHistogram(
            model,
            self.counts.completed,
            self.latency_sum_us,
            self.latency_max_us,
            tuple(sorted(self.latency_buckets.items())),
        )


class TaskTimes(Protocol):
    """Who is told when completed tasks were received, begun and ended."""

    def task_completed(self, model: str, received_s: float, started_s: float, ended_s: float) -> None: ...


class TaskLedger:
    """All open tasks of all applications."""

    def __init__(self, times: TaskTimes | None = None, served: Callable[[], Container[str]] = tuple) -> None:
        """`served` tells the models of the active plan: others give their places up when one is wanted."""
        self._served = served
        self._times = times
        self._next = 1
        self._open: dict[TaskId, OpenTask] = {}
        self.totals: dict[str, TaskTotals] = {}
        self._interval: dict[str, Interval] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, *, owner: int, owner_task: int, model: str, now_s: float) -> OpenTask:
        """A task arrived; it must end by `end`."""
        task = OpenTask(TaskId(self._next), owner, owner_task, model, now_s)
        self._next += 1
        self._open[task.id] = task
        totals = self.totals.get(model) or self._totals_of(model)
        interval = self._interval.get(model) or self._interval_of(model)
        totals.begin()
        interval.counts.begin()
        return task

    def end(
        self, task: TaskId, outcome: Outcome, now_s: float, started_s: float | None = None
    ) -> OpenTask | None:
        """The task ended at `now_s`, its first step began at `started_s`; None if it had ended before.

        The first end stands.
        """
        ended = self._open.pop(task, None)
        if ended is None:
            return None
        model = ended.model
        totals = self.totals.get(model) or self._totals_of(model)
        interval = self._interval.get(model) or self._interval_of(model)
        totals.end(outcome)
        interval.counts.end(outcome)
        if outcome is Outcome.COMPLETED:
            interval.add_latency(max(round((now_s - ended.received_at_s) * 1e6), 0))
            if self._times is not None and started_s is not None:
                self._times.task_completed(model, ended.received_at_s, started_s, now_s)
        return ended

    def open_tasks(self) -> list[OpenTask]:
        """All that have not ended, oldest first."""
        return list(self._open.values())

    def take_intervals(self) -> dict[str, Interval]:
        """Per model what happened since the last call; models without an event are left out."""
        taken, self._interval = self._interval, {}
        return taken

    def _totals_of(self, model: str) -> TaskTotals:
        if len(self.totals) >= MOST_MODELS:
            self._give_up_oldest()
        return self.totals.setdefault(model, TaskTotals(model=model))

    def _give_up_oldest(self) -> None:
        """Add the totals of the oldest model that is served no more to those of `OTHER_MODELS`."""
        served, others = self._served(), self.totals.pop(OTHER_MODELS, TaskTotals(model=OTHER_MODELS))
        for name, totals in self.totals.items():
            if name not in served and name != UNKNOWN_MODEL and not totals.open:
                for count in TaskTotals.__struct_fields__[1:]:
                    setattr(others, count, getattr(others, count) + getattr(totals, count))
                del self.totals[name]
                break
        self.totals[OTHER_MODELS] = others

    def _interval_of(self, model: str) -> Interval:
        return self._interval.setdefault(model, Interval(TaskTotals(model=model)))

"""The launcher of one model: what waits in its queue, and when the next tasks may go into slot 0.

The spacing is counted from the last launch, `launch_interval_us` for each task that it took; there is no
clock grid (TOP's launcher dequeues by frequency). A batch is launched when it is full or its oldest task has
waited `batch_max_delay_us`.
"""

import math
from dataclasses import replace

from stageloom.shared.engine.queues import TaskQueue
from stageloom.shared.engine.slots import ModelState
from stageloom.shared.engine.steps import Outcome, Task


class Launcher:
    """One model by name; it outlives the plans that serve it."""

    __slots__ = (
        "arrived",
        "batch",
        "delay_s",
        "ended",
        "graph",
        "interval_s",
        "launched",
        "name",
        "next_s",
        "queue",
        "served",
        "target",
        "work_conserving",
    )

    def __init__(self, target: ModelState) -> None:
        self.name = target.name
        self.queue = TaskQueue(target.bound.plan.queue)
        self.graph = target.bound.graph
        self.next_s = -math.inf  # the spacing since the last launch is over from here on
        self.target: ModelState | None = None  # where it launches into; None while no plan serves the model
        self.served = True  # the plan activated last has the model
        self.ended = dict.fromkeys(Outcome, 0)
        self.arrived = 0  # tasks, also those that found the queue full
        self.launched = 0
        self.batch = 1
        self.delay_s = 0.0
        self.interval_s = 0.0
        self.work_conserving = True

    def follow(self, target: ModelState, *, shrink: bool = True) -> list[Task]:
        """Serve a new plan from now on; returns the queued tasks that its bounds leave no room for.

        Without `shrink` the queue's bounds stay where the plan's are smaller.
        """
        plan = target.bound.plan
        self.target = target
        self.graph = target.bound.graph
        self.served = True
        self.batch = plan.batch
        self.delay_s = plan.batch_max_delay_us * 1e-6
        self.interval_s = plan.launch_interval_us * 1e-6
        self.work_conserving = plan.work_conserving
        bounds, before = plan.queue, self.queue.plan
        if not shrink:
            bounds = replace(
                bounds,
                max_tasks=max(bounds.max_tasks, before.max_tasks),
                max_bytes=max(bounds.max_bytes, before.max_bytes),
            )
        return self.queue.reconfigure(bounds)

    def due_s(self, *, early: bool = False) -> float:
        """From when on a launch is allowed, slots aside: infinity with nothing to launch.

        With `early` the spacing does not count, where the plan is work conserving.
        """
        launchable = self.queue.launchable
        if not launchable:
            return math.inf
        spaced = -math.inf if early and self.work_conserving else self.next_s
        if launchable >= self.batch:
            return spaced
        return max(spaced, self.queue.oldest_launchable_s + self.delay_s)

    def take(self, now: float) -> list[Task]:
        """Take the tasks of one launch out of the queue and start the spacing."""
        rows = [self.queue.take() for _ in range(min(self.batch, self.queue.launchable))]
        self.next_s = now + self.interval_s * len(rows)
        self.launched += len(rows)
        return rows


class SharedLine:
    """Shared tasks in order of arrival, on their way into the one-deep buffers of their models.

    A task enters when the buffers of all its models are free and no older shared task waits for one of them.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[int, Task] = {}

    def add(self, task: Task) -> None:
        """A shared task came."""
        self._waiting[task.seq] = task

    def discard(self, task: Task) -> None:
        """It ended while it waited."""
        self._waiting.pop(task.seq, None)

    def enter(self, launchers: dict[str, Launcher]) -> None:
        """Let every task in that may enter now."""
        if not self._waiting:
            return
        claimed: set[str] = set()
        for task in list(self._waiting.values()):
            models = task.models
            if not claimed.isdisjoint(models) or any(launchers[m].queue.buffer is not None for m in models):
                claimed.update(models)
                if len(claimed) == len(launchers):
                    return
                continue
            del self._waiting[task.seq]
            task.buffered = True
            for model in models:
                launchers[model].queue.let_in(task)

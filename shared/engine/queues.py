"""One model's queue: bounded in tasks and bytes exactly, under one of four rules.

A rule has a run order (who is launched next) and a losing order (who goes when the queue is full):

| rule | runs first | loses when full |
| --- | --- | --- |
| refuse newest | oldest | the newcomer |
| drop oldest | oldest | oldest |
| deadline | what is wanted first | what is wanted last, the newest of equals |
| priority | highest priority | lowest priority, the newest of equals |

When a task without a deadline is wanted: `stageloom.shared.engine.patience`.

A shared task is counted in the queue of each of its models from its arrival until it is launched there. It
can be launched only from the model's one-deep buffer, and cannot lose once it is in the buffers.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush

from stageloom.shared.engine.patience import wanted_by_s
from stageloom.shared.engine.slots import ModelState
from stageloom.shared.engine.steps import Outcome, Task
from stageloom.shared.plan import QueuePlan, QueueRule

_Key = tuple[float, int]
_Heap = list[tuple[float, int, Task]]
_SLACK = 64  # entries of ended tasks that a heap may hold beyond the live ones before it is rebuilt


class TaskQueue:
    """The tasks of one model that are not launched yet; see the module's text."""

    __slots__ = (
        "_entries",
        "_loses",
        "_patient",
        "_runs",
        "_singles",
        "buffer",
        "launchable",
        "nbytes",
        "plan",
    )

    def __init__(self, plan: QueuePlan) -> None:
        self.plan = plan
        self.nbytes = 0
        self.launchable = 0  # tasks that may be launched now
        self.buffer: Task | None = None  # a shared task that may be launched; see `admit`
        self._entries: OrderedDict[int, Task] = OrderedDict()  # by arrival, the buffered one included
        self._singles: OrderedDict[int, Task] = OrderedDict()  # those that need no buffer
        self._runs: _Heap = []  # singles in run order; only where it is not the order of arrival
        self._patient: OrderedDict[int, Task] = OrderedDict()  # singles without a deadline, by DEADLINE
        self._loses: _Heap = []  # all in losing order; likewise

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def oldest_arrived_s(self) -> float | None:
        """When the oldest task came."""
        return next((task.arrived_s for task in self._entries.values()), None)

    @property
    def oldest_launchable_s(self) -> float:
        """When the oldest task that may be launched came; infinity where there is none."""
        oldest = self.buffer.arrived_s if self.buffer is not None else math.inf
        for task in self._singles.values():
            return min(oldest, task.arrived_s)
        return oldest

    def entries(self) -> Iterator[Task]:
        """All tasks in order of arrival."""
        return iter(self._entries.values())

    def losers(self, newcomer: Task) -> list[Task] | None:
        """Who must go so that `newcomer` fits; None where it loses itself. Changes nothing."""
        nbytes = newcomer.nbytes
        free_tasks = self.plan.max_tasks - len(self._entries)
        free_bytes = self.plan.max_bytes - self.nbytes
        if free_tasks >= 1 and free_bytes >= nbytes:
            return []
        if nbytes > self.plan.max_bytes or self.plan.rule is QueueRule.REFUSE_NEWEST:
            return None
        found: list[Task] = []
        for task in self._losing_order(self._key(newcomer)):
            found.append(task)
            free_tasks += 1
            free_bytes += task.nbytes
            if free_tasks >= 1 and free_bytes >= nbytes:
                return found
        return None

    def add(self, task: Task) -> None:
        """Take in a task for which there is room."""
        self._entries[task.seq] = task
        self.nbytes += task.nbytes
        if not task.shared:
            self._singles[task.seq] = task
            self.launchable += 1
        if self._keyed:
            value, seq = self._key(task)
            if not task.shared:
                if self._is_patient(task):
                    self._patient[seq] = task
                else:
                    heappush(self._runs, (value, seq, task))
            heappush(self._loses, (-value, -seq, task))

    def admit(self, task: Task) -> None:
        """A shared task enters the empty buffer."""
        self.buffer = task
        self.launchable += 1

    def discard(self, task: Task) -> None:
        """Forget a task that was launched or has ended; unknown ones are ignored."""
        if self._entries.pop(task.seq, None) is None:
            return
        self.nbytes -= task.nbytes
        if self._singles.pop(task.seq, None) is not None:
            self._patient.pop(task.seq, None)
            self.launchable -= 1
        elif self.buffer is task:
            self.buffer = None
            self.launchable -= 1
        if len(self._loses) > 2 * len(self._entries) + _SLACK:
            self._rebuild()
        elif len(self._runs) > 2 * len(self._singles) + _SLACK:
            self._rebuild()

    def first(self, turn_s: float = -math.inf) -> Task:
        """The task to launch next; there must be one. `turn_s`: the model's turn, see `wanted_by_s`."""
        first: Task | None = None
        single = self._first_single()
        if single is not None and self.buffer is None and not self._patient:
            return single
        for task in (self.buffer, single, next(iter(self._patient.values()), None)):
            if task is not None and (first is None or self._key(task, turn_s) < self._key(first, turn_s)):
                first = task
        assert first is not None
        return first

    def take(self, turn_s: float = -math.inf) -> Task:
        """Remove and return the task to launch next; there must be one."""
        task = self.first(turn_s)
        self.discard(task)
        return task

    def reconfigure(self, plan: QueuePlan) -> list[Task]:
        """Follow a new plan's rule and bounds; returns who no longer fits, still in the queue."""
        self.plan = plan
        self._rebuild()
        over_tasks = len(self._entries) - plan.max_tasks
        over_bytes = self.nbytes - plan.max_bytes
        losers: list[Task] = []
        order = reversed(self._entries.values()) if plan.rule is QueueRule.REFUSE_NEWEST else None
        for task in order or self._losing_order((-math.inf, -1)):
            if over_tasks <= 0 and over_bytes <= 0:
                break
            if task.buffered:
                continue
            losers.append(task)
            over_tasks -= 1
            over_bytes -= task.nbytes
        return losers

    @property
    def _keyed(self) -> bool:
        return self.plan.rule in (QueueRule.DEADLINE, QueueRule.PRIORITY)

    def _is_patient(self, task: Task) -> bool:
        """Its place in the run order depends on the model's turn."""
        return self.plan.rule is QueueRule.DEADLINE and task.deadline_s == math.inf

    def _key(self, task: Task, turn_s: float = -math.inf) -> _Key:
        """Run order: the smallest first."""
        if self.plan.rule is QueueRule.DEADLINE:
            return wanted_by_s(task, turn_s), task.seq
        if self.plan.rule is QueueRule.PRIORITY:
            return -task.priority, task.seq
        return 0, task.seq

    def _losing_order(self, newcomer: _Key) -> Iterator[Task]:
        """Tasks that lose before the newcomer does, first loser first. Tasks in the buffers never lose."""
        if not self._keyed:
            yield from (task for task in self._entries.values() if not task.buffered)
            return
        popped: _Heap = []
        try:
            while self._loses:
                item = heappop(self._loses)
                task = item[2]
                if task.seq not in self._entries or task.buffered:
                    continue
                popped.append(item)
                if self._key(task) < newcomer:
                    return
                yield task
        finally:
            for item in popped:
                heappush(self._loses, item)

    def _first_single(self) -> Task | None:
        if not self._keyed:
            return next(iter(self._singles.values()), None)
        while self._runs and self._runs[0][1] not in self._singles:
            heappop(self._runs)
        return self._runs[0][2] if self._runs else None

    def _rebuild(self) -> None:
        self._runs.clear()
        self._loses.clear()
        self._patient.clear()
        if not self._keyed:
            return
        for task in self._singles.values():
            if self._is_patient(task):
                self._patient[task.seq] = task
            else:
                self._runs.append((*self._key(task), task))
        self._loses.extend(
            (-value, -seq, task) for task in self._entries.values() for value, seq in [self._key(task)]
        )
        heapify(self._runs)
        heapify(self._loses)


class Launcher:
    """One model by name; it goes on from plan to plan while one serves it."""

    __slots__ = (
        "arrived",
        "batch",
        "delay_s",
        "ended",
        "graph",
        "interval_s",
        "last_count",
        "last_s",
        "launched",
        "name",
        "next_s",
        "queue",
        "served",
        "target",
        "tightest_s",
        "turn_s",
        "work_conserving",
    )

    def __init__(self, target: ModelState) -> None:
        self.name = target.name
        self.queue = TaskQueue(target.bound.plan.queue)
        self.graph = target.bound.graph
        self.last_s = -math.inf  # the last launch,
        self.last_count = 0  # its tasks,
        self.next_s = -math.inf  # and from when on the spacing since then is over
        self.turn_s = -math.inf  # from here on tasks without a deadline are within the model's share
        self.target: ModelState | None = None  # where it launches into; None while no plan serves the model
        self.served = True  # the plan activated last has the model
        self.ended = dict.fromkeys(Outcome, 0)
        self.arrived = 0  # tasks, also those that found the queue full
        self.launched = 0
        self.tightest_s = math.inf  # from arrival to deadline, of the tasks since it was last taken
        self.batch = 1
        self.delay_s = 0.0
        self.interval_s = 0.0
        self.work_conserving = True

    def follow(self, target: ModelState, *, shrink: bool = True) -> list[Task]:
        """Serve a new plan from now on; returns the queued tasks that its bounds leave no room for.

        Its spacing counts from the last launch, whatever interval the plan before had.
        Without `shrink` the queue's bounds stay where the plan's are smaller.
        """
        plan = target.bound.plan
        self.target = target
        self.graph = target.bound.graph
        self.served = True
        self.batch = plan.batch
        self.delay_s = plan.batch_max_delay_us * 1e-6
        self.interval_s = plan.launch_interval_us * 1e-6
        self.next_s = self.last_s + self.interval_s * self.last_count
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
        rows = [self.queue.take(self.turn_s) for _ in range(min(self.batch, self.queue.launchable))]
        self.last_s, self.last_count = now, len(rows)
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
                launchers[model].queue.admit(task)

"""One model's queue: bounded in tasks and bytes exactly, under one of four rules.

A rule has a run order (who is launched next) and a losing order (who goes when the queue is full):

| rule | runs first | loses when full |
| --- | --- | --- |
| refuse newest | oldest | the newcomer |
| drop oldest | oldest | oldest |
| deadline | earliest deadline | latest deadline, the newest of equals |
| priority | highest priority | lowest priority, the newest of equals |

A shared task is counted in the queue of each of its models from its arrival until it is launched there. It
can be launched only from the model's one-deep buffer, and cannot lose once it is in the buffers.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from stageloom.shared.engine.records import TaskRecord
from stageloom.shared.plan import QueuePlan, QueueRule

_Key = tuple[float, int]
_Heap = list[tuple[float, int, TaskRecord]]
_SLACK = 64  # entries of ended tasks that a heap may hold beyond the live ones before it is rebuilt


class TaskQueue:
    """The tasks of one model that are not launched yet; see the module's text."""

    __slots__ = ("_entries", "_loses", "_runs", "_singles", "buffer", "launchable", "nbytes", "plan")

    def __init__(self, plan: QueuePlan) -> None:
        self.plan = plan
        self.nbytes = 0
        self.launchable = 0  # tasks that may be launched now
        self.buffer: TaskRecord | None = None  # a shared task that may be launched; see `let_in`
        self._entries: OrderedDict[int, TaskRecord] = OrderedDict()  # by arrival, the buffered one included
        self._singles: OrderedDict[int, TaskRecord] = OrderedDict()  # those that need no buffer
        self._runs: _Heap = []  # singles in run order; only where it is not the order of arrival
        self._loses: _Heap = []  # all in losing order; likewise

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def oldest_arrived_s(self) -> float | None:
        """When the oldest task came."""
        return next((entry.arrived_s for entry in self._entries.values()), None)

    @property
    def oldest_launchable_s(self) -> float:
        """When the oldest task that may be launched came; infinity where there is none."""
        oldest = self.buffer.arrived_s if self.buffer is not None else math.inf
        for entry in self._singles.values():
            return min(oldest, entry.arrived_s)
        return oldest

    def entries(self) -> Iterator[TaskRecord]:
        """All tasks in order of arrival."""
        return iter(self._entries.values())

    def losers(self, newcomer: TaskRecord) -> list[TaskRecord] | None:
        """Who must go so that `newcomer` fits; None where it loses itself. Changes nothing."""
        nbytes = newcomer.task.nbytes
        free_tasks = self.plan.max_tasks - len(self._entries)
        free_bytes = self.plan.max_bytes - self.nbytes
        if free_tasks >= 1 and free_bytes >= nbytes:
            return []
        if nbytes > self.plan.max_bytes or self.plan.rule is QueueRule.REFUSE_NEWEST:
            return None
        found: list[TaskRecord] = []
        for entry in self._losing_order(self._key(newcomer)):
            found.append(entry)
            free_tasks += 1
            free_bytes += entry.task.nbytes
            if free_tasks >= 1 and free_bytes >= nbytes:
                return found
        return None

    def add(self, entry: TaskRecord) -> None:
        """Take in a task for which there is room."""
        self._entries[entry.seq] = entry
        self.nbytes += entry.task.nbytes
        if not entry.shared:
            self._singles[entry.seq] = entry
            self.launchable += 1
        if self._keyed:
            value, seq = self._key(entry)
            if not entry.shared:
                heappush(self._runs, (value, seq, entry))
            heappush(self._loses, (-value, -seq, entry))

    def let_in(self, entry: TaskRecord) -> None:
        """A shared task enters the empty buffer."""
        self.buffer = entry
        self.launchable += 1

    def discard(self, entry: TaskRecord) -> None:
        """Forget a task that was launched or has ended; unknown ones are ignored."""
        if self._entries.pop(entry.seq, None) is None:
            return
        self.nbytes -= entry.task.nbytes
        if self._singles.pop(entry.seq, None) is not None:
            self.launchable -= 1
        elif self.buffer is entry:
            self.buffer = None
            self.launchable -= 1
        if len(self._loses) > 2 * len(self._entries) + _SLACK:
            self._rebuild()
        elif len(self._runs) > 2 * len(self._singles) + _SLACK:
            self._rebuild()

    def first(self) -> TaskRecord:
        """The task to launch next; there must be one."""
        single = self._first_single()
        buffered = self.buffer
        if single is None or (buffered is not None and self._key(buffered) < self._key(single)):
            assert buffered is not None
            return buffered
        return single

    def take(self) -> TaskRecord:
        """Remove and return the task to launch next; there must be one."""
        entry = self.first()
        self.discard(entry)
        return entry

    def reconfigure(self, plan: QueuePlan) -> list[TaskRecord]:
        """Follow a new plan's rule and bounds; returns who no longer fits, still in the queue."""
        self.plan = plan
        self._rebuild()
        over_tasks = len(self._entries) - plan.max_tasks
        over_bytes = self.nbytes - plan.max_bytes
        losers: list[TaskRecord] = []
        order = reversed(self._entries.values()) if plan.rule is QueueRule.REFUSE_NEWEST else None
        for entry in order or self._losing_order((-math.inf, -1)):
            if over_tasks <= 0 and over_bytes <= 0:
                break
            if entry.buffered:
                continue
            losers.append(entry)
            over_tasks -= 1
            over_bytes -= entry.task.nbytes
        return losers

    @property
    def _keyed(self) -> bool:
        return self.plan.rule in (QueueRule.DEADLINE, QueueRule.PRIORITY)

    def _key(self, entry: TaskRecord) -> _Key:
        """Run order: the smallest first."""
        if self.plan.rule is QueueRule.DEADLINE:
            return entry.deadline_s, entry.seq
        if self.plan.rule is QueueRule.PRIORITY:
            return -entry.task.priority, entry.seq
        return 0, entry.seq

    def _losing_order(self, newcomer: _Key) -> Iterator[TaskRecord]:
        """Tasks that lose before the newcomer does, first loser first. Tasks in the buffers never lose."""
        if not self._keyed:
            yield from (entry for entry in self._entries.values() if not entry.buffered)
            return
        popped: _Heap = []
        try:
            while self._loses:
                item = heappop(self._loses)
                entry = item[2]
                if entry.seq not in self._entries or entry.buffered:
                    continue
                popped.append(item)
                if self._key(entry) < newcomer:
                    return
                yield entry
        finally:
            for item in popped:
                heappush(self._loses, item)

    def _first_single(self) -> TaskRecord | None:
        if not self._keyed:
            return next(iter(self._singles.values()), None)
        while self._runs and self._runs[0][1] not in self._singles:
            heappop(self._runs)
        return self._runs[0][2] if self._runs else None

    def _rebuild(self) -> None:
        self._runs.clear()
        self._loses.clear()
        if not self._keyed:
            return
        self._runs.extend((*self._key(entry), entry) for entry in self._singles.values())
        self._loses.extend(
            (-value, -seq, entry) for entry in self._entries.values() for value, seq in [self._key(entry)]
        )
        heapify(self._runs)
        heapify(self._loses)

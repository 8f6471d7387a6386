"""Records what the running engine does for a while: steps with their groups, launches, queues, swaps, tasks.

Off, it costs a comparison per step. On, the engine's threads append small values to queues, and the main
thread writes them out every few milliseconds, so memory is bounded by what happens in between and by
MAX_WAITING; what goes beyond that, or beyond the file's bound, is counted as dropped and never waited for.

The file is a sequence of `Batch`es in msgpack, each after its length in four bytes, and one `Recorded` last.
"""

import math
import os
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from edge_agent.executor.base import StepResult
from edge_agent.worker.messages import Record, RecordingEnded
from shared.bound import BoundPlan
from shared.engine.core import EngineCore
from shared.engine.steps import Outcome, PlanKey, Step
from shared.ids import TaskId

MAX_WAITING = 20_000
"""Entries of each kind that wait to be written: some megabytes."""

MAX_BYTES = 256 << 20
"""Of the file."""

_WRITE_S = 0.02  # how often is written
_ENTRIES_PER_WRITE = 1000  # of each kind: a millisecond or two in which Python does nothing else

_length = struct.Struct("<I")


class StepEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step that ended well. `groups`: item of the launch list, stream, begin, end."""

    step: int
    lane: int
    key: int
    combined: int
    mask: int
    positions: tuple[int, ...]  # of the members, downstream first
    instances: tuple[int, ...]  # likewise
    fallback: bool  # no program was ready: the members ran one after another, each with its own items
    began_s: float
    ended_s: float
    groups: tuple[tuple[int, int, float, float], ...]


class QueueEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A model's queue changed: the tasks that wait, and how many were launched at this instant."""

    at_s: float
    model: str
    queued: int
    launched: int


class SwapEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """From this instant on launches go to this plan; None: to none."""

    at_s: float
    key: int | None


class TaskEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A task that ended. `began_s`: its first step; None if it never ran."""

    task: int
    models: tuple[str, ...]
    queued_s: float
    began_s: float | None
    ended_s: float
    outcome: str


class Batch(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """What happened since the last one."""

    steps: list[StepEntry]
    queues: list[QueueEntry]
    swaps: list[SwapEntry]
    tasks: list[TaskEntry]

    @property
    def entries(self) -> int:
        """All of them."""
        return len(self.steps) + len(self.queues) + len(self.swaps) + len(self.tasks)


class Recorded(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The recording as a whole; `plans`: canonical bytes of the plans that ran, by key."""

    began_s: float
    ended_s: float
    plans: dict[int, bytes]
    dropped: int  # entries
    own_s: float  # of processor time that recording and writing took, on all threads


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Batch | Recorded).decode


class Recorder:
    """What has happened and is not written yet. `step` comes from any lane, the rest under the lock."""

    def __init__(self) -> None:
        self.plans: dict[PlanKey, BoundPlan] = {}
        self.dropped = 0
        self.own_s = 0.0
        self._steps: deque[StepEntry] = deque()
        self._queues: deque[QueueEntry] = deque()
        self._swaps: deque[SwapEntry] = deque()
        self._tasks: deque[TaskEntry] = deque()
        self._seen: dict[str, tuple[int, int]] = {}
        self._key: PlanKey | None = None

    def step(self, step: Step, result: StepResult, bound: BoundPlan | None) -> None:
        """A step ended."""
        begun_s = time.thread_time()
        program, members = step.program, step.members
        if bound is not None:
            self.plans[program.plan] = bound
        self._keep(
            self._steps,
            StepEntry(
                step.id,
                step.lane,
                program.plan,
                program.combined,
                program.mask,
                tuple([member.position for member in members]),
                tuple([member.instance for member in members]),
                step.fallback,
                result.started_s,
                result.ended_s,
                tuple([(g.item, g.stream, g.started_s, g.ended_s) for g in result.groups]),
            ),
        )
        self.own_s += time.thread_time() - begun_s

    def look(self, core: EngineCore, key: PlanKey | None, now: float) -> None:
        """An event was dealt with: note what it did to the queues and to the plan that runs."""
        begun_s = time.thread_time()
        for name, queued, launched in core.queues():
            before = self._seen.get(name)
            if before != (queued, launched):
                self._seen[name] = (queued, launched)
                since = 0 if before is None else launched - before[1]
                self._keep(self._queues, QueueEntry(now, name, queued, since))
        if key != self._key:
            self._key = key
            self._keep(self._swaps, SwapEntry(now, key))
        self.own_s += time.thread_time() - begun_s

    def task(
        self,
        task: TaskId,
        models: tuple[str, ...],
        times_s: tuple[float, float | None, float],
        outcome: Outcome,
    ) -> None:
        """A task ended; `times_s`: queued, begun, ended."""
        self._keep(self._tasks, TaskEntry(task, models, *times_s, outcome.value))

    def take(self) -> Batch | None:
        """Some of what waits, in order; None if nothing does."""
        batch = Batch(*(_some(waiting) for waiting in (self._steps, self._queues, self._swaps, self._tasks)))
        return batch if batch.entries else None

    def _keep(self, waiting: deque[Any], entry: msgspec.Struct) -> None:
        if len(waiting) < MAX_WAITING:
            waiting.append(entry)
        else:
            self.dropped += 1


def _some(waiting: deque[Any]) -> list[Any]:
    return [waiting.popleft() for _ in range(min(len(waiting), _ENTRIES_PER_WRITE))]


class Recordable(Protocol):
    """The driver, as far as it matters here."""

    def record(self, recorder: Recorder | None) -> None:
        """Tell this recorder what happens from now on; None: nobody."""


class Recording:
    """At most one recording at a time, driven by the engine process's main thread."""

    def __init__(
        self, driver: Callable[[], Recordable | None], report: Callable[[RecordingEnded], None]
    ) -> None:
        self._driver = driver
        self._report = report
        self._order: Record | None = None
        self._recorder = Recorder()
        self._fd = -1
        self._bytes = 0
        self._began_s = self._until_s = 0.0
        self._full = False
        self.due_s = math.inf  # when `advance` has something to do

    def order(self, order: Record, fd: int, now: float) -> None:
        """Record from now on into a file; `fd` stays the caller's."""
        driver = self._driver()
        if driver is None or self._order is not None:
            why = "another recording is under way" if self._order else "no plan is loaded"
            self._report(RecordingEnded(order.number, why))
            return
        self._fd = os.dup(fd)
        self._order, self._recorder = order, Recorder()
        self._bytes, self._full = 0, False
        self._began_s, self._until_s = now, now + order.seconds
        driver.record(self._recorder)
        self.due_s = now + _WRITE_S

    def advance(self, now: float) -> None:
        """Write some of what waits; end when the time is up and nothing waits any more."""
        order = self._order
        if order is None or now < self.due_s:
            return
        if now >= self._until_s and (driver := self._driver()) is not None:
            driver.record(None)
        try:
            batch = self._recorder.take()
            if batch is not None:
                self._write(batch)
            elif now >= self._until_s:
                self._finish(order)
                return
        except OSError as error:
            self._end(order, f"the recording cannot be written: {error.strerror}")
            return
        self.due_s = now + (_WRITE_S if now < self._until_s else 0.0)

    def _write(self, batch: Batch) -> None:
        begun_s = time.thread_time()
        if self._full:
            self._recorder.dropped += batch.entries
        else:
            self._append(batch)
            self._full = self._bytes > MAX_BYTES
        self._recorder.own_s += time.thread_time() - begun_s

    def _append(self, message: Batch | Recorded) -> None:
        body = _encode(message)
        data = _length.pack(len(body)) + body
        while data:
            written = os.write(self._fd, data)
            self._bytes += written
            data = data[written:]

    def _finish(self, order: Record) -> None:
        recorder = self._recorder
        plans = {int(key): bound.plan.wire for key, bound in recorder.plans.items()}
        self._append(Recorded(self._began_s, self._until_s, plans, recorder.dropped, recorder.own_s))
        self._end(order, "")

    def _end(self, order: Record, reason: str) -> None:
        if (driver := self._driver()) is not None:
            driver.record(None)
        os.close(self._fd)
        self._order, self.due_s = None, math.inf
        self._report(RecordingEnded(order.number, reason))


def read_recording(data: bytes) -> tuple[Batch, Recorded]:
    """All batches of a file as one, and what it says of the whole.

    Raises:
        ValueError: the file is cut off or holds something else.
    """
    whole = Batch([], [], [], [])
    at = 0
    while at + _length.size <= len(data):
        (size,) = _length.unpack_from(data, at)
        at += _length.size
        message = _decode(data[at : at + size])
        at += size
        if isinstance(message, Recorded):
            return whole, message
        whole.steps.extend(message.steps)
        whole.queues.extend(message.queues)
        whole.swaps.extend(message.swaps)
        whole.tasks.extend(message.tasks)
    raise ValueError("the recording is cut off")

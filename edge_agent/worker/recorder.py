"""Records what the running engine does for a while: steps with their groups, launches, queues, swaps, tasks.

Off, it costs a comparison per step. On, the engine's threads append small values to queues, and the main
thread encodes them every few milliseconds and hands them to the thread that writes the file: the engine never
waits for a caller's file. Memory is bounded by what happens in between, by MAX_WAITING and by the file's
bounds; what goes beyond is counted as dropped.

The file is a sequence of `RecordingBatch`es in msgpack, each after its length in four bytes, and one
`RecordingSummary` last.
"""

import math
import os
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from stageloom.edge_agent.executor.base import StepResult
from stageloom.edge_agent.worker.messages import RecordingEnded, StartRecording
from stageloom.edge_agent.worker.pinning import may_keep_to
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.steps import Outcome, PlanKey, Step
from stageloom.shared.ids import TaskId

MAX_BYTES: Final = 256 << 20
"""Of the file."""

MAX_WAITING_BYTES: Final = 16 << 20
"""Handed over and not written yet; what comes on top is refused."""


class RecordingFile:
    """Takes data until `finish`; `ended` says when nothing more will be written, `error` why not all was.

    `put`, `finish` and `abandon` are the engine's main thread's and never wait.
    """

    def __init__(self, descriptor: int) -> None:
        """Begin to write; `descriptor` stays the caller's.

        Raises:
            OSError: the system gives no more descriptors or threads.
        """
        self.error = ""
        self._descriptor = os.dup(descriptor)
        self._handed_bytes = 0
        self._written_bytes = 0  # the thread's
        self._abandoned = False
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # threading's, where there are too many threads
            os.close(self._descriptor)
            raise OSError(f"{error}; raise the limit of threads (TasksMax of the service)") from error

    def put(self, data: bytes) -> bool:
        """Hand data over; False, and nothing of it is written, if the file is full or too slow."""
        full = self._handed_bytes > MAX_BYTES
        if full or self._handed_bytes - self._written_bytes > MAX_WAITING_BYTES:
            return False
        self._handed_bytes += len(data)
        self._queue.put(data)
        return True

    def finish(self, data: bytes) -> None:
        """Hand over the last data, however full the file is."""
        self._queue.put(data)
        self._queue.put(None)

    def abandon(self) -> None:
        """Write nothing more beyond what the thread is writing now."""
        self._abandoned = True
        self._queue.put(None)

    @property
    def ended(self) -> bool:
        """Whether the thread is done with the file and has closed it."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def _run(self) -> None:
        may_keep_to(os.sched_getaffinity(os.getpid()))  # not to those of the lane that took the order
        try:
            while (data := self._queue.get()) is not None and not self._abandoned:
                self._write(data)
        except OSError as error:
            self.error = f"the recording cannot be written: {error.strerror}"
        finally:
            os.close(self._descriptor)

    def _write(self, data: bytes) -> None:
        while data and not self._abandoned:
            written = os.write(self._descriptor, data)
            self._written_bytes += written
            data = data[written:]


MAX_WAITING = 20_000
"""Entries of each kind that wait to be written: some megabytes."""

CLOSING_S = 10.0
"""How long after its time a recording may take to reach its file."""

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
    variant: int = 0  # of the ways to run it


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


class RecordingBatch(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """What happened since the last one."""

    steps: list[StepEntry]
    queues: list[QueueEntry]
    swaps: list[SwapEntry]
    tasks: list[TaskEntry]

    @property
    def entries(self) -> int:
        return len(self.steps) + len(self.queues) + len(self.swaps) + len(self.tasks)


class RecordingSummary(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The recording as a whole; `plans`: canonical bytes of the plans that ran, by key."""

    began_s: float
    ended_s: float
    plans: dict[int, bytes]
    dropped: int  # entries
    own_s: float  # of processor time: noting steps and queues, and encoding; not noting tasks, nor writing


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RecordingBatch | RecordingSummary).decode


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
                result.groups,
                program.variant,
            ),
        )
        self.own_s += time.thread_time() - begun_s

    def note_queues(self, core: EngineCore, key: PlanKey | None, now: float) -> None:
        """An event was dealt with: note what it did to the queues and to the plan that runs."""
        begun_s = time.thread_time()
        queues = core.queues()
        for name, queued, launched in queues:
            before = self._seen.get(name)
            if before != (queued, launched):
                self._seen[name] = (queued, launched)
                since = 0 if before is None else launched - before[1]
                self._keep(self._queues, QueueEntry(now, name, queued, since))
        if len(self._seen) > len(queues):  # no plan serves some model any more
            for name in self._seen.keys() - {name for name, _, _ in queues}:
                del self._seen[name]
                self._keep(self._queues, QueueEntry(now, name, 0, 0))
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

    def take(self) -> RecordingBatch | None:
        """Some of what waits, in order; None if nothing does."""
        batch = RecordingBatch(
            *(_some(waiting) for waiting in (self._steps, self._queues, self._swaps, self._tasks))
        )
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
        self,
        driver: Callable[[], Recordable | None],
        report: Callable[[RecordingEnded], None],
        open_file: Callable[[int], RecordingFile] = RecordingFile,
    ) -> None:
        self._driver = driver
        self._report = report
        self._open_file = open_file
        self._order: StartRecording | None = None
        self._recorder = Recorder()
        self._file: RecordingFile | None = None  # of the newest recording, ended or not
        self._began_s = self._until_s = 0.0
        self._complete = False  # all is handed to the file
        self.due_s = math.inf  # when `advance` has something to do

    def order(self, order: StartRecording, fd: int, now: float) -> None:
        """Record from now on into a file; `fd` stays the caller's.

        Raises:
            OSError: as `RecordingFile`.
        """
        driver = self._driver()
        if self._order is not None or (self._file is not None and not self._file.ended):
            self._report(RecordingEnded(order.number, "another recording is under way"))
            return
        if driver is None:
            self._report(RecordingEnded(order.number, "no plan is loaded"))
            return
        self._file = self._open_file(fd)
        self._order, self._recorder, self._complete = order, Recorder(), False
        self._began_s, self._until_s = now, now + order.seconds
        driver.record(self._recorder)
        self.due_s = now + _WRITE_S

    def advance(self, now: float) -> None:
        """Hand over some of what waits; end when the time is up and the file has it all."""
        order, file = self._order, self._file
        if order is None or file is None or now < self.due_s:
            return
        if now >= self._until_s and (driver := self._driver()) is not None:
            driver.record(None)
        if file.ended:
            self._end(order, file.error)
            return
        if now >= self._until_s + CLOSING_S:
            file.abandon()
            self._end(order, f"its file took more than {CLOSING_S:g} s beyond the recording; try again")
            return
        batch = None if self._complete else self._recorder.take()
        if batch is not None:
            self._hand_over(batch, file)
        elif now >= self._until_s and not self._complete:
            self._finish(file)
        waits = batch is None or now < self._until_s
        self.due_s = now + (_WRITE_S if waits else 0.0)

    def _hand_over(self, batch: RecordingBatch, file: RecordingFile) -> None:
        begun_s = time.thread_time()
        if not file.put(_framed(batch)):
            self._recorder.dropped += batch.entries
        self._recorder.own_s += time.thread_time() - begun_s

    def _finish(self, file: RecordingFile) -> None:
        recorder = self._recorder
        plans = {int(key): bound.plan.wire for key, bound in recorder.plans.items()}
        file.finish(
            _framed(RecordingSummary(self._began_s, self._until_s, plans, recorder.dropped, recorder.own_s))
        )
        self._complete = True

    def _end(self, order: StartRecording, reason: str) -> None:
        if (driver := self._driver()) is not None:
            driver.record(None)
        self._order, self.due_s = None, math.inf
        self._report(RecordingEnded(order.number, reason))


def _framed(message: RecordingBatch | RecordingSummary) -> bytes:
    body = _encode(message)
    return _length.pack(len(body)) + body


def read_recording(data: bytes) -> tuple[RecordingBatch, RecordingSummary]:
    """All batches of a file as one, and what it says of the whole.

    Raises:
        ValueError: the file is cut off or holds something else.
    """
    whole = RecordingBatch([], [], [], [])
    at = 0
    while at + _length.size <= len(data):
        (size,) = _length.unpack_from(data, at)
        at += _length.size
        message = _decode(data[at : at + size])
        at += size
        if isinstance(message, RecordingSummary):
            return whole, message
        whole.steps.extend(message.steps)
        whole.queues.extend(message.queues)
        whole.swaps.extend(message.swaps)
        whole.tasks.extend(message.tasks)
    raise ValueError("the recording is cut off")

"""Runs a launch list's items on threads: the caller's and some of a persistent pool.

An item that may begin is taken by whoever is free first. The caller calls helpers for what it cannot begin
itself and goes on; a helper that wakes too late finds nothing left, so a wake-up (30 to 50 us where measured,
more than a small group takes) is waited for by nobody. Likewise whoever ends the last item of a stage begins
the next one, while the others are still waking up. Only a caller with nothing to do sleeps.

Helpers are called only while fewer threads are at work than there are cores: with a step in every lane a
helper would but take turns with them, and both steps would wait at their stages' ends for who is not running.
A lane that has ended a step is still at work for a moment: most often its next step is about to begin.

A session releases the interpreter lock while it computes; what is decided in between is a few lines under one
lock per run.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from queue import SimpleQueue

from stageloom.shared.engine.steps import Step
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import StepId
from stageloom.shared.launch_list import Item


class StepOrder:
    """Tracks steps between issue and end. Every method may be called from any lane's thread.

    Most steps have nothing left to wait for, so a gate is made by whoever must wait: a lock that is held
    until the step ends, which the waiting take and let go at once. Locks cost a tenth of `threading.Event`.
    """

    def __init__(self) -> None:
        self._running: set[StepId] = set()
        self._gates: dict[StepId, threading.Lock] = {}

    def issue(self, step: Step) -> None:
        """Register a step; steps that name it in `after` will wait for it."""
        if step.id in self._running:
            raise ExecutorError(f"step {step.id} was issued twice")
        self._running.add(step.id)

    def begin(self, step: Step) -> None:
        """Block until every step in `step.after` has ended."""
        for before in step.after:
            if before in self._running:
                self._pass(before)

    def _pass(self, step: StepId) -> None:
        made = threading.Lock()
        made.acquire()
        gate = self._gates.setdefault(step, made)
        # `end` takes the step away first and looks for a gate then: seen here, it will open this one.
        if step in self._running:
            with gate:
                pass
        else:
            self._gates.pop(step, None)

    def end(self, step: Step) -> None:
        """The step has ended, well or badly."""
        self._running.remove(step.id)
        if self._gates:
            gate = self._gates.pop(step.id, None)
            if gate is not None:
                gate.release()

    def running(self, step: StepId) -> bool:
        return step in self._running


MAX_THREADS = max(2, len(os.sched_getaffinity(0)))
"""Threads that one step may use, the caller's included: more than cores only adds switches."""

_BETWEEN_STEPS_S = 0.001
"""A lane whose step has ended counts as at work for so long; the next one begins some 10 us later, or 200 us
where another thread holds the interpreter."""


@dataclass(frozen=True, slots=True)
class Threading:
    """What must have ended before an item may begin, and how many threads can be of use."""

    threads: int  # the caller's included
    waits: tuple[int, ...]  # per item the number of items that it waits for [num_items]
    frees: tuple[tuple[int, ...], ...]  # per item those that wait for it [num_items][...]


def assign(launches: Sequence[Item], max_threads: int = MAX_THREADS) -> Threading:
    """Work out who waits for whom: an item for those it names, and for the one before it on its stream."""
    latest: dict[int, int] = {}
    waits: list[int] = []
    frees: list[list[int]] = [[] for _ in launches]
    for index, item in enumerate(launches):
        before = set(item.waits)
        if item.stream in latest:
            before.add(latest[item.stream])
        latest[item.stream] = index
        waits.append(len(before))
        for earlier in before:
            frees[earlier].append(index)
    return Threading(max(1, min(len(latest), max_threads)), tuple(waits), tuple(map(tuple, frees)))


class _Run:
    """One run of a launch list in progress. Everything but `body` and `pool` is guarded by `lock`."""

    __slots__ = (
        "asleep",
        "bell",
        "body",
        "error",
        "frees",
        "idle",
        "lock",
        "pool",
        "ready",
        "running",
        "waits",
    )

    def __init__(self, plan: Threading, body: Callable[[int], None], pool: "StreamPool") -> None:
        self.body = body
        self.pool = pool  # where helpers come from
        self.frees = plan.frees
        self.waits = list(plan.waits)
        self.ready = [item for item, count in enumerate(plan.waits) if not count]  # a heap
        self.running = 0
        self.idle = plan.threads - 1  # helpers that may be called
        self.asleep = False  # the caller, on its bell
        self.bell = threading.Lock()
        self.bell.acquire()
        self.lock = threading.Lock()
        self.error: BaseException | None = None

    def lead(self) -> None:
        """Run items until all have ended, or after an error those that had begun."""
        ended = -1
        while True:
            with self.lock:
                item = self._next(ended)
                if item < 0:
                    if not self.running:
                        return
                    self.asleep = True
            if item < 0:
                self.pool.sleep()
                self.bell.acquire()
                self.pool.begin()
                ended = -1
            else:
                ended = self._run(item)

    def help(self) -> None:
        """Run items as long as one is ready."""
        ended = -1
        while True:
            with self.lock:
                item = self._next(ended)
                if self.asleep and (self.ready or not self.running):
                    self.asleep = False
                    self.bell.release()
                if item < 0:
                    self.idle += 1
                    return
            ended = self._run(item)

    def _next(self, ended: int) -> int:
        """Note that an item has ended, where one has; take the first one that is ready, or -1."""
        ready = self.ready
        if ended >= 0:
            self.running -= 1
            for item in self.frees[ended]:
                self.waits[item] -= 1
                if not self.waits[item]:
                    heappush(ready, item)
        if self.error is not None:
            ready.clear()
        if not ready:
            return -1
        self.running += 1
        item = heappop(ready)
        wanted = len(ready) - self.asleep
        while wanted > 0 and self.idle and self.pool.call(self):
            self.idle -= 1
            wanted -= 1
        return item

    def _run(self, item: int) -> int:
        try:
            self.body(item)
        except BaseException as error:  # carried to the caller's thread by `StreamPool.run`
            with self.lock:
                if self.error is None:
                    self.error = error
        return item


class StreamPool:
    """Threads shared by all lanes; it grows to what the loaded programs can use at once.

    A lane's thread tells when its step begins, ends, and sleeps in between. `cores`: helpers are called while
    fewer threads than that are at work.
    """

    def __init__(self, cores: int = MAX_THREADS, clock: Callable[[], float] = time.monotonic) -> None:
        self._cores = cores
        self._clock = clock
        self._lock = threading.Lock()
        self._helping = 0  # helpers that have been called and have not returned
        self._at_work_until_s: dict[int, float] = {}  # per thread that runs steps
        self._calls: SimpleQueue[_Run | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def grow(self, threads: int) -> None:
        """Have at least `threads` helpers; without them a run's items come one after another."""
        while len(self._threads) < threads:
            thread = threading.Thread(target=self._serve, name=f"stream-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self) -> None:
        while (run := self._calls.get()) is not None:
            run.help()
            del run  # or an idle helper would keep the last step's tensors alive
            with self._lock:
                self._helping -= 1

    def begin(self) -> None:
        """The calling thread begins a step, or goes on with it."""
        self._at_work_until_s[threading.get_ident()] = math.inf

    def sleep(self) -> None:
        """The calling thread has to wait within its step."""
        self._at_work_until_s[threading.get_ident()] = -math.inf

    def end(self) -> None:
        """The calling thread's step has ended."""
        self._at_work_until_s[threading.get_ident()] = self._clock() + _BETWEEN_STEPS_S

    def call(self, run: _Run) -> bool:
        """Wake a helper, unless as many calls wait as there are helpers, or no core is free for it."""
        now_s = self._clock()
        stepping = sum(until_s > now_s for until_s in list(self._at_work_until_s.values()))
        with self._lock:
            if stepping + self._helping >= self._cores or self._calls.qsize() >= len(self._threads):
                return False
            self._helping += 1
        self._calls.put(run)
        return True

    def run(self, plan: Threading, body: Callable[[int], None]) -> None:
        """Call `body(item)` for every item, in an order that obeys the waits; the first error is raised."""
        run = _Run(plan, body, self)
        run.lead()
        if run.error is not None:
            raise run.error

    def close(self) -> None:
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

"""Runs a launch list's items on threads: the caller's and some of a persistent pool.

An item that may begin is taken by whoever is free first. The caller calls helpers for what it cannot begin
itself and goes on; a helper that wakes too late finds nothing left, so a wake-up (30 to 50 us where measured,
more than a small group takes) is waited for by nobody. Likewise whoever ends the last item of a stage begins
the next one, while the others are still waking up. Only a caller with nothing to do sleeps.

Helpers are called only while fewer threads are at work than there are cores: with a step in every lane a
helper would but take turns with them, and both steps would wait at their stages' ends for who is not running.
A lane that has ended a step is still at work for a moment: most often its next step is about to begin.

An item that names a resource other than its lane's is taken by a helper of that resource alone, which keeps
to its cores: so the halves of a split operator run where the plan says.

A session releases the interpreter lock while it computes; what is decided in between is a few lines under one
lock per run.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from queue import SimpleQueue
from types import MappingProxyType
from typing import TypeAlias

from stageloom.edge_agent.worker.pinning import log_lost, may_keep_to
from stageloom.shared.engine.steps import Step
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import StepId
from stageloom.shared.launch_list import Item
from stageloom.shared.schedule import OWN_RESOURCE


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
            self._open(step)

    def end(self, step: Step) -> None:
        """The step has ended, well or badly."""
        self._running.remove(step.id)
        if self._gates:
            self._open(step.id)

    def _open(self, step: StepId) -> None:
        """Let those go on that wait at a step's gate: once it is taken away nobody else can."""
        gate = self._gates.pop(step, None)
        if gate is not None:
            gate.release()

    def running(self, step: StepId) -> bool:
        return step in self._running


MAX_THREADS = max(2, len(os.sched_getaffinity(0)))
"""Threads that one step may use, the caller's included: more than cores only adds switches.

On one core two, of which the pool calls the second only while no step is at work.
"""

_BETWEEN_STEPS_S = 0.001
"""A lane whose step has ended counts as at work for so long; the next one begins some 10 us later, or 200 us
where another thread holds the interpreter."""


Cores: TypeAlias = tuple[int, ...]
"""Of a resource, ascending; empty: any."""


@dataclass(frozen=True, slots=True)
class Threading:
    """What must have ended before an item may begin, and how many threads can be of use."""

    threads: int  # the caller's included
    waits: tuple[int, ...]  # per item the number of items that it waits for [num_items]
    frees: tuple[tuple[int, ...], ...]  # per item those that wait for it [num_items][...]
    resources: tuple[int, ...] = ()  # per item the resource that it names [num_items]; empty: none does

    @property
    def alone(self) -> bool:
        """Whether one thread is all that can be of use."""
        return self.threads == 1 and not self.resources


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
    named = any(item.resource != OWN_RESOURCE for item in launches)
    return Threading(
        max(1, min(len(latest), max_threads)),
        tuple(waits),
        tuple(map(tuple, frees)),
        tuple(item.resource for item in launches) if named else (),
    )


class _Run:
    """One run of a launch list in progress. Everything but `body` and `pool` is guarded by `lock`."""

    __slots__ = (
        "asleep",
        "away",
        "away_called",
        "bell",
        "body",
        "error",
        "frees",
        "idle",
        "lock",
        "pool",
        "ready",
        "resources",
        "running",
        "waits",
    )

    def __init__(
        self,
        plan: Threading,
        body: Callable[[int], None],
        pool: "StreamPool",
        own: int = OWN_RESOURCE,
        cores: Mapping[int, Cores] = MappingProxyType({}),
    ) -> None:
        self.body = body
        self.resources = tuple(OWN_RESOURCE if one == own else one for one in plan.resources)
        self.away: dict[int, tuple[Cores, list[int]]] = {  # by resource its cores, and a heap
            one: (cores.get(one, ()), []) for one in set(self.resources) - {OWN_RESOURCE}
        }
        self.away_called: set[int] = set()  # resources whose helper is at this run, or on its way
        self.pool = pool  # where helpers come from
        self.frees = plan.frees
        self.waits = list(plan.waits)
        self.ready: list[int] = []  # a heap, of items that the lane's own resource runs
        for item, count in enumerate(plan.waits):
            if not count:
                self._push(item)
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
                    if self._over():
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
                self._wake()
                if item < 0:
                    self.idle += 1
                    return
            ended = self._run(item)

    def help_on(self, resource: int) -> None:
        """Run items of a resource as long as one is ready."""
        ended = -1
        while True:
            with self.lock:
                item = self._next(ended, resource)
                self._wake()
                if item < 0:
                    self.away_called.discard(resource)
                    return
            ended = self._run(item)

    def _over(self) -> bool:
        """Nothing runs, and nothing waits for a helper."""
        return not self.running and not any(heap for _, heap in self.away.values())

    def _wake(self) -> None:
        """Call the caller back where there is something to do, or nothing left."""
        if self.asleep and (self.ready or self._over()):
            self.asleep = False
            self.bell.release()

    def _push(self, item: int) -> None:
        resource = self.resources[item] if self.resources else OWN_RESOURCE
        heappush(self.ready if resource == OWN_RESOURCE else self.away[resource][1], item)

    def _next(self, ended: int, resource: int = OWN_RESOURCE) -> int:
        """Note that an item has ended, where one has; take the first one that is ready there, or -1."""
        ready = self.ready
        if ended >= 0:
            self.running -= 1
            for item in self.frees[ended]:
                self.waits[item] -= 1
                if not self.waits[item]:
                    self._push(item)
        if self.error is not None:
            ready.clear()
            for _, heap in self.away.values():
                heap.clear()
        for other, (cores, heap) in self.away.items():
            if heap and other != resource and other not in self.away_called:
                self.away_called.add(other)
                self.pool.call_on(cores, self, other)
        if resource != OWN_RESOURCE:
            ready = self.away[resource][1]
        if not ready:
            return -1
        self.running += 1
        item = heappop(ready)
        if resource != OWN_RESOURCE:
            ready = self.ready
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
    fewer threads than that are at work; 0: as many as the process may use.
    """

    def __init__(self, cores: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._cores = cores or len(os.sched_getaffinity(0))
        self._clock = clock
        self._lock = threading.Lock()
        self._helping = 0  # helpers that have been called and have not returned
        self._at_work_until_s: dict[int, float] = {}  # per thread that runs steps
        self._calls: SimpleQueue[_Run | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pinned: dict[Cores, _PinnedHelpers] = {}

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

    def grow_on(self, cores: Cores, threads: int) -> None:
        """Have at least `threads` helpers that keep to these cores; without a list they run anywhere."""
        with self._lock:
            helpers = self._pinned.setdefault(cores, _PinnedHelpers(cores, self._came_back))
            helpers.grow(threads)

    def _came_back(self) -> None:
        with self._lock:
            self._helping -= 1

    def call_on(self, cores: Cores, run: _Run, resource: int) -> None:
        """Wake a helper that keeps to these cores for the items of a resource."""
        if cores not in self._pinned:
            self.grow_on(cores, 1)
        with self._lock:
            self._helping += 1
        self._pinned[cores].calls.put((run, resource))

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

    def run(
        self,
        plan: Threading,
        body: Callable[[int], None],
        own: int = OWN_RESOURCE,
        cores: Mapping[int, Cores] = MappingProxyType({}),
    ) -> None:
        """Call `body(item)` for every item, in an order that obeys the waits; the first error is raised.

        `own` is the resource of the calling thread, `cores` has those of the others that items name.
        """
        run = _Run(plan, body, self, own, cores)
        run.lead()
        if run.error is not None:
            raise run.error

    def close(self) -> None:
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        for helpers in self._pinned.values():
            helpers.close()
        self._pinned.clear()


class _PinnedHelpers:
    """Threads that keep to the cores of a resource; `came_back` is called when one has done its work."""

    def __init__(self, cores: Cores, came_back: Callable[[], None]) -> None:
        self.calls: SimpleQueue[tuple[_Run, int] | None] = SimpleQueue()
        self._cores = cores
        self._came_back = came_back
        self._threads: list[threading.Thread] = []

    def grow(self, threads: int) -> None:
        while len(self._threads) < threads:
            names = ",".join(map(str, self._cores)) or "any"
            thread = threading.Thread(target=self._serve, name=f"cores-{names}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self) -> None:
        if self._cores and not may_keep_to(self._cores):
            log_lost(self._cores)
        while (call := self.calls.get()) is not None:
            run, resource = call
            run.help_on(resource)
            del run, call  # or an idle helper would keep the last step's tensors alive
            self._came_back()

    def close(self) -> None:
        for _ in self._threads:
            self.calls.put(None)
        for thread in self._threads:
            thread.join()

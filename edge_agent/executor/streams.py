"""Runs a launch list's items on threads: stream 0 on the caller's, the others on a persistent pool.

Handing work over and joining costs two wake-ups; raw locks are the cheapest way to do it in Python, and a
session releases the interpreter lock while it computes. Streams beyond the number of threads share one:
items are in issue order, and a wait names an earlier item, so sharing cannot deadlock.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

MAX_THREADS = max(2, os.cpu_count() or 1)
"""Threads that one step may use, the caller's included: more than cores only adds switches."""


class Waiting(Protocol):
    """What matters of a launch-list item here."""

    @property
    def stream(self) -> int:
        """Its stream."""

    @property
    def waits(self) -> tuple[int, ...]:
        """Earlier items that must have ended."""


@dataclass(frozen=True, slots=True)
class Threading:
    """Which thread runs which items, and what each item waits for on other threads."""

    items: tuple[tuple[int, ...], ...]  # per thread its items, ascending [num_threads][...]
    waits: tuple[tuple[int, ...], ...]  # per item the gates to pass before it [num_items][...]
    opens: tuple[tuple[int, ...], ...]  # per item the gates to open after it [num_items][...]
    gates: int


def assign(launches: Sequence[Waiting], max_threads: int = MAX_THREADS) -> Threading:
    """Spread streams over threads; streams that are never used leave no gap."""
    order = {stream: index for index, stream in enumerate(sorted({item.stream for item in launches}))}
    thread_of = [order[item.stream] % max_threads for item in launches]
    threads = max(thread_of, default=0) + 1
    waits: list[list[int]] = [[] for _ in launches]
    opens: list[list[int]] = [[] for _ in launches]
    gates = 0
    for index, item in enumerate(launches):
        latest: dict[int, int] = {}
        for before in item.waits:
            if thread_of[before] != thread_of[index]:
                latest[thread_of[before]] = max(before, latest.get(thread_of[before], -1))
        for before in latest.values():
            opens[before].append(gates)
            waits[index].append(gates)
            gates += 1
    return Threading(
        items=tuple(tuple(i for i, t in enumerate(thread_of) if t == thread) for thread in range(threads)),
        waits=tuple(map(tuple, waits)),
        opens=tuple(map(tuple, opens)),
        gates=gates,
    )


class _Run:
    """One run of a launch list in progress."""

    __slots__ = ("body", "error", "gates", "joined", "threading")

    def __init__(self, threading_: Threading, body: Callable[[int], None]) -> None:
        self.threading = threading_
        self.body = body
        self.gates = [threading.Lock() for _ in range(threading_.gates)]
        for gate in self.gates:
            gate.acquire()
        self.joined = [threading.Lock() for _ in range(len(threading_.items) - 1)]
        for lock in self.joined:
            lock.acquire()
        self.error: BaseException | None = None

    def on_thread(self, thread: int) -> None:
        """Run this thread's items; after an error the rest only open their gates."""
        plan = self.threading
        for item in plan.items[thread]:
            for gate in plan.waits[item]:
                self.gates[gate].acquire()
            if self.error is None:
                try:
                    self.body(item)
                except BaseException as error:  # carried to the caller's thread by `run`
                    self.error = error
            for gate in plan.opens[item]:
                self.gates[gate].release()


class StreamPool:
    """Threads shared by all lanes; it grows to what the loaded programs can use at once."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[_Run, int] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def grow(self, threads: int) -> None:
        """Have at least `threads` helpers. A run blocks while a helper is missing, so callers grow first."""
        while len(self._threads) < threads:
            thread = threading.Thread(target=self._serve, name=f"stream-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            run, thread = job
            run.on_thread(thread)
            run.joined[thread - 1].release()
            del job, run  # or an idle helper would keep the last step's tensors alive

    def run(self, plan: Threading, body: Callable[[int], None]) -> None:
        """Call `body(item)` for every item, in an order that obeys the waits; the first error is raised."""
        run = _Run(plan, body)
        for thread in range(1, len(plan.items)):
            self._jobs.put((run, thread))
        run.on_thread(0)
        for lock in run.joined:
            lock.acquire()
        if run.error is not None:
            raise run.error

    def close(self) -> None:
        """End the helpers."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

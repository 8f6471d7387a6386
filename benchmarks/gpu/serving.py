"""Whole plans in the engine: tasks per second from full queues, and latencies under open loads.

The engine runs in this process as its own process runs it. Tasks come from and go to the host: what is
measured here is a service, and not a kernel.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from statistics import pvariance
from typing import Any, Final

import numpy as np

from benchmarks.gpu.arrivals import Arrival
from benchmarks.gpu.networks import Subject
from benchmarks.gpu.rounds import percentile
from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.plan import Plan

_SAMPLE_S: Final = 0.02
_DRAIN_S: Final = 20.0


@dataclass
class Served:
    """What became of the tasks of one window."""

    latencies_s: dict[str, list[float]] = field(default_factory=dict)  # of completed tasks, by model
    ended_s: list[float] = field(default_factory=list)  # completed, on the engine's clock
    outcomes: Counter[str] = field(default_factory=Counter)
    variances_s2: list[float] = field(default_factory=list)  # of queued work, at even instants
    submitted: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, model: str, submitted_s: float, end: TaskDone) -> None:
        """One task ended; called on the engine's threads."""
        with self.lock:
            self.outcomes[end.outcome.value] += 1
            if end.outcome is Outcome.COMPLETED:
                self.ended_s.append(end.ended_s)
                self.latencies_s.setdefault(model, []).append(end.ended_s - submitted_s)

    @property
    def lost(self) -> int:
        """Tasks that did not complete."""
        return self.submitted - self.outcomes[Outcome.COMPLETED.value]

    def figures(self, deadlines_s: Mapping[str, float]) -> dict[str, Any]:
        """For a row; times in milliseconds."""
        everything = sorted(one for own in self.latencies_s.values() for one in own)
        if not everything:
            return {"completed": 0, "lost": self.lost}
        late = sum(one > deadlines_s[model] for model, own in self.latencies_s.items() for one in own)
        return {
            "completed": len(everything),
            "lost": self.lost,
            "p50_ms": percentile(everything, 50) * 1e3,
            "p99_ms": percentile(everything, 99) * 1e3,
            "deadline_misses": late / len(everything),
            "queue_variance_s2": max(self.variances_s2, default=0.0),
        }


class Service:
    """An engine with one executor; plans are loaded once and activated in turns."""

    def __init__(self, executor: Executor, subjects: Sequence[Subject]) -> None:
        """`executor` has no plan loaded; it is closed with the service."""
        self._subjects = {one.name: one for one in subjects}
        self._artifacts = {one.artifact.digest: one.artifact for one in subjects}
        self._inputs = {
            one.name: {one.artifact.graph.tensors[one.artifact.graph.inputs[0]].name: one.image}
            for one in subjects
        }
        self.shell = InProcessEngine(executor)

    def load(self, plan: Plan) -> PlanKey:
        """Load and prepare a plan.

        Raises:
            PlanError, ExecutorError: as the shell.
        """
        return self.shell.load(plan, self._artifacts)

    def close(self) -> None:
        """End the engine."""
        self.shell.close()

    def submit(self, model: str, on_end: Callable[[TaskDone], None]) -> "Future[dict[str, np.ndarray]]":
        """One task with the model's image."""
        return self.shell.submit(model, self._inputs[model], on_end=on_end)

    def saturated(self, mix: Mapping[str, int], seconds: float, depth: int) -> tuple[float, Served]:
        """Tasks per second while `depth` tasks are always there, models in the ratio of `mix`."""
        served = Served()
        turns = [model for model, share in mix.items() for _ in range(share)]
        began_s = time.monotonic()
        stop_s = began_s + seconds
        numbers, left = count(), count(1)
        drained = threading.Event()

        def submit() -> None:
            model = turns[next(numbers) % len(turns)]
            submitted_s = time.monotonic()

            def on_end(end: TaskDone) -> None:
                served.note(model, submitted_s, end)
                if end.outcome is Outcome.COMPLETED and end.ended_s < stop_s:
                    submit()
                elif next(left) == depth:
                    drained.set()

            with served.lock:
                served.submitted += 1
            self.submit(model, on_end)

        for _ in range(depth):
            submit()
        if not drained.wait(seconds + _DRAIN_S):
            raise RuntimeError(f"{served.lost} tasks did not end in {_DRAIN_S:.0f} s")
        if not served.ended_s:
            raise RuntimeError(f"no task completed: {dict(served.outcomes)}")
        # From the begin: the tasks of a batch end together, and the first batch took its time, too.
        return len(served.ended_s) / (max(served.ended_s) - began_s), served

    def open_load(self, plan: Sequence[Arrival], service_s: Mapping[str, float]) -> Served:
        """Submit tasks when they arrive, however long earlier ones take; latency counts from the arrival."""
        served = Served()
        left = threading.Semaphore(0)
        began_s = time.monotonic()
        next_sample_s = began_s
        for arrival in plan:
            due_s = began_s + arrival.at_s
            while (now_s := time.monotonic()) < due_s:
                if now_s >= next_sample_s:
                    self._sample(served, service_s)
                    next_sample_s += _SAMPLE_S
                else:
                    time.sleep(min(due_s - now_s, next_sample_s - now_s, 1e-3))
            self._submit(arrival.model, due_s, served, left)
        ends_s = time.monotonic() + _DRAIN_S
        for _ in plan:
            if not left.acquire(timeout=max(ends_s - time.monotonic(), 0.0)):
                break
        return served

    def _submit(self, model: str, due_s: float, served: Served, left: threading.Semaphore) -> None:
        def on_end(end: TaskDone) -> None:
            served.note(model, due_s, end)
            left.release()

        served.submitted += 1
        future = self.submit(model, on_end)
        if future.done() and future.exception() is not None and not served.outcomes:
            raise RuntimeError(str(future.exception()))

    def _sample(self, served: Served, service_s: Mapping[str, float]) -> None:
        queued_s = [queue.queued * service_s[queue.name] for queue in self.shell.stats().models]
        served.variances_s2.append(pvariance(queued_s))

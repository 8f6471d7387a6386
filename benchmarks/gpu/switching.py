"""Plan switches under full queues: how long until the new plan serves, and whether a task is lost."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from benchmarks.gpu.rounds import percentile
from benchmarks.gpu.serving import Service
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.plan import Plan

_WAIT_S: Final = 60.0
_AROUND_S: Final = 0.05  # before and after a switch, in which gaps are looked for


@dataclass
class Switches:
    """What a number of switches took; times in seconds."""

    first_task_s: list[float] = field(default_factory=list)  # from `activate` to a task done by the new plan
    gap_s: list[float] = field(default_factory=list)  # the longest pause between two tasks around a switch
    load_s: list[float] = field(default_factory=list)  # loading and preparing while the other plan serves
    load_gap_s: list[float] = field(default_factory=list)  # the longest pause between two tasks meanwhile
    completed: int = 0
    lost: int = 0

    def figures(self) -> dict[str, Any]:
        """For a row; times in milliseconds."""
        found: dict[str, Any] = {"switches": len(self.first_task_s), "completed": self.completed}
        for name in ("first_task_s", "gap_s", "load_s", "load_gap_s"):
            taken = [one * 1e3 for one in getattr(self, name)]
            found[f"{name[:-2]}_p50_ms"] = percentile(taken, 50)
            found[f"{name[:-2]}_p99_ms"] = percentile(taken, 99)
        return {**found, "lost": self.lost}


class Switching:
    """Keeps `depth` tasks in the engine, models in turns, and changes the plan below them."""

    def __init__(self, service: Service, models: Sequence[str], depth: int) -> None:
        self._service = service
        self._models = models
        self._depth = depth
        self._lock = threading.Condition()
        self._ended: list[tuple[float, PlanKey | None]] = []
        self._submitted = 0
        self._completed = 0
        self._open = 0
        self._stopping = False

    def run(self, plans: Sequence[Plan], times: int, *, until_s: float) -> Switches:
        """Switch from each plan to the next, around and around, at most until `until_s` (monotonic clock).

        Raises:
            PlanError, ExecutorError: a plan cannot be loaded.
            RuntimeError: the engine stopped completing tasks.
        """
        found = Switches()
        self._service.shell.activate(self._service.load(plans[0]), keep=True)
        try:
            for _ in range(self._depth):
                self._submit()
            for number in range(1, times + 1):
                if time.monotonic() >= until_s and found.first_task_s:
                    break
                self._switch(plans[number % len(plans)], found)
        finally:
            self._end()  # else the tasks would go on beside whatever is measured next
        found.completed, found.lost = self._completed, self._submitted - self._completed
        return found

    def _end(self) -> None:
        with self._lock:
            self._stopping = True
            if not self._lock.wait_for(lambda: self._open == 0, _WAIT_S):
                raise RuntimeError(f"{self._open} tasks did not end in {_WAIT_S:.0f} s")

    def _switch(self, plan: Plan, found: Switches) -> None:
        began_s = time.monotonic()
        key = self._service.load(plan)
        ready_s = time.monotonic()
        self._service.shell.activate(key)
        with self._lock:
            if not self._lock.wait_for(lambda: any(done == key for _, done in self._ended), _WAIT_S):
                raise RuntimeError(f"no task was completed by the new plan in {_WAIT_S:.0f} s")
            first_s = next(at_s for at_s, done in self._ended if done == key)
            after_s = first_s + _AROUND_S
            if not self._lock.wait_for(lambda: self._ended[-1][0] > after_s, _WAIT_S):
                raise RuntimeError("the new plan stopped completing tasks")
            times_s = [at_s for at_s, _ in self._ended]
            self._ended = self._ended[-self._depth :]
        found.load_s.append(ready_s - began_s)
        found.first_task_s.append(first_s - ready_s)
        found.load_gap_s.append(longest_gap(times_s, began_s, ready_s))
        found.gap_s.append(longest_gap(times_s, ready_s - _AROUND_S, after_s))

    def _submit(self) -> None:
        with self._lock:
            model = self._models[self._submitted % len(self._models)]
            self._submitted += 1
            self._open += 1
        self._service.submit(model, self._on_end)

    def _on_end(self, end: TaskDone) -> None:
        with self._lock:
            self._open -= 1
            again = not self._stopping and end.outcome is Outcome.COMPLETED
            self._completed += end.outcome is Outcome.COMPLETED
            self._ended.append((end.ended_s, end.plan))
            self._lock.notify_all()
        if again:
            self._submit()


def longest_gap(times_s: Sequence[float], from_s: float, to_s: float) -> float:
    """The longest time without an event that overlaps the window; 0 with fewer than two events."""
    ordered = sorted(times_s)
    gaps = [later - at for at, later in pairwise(ordered) if later >= from_s and at <= to_s]
    return max(gaps, default=0.0)

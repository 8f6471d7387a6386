"""Whole plans in the engine: the rivals' policies under full queues and open loads, and plan switches.

The engine runs in this process as its own process runs it. Tasks come from and go to the host: what is
measured here is a service, and not a kernel.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any, Final

import numpy as np

from benchmarks.gpu.networks import Subject
from benchmarks.gpu.results import Deadline, Results, Settings
from benchmarks.runner import percentile
from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.planner.tournament.candidates import plan_candidates
from stageloom.planner.twin.arrivals import Periodic, Poisson, Process, arrivals
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.plan import ExecutorOptions, Plan, QueuePlan
from stageloom.shared.search.arrangements import Arrangement, arranged_plan
from stageloom.shared.search.compose import ModelChoice, Rules
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.job import run_search

_DRAIN_S: Final = 60.0
_AROUND_S: Final = 0.05  # before and after a switch, in which gaps are looked for
_RAMP_UP: Final = 0.2  # of a window, before it
_DEPTH_PER_MODEL: Final = 8
_DOUBLINGS: Final = 6  # of a window in which nothing ran
_LOADS: Final = (0.5, 0.8, 0.95, 1.1)
_SHARES: Final = (1, 2, 4)  # TOP's mix under open loads
_DEADLINE_TIMES: Final = 10.0  # a task's deadline over its model's service time alone
_SWITCHES: Final = 100
_SWITCHING_S: Final = 25.0
_SEQUENTIAL: Final = "sequential"
_RIVALS: Final = (_SEQUENTIAL, "instances", "batching")
_OURS: Final = "ours, best"
_SHARED: Final = ((1, 1), (2, 1), (4, 1), (8, 1), (2, 8), (4, 8))  # lanes and batches
_QUEUE: Final = QueuePlan(max_tasks=4096, max_bytes=8 << 30)


class Service:
    """An engine on one executor, which is closed with it; plans are loaded once and activated in turns."""

    def __init__(self, executor: Executor, subjects: Sequence[Subject]) -> None:
        self._artifacts = {subject.artifact.digest: subject.artifact for subject in subjects}
        self._feeds = {subject.name: subject.feeds for subject in subjects}
        self.engine = InProcessEngine(executor)

    def load(self, plan: Plan) -> PlanKey:
        """
        Raises:
            PlanError, ExecutorError: as the engine.
        """
        return self.engine.load(plan, self._artifacts)

    def activate(self, key: PlanKey, *, keep: bool = False) -> None:
        self.engine.activate(key, keep=keep)

    def submit(self, model: str, on_end: Callable[[TaskDone], None]) -> None:
        """One task with the model's image."""
        self.engine.submit(model, self._feeds[model], on_end=on_end)


class Tasks:
    """The tasks of one load; `ends` are those that completed, with their model and when they were due."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.changed = threading.Condition()
        self.ends: list[tuple[str, float, TaskDone]] = []
        self.submitted = 0
        self.open = 0

    @property
    def lost(self) -> int:
        """Tasks that ended and did not complete."""
        return self.submitted - self.open - len(self.ends)

    def submit(self, model: str, due_s: float, then: Callable[[TaskDone], None] = lambda end: None) -> None:
        """Latency counts from `due_s`; `then` is called on the engine's threads."""

        def on_end(end: TaskDone) -> None:
            if end.outcome is Outcome.COMPLETED:
                self.ends.append((model, due_s, end))
            then(end)  # before this task counts as ended, so that `open` is 0 only when all have
            with self.changed:
                self.open -= 1
                self.changed.notify_all()

        with self.changed:
            self.submitted += 1
            self.open += 1
        self._service.submit(model, on_end)

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """
        Raises:
            RuntimeError: it did not come in time.
        """
        with self.changed:
            if not self.changed.wait_for(until, _DRAIN_S):
                raise RuntimeError(f"{what} did not come in {_DRAIN_S:.0f} s; {self.open} tasks are open")

    def drain(self) -> None:
        self.wait(lambda: self.open == 0, "the end of all tasks")

    def figures(self, deadlines_s: Mapping[str, float]) -> dict[str, Any]:
        """For a row; times in milliseconds."""
        latencies = [(model, end.ended_s - due_s) for model, due_s, end in self.ends]
        if not latencies:
            return {"completed": 0, "lost": self.lost}
        seconds = [latency_s for _, latency_s in latencies]
        late = sum(latency_s > deadlines_s[model] for model, latency_s in latencies)
        return {
            "completed": len(latencies),
            "lost": self.lost,
            "p50_ms": percentile(seconds, 50) * 1e3,
            "p99_ms": percentile(seconds, 99) * 1e3,
            "deadline_misses": late / len(latencies),
        }


class FullQueues(Tasks):
    """Keeps `depth` tasks in the engine, models in turns, while it is entered."""

    def __init__(self, service: Service, models: Sequence[str], depth: int) -> None:
        super().__init__(service)
        self._models, self._depth = models, depth
        self._stopping = False

    def __enter__(self) -> "FullQueues":
        for _ in range(self._depth):
            self._next()
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for the last task: it would go on beside whatever is measured next."""
        self._stopping = True
        self.drain()

    def _next(self, end: TaskDone | None = None) -> None:
        if end is None or (end.outcome is Outcome.COMPLETED and not self._stopping):
            self.submit(self._models[self.submitted % len(self._models)], time.monotonic(), self._next)


def full_queues(service: Service, models: Sequence[str], depth: int, seconds: float) -> tuple[float, Tasks]:
    """Tasks per second while `depth` tasks are always there.

    Raises:
        RuntimeError: none completed, or some never ended.
    """
    with FullQueues(service, models, depth) as tasks:
        time.sleep(_RAMP_UP * seconds)
        began_s = time.monotonic()
        time.sleep(seconds)
        ended_s = time.monotonic()
    runs = [(end.started_s, end.ended_s) for _, _, end in tasks.ends if end.started_s is not None]
    if not runs:
        raise RuntimeError(f"no task completed, {tasks.lost} were lost")
    return rate_per_s(runs, began_s, ended_s), tasks


def rate_per_s(runs: Sequence[tuple[float, float]], began_s: float, ended_s: float) -> float:
    """Tasks per second in a window. A task counts by the share of its run that lies in it, so that the rate
    depends neither on where the window cuts nor on tasks that end together."""
    shares = (
        max(min(run_ended_s, ended_s) - max(run_began_s, began_s), 0.0) / (run_ended_s - run_began_s)
        for run_began_s, run_ended_s in runs
    )
    return sum(shares) / (ended_s - began_s)


def open_load(service: Service, load: Mapping[str, Process], seconds: float, seed: int) -> Tasks:
    """Submit tasks when they are due, however long earlier ones take."""
    rng = np.random.default_rng(seed)
    due = [(at_s, model) for model, process in load.items() for at_s in arrivals(process, seconds, rng)]
    tasks = Tasks(service)
    began_s = time.monotonic()
    for at_s, model in sorted(due):
        time.sleep(max(began_s + at_s - time.monotonic(), 0.0))
        tasks.submit(model, began_s + at_s)
    tasks.drain()
    return tasks


Switches = dict[str, list[float]]
"""Seconds of every switch. `first_task`: from `activate` to a task done by the new plan; `gap`: the longest
pause between two tasks around it; `load`: loading and preparing while the other plan serves."""


def switch(
    service: Service, plans: Sequence[Plan], models: Sequence[str], depth: int, times: int, deadline: Deadline
) -> dict[str, Any]:
    """Switch from each plan to the next under full queues, around and around, until the deadline.

    Raises:
        PlanError, ExecutorError: a plan cannot be loaded.
        RuntimeError: the engine stopped completing tasks.
    """
    taken: Switches = {"first_task": [], "gap": [], "load": []}
    service.activate(service.load(plans[0]), keep=True)
    with FullQueues(service, models, depth) as tasks:
        for number in range(1, times + 1):
            if deadline.over and taken["gap"]:
                break
            _switch(service, plans[number % len(plans)], tasks, taken)
    percentiles = {
        f"{name}_p{percent}_ms": percentile(seconds, percent) * 1e3
        for name, seconds in taken.items()
        for percent in (50, 99)
    }
    return {"switches": len(taken["gap"]), "completed": len(tasks.ends), "lost": tasks.lost, **percentiles}


def _switch(service: Service, plan: Plan, tasks: Tasks, taken: Switches) -> None:
    began_s = time.monotonic()
    key = service.load(plan)
    ready_s = time.monotonic()
    seen = len(tasks.ends)
    service.activate(key)
    tasks.wait(lambda: any(end.plan == key for _, _, end in tasks.ends[seen:]), "a task of the new plan")
    first_s = next(end.ended_s for _, _, end in tasks.ends[seen:] if end.plan == key)
    after_s = first_s + _AROUND_S
    tasks.wait(lambda: tasks.ends[-1][2].ended_s > after_s, "the next task of the new plan")
    times_s = [end.ended_s for _, _, end in list(tasks.ends)]
    taken["load"].append(ready_s - began_s)
    taken["first_task"].append(first_s - ready_s)
    taken["gap"].append(longest_gap(times_s, ready_s - _AROUND_S, after_s))


def longest_gap(times_s: Sequence[float], from_s: float, to_s: float) -> float:
    """The longest time without an event that overlaps the window; 0 with fewer than two events."""
    gaps = [later - at for at, later in pairwise(sorted(times_s)) if later >= from_s and at <= to_s]
    return max(gaps, default=0.0)


def rival_plans(subjects: Sequence[Subject], options: ExecutorOptions, ours: Plan | None) -> dict[str, Plan]:
    """Rivals of a tournament on whole models, and ours where one was chosen."""
    models = [
        ModelChoice(
            name=subject.name, artifact=subject.artifact.digest, graph=subject.artifact.graph, queue=_QUEUE
        )
        for subject in subjects
    ]
    rules = Rules(run_ahead=2)
    candidates = plan_candidates(models, CostTable(), executor=options, policy_names=_RIVALS, rules=rules)
    plans = {
        candidate.policy: run_search(candidate.job, time.monotonic)
        for candidate in candidates
        if candidate.partition == "whole"
    }
    plans |= shared_gpu_plans(models, options)
    return plans if ours is None else {**plans, _OURS: ours}


def shared_gpu_plans(models: Sequence[ModelChoice], options: ExecutorOptions) -> dict[str, Plan]:
    """What `auto` makes for a GPU, with other numbers of lanes and other batches."""
    count = len(models)
    return {
        f"auto, lanes {lanes}, batch {batch}": arranged_plan(
            models, Arrangement(lanes, 0, (1,) * count, (options,) * count, (batch,) * count), ()
        )
        for lanes, batch in _SHARED
    }


class ServingRows:
    """Loads every plan once; rows of one service follow."""

    def __init__(
        self,
        service: Service,
        subjects: Sequence[Subject],
        settings: Settings,
        results: Results,
        ours: Plan | None,
    ) -> None:
        self._service = service
        self._settings = settings
        self._results = results
        self._models = [subject.name for subject in subjects]
        self._depth = _DEPTH_PER_MODEL * len(subjects)
        self._window_s = 0.1 if settings.quick else 1.0
        options = ExecutorOptions(name=settings.executor, precision=settings.precision)
        self._plans = rival_plans(subjects, options, ours)
        self._keys: dict[str, PlanKey] = {}
        self._service_s: dict[str, float] = {}  # of one task under full queues of nothing else

    def full_queues(self, loading: Deadline) -> None:
        """Tasks per second of every plan, models 1:1:1; plans are loaded until the deadline."""
        for name, plan in self._plans.items():
            if loading.over:
                self._results.skip("serving", f"{name}: load", "the time was up")
                continue
            with self._results.attempt("serving", f"{name}: load"):
                self._keys[name] = self._service.load(plan)
        self._service.activate(self._keys[_SEQUENTIAL], keep=True)
        for model in self._models:
            self._service_s[model] = self._taken_s(model)
        for name, key in self._keys.items():
            with self._results.attempt("serving", f"{name}: full queues"):
                self._service.activate(key, keep=True)
                # The first half window gives the masks that occur their programs.
                full_queues(self._service, self._models, self._depth, self._window_s / 2)
                rate, tasks = full_queues(self._service, self._models, self._depth, self._window_s)
                figures = {f"serving.{name.replace(' ', '_').replace(',', '')}.tasks_per_s": rate}
                self._add(f"{name}, full queues", tasks, figures, tasks_per_s=rate)

    def _taken_s(self, model: str) -> float:
        """Seconds of one task under full queues of nothing else.

        A window in which nothing ran, on a machine that others keep busy, is measured again, twice as long.

        Raises:
            RuntimeError: nothing ran in the longest either.
        """
        for doubling in range(_DOUBLINGS):
            window_s = self._window_s / 3 * 2**doubling
            rate, _ = full_queues(self._service, [model], _DEPTH_PER_MODEL, window_s)
            if rate > 0.0:
                return 1.0 / rate
        raise RuntimeError(f"no task of {model} ran within {window_s:g} s")

    def _add(self, row: str, tasks: Tasks, figures: Mapping[str, float], **columns: float) -> None:
        deadlines_s = {model: _DEADLINE_TIMES * taken_s for model, taken_s in self._service_s.items()}
        self._results.add(figures, part="serving", name=row, **columns, **tasks.figures(deadlines_s))

    def open_loads(self, deadline: Deadline, rng: Random) -> None:
        """Loads 1:2:4 scaled to the sequential graphs' capacity, periodic and Poisson, for every plan."""
        if not self._service_s:
            return
        shares = {model: _SHARES[index % len(_SHARES)] for index, model in enumerate(self._models)}
        turn_s = sum(share * self._service_s[model] for model, share in shares.items())
        for load in _LOADS[1:2] if self._settings.quick else _LOADS:
            rates = {model: load * share / turn_s for model, share in shares.items()}
            arriving: dict[str, dict[str, Process]] = {
                "periodic": {
                    model: Periodic(rate_per_s=rate, offset_s=rng.random() / rate)
                    for model, rate in rates.items()
                },
                "Poisson": {model: Poisson(rate_per_s=rate) for model, rate in rates.items()},
            }
            for kind, processes in arriving.items():
                seed = rng.getrandbits(32)  # the same arrivals for every plan
                for name, key in self._keys.items():
                    row = f"{name}, load {load:g}, {kind}"
                    if deadline.left_s < 2 * self._window_s:
                        self._results.skip("serving", row, "the time was up")
                        continue
                    with self._results.attempt("serving", row):
                        self._service.activate(key, keep=True)
                        self._add(row, open_load(self._service, processes, self._window_s, seed), {})

    def switches(self, deadline: Deadline) -> dict[str, Any]:
        """Switches between sequential graphs and ours (batches where none was chosen).

        Raises:
            PlanError, ExecutorError, RuntimeError: see `switch`.
        """
        between = [self._plans[_SEQUENTIAL], self._plans.get(_OURS, self._plans[_RIVALS[-1]])]
        times = 2 if self._settings.quick else _SWITCHES
        until = deadline.within(_SWITCHING_S)
        figures = switch(self._service, between, self._models, self._depth, times, until)
        self._results.add(
            {"switch.p99_ms": figures["first_task_p99_ms"], "switch.lost": float(figures["lost"])},
            part="switching",
            name="between sequential graphs and ours, full queues",
            **figures,
        )
        return figures

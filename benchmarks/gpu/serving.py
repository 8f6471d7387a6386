"""When tasks arrive under an open load. Pure: the same seed gives the same arrivals.

Whole plans in the engine: tasks per second from full queues, and latencies under open loads.

The engine runs in this process as its own process runs it. Tasks come from and go to the host: what is
measured here is a service, and not a kernel.

Plan switches under full queues: how long until the new plan serves, and whether a task is lost.

Rows of whole plans in the engine: the rivals' policies as plans, under full queues and open loads.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count, pairwise
from random import Random
from statistics import pvariance
from typing import Any, Final

import numpy as np

from benchmarks.gpu.networks import Subject
from benchmarks.gpu.results import Deadline, Results, Settings
from benchmarks.runner import percentile
from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.plan import ExecutorOptions, Plan, QueuePlan
from stageloom.shared.search.compose import Combination, ModelChoice, Rules, compose


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float  # since the load began
    model: str


def arrivals(
    rates_per_s: Mapping[str, float], seconds: float, *, poisson: bool, rng: Random
) -> list[Arrival]:
    """Every model at its rate, from 0 to `seconds`, by time; periodic ones begin at random phases."""
    found = []
    for model, rate_per_s in rates_per_s.items():
        gap_s = 1.0 / rate_per_s
        at_s = rng.expovariate(rate_per_s) if poisson else rng.random() * gap_s
        while at_s < seconds:
            found.append(Arrival(at_s, model))
            at_s += rng.expovariate(rate_per_s) if poisson else gap_s
    return sorted(found, key=lambda one: (one.at_s, one.model))


def shares(models: Sequence[str], weights: Sequence[int] = (1, 2, 4)) -> dict[str, float]:
    """TOP's mix: the models' shares of all tasks, 1:2:4 in the models' order."""
    used = [weights[index % len(weights)] for index in range(len(models))]
    return {model: weight / sum(used) for model, weight in zip(models, used, strict=True)}


def rates(mix: Mapping[str, float], service_s: Mapping[str, float], load: float) -> dict[str, float]:
    """Rates per second under which one server with these service times is busy for the share `load`."""
    mean_s = sum(share * service_s[model] for model, share in mix.items())
    return {model: load * share / mean_s for model, share in mix.items()}


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
        self._artifacts = {subject.artifact.digest: subject.artifact for subject in subjects}
        self._inputs = {subject.name: subject.feeds for subject in subjects}
        self.shell = InProcessEngine(executor)

    def load(self, plan: Plan) -> PlanKey:
        """Load and prepare a plan.

        Raises:
            PlanError, ExecutorError: as the shell.
        """
        return self.shell.load(plan, self._artifacts)

    def close(self) -> None:
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


_PART = "serving"
_DEPTH_PER_MODEL = 8
_LOADS = (0.5, 0.8, 0.95, 1.1)
_DEADLINE_TIMES = 10.0  # a task's deadline over its model's service time alone
_SWITCHES = 100
_SEQUENTIAL = "sequential graphs"
_OURS = "ours, best"
_QUEUE = QueuePlan(max_tasks=4096, max_bytes=8 << 30)


def plans(subjects: Sequence[Subject], options: ExecutorOptions, ours: Plan | None) -> dict[str, Plan]:
    """Rival policies, and ours where one was chosen."""

    def choices(**how: Any) -> list[ModelChoice]:
        return [
            ModelChoice(
                name=one.name, artifact=one.artifact.digest, graph=one.artifact.graph, queue=_QUEUE, **how
            )
            for one in subjects
        ]

    def made(lanes: int, scheduler: str = "sequential", together: bool = False, **how: Any) -> Plan:
        return compose(
            choices(**how),
            scheduler=scheduler,
            combination=Combination.ALIGNED if together else Combination.ALONE,
            members_max=len(subjects),
            lanes=lanes,
            executor=options,
            rules=Rules(run_ahead=2),
        )

    found = {
        _SEQUENTIAL: made(1),
        "N instances on N streams": made(len(subjects), replicas=2),
        "one joint graph": made(1, "opara", True),
    }
    if ours is not None:
        found[_OURS] = ours
    if all(
        one.artifact.graph.batchable for one in subjects
    ):  # last: kernels are chosen for three more batches
        found["dynamic batching up to 8"] = made(1, batch=8, batch_max_delay_us=2000)
    return found


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
        self._names = [one.name for one in subjects]
        self._depth = _DEPTH_PER_MODEL * len(subjects)
        self._window_s = 0.1 if settings.quick else 1.0
        options = ExecutorOptions(name=settings.executor, precision=settings.precision)
        self._plans = plans(subjects, options, ours)
        self._keys: dict[str, PlanKey] = {}
        self._service_s: Mapping[str, float] = {}
        self._deadlines_s: Mapping[str, float] = {}

    def full_queues(self, deadline: Deadline) -> None:
        """Tasks per second of every plan, models 1:1:1; plans are loaded in the first half of the time."""
        loading = deadline.within(deadline.share_s(0.5))
        for name, plan in self._plans.items():
            if not loading.left_s:
                self._results.skip(_PART, f"{name}: load", "the time was up")
                continue
            with self._results.attempt(_PART, f"{name}: load"):
                self._keys[name] = self._service.load(plan)
        self._service_s = self._alone_s()
        self._deadlines_s = {name: _DEADLINE_TIMES * taken for name, taken in self._service_s.items()}
        for name, key in self._keys.items():
            with self._results.attempt(_PART, f"{name}: full queues"):
                self._service.shell.activate(key, keep=True)
                mix = dict.fromkeys(self._names, 1)
                self._service.saturated(mix, self._window_s / 2, self._depth)  # masks get their programs
                per_s, served = self._service.saturated(mix, self._window_s, self._depth)
                slug = name.replace(" ", "_").replace(",", "")
                self._results.add(
                    {f"serving.{slug}.tasks_per_s": per_s},
                    part=_PART,
                    name=f"{name}, full queues",
                    tasks_per_s=per_s,
                    **served.figures(self._deadlines_s),
                )

    def _alone_s(self) -> Mapping[str, float]:
        """Seconds of one task of each model at full queues of nothing else, under sequential graphs.

        Raises:
            RuntimeError: no plan was loaded; where sequential graphs were not, it is another.
        """
        key = self._keys.get(_SEQUENTIAL, next(iter(self._keys.values()), None))
        if key is None:
            raise RuntimeError("no plan was loaded")
        self._service.shell.activate(key, keep=True)
        seconds = 0.05 if self._settings.quick else 0.3
        found = {}
        for name in self._names:
            per_s, _ = self._service.saturated({name: 1}, seconds, _DEPTH_PER_MODEL)
            found[name] = 1.0 / per_s
        return found

    def open_loads(self, deadline: Deadline, rng: Random) -> None:
        """Loads 1:2:4 scaled to the sequential graphs' capacity, periodic and Poisson, for every plan."""
        for load in _LOADS[1:2] if self._settings.quick else _LOADS:
            per_s_of = rates(shares(self._names), self._service_s, load)
            for poisson in (False, True):
                tasks = arrivals(per_s_of, self._window_s, poisson=poisson, rng=rng)
                for name, key in self._keys.items():
                    row = f"{name}, load {load:g}, {'Poisson' if poisson else 'periodic'}"
                    if deadline.left_s < 2 * self._window_s:
                        self._results.skip(_PART, row, "the time was up")
                        continue
                    with self._results.attempt(_PART, row):
                        self._service.shell.activate(key, keep=True)
                        served = self._service.open_load(tasks, self._service_s)
                        self._results.add({}, part=_PART, name=row, **served.figures(self._deadlines_s))

    def switch(self, seconds: float) -> Mapping[str, Any]:
        """Switches between sequential graphs and ours (the joint graph where none was chosen).

        Raises:
            PlanError, ExecutorError, RuntimeError: see Switching.
        """
        between = [self._plans[_SEQUENTIAL], self._plans.get(_OURS, self._plans["one joint graph"])]
        times = 2 if self._settings.quick else _SWITCHES
        switching = Switching(self._service, self._names, self._depth)
        found = switching.run(between, times, until_s=time.monotonic() + seconds).figures()
        return added(self._results, found)


def added(results: Results, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row and the figures of the switches."""
    results.add(
        {"switch.p99_ms": found["first_task_p99_ms"], "switch.lost": float(found["lost"])},
        part="switching",
        name="between sequential graphs and ours, full queues",
        **found,
    )
    return found

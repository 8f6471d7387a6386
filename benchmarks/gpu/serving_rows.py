"""Rows of whole plans in the engine: the rivals' policies as plans, under full queues and open loads."""

import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from benchmarks.gpu.arrivals import arrivals, rates, shares
from benchmarks.gpu.networks import Subject
from benchmarks.gpu.results import Deadline, Results
from benchmarks.gpu.serving import Service
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.switching import Switching
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.plan import ExecutorOptions, Plan, QueuePlan
from stageloom.shared.search.compose import Combination, ModelChoice, Rules, compose

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

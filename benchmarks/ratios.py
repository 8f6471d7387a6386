"""The saturated engine over onnxruntime itself: choose first, then compare on fresh windows.

Which onnxruntime setting is best is itself measured with noise, and the best of several noisy figures is too
good: divided by that maximum, an engine of equal speed would seem slower. So settings and engine plans are
chosen in windows of their own, and what was chosen runs again, side by side, in windows that chose nothing:
in each round one window of each contestant, in random order. A figure is the median over rounds of the
engine's tasks per second over onnxruntime's in the same round.

A window is a span of time within a longer run: it begins after a ramp-up, and the load goes on until
every task that was running at its end has ended. A task counts by the share of its own run that lies in
the window, so the rate depends neither on where the window happens to cut nor on how many tasks run side
by side (from the first to the last completion, three callers in step would seem to do 2 / (n - 1) more
than one).
"""

import random
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime

from benchmarks import zoo
from benchmarks.runner import Report, progress, spread
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.shared.artifact import Artifact
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.plan import Plan
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.costs import CostTable

RAMP_UP = 0.15
"""The part of a window's length that runs before it."""

MIN_TASKS = 8
"""Tasks that end in a window at least: it is prolonged for them."""

Inputs = Mapping[str, np.ndarray]
Span = tuple[float, float]
"""When a task began and ended to run, seconds on the monotonic clock."""


@dataclass(frozen=True, slots=True)
class Window:
    """What one contestant did in one window."""

    rate_per_s: float  # tasks
    cpu_s: float  # of this process per task: says what a task costs even while others use the machine


def measured(spans: Sequence[Span], begin_s: float, end_s: float, cpu_s: float) -> Window:
    """The window from `begin_s` to `end_s` out of all tasks of a run and the processor time they took."""
    tasks = sum(
        max(0.0, min(ended_s, end_s) - max(began_s, begin_s)) / (ended_s - began_s)
        for began_s, ended_s in spans
    )
    return Window(tasks / (end_s - begin_s), cpu_s / len(spans))


class Clocked:
    """One window that is being measured, told of every task by whatever threads run them."""

    def __init__(self, seconds: float, at_a_time: int) -> None:
        self._spans: list[Span] = []
        self._at_a_time = at_a_time  # tasks that run side by side
        self._behind = 0  # tasks that ended behind the window
        self._lock = threading.Lock()
        self._began_cpu_s = time.process_time()
        self._begin_s = time.monotonic() + RAMP_UP * seconds
        self._end_s = self._begin_s + seconds

    def ended(self, began_s: float, ended_s: float) -> bool:
        """A task ended; whether another one is to take its place."""
        with self._lock:
            self._spans.append((began_s, ended_s))
            if len(self._spans) < MIN_TASKS:
                self._end_s = max(self._end_s, ended_s)
            elif ended_s > self._end_s:
                self._behind += 1
            return self._behind < self._at_a_time

    def window(self) -> Window:
        cpu_s = time.process_time() - self._began_cpu_s
        return measured(self._spans, self._begin_s, self._end_s, cpu_s)


@dataclass(frozen=True)
class Setting:
    """How onnxruntime is used directly."""

    intra_op_threads: int
    callers: int
    sessions: int  # per model; callers share them in turn

    @property
    def name(self) -> str:
        return f"{self.intra_op_threads} threads, {self.callers} callers, {self.sessions} sessions"


class Direct:
    """Threads that call onnxruntime's sessions, default options but for the threads; models take turns."""

    def __init__(self, setting: Setting, workload: Sequence[Artifact], inputs: Sequence[Inputs]) -> None:
        self.name = f"onnxruntime: {setting.name}"
        self._callers = setting.callers
        self._inputs = inputs
        self._outputs = [[a.graph.tensors[t].name for t in a.graph.outputs] for a in workload]
        self._sessions = [
            [_session(artifact, setting.intra_op_threads) for artifact in workload]
            for _ in range(setting.sessions)
        ]
        for sessions in self._sessions:
            for index in range(len(workload)):
                self._run(sessions, index)

    def _run(self, sessions: Sequence[Any], index: int) -> None:
        sessions[index].run(self._outputs[index], self._inputs[index])

    def window(self, seconds: float) -> Window:
        """Run for `seconds`, longer for less than MIN_TASKS; nothing runs before or after."""
        turns = count()
        clocked = Clocked(seconds, self._callers)

        def call(caller: int) -> None:
            sessions = self._sessions[caller % len(self._sessions)]
            goes_on = True
            while goes_on:
                began_s = time.monotonic()
                self._run(sessions, next(turns) % len(self._inputs))
                goes_on = clocked.ended(began_s, time.monotonic())

        threads = [threading.Thread(target=call, args=(caller,)) for caller in range(self._callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return clocked.window()

    def close(self) -> None:
        self._sessions = []


def _session(artifact: Artifact, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(artifact.onnx_bytes(), options, providers=["CPUExecutionProvider"])


class Engine:
    """The engine as its process runs it; every task that ends makes room for the next one."""

    def __init__(self, name: str, plan: Plan, workload: Sequence[Artifact], inputs: Sequence[Inputs]) -> None:
        self.name = name
        self._models = [model.name for model in plan.models]
        self._inputs = inputs
        self._at_a_time = min(plan.lanes, sum(model.replicas for model in plan.models))
        self._depth = 2 * sum(model.replicas for model in plan.models)
        self._shell = InProcessEngine(OnnxExecutor())
        key = self._shell.load(plan, {artifact.digest: artifact for artifact in workload})
        self._shell.activate(key)
        for index, model in enumerate(self._models):
            self._shell.submit(model, inputs[index]).result()

    def window(self, seconds: float) -> Window:
        turns, left = count(), count(1)
        failed: list[TaskDone] = []
        drained = threading.Event()
        clocked = Clocked(seconds, self._at_a_time)

        def submit() -> None:
            index = next(turns) % len(self._models)
            self._shell.submit(self._models[index], self._inputs[index], on_end=on_end)

        def on_end(end: TaskDone) -> None:
            if end.outcome is not Outcome.COMPLETED or end.started_s is None:
                failed.append(end)
            elif clocked.ended(end.started_s, end.ended_s) and not failed:
                submit()
                return
            if next(left) == self._depth:
                drained.set()

        for _ in range(self._depth):
            submit()
        drained.wait()
        if failed:
            raise RuntimeError(f"{self.name}: {failed[0].reason}")
        return clocked.window()

    def close(self) -> None:
        self._shell.close()


Workload = Mapping[str, Artifact]
"""Models by name; their tasks come in turn."""


def plan_of(workload: Workload, partition: str, *, replicas: int = 1, **how: Any) -> Plan:
    """A plan of all models of a workload; `how` is for `compose`."""
    fields: dict[str, Any] = {"partition": partition, "replicas": replicas}
    choices = [
        ModelChoice(name=name, artifact=artifact.digest, graph=artifact.graph, **fields)
        for name, artifact in workload.items()
    ]
    return compose(choices, **how)


Contestant = Direct | Engine


@dataclass(frozen=True)
class EnginePlan:
    """How the engine is used: every block is a combined block of its own."""

    partition: str
    scheduler: str
    replicas: int
    lanes: int
    contention: float = 1.0  # what the scheduler is told; below 1 it expects groups to overlap

    @property
    def name(self) -> str:
        return f"{self.partition} {self.scheduler}, {self.replicas} replicas, {self.lanes} lanes"

    def plan(self, workload: Workload) -> Plan:
        """The plan for a workload of models by name."""
        costs = CostTable(rates=DeviceRates(contention=self.contention))
        how = {"scheduler": self.scheduler, "lanes": self.lanes, "costs": costs}
        return replace(plan_of(workload, self.partition, replicas=self.replicas, **how), run_ahead=1)


SETTINGS = tuple(
    Setting(*numbers) for numbers in ((1, 1, 1), (1, 2, 1), (1, 2, 2), (1, 3, 1), (2, 1, 1), (2, 2, 1))
)

WHOLE = (
    EnginePlan(partition="whole", scheduler="sequential", replicas=2, lanes=2),
    EnginePlan(partition="whole", scheduler="sequential", replicas=3, lanes=3),
)
BLOCKS = (EnginePlan(partition="paper", scheduler="sequential", replicas=2, lanes=2),)
STAGED = (
    EnginePlan(partition="paper", scheduler="greedy", replicas=1, lanes=1),
    EnginePlan(partition="paper", scheduler="ios", replicas=1, lanes=1, contention=0.5),
    EnginePlan(partition="paper", scheduler="ios", replicas=2, lanes=2, contention=0.5),
)


@dataclass(frozen=True)
class Effort:
    choosing: int  # windows per contestant, each half as long as those that count
    rounds: int
    window_s: float


FULL = Effort(choosing=3, rounds=15, window_s=1.0)
QUICK = Effort(choosing=1, rounds=3, window_s=0.4)


def workloads(names: Sequence[str], folder: Path, *, width: float = 1.0) -> dict[str, Workload]:
    """Every model alone, and `mix` of all."""
    progress(f"import {', '.join(names)}")
    artifacts = zoo.artifacts(names, folder, width=width)
    return {**{name: {name: artifact} for name, artifact in artifacts.items()}, "mix": artifacts}


def compare_all(
    report: Report, names: Sequence[str], kinds: Mapping[str, Sequence[EnginePlan]], *, quick: bool
) -> None:
    """`compare` on every model and on the mix of all."""
    with tempfile.TemporaryDirectory() as folder:
        for name, workload in workloads(names, Path(folder)).items():
            compare(report, name, workload, kinds, QUICK if quick else FULL)


def compare(
    report: Report,
    name: str,
    workload: Workload,
    kinds: Mapping[str, Sequence[EnginePlan]],
    effort: Effort,
    settings: Sequence[Setting] = SETTINGS,
) -> None:
    """Add `KIND.name` for every kind of engine plan, and the rows behind it."""
    rng = random.Random(name)
    artifacts = list(workload.values())
    inputs = [zoo.noise_for(artifact) for artifact in artifacts]
    direct = _choose([Direct(setting, artifacts, inputs) for setting in settings], effort, rng)
    chosen: dict[str, Contestant] = {}
    for kind, plans in kinds.items():
        progress(f"{name}: {kind}, {len(plans)} plans beside {direct.name}")
        engines = [Engine(plan.name, plan.plan(workload), artifacts, inputs) for plan in plans]
        chosen[kind] = _choose(engines, effort, rng)
    progress(f"{name}: {effort.rounds} rounds")
    found = _rounds({"onnxruntime": direct, **chosen}, effort.rounds, effort.window_s, rng)
    for contestant in (direct, *chosen.values()):
        contestant.close()
    base = found.pop("onnxruntime")
    report.add({}, [_row(name, direct.name, base, base)])
    for kind, windows in found.items():
        figure = median(a.rate_per_s / b.rate_per_s for a, b in zip(windows, base, strict=True))
        report.add({f"{kind}.{name}": figure}, [_row(name, chosen[kind].name, windows, base)])


def _choose(contestants: Sequence[Contestant], effort: Effort, rng: random.Random) -> Contestant:
    """The one with the highest median rate; the others are closed."""
    best = contestants[0]
    if len(contestants) > 1:
        by_name = {contestant.name: contestant for contestant in contestants}
        found = _rounds(by_name, effort.choosing, effort.window_s / 2, rng)
        best = max(contestants, key=lambda contestant: median(w.rate_per_s for w in found[contestant.name]))
    for contestant in contestants:
        if contestant is not best:
            contestant.close()
    return best


def _rounds(
    contestants: Mapping[str, Contestant], rounds: int, seconds: float, rng: random.Random
) -> dict[str, list[Window]]:
    """Per contestant one window per round; each round in an order of its own."""
    found: dict[str, list[Window]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name in rng.sample(list(contestants), len(contestants)):
            found[name].append(contestants[name].window(seconds))
    return found


def _row(name: str, contestant: str, windows: Sequence[Window], base: Sequence[Window]) -> dict[str, object]:
    ratios = [a.rate_per_s / b.rate_per_s for a, b in zip(windows, base, strict=True)]
    cpu_ratios = [b.cpu_s / a.cpu_s for a, b in zip(windows, base, strict=True)]
    return {
        "workload": name,
        "contestant": contestant,
        "rounds": len(windows),
        **{f"{key}_per_s": value for key, value in spread([w.rate_per_s for w in windows]).items()},
        "cpu_ms_per_task": 1e3 * median(w.cpu_s for w in windows),
        **{f"ratio_{key}": value for key, value in spread(ratios).items()},
        "ratio_by_cpu": median(cpu_ratios),
    }

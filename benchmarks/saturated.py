"""Contestants that run tasks from memory as fast as they can, for a given time.

A contestant's rate counts completions between its first and its last in the window, so that neither ramp-up
nor a task cut off at the end makes it coarse.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import numpy as np
import onnxruntime

from edge_agent.executor.onnx import OnnxExecutor
from edge_agent.worker.shell import EngineShell
from edge_agent.worker.tasks import TaskEnd
from shared.artifact import Artifact
from shared.engine.steps import Outcome
from shared.plan import Plan
from shared.search.compose import Combination, ModelChoice, compose

MIN_TASKS = 8

Inputs = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Window:
    """What one contestant did in one window."""

    rate_per_s: float  # tasks
    cpu_s: float  # of this process per task: says what a task costs even while others use the machine


def measured(ended_s: Sequence[float], cpu_s: float) -> Window:
    """A window from the times at which its tasks ended and the processor time it took."""
    ordered = sorted(ended_s)
    return Window((len(ordered) - 1) / (ordered[-1] - ordered[0]), cpu_s / len(ordered))


class Contestant(Protocol):
    """Something that runs the workload."""

    name: str

    def window(self, seconds: float) -> Window:
        """Run for `seconds`, longer for less than MIN_TASKS; nothing runs before or after."""

    def close(self) -> None:
        """Free everything."""


@dataclass(frozen=True)
class Setting:
    """How onnxruntime is used directly."""

    intra_op_threads: int
    callers: int
    sessions: int  # per model; callers share them in turn

    @property
    def name(self) -> str:
        """For tables."""
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
        """See Contestant."""
        turns = count()
        ended: list[float] = []
        began_cpu_s = time.process_time()
        stop_s = time.monotonic() + seconds

        def call(caller: int) -> None:
            sessions = self._sessions[caller % len(self._sessions)]
            while time.monotonic() < stop_s or len(ended) < MIN_TASKS:
                self._run(sessions, next(turns) % len(self._inputs))
                ended.append(time.monotonic())

        threads = [threading.Thread(target=call, args=(caller,)) for caller in range(self._callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return measured(ended, time.process_time() - began_cpu_s)

    def close(self) -> None:
        """See Contestant."""
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
        self._depth = 2 * sum(model.replicas for model in plan.models)
        self._shell = EngineShell(OnnxExecutor())
        key = self._shell.load(plan, {artifact.digest: artifact for artifact in workload})
        self._shell.activate(key)
        for index, model in enumerate(self._models):
            self._shell.submit(model, inputs[index]).result()

    def window(self, seconds: float) -> Window:
        """See Contestant."""
        turns = count()
        ended: list[float] = []
        failed: list[TaskEnd] = []
        drained = threading.Event()
        left = count(1)
        began_cpu_s = time.process_time()
        stop_s = time.monotonic() + seconds

        def submit() -> None:
            index = next(turns) % len(self._models)
            self._shell.submit(self._models[index], self._inputs[index], on_end=on_end)

        def on_end(end: TaskEnd) -> None:
            if end.outcome is not Outcome.COMPLETED:
                failed.append(end)
            ended.append(end.ended_s)
            if not failed and (end.ended_s < stop_s or len(ended) < MIN_TASKS):
                submit()
            elif next(left) == self._depth:
                drained.set()

        for _ in range(self._depth):
            submit()
        drained.wait()
        if failed:
            raise RuntimeError(f"{self.name}: {failed[0].reason}")
        return measured(ended, time.process_time() - began_cpu_s)

    def close(self) -> None:
        """See Contestant."""
        self._shell.close()


@dataclass(frozen=True)
class EnginePlan:
    """How the engine is used: every block is a combined block of its own."""

    partition: str
    scheduler: str
    replicas: int
    lanes: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.partition} {self.scheduler}, {self.replicas} replicas, {self.lanes} lanes"

    def plan(self, workload: Mapping[str, Artifact]) -> Plan:
        """The plan for a workload of models by name."""
        choices = [
            ModelChoice(
                name=name,
                artifact=artifact.digest,
                graph=artifact.graph,
                partition=self.partition,
                replicas=self.replicas,
            )
            for name, artifact in workload.items()
        ]
        plan = compose(choices, scheduler=self.scheduler, combination=Combination.ALONE, lanes=self.lanes)
        return replace(plan, run_ahead=1)

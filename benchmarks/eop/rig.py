"""Two resources that run split models: one engine per model, whose plans take turns, and times of parts.

The paced pair is onnxruntime on both cores, the second one made K times slower: whoever computes there waits
K - 1 times as long as it computed. It says what splits do, whatever the machine; the other pair is
onnxruntime beside OpenVINO, as they are.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from benchmarks.eop.models import Subject
from stageloom.edge_agent.executor.base import Executor, StepResult, TimingRequest
from stageloom.edge_agent.executor.executors import Executors, make_executor
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.executor.onnx.session_executor import SessionExecutor
from stageloom.edge_agent.executor.onnx.split_timing import PartTimingRequest
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import WorkerConfig
from stageloom.edge_agent.worker.part_profile import copy_rate
from stageloom.shared.engine.steps import PlanKey, Step
from stageloom.shared.importer.splittable import SplitReader
from stageloom.shared.plan import CombinedBlock, ExecutorOptions, Member, ModelPlan, Plan, Resource
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.eop import equal
from stageloom.shared.search.measured_splits import (
    PartSample,
    SplitMeasurements,
    alike,
    operators_to_time,
    split_problem,
)
from stageloom.shared.search.split_plan import ResourcePair, split_plan
from stageloom.shared.search.split_problem import SplitChoice, SplitProblem, Whole
from tests.executor.paced import PacedExecutor

SLOW: Final = 3.0
TOLERANCE: Final = 1e-4
RESULT_S: Final = 120.0
WINDOW_S: Final = 0.05
"""Of one plan before the next one has its turn, at least."""


@dataclass(frozen=True)
class Machine:
    """Two cores, and the executors on them: the one of `names[0]` is the fast one."""

    names: tuple[str, str]
    cores: tuple[int, int]

    @property
    def label(self) -> str:
        return " beside ".join(self.names)

    @property
    def paced(self) -> bool:
        return "paced" in self.names

    @property
    def swapped(self) -> "Machine":
        return Machine((self.names[1], self.names[0]), self.cores)

    @property
    def pair(self) -> ResourcePair:
        first, second = (ExecutorOptions(name=name) for name in self.names)
        return ResourcePair((first, second), ((self.cores[0],), (self.cores[1],)))


def executor_of(name: str) -> Executor:
    """A new one; `paced` is K times slower than onnxruntime."""
    return PacedExecutor(OnnxExecutor(), slow=SLOW) if name == "paced" else make_executor(name)


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """This thread on one core."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, everywhere)


class Rig:
    """One model and the plans of it that take turns."""

    def __init__(self, subject: Subject, machine: Machine) -> None:
        sys.setswitchinterval(WorkerConfig().switch_interval_s)
        self.subject, self.machine = subject, machine
        self._steps: list[float] = []
        self._engine = InProcessEngine(Executors(executor_of), on_step=self._on_step)
        self._now: PlanKey | None = None
        self._wanted: Mapping[str, np.ndarray] | None = None

    def _on_step(self, step: Step, result: StepResult) -> None:
        self._steps.append(result.ended_s - result.started_s)

    def close(self) -> None:
        """End the engine's threads."""
        self._engine.close()

    def load(self, plan: Plan) -> PlanKey:
        """A plan, whose outputs are those of the first one that was loaded.

        Raises:
            ArithmeticError: they are not, within 1e-4.
        """
        key = self._engine.load(plan, {self.subject.artifact.digest: self.subject.artifact})
        self._activate(key)
        made = self._run()
        if self._wanted is None:
            self._wanted = made
        for name, wanted in self._wanted.items():
            apart = float(np.linalg.norm(made[name] - wanted) / (np.linalg.norm(wanted) or 1.0))
            if not apart < TOLERANCE:
                raise ArithmeticError(f"{self.subject.label}: {name} is {apart:.1e} away under a plan")
        return key

    def choice(self, choice: SplitChoice) -> PlanKey:
        """The plan of a choice."""
        artifact = self.subject.artifact
        return self.load(split_plan("m", artifact.digest, artifact.graph, choice, self.machine.pair))

    def wide(self, executor: str) -> PlanKey:
        """One session of two threads on both cores."""
        artifact = self.subject.artifact
        everything = tuple(range(len(artifact.graph.operators)))
        return self.load(
            Plan(
                models=(ModelPlan(name="m", artifact=artifact.digest),),
                combined=(CombinedBlock((Member(0, 0, 0),), StageSchedule((Stage((everything,)),))),),
                executor=ExecutorOptions(name=executor, intra_op_threads=2),
                resources=(Resource(cores=self.machine.cores),),
                lane_resources=(0,),
            )
        )

    def _activate(self, key: PlanKey) -> None:
        if key != self._now:
            self._engine.activate(key, keep=True)
            self._now = key

    def _run(self) -> dict[str, np.ndarray]:
        return self._engine.submit("m", self.subject.feeds).result(RESULT_S)

    def window_s(self, key: PlanKey) -> float:
        """Median seconds of a task under a plan, over a window, from submission to result."""
        return self._window(key, self._run_s)

    def step_window_s(self, key: PlanKey) -> float:
        """Median seconds of a step under a plan, over a window."""
        return self._window(key, self._step_s)

    def _window(self, key: PlanKey, once: Callable[[], float]) -> float:
        self._activate(key)
        once()
        taken: list[float] = []
        gc.disable()  # a collection would fall on any plan at random
        try:
            while sum(taken) < WINDOW_S:
                taken.append(once())
        finally:
            gc.enable()
        return median(taken)

    def _run_s(self) -> float:
        began_s = time.perf_counter()
        self._run()
        return time.perf_counter() - began_s

    def _step_s(self) -> float:
        self._steps.clear()
        self._run()
        return sum(self._steps)


def whole(problem_size: int, resource: int) -> SplitChoice:
    """Everything on one resource."""
    on = Whole(resource)
    return SplitChoice(states=(on,) * problem_size, splits=(), seconds=0.0, home=on)


# Times of parts


@dataclass(frozen=True)
class Limits:
    """Of one model's profile on one resource."""

    seconds: float = 20.0
    points: int = 9
    repeats: int = 5


@dataclass(frozen=True)
class Profile:
    """What operators of a model and their parts take on both resources."""

    reader: SplitReader
    alone_s: tuple[tuple[float, ...], tuple[float, ...]]
    parts: tuple[tuple[PartSample, ...], tuple[PartSample, ...]]

    def problem(self, subject: Subject, session_s: Sequence[float], join: "JoinCost") -> SplitProblem:
        """`session_s`: what the whole model takes on each resource in one session."""
        fast, slow = (
            SplitMeasurements(
                alone_s=self.alone_s[r],
                parts=self.parts[r],
                session_s=session_s[r],
                handover_s=join.handover_s,
                copy_bytes_per_s=join.bytes_per_s,
            )
            for r in (0, 1)
        )
        return split_problem(subject.artifact.graph, self.reader, (fast, slow))


def profiled(subject: Subject, machine: Machine, limits: Limits) -> Profile:
    """Operators alone, then parts of those that take longest, until the time is up; equal ones once."""
    graph = subject.artifact.graph
    reader = SplitReader(subject.artifact)
    axes = tuple(reader.axes(op) for op in range(len(graph.operators)))
    first = alike(graph, reader)
    alone, parts = [], []
    for name, core in zip(machine.names, machine.cores, strict=True):
        executor = executor_of(name)
        assert isinstance(executor, SessionExecutor)
        with on_core(core):
            request = TimingRequest(repeats=limits.repeats, limit_s=limits.seconds)
            own = executor.time_operators(subject.artifact, request, lambda: True)
        # A paced part waits as it should: fewer of its times say the same.
        few = name == "paced" and limits.points > 6
        own_s = [max(one.median_us, 1.0) / 1e6 for one in own]
        timed = executor.time_parts(
            subject.artifact,
            PartTimingRequest(
                ops=tuple(operators_to_time(axes, first, own_s)),
                points=6 if few else limits.points,
                repeats=3 if few else limits.repeats,
                limit_s=limits.seconds,
                cores=(core,),
            ),
            lambda: True,
        )
        executor.close()
        alone.append(tuple(own_s))
        parts.append(tuple(PartSample(*one[:3], one.time.median_us / 1e6) for one in timed))
    return Profile(reader, (alone[0], alone[1]), (parts[0], parts[1]))


@dataclass(frozen=True)
class JoinCost:
    """What calling the other resource takes, and what halves are put together with."""

    handover_s: float
    bytes_per_s: float


CHAIN: Final = 24
"""Operators of the model on which hand-overs are measured."""


def measured_joins(machine: Machine, subject: Subject) -> JoinCost:
    """From a chain of small layers, each split: what it takes longer than its parts, per operator."""
    profile = profiled(subject, machine, Limits(seconds=5.0, points=2, repeats=15))
    rig = Rig(subject, machine)
    try:
        problem = profile.problem(subject, [sum(one) for one in profile.alone_s], JoinCost(0.0, 1e9))
        choice = equal(problem)
        rig.choice(whole(len(problem.operators), 0))
        key = rig.choice(choice)
        taken_s = median(rig.step_window_s(key) for _ in range(5))
    finally:
        rig.close()
    parts_s = sum(
        operator.seconds(state) for operator, state in zip(problem.operators, choice.states, strict=True)
    )
    return JoinCost(max((taken_s - parts_s) / max(len(choice.splits), 1), 1e-6), copy_rate())

"""The twin decides as the agent's engine does: a served load is recorded, and replayed on its clock."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from stageloom.edge_agent.executor.base import StepResult
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.planner.twin.arrivals import Recorded
from stageloom.planner.twin.lanes import Lanes
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.times import StepTime
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.steps import Action, Step, Task
from stageloom.shared.ids import StepId
from stageloom.shared.plan import QueuePlan, QueueRule, StepChoice
from tests.engine.plans import chains
from tests.twin.cases import device, measured

Decision = tuple[int, int, int, int, tuple[tuple[int, ...], ...]]
"""Step, lane, combined block, mask, and per member its tasks, counted from the first one."""


class Spy(EngineCore):
    """Notes which tasks came and steps ended, the n-th of them at instant n, and what was issued.

    The instants are its clock, too: the threads take the lock in another order than they read theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events = 0
        self.came: list[tuple[str, float]] = []
        self.ended_s: dict[StepId, float] = {}
        self.issued: list[Step] = []

    def submit(self, task: Task, now: float) -> list[Action]:
        at_s = self._instant()
        self.came.append((task.models[0], at_s))
        return self._note(super().submit(task, at_s))

    def step_done(
        self, step_id: StepId, now: float, error: str | None = None, compute_s: float | None = None
    ) -> list[Action]:
        assert error is None
        at_s = self.ended_s[step_id] = self._instant()
        return self._note(super().step_done(step_id, at_s, error, compute_s))

    def tick(self, now: float) -> list[Action]:
        return self._note(super().tick(float(self._events)))

    def _instant(self) -> float:
        self._events += 1
        return float(self._events)

    def _note(self, actions: list[Action]) -> list[Action]:
        self.issued += [action for action in actions if isinstance(action, Step)]
        return actions


class Slow(NullExecutor):
    """Every step takes a moment of its own, so that others come in between."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)
        self._lock = threading.Lock()

    def wait(self, step: StepId) -> StepResult:
        with self._lock:
            pause_s = self._random.uniform(0.0, 8e-4)
        time.sleep(pause_s)
        return super().wait(step)


class RecordedLanes(Lanes):
    """Every step ends when it was recorded to."""

    def __init__(self, ends_s: dict[StepId, float]) -> None:
        super().__init__(device())
        self._ends_s = ends_s
        self._open: dict[StepId, Step] = {}

    def issue(self, step: Step, time: StepTime, now: float) -> None:
        self._open[step.id] = step
        self._look()

    def end_next(self) -> tuple[Step, float]:
        step = self._open.pop(min(self._open, key=self._ends_s.__getitem__))
        self._look()
        return step, 0.0

    def advance(self, now: float) -> None:
        """Nothing is counted."""

    def _look(self) -> None:
        self.next_end_s = min((self._ends_s[one] for one in self._open), default=float("inf"))


def decisions(steps: Sequence[Step], first_task: int) -> list[Decision]:
    return [
        (
            step.id,
            step.lane,
            step.program.combined,
            step.program.mask,
            tuple(tuple(task - first_task for task in member.tasks) for member in step.members),
        )
        for step in steps
    ]


def serve(bound: BoundPlan, tasks: int, seed: int) -> Spy:
    """Let the agent's engine serve bursts of tasks; returns what it noted."""
    random, spy = Random(seed), Spy()
    with InProcessEngine(Slow(seed)) as shell:
        shell._driver._core = spy
        artifacts = {
            model.plan.artifact: Artifact(model.plan.artifact, model.graph, Path(), 0, 0)
            for model in bound.models
        }
        shell.activate(shell.load(bound.plan, artifacts))
        names = [model.plan.name for model in bound.models]
        inputs = {"t0": np.zeros((2,), np.float32)}
        futures = []
        for _ in range(tasks):
            futures.append(shell.submit(random.choice(names), inputs))
            if random.random() < 0.5:
                time.sleep(random.uniform(0.0, 2e-3))
        for future in futures:
            future.exception(timeout=30.0)
    return spy


@pytest.mark.promise("twin-decides-agent-s")
@pytest.mark.parametrize("choice", StepChoice)
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_recorded_load_is_replayed_decision_by_decision(lanes: int, choice: StepChoice) -> None:
    bound = chains(
        3,
        2,
        groups=[
            [(0, 0, 0), (1, 0, 0)],
            [(0, 0, 1)],
            [(0, 0, 2), (1, 0, 1)],
            [(0, 1, 0)],
            [(0, 1, 1), (0, 1, 2)],
            [(1, 1, 0), (1, 1, 1)],
        ],
        fields={"replicas": 2, "queue": QueuePlan(rule=QueueRule.DROP_OLDEST, max_tasks=12)},
        lanes=lanes,
        step_choice=choice,
    )
    spy = serve(bound, 120, seed=lanes)
    load = {
        name: Recorded(times_s=tuple(at_s for model, at_s in spy.came if model == name))
        for name in ("a", "b")
    }
    twin = Twin(measured(bound, {"a": 1.0, "b": 1.0}), load)
    replayed = twin._core = Spy()
    twin._lanes = RecordedLanes(spy.ended_s)
    twin.deploy(bound)
    twin.run(max(spy.ended_s.values()) + 1.0)
    assert len(spy.issued) > 60
    assert decisions(replayed.issued, 0) == decisions(spy.issued, 1)
    assert replayed.ended_s == spy.ended_s

"""Run one model under a plan through the engine and record every tensor at a block border."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from stageloom.edge_agent.executor.base import Executor, StepResult
from stageloom.edge_agent.verify.inputs import Feeds
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.edge_agent.worker.runtime import EngineRuntime
from stageloom.edge_agent.worker.tasks import EngineTask
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, Outcome, PlanKey, Step
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import TaskId
from stageloom.shared.plan import Member

if TYPE_CHECKING:
    import numpy as np

Place: TypeAlias = tuple[int, str]
"""The block behind which a tensor was recorded (the number of blocks: the task's answer), and its name."""

_PREPARE_S = 600.0
_MAX_DELAY_S = 0.002


@dataclass(slots=True)
class TaskTrace:
    """The recorded tensors of one task, and how it ended."""

    tensors: "dict[Place, np.ndarray]" = field(default_factory=dict)
    outcome: Outcome | None = None
    reason: str = ""


class _ArrayTask(EngineTask):
    """A task whose inputs and outputs are arrays."""

    def __init__(self, number: TaskId, model: str, feeds: Feeds, blocks: int) -> None:
        super().__init__(id=number, models=(model,), nbytes=sum(array.nbytes for array in feeds.values()))
        self.trace = TaskTrace()
        self.over = threading.Event()
        self._feeds = feeds
        self._blocks = blocks

    def inputs(self, model: str) -> "Mapping[str, np.ndarray]":
        return self._feeds

    def deliver(self, model: str, outputs: "Mapping[str, np.ndarray]") -> None:
        for name, array in outputs.items():
            self.trace.tensors[self._blocks, name] = array.copy()

    def answer(self, done: TaskDone) -> None:
        self.trace.outcome, self.trace.reason = done.outcome, done.reason
        self.over.set()


class EngineRun:
    """An engine in this process that serves one model; the plan has batch 1 and that model only."""

    def __init__(self, executor: Executor, bound: BoundPlan, artifact: Artifact) -> None:
        """Own the executor, which `close` closes.

        Raises:
            ExecutorError: the executor cannot load or prepare the plan.
        """
        self._bound = bound
        self._executor = executor
        self._seen: dict[InstanceId, dict[Place, np.ndarray]] = {}
        self._task_of: dict[InstanceId, TaskId] = {}
        self._next_task = 0
        self._fallbacks = 0
        executor.tap = self._tap
        self._driver = EngineRuntime(executor)
        self._driver.on_step = self._on_step
        try:
            self._driver.load(PlanKey(0), bound, {artifact.digest: artifact})
            if missing := self._driver.wait_prepared(PlanKey(0), _PREPARE_S):
                raise ExecutorError(f"{missing} programs were not ready in {_PREPARE_S:.0f} s")
            self._driver.activate(PlanKey(0))
        except BaseException:
            self._driver.close()
            raise

    def run(self, tasks: Sequence[Feeds], delays: "np.random.Generator | None") -> list[TaskTrace]:
        """Submit all tasks at once and wait for them; `delays` draws a pause before every group.

        Raises:
            ExecutorError: no program could be prepared, so the members ran one after another.
        """
        self._executor.pause = None if delays is None else _Pauses(delays)
        self._seen.clear()
        self._task_of.clear()
        blocks = self._bound.models[0].plan.num_blocks
        name = self._bound.models[0].plan.name
        running: dict[TaskId, _ArrayTask] = {}
        for feeds in tasks:
            task = _ArrayTask(TaskId(self._next_task), name, feeds, blocks)
            self._next_task += 1
            running[task.id] = task
            self._driver.submit(task)
        for task in running.values():
            task.over.wait()
        if self._fallbacks:
            raise ExecutorError(f"executor {self._executor.name!r} could not prepare the schedule")
        for instance, tensors in self._seen.items():
            number = self._task_of.get(instance, TaskId(-1))
            if number in running:  # else a step of a task that failed in an earlier run ended late
                running[number].trace.tensors.update(tensors)
        return [task.trace for task in running.values()]

    def close(self) -> None:
        """Stop the engine and close the executor."""
        self._driver.close()

    def _tap(self, instance: InstanceId, member: Member, tensors: "Mapping[str, np.ndarray]") -> None:
        seen = self._seen.setdefault(instance, {})
        for name, array in tensors.items():
            seen[member.block, name] = array.copy()

    def _on_step(self, step: Step, result: StepResult) -> None:
        self._fallbacks += step.fallback
        for member in step.members:
            self._task_of[member.instance] = member.tasks[0]


class _Pauses:
    """A random pause before a group; called from several threads."""

    def __init__(self, rng: "np.random.Generator") -> None:
        self._rng = rng
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            seconds = float(self._rng.random()) * _MAX_DELAY_S
        time.sleep(seconds)

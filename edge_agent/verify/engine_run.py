"""Run one model under a plan through the engine and record every tensor at a block border."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from stageloom.edge_agent.executor.base import Executor, StepResult
from stageloom.edge_agent.verify.inputs import Feeds
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, Step
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import TaskId
from stageloom.shared.plan import Member, QueuePlan

if TYPE_CHECKING:
    import numpy as np

Place: TypeAlias = tuple[int, str]
"""The block behind which a tensor was recorded (the number of blocks: the task's answer), and its name."""

_MAX_DELAY_S = 0.002

_ROOM = QueuePlan(max_tasks=1 << 24, max_bytes=1 << 40)
"""Tasks come all at once, and a refusal would look like a defect; their inputs are in memory anyway."""


@dataclass(slots=True)
class TaskTrace:
    """The recorded tensors of one task, and why it did not complete."""

    tensors: "dict[Place, np.ndarray]" = field(default_factory=dict)
    error: BaseException | None = None


class EngineRun:
    """An engine in this process that serves one model; the plan has batch 1 and that model only."""

    def __init__(self, executor: Executor, bound: BoundPlan, artifact: Artifact) -> None:
        """Own the executor, which `close` closes.

        Raises:
            ExecutorError: the executor cannot load or prepare the plan.
        """
        self._model = replace(bound.models[0].plan, queue=_ROOM)
        self._executor = executor
        self._seen: dict[InstanceId, dict[Place, np.ndarray]] = {}
        self._task_of: dict[InstanceId, TaskId] = {}
        self._fallbacks = 0
        executor.tap = self._tap
        self._engine = InProcessEngine(executor, on_step=self._on_step)
        try:
            plan = replace(bound.plan, models=(self._model,))
            self._engine.activate(self._engine.load(plan, {artifact.digest: artifact}))
        except BaseException:
            self._engine.close()
            raise

    def run(self, tasks: Sequence[Feeds], delays: "np.random.Generator | None") -> list[TaskTrace]:
        """Submit all tasks at once and wait for them; `delays` draws a pause before every group.

        Raises:
            ExecutorError: no program could be prepared, so the members ran one after another.
        """
        self._executor.pause = None if delays is None else _Pauses(delays)
        self._seen.clear()
        self._task_of.clear()
        futures = [self._engine.submit(self._model.name, feeds) for feeds in tasks]
        traces = {future.task: TaskTrace(error=future.exception()) for future in futures}
        if self._fallbacks:
            raise ExecutorError(f"executor {self._executor.name!r} could not prepare the schedule")
        for instance, tensors in self._seen.items():
            traced = traces.get(self._task_of.get(instance, TaskId(-1)))
            if traced is not None:  # else a step of a task that failed in an earlier run ended late
                traced.tensors.update(tensors)
        for future in futures:
            if (trace := traces[future.task]).error is None:
                answer = {(self._model.num_blocks, name): array for name, array in future.result().items()}
                trace.tensors.update(answer)
        return list(traces.values())

    def close(self) -> None:
        """Stop the engine and close the executor."""
        self._engine.close()

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

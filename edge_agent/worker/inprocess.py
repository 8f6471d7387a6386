"""The engine inside this process, for verification, benchmarks and tests: numpy arrays in and out.

The service runs the same driver in a process of its own; see `process`.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import numpy as np

from stageloom.edge_agent.executor.base import StepRunner, input_problem
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.edge_agent.worker.recorder import Recorder
from stageloom.edge_agent.worker.runtime import EngineRuntime, StepObserver
from stageloom.edge_agent.worker.tasks import EngineTask
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import bind
from stageloom.shared.engine.history import DurationHistory
from stageloom.shared.engine.residency import Bus
from stageloom.shared.engine.stats import EngineStats
from stageloom.shared.engine.steps import Code, Outcome, PlanKey
from stageloom.shared.errors import (
    ExecutorError,
    StageloomError,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskRefused,
)
from stageloom.shared.ids import Digest, TaskId
from stageloom.shared.plan import Plan

Outputs = dict[str, np.ndarray]
"""By tensor name; `MODEL/TENSOR` for a task that names several models."""

PREPARE_TIMEOUT_S = 600.0


class InProcessEngine:
    """An engine with an executor, or several. Use it as a context manager: it has threads.

    Set `executor.tap` before the first task to see every block border.
    """

    def __init__(
        self,
        executor: StepRunner,
        *,
        on_step: StepObserver | None = None,
        history: DurationHistory | None = None,
        bus: Bus | None = None,
    ) -> None:
        """`history` and `bus`: see `EngineRuntime`."""
        self.executor = executor
        self._driver = EngineRuntime(executor, history=history, bus=bus)
        self._driver.on_step = on_step
        self._keys = itertools.count(1)
        self._ids = itertools.count(1)

    def load(self, plan: Plan, artifacts: Mapping[Digest, Artifact]) -> PlanKey:
        """Load a plan and wait until its programs are ready.

        Raises:
            PlanError: the plan is not legal for the artifacts' graphs.
            ExecutorError: the executor cannot load it, or cannot prepare it in time.
        """
        bound = bind(plan, {digest: artifact.graph for digest, artifact in artifacts.items()})
        key = PlanKey(next(self._keys))
        self._driver.load(key, bound, artifacts)
        if missing := self._driver.wait_prepared(key, PREPARE_TIMEOUT_S):
            raise ExecutorError(f"{missing} programs were not ready in {PREPARE_TIMEOUT_S:.0f} s")
        return key

    def activate(self, key: PlanKey, *, keep: bool = False) -> None:
        """Send new launches to a loaded plan; with `keep` the one before stays loaded.

        Raises:
            ValueError: the plan is not loaded.
        """
        self._driver.activate(key, keep=keep)

    def unload(self, key: PlanKey) -> None:
        """Give up a plan that is not in use.

        Raises:
            ValueError: the plan is not loaded or in use.
        """
        self._driver.unload(key)

    def submit(
        self,
        model: str | Sequence[str],
        inputs: Mapping[str, np.ndarray],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        on_end: Callable[[TaskDone], None] | None = None,
    ) -> "EngineFuture":
        """One task of one model, or one task that several models share the input of.

        The future ends with the outputs or with TaskRefused, TaskExpired, TaskCancelled or TaskFailed.
        Arrays must not change until then. `on_end` runs on an engine thread, after the future is done.
        """
        names = (model,) if isinstance(model, str) else tuple(model)
        task = _ArrayTask(
            inputs, on_end, id=TaskId(next(self._ids)), models=names, priority=priority, deadline_s=deadline_s
        )
        try:
            self._check(names, inputs)
            self._driver.submit(task)
        except TaskRefused as error:
            task.future.set_exception(error)
        return task.future

    def cancel(self, future: "EngineFuture") -> None:
        """End a submitted task early; its future ends with TaskCancelled if it had not ended."""
        self._driver.cancel(future.task)

    def record(self, recorder: Recorder | None) -> None:
        """Have everything that happens from now on recorded; None: no more."""
        self._driver.record(recorder)

    def stats(self) -> EngineStats:
        """The engine's state at this instant."""
        return self._driver.snapshot()[0]

    @property
    def idle(self) -> bool:
        return self._driver.idle

    def close(self) -> None:
        """End the threads after the steps in flight, and the executor. Futures left over never end."""
        self._driver.close()

    def __enter__(self) -> "InProcessEngine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, names: tuple[str, ...], inputs: Mapping[str, np.ndarray]) -> None:
        bound = self._driver.active
        if bound is None:
            raise TaskRefused(Code.UNKNOWN_MODEL, "no plan is active", remedy="activate one")
        for name in names:
            if name in bound.model_index:
                graph = bound.models[bound.model_index[name]].graph
                if problem := input_problem(graph, inputs):
                    raise TaskRefused("bad_input", problem)


class EngineFuture(Future[Outputs]):
    """A future that knows its task."""

    def __init__(self, task: TaskId) -> None:
        super().__init__()
        self.task = task


class _ArrayTask(EngineTask):
    """A task in numpy arrays."""

    __slots__ = ("_inputs", "_on_end", "_outputs", "future")

    def __init__(
        self,
        inputs: Mapping[str, np.ndarray],
        on_end: Callable[[TaskDone], None] | None,
        **fields: Any,
    ) -> None:
        super().__init__(nbytes=sum(array.nbytes for array in inputs.values()), **fields)
        self.future = EngineFuture(self.id)
        self._inputs = inputs
        self._outputs: Outputs = {}
        self._on_end = on_end

    def inputs(self, model: str) -> Mapping[str, np.ndarray]:
        """The arrays that were submitted."""
        return self._inputs

    def deliver(self, model: str, outputs: Mapping[str, np.ndarray]) -> None:
        """Keep the arrays by reference."""
        for name, array in outputs.items():
            self._outputs[f"{model}/{name}" if self.shared else name] = array

    def answer(self, done: TaskDone) -> None:
        if done.outcome is Outcome.COMPLETED:
            self.future.set_result(self._outputs)
        else:
            self.future.set_exception(_error(done))
        if self._on_end is not None:
            self._on_end(done)


def _error(done: TaskDone) -> StageloomError:
    if done.outcome is Outcome.REFUSED:
        return TaskRefused(done.code, done.reason)
    kinds = {Outcome.EXPIRED: TaskExpired, Outcome.CANCELLED: TaskCancelled, Outcome.FAILED: TaskFailed}
    return kinds[done.outcome](done.reason)

"""The executors of one engine process: each plan runs on the one that it names, side by side with others.

Plans of different executors can so be swapped and compared like any two: an instance never moves from one
executor to another (`stageloom.shared.engine.swap`), so no step waits for a step of another executor. An
executor is made when a plan names it, and closed when it has no plan while another has: its plan has given
way.
"""

import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import cast

from stageloom.edge_agent.executor.base import Executor, Rows, StepResult
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, MoveInstance, PlanKey, ProgramKey, Step
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import Digest, StepId

_WHERE = {
    "null": ("stageloom.edge_agent.executor.null", "NullExecutor", "pip install 'stageloom[edge]'"),
    "onnx": (
        "stageloom.edge_agent.executor.onnx.executor",
        "OnnxExecutor",
        "pip install 'stageloom[edge,onnx]'",
    ),
    "onnx_cuda": (
        "stageloom.edge_agent.executor.onnx_cuda.executor",
        "OnnxCudaExecutor",
        "pip install 'stageloom[edge,onnx-gpu]'",
    ),
    "torch_cpu": (
        "stageloom.edge_agent.executor.torch.cpu",
        "TorchCpuExecutor",
        "pip install 'stageloom[edge,torch]'",
    ),
    "torch_cuda": (
        "stageloom.edge_agent.executor.torch.executor",
        "TorchCudaExecutor",
        "pip install 'stageloom[edge,torch]'",
    ),
}

EXECUTORS = tuple(_WHERE)
"""Known names."""


def make_executor(name: str) -> Executor:
    """A new executor.

    Raises:
        ExecutorError: the name is unknown, or a package of the backend is missing.
    """
    if name not in _WHERE:
        raise ExecutorError(f"no executor is called {name!r}", remedy=f"use one of {', '.join(_WHERE)}")
    module, attribute, remedy = _WHERE[name]
    try:
        factory = getattr(import_module(module), attribute)
    except ImportError as error:
        raise ExecutorError(f"executor {name!r} cannot be loaded: {error}", remedy=remedy) from error
    return cast(Executor, factory())


class Executors:
    """Satisfies `StepRunner`: what comes is handed on by plan; a failure is that executor's."""

    def __init__(self, make: Callable[[str], Executor] = make_executor) -> None:
        self._make = make
        self._lock = threading.Lock()  # over changes of the two below, and while a backend is imported
        self._made: dict[str, Executor] = {}
        self._of: dict[PlanKey, Executor] = {}
        self._issued: dict[StepId, Executor] = {}
        self._tracing = False

    @property
    def tracing(self) -> bool:
        return self._tracing

    @tracing.setter
    def tracing(self, on: bool) -> None:
        self._tracing = on  # first: an executor that is being made looks here once it is found below
        for executor in list(self._made.values()):
            executor.tracing = on

    def runs(self, name: str) -> bool:
        """An executor of this name has a plan."""
        return any(executor.name == name for executor in list(self._of.values()))

    def stated_bytes(self, bound: BoundPlan, *, alone: bool = False) -> int:
        """Bytes that `load` and `prepare` will add for this plan; `alone`: with nothing else loaded.

        Raises:
            ExecutorError: its executor cannot be made.
        """
        with self._lock:
            executor = self._made_for(bound)
        return executor.stated_bytes(bound, alone=alone)

    @property
    def held_bytes(self) -> int:
        """Bytes that the loaded plans state together."""
        return sum(executor.held_bytes for executor in list(self._made.values()))

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """Make a plan known to its executor.

        Raises:
            ExecutorError: the executor cannot be made, or cannot load it.
        """
        with self._lock:
            executor = self._of[key] = self._made_for(bound)
        try:
            executor.load(key, bound, artifacts)
        except BaseException:
            del self._of[key]
            raise
        finally:
            self._close_unused()

    def prepare(self, program: ProgramKey) -> None:
        """Build what `issue` needs for this program.

        Raises:
            ExecutorError: the program cannot be built.
        """
        self._of[program.plan].prepare(program)

    def issue(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
        executor = self._of[step.program.plan]
        executor.issue(step, feeds)
        self._issued[step.id] = executor

    def wait(self, step: StepId) -> StepResult:
        """Block until an issued step has ended.

        Raises:
            ExecutorError: the step failed.
        """
        return self._issued.pop(step).wait(step)

    def move(self, action: MoveInstance) -> None:
        """Carry out a move; both plans are of one executor."""
        self._of[action.new[0]].move(action)

    def drop(self, instance: InstanceId) -> None:
        """Free what the instance holds, wherever it ran; those that do not know it do nothing."""
        for executor in list(self._made.values()):
            executor.drop(instance)

    def unload(self, key: PlanKey) -> None:
        """Free a plan that no instance uses, and its executor if only others have plans now."""
        executor = self._of.get(key)
        if executor is not None:
            executor.unload(key)
            del self._of[key]
            self._close_unused()

    def drop_idle(self) -> None:
        """Free what is kept for plans that are not loaded."""
        for executor in list(self._made.values()):
            executor.drop_idle()

    def close(self) -> None:
        with self._lock:
            executors = list(self._made.values())
            self._made.clear()
            self._of.clear()
        for executor in executors:
            executor.close()

    def _made_for(self, bound: BoundPlan) -> Executor:
        """The executor that the plan names. The lock is held."""
        name = bound.plan.executor.name
        executor = self._made.get(name)
        if executor is None:
            executor = self._made[name] = self._make(name)
            executor.tracing = self._tracing
        return executor

    def _close_unused(self) -> None:
        """Close executors without a plan, unless none has one: then the last keeps what it may need again."""
        with self._lock:
            users = list(self._of.values())
            unused = [executor for executor in self._made.values() if users and executor not in users]
            for executor in unused:
                del self._made[executor.name]
        for executor in unused:
            executor.close()

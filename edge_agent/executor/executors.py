"""The executors of one engine process: each combined block runs on the one that its plan gives it.

Plans of different executors can so be swapped and compared like any two. Within a plan those whose slots hold
arrays by reference hand them to one another at the borders of blocks; their steps wait for one another by one
shared order. An executor is made when a plan names it, and closed when it has no plan while another has: its
plan has given way.
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import cast

from stageloom.edge_agent.executor.base import Executor, Rows, StepResult
from stageloom.edge_agent.executor.host import NO_SLOT, HostExecutor
from stageloom.edge_agent.executor.threads import StepOrder
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
    "openvino": (
        "stageloom.edge_agent.executor.openvino.executor",
        "OpenvinoExecutor",
        "pip install 'stageloom[edge,openvino]'",
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
    """Satisfies `StepRunner`: what comes is handed on by plan and block; a failure is that executor's."""

    def __init__(self, make: Callable[[str], Executor] = make_executor) -> None:
        self._make = make
        self._lock = threading.Lock()  # over changes of the two below, and while a backend is imported
        self._made: dict[str, Executor] = {}
        self._of: dict[PlanKey, tuple[Executor, ...]] = {}  # by combined block
        self._issued: dict[StepId, Executor] = {}
        self._order = StepOrder()
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
        return any(executor.name == name for of in list(self._of.values()) for executor in of)

    def stated_bytes(self, bound: BoundPlan, *, alone: bool = False) -> int:
        """Bytes that `load` and `prepare` will add for this plan; `alone`: with nothing else loaded.

        Raises:
            ExecutorError: one of its executors cannot be made.
        """
        with self._lock:
            executors = [self._made_for(name) for name in bound.executor_names]
        return sum(executor.stated_bytes(bound, alone=alone) for executor in executors)

    @property
    def held_bytes(self) -> int:
        """Bytes that the loaded plans state together."""
        return sum(executor.held_bytes for executor in list(self._made.values()))

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """Make a plan known to its executors.

        Raises:
            ExecutorError: an executor cannot be made, cannot load it, or cannot share a plan.
        """
        with self._lock:
            executors = {name: self._made_for(name) for name in bound.executor_names}
            self._of[key] = tuple(executors[bound.executor_of(i).name] for i in range(len(bound.combined)))
        loaded: list[Executor] = []
        try:
            _require_shared_slots(executors)
            for executor in executors.values():
                loaded.append(executor)
                executor.load(key, bound, artifacts)
        except BaseException:
            for executor in loaded[:-1]:
                executor.unload(key)
            del self._of[key]
            raise
        finally:
            self._close_unused()

    def prepare(self, program: ProgramKey) -> None:
        """Build what `issue` needs for this program.

        Raises:
            ExecutorError: the program cannot be built.
        """
        self._of[program.plan][program.combined].prepare(program)

    def issue(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
        executor = self._of[step.program.plan][step.program.combined]
        executor.issue(step, feeds)
        self._issued[step.id] = executor

    def wait(self, step: StepId) -> StepResult:
        """Block until an issued step has ended.

        Raises:
            ExecutorError: the step failed.
        """
        return self._issued.pop(step).wait(step)

    def move(self, action: MoveInstance) -> None:
        """Carry out a move; both plans are of the same executors."""
        for executor in dict.fromkeys(self._of[action.new[0]]):
            executor.move(action)

    def drop(self, instance: InstanceId) -> None:
        """Free what the instance holds, wherever it ran; those that do not know it do nothing."""
        for executor in list(self._made.values()):
            executor.drop(instance)

    def unload(self, key: PlanKey) -> None:
        """Free a plan that no instance uses, and the executors that no plan needs while others have one."""
        executors = self._of.get(key)
        if executors is not None:
            for executor in dict.fromkeys(executors):
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

    def _made_for(self, name: str) -> Executor:
        """The executor of this name. The lock is held."""
        executor = self._made.get(name)
        if executor is None:
            executor = self._made[name] = self._make(name)
            executor.tracing = self._tracing
            if isinstance(executor, HostExecutor) and executor.passes_slots:
                executor.order = self._order
                executor.elsewhere = partial(self._taken_from_others, executor)
        return executor

    def _taken_from_others(self, executor: Executor, instance: InstanceId) -> object:
        """What another executor keeps of an instance, which goes on elsewhere."""
        for other in list(self._made.values()):
            if other is not executor and isinstance(other, HostExecutor) and other.passes_slots:
                slot = other.give_away(instance)
                if slot is not NO_SLOT:
                    return slot
        return NO_SLOT

    def _close_unused(self) -> None:
        """Close executors without a plan, unless none has one: then the last keeps what it may need again."""
        with self._lock:
            users = {id(executor) for of in self._of.values() for executor in of}
            unused = [executor for executor in self._made.values() if users and id(executor) not in users]
            for executor in unused:
                del self._made[executor.name]
        for executor in unused:
            executor.close()


def _require_shared_slots(executors: Mapping[str, Executor]) -> None:
    """Raises:
    ExecutorError: executors of one plan keep tensors where the others cannot read them.
    """
    for name, executor in executors.items():
        if len(executors) > 1 and not (isinstance(executor, HostExecutor) and executor.passes_slots):
            raise ExecutorError(
                f"executor {name!r} cannot share a plan with {', '.join(executors.keys() - {name})}",
                remedy="use one executor for all of the plan's blocks",
            )

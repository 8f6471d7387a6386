"""The executors of one engine process: each combined block runs on the one that its plan gives it.

Plans of different executors can so be swapped and compared like any two. Within a plan those whose slots hold
arrays by reference share a store of them, where other memory nodes have copies; their steps wait for one
another by one shared order. An executor is made when a plan names it, and closed when it has no plan while
another has: its plan has given way.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final, cast

from stageloom.edge_agent.executor.base import (
    DeviceRunner,
    Executor,
    Rows,
    StepResult,
    StepRunner,
    lost_tensors,
)
from stageloom.edge_agent.executor.host import HostExecutor
from stageloom.edge_agent.executor.slot_store import SlotStore
from stageloom.edge_agent.executor.threads import StepOrder
from stageloom.edge_agent.machine.jetson import how_to_install
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import CopySlot, InstanceId, MoveInstance, PlanKey, ProgramKey, Step
from stageloom.shared.errors import BackendUnavailable, ExecutorError, ExtensionError
from stageloom.shared.extensions import ExtensionGroup, Extensions, extensions
from stageloom.shared.ids import Digest, StepId

_WHERE = {
    "null": ("stageloom.edge_agent.executor.null", "NullExecutor", ""),
    "onnx": (
        "stageloom.edge_agent.executor.onnx.executor",
        "OnnxExecutor",
        "onnx",
    ),
    "onnx_cuda": (
        "stageloom.edge_agent.executor.onnx_cuda.executor",
        "OnnxCudaExecutor",
        "onnx-gpu",
    ),
    "openvino": (
        "stageloom.edge_agent.executor.openvino.executor",
        "OpenvinoExecutor",
        "openvino",
    ),
    "torch_cpu": (
        "stageloom.edge_agent.executor.torch.cpu",
        "TorchCpuExecutor",
        "torch",
    ),
    "torch_cuda": (
        "stageloom.edge_agent.executor.torch.executor",
        "TorchCudaExecutor",
        "torch",
    ),
}

EXECUTORS = tuple(_WHERE)
"""Stageloom's own names."""


def added_executors() -> Extensions:
    """Executors of other distributions, as their metadata says; none is imported."""
    return extensions(ExtensionGroup.EXECUTORS, _WHERE)


def make_executor(name: str) -> Executor:
    """A new executor.

    Raises:
        ExecutorError: the name is unknown, a package of the backend is missing, or another distribution's
            does not load.
    """
    if name not in _WHERE:
        return _make_added(name)
    module, attribute, extra = _WHERE[name]
    try:
        factory = getattr(import_module(module), attribute)
    except ImportError as error:
        remedy = how_to_install(extra) if extra else "pip install 'stageloom[edge]'"
        raise BackendUnavailable(f"executor {name!r} cannot be loaded: {error}", remedy=remedy) from error
    return cast(Executor, factory())


def _make_added(name: str) -> Executor:
    added = added_executors()
    if name in added.problems:
        wrong = added.problems[name]
        raise ExecutorError(wrong.cause, remedy=wrong.remedy)
    if name not in added.usable:
        names = ", ".join((*_WHERE, *added.usable))
        raise ExecutorError(f"no executor is called {name!r}", remedy=f"use one of {names}")

    def made(factory: Callable[[], object]) -> Executor:
        executor = factory()
        missing = [wanted for wanted in _MEMBERS if not hasattr(executor, wanted)]
        if missing:
            raise TypeError(f"it has no {', '.join(missing)}, which executors have")
        if getattr(executor, "name", None) != name:
            raise TypeError(f"it calls itself {getattr(executor, 'name', None)!r}")
        return cast(Executor, executor)

    try:
        return added.usable[name].load(made)
    except ExtensionError as error:
        raise ExecutorError(error.cause, remedy=error.remedy) from error


_MEMBERS: Final = tuple(
    sorted(
        name
        for kind in (StepRunner, Executor)
        for name in {*vars(kind), *vars(kind).get("__annotations__", {})}
        if not name.startswith("_")
    )
)
"""What `Executor` asks for."""


class Executors:
    """Satisfies `StepRunner`, `CopyRunner` and `DeviceRunner`: what comes is handed on by plan and block.

    A failure is that executor's.
    """

    def __init__(
        self, make: Callable[[str], Executor] = make_executor, store: SlotStore | None = None
    ) -> None:
        """`store` keeps the tensors of executors that pass them by reference."""
        self._make = make
        self._store = SlotStore() if store is None else store
        self._bound: dict[PlanKey, BoundPlan] = {}
        self._lock = threading.Lock()  # over changes of the four below, and while a backend is imported
        self._made: dict[str, Executor] = {}
        self._asked = Counter[str]()  # by name, questions for bytes that are being answered
        self._of: dict[PlanKey, dict[tuple[int, int], Executor]] = {}  # by combined block and variant
        self._all_of: dict[PlanKey, tuple[Executor, ...]] = {}  # with those that run groups of blocks alone
        self._issued: dict[StepId, Executor] = {}
        self._order = StepOrder()
        self._tracing = False
        self._lost = False  # by an executor that may be closed since

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
        return any(one.name == name for of in list(self._of.values()) for one in of.values())

    def stated_bytes(self, bound: BoundPlan, *, alone: bool = False) -> int:
        """Bytes that `load` and `prepare` will add for this plan; `alone`: with nothing else loaded.

        Raises:
            ExecutorError: one of its executors cannot be made.
        """
        names = bound.executor_names
        with self._lock:
            executors = [self._made_for(name) for name in names]
            self._asked.update(names)
        try:
            return sum(executor.stated_bytes(bound, alone=alone) for executor in executors)
        finally:
            with self._lock:
                self._asked.subtract(names)

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
            self._all_of[key] = tuple(executors.values())
            self._of[key] = {pair: executors[bound.executor_of(*pair).name] for pair in bound.variants}
        loaded: list[Executor] = []
        try:
            _require_shared_slots(bound, executors)
            for executor in executors.values():
                loaded.append(executor)
                executor.load(key, bound, artifacts)
            self._bound[key] = bound
        except BaseException:
            self._lost = self.lost()
            # Those that did not load it, too: one before them may have put sessions for its groups there.
            for executor in executors.values() if loaded and len(executors) > 1 else ():
                executor.unload(key)
            with self._lock:
                del self._of[key], self._all_of[key]
            raise
        finally:
            self._close_unused()

    def prepare(self, program: ProgramKey) -> None:
        """Build what `issue` needs for this program.

        Raises:
            ExecutorError: the program cannot be built.
        """
        self._of[program.plan][program.combined, program.variant].prepare(program)

    def issue(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
        program = step.program
        executor = self._of[program.plan][program.combined, program.variant]
        executor.issue(step, feeds)
        self._issued[step.id] = executor

    def wait(self, step: StepId) -> StepResult:
        """Block until an issued step has ended.

        Raises:
            ExecutorError: the step failed.
        """
        return self._issued.pop(step).wait(step)

    def copy(self, copy: CopySlot) -> None:
        """Copy a slot's tensors to another memory node, on this thread.

        Raises:
            ExecutorError: the instance has lost its tensors.
        """
        key, (model, _, number) = copy.slot
        try:
            bound = self._bound[key].models[model]
            made = bound.graph.inputs if not number else bound.blocks[number - 1].makes
            self._store.read(copy.instance, copy.node, made)
        except KeyError:
            raise lost_tensors(copy.instance) from None

    def move(self, action: MoveInstance) -> None:
        """Carry out a move; both plans are of the same executors."""
        for executor in dict.fromkeys(self._of[action.new[0]].values()):
            executor.move(action)

    def drop(self, instance: InstanceId) -> None:
        """Free what the instance holds, wherever it ran; those that do not know it do nothing."""
        for executor in list(self._made.values()):
            executor.drop(instance)

    def unload(self, key: PlanKey) -> None:
        """Free a plan that no instance uses, and the executors that no plan needs while others have one."""
        executors = self._of.get(key)
        if executors is not None:
            for executor in self._all_of[key]:
                executor.unload(key)
            with self._lock:
                del self._of[key], self._all_of[key], self._bound[key]
            self._close_unused()

    def drop_idle(self) -> None:
        """Free what is kept for plans that are not loaded."""
        for executor in list(self._made.values()):
            executor.drop_idle()

    def lost(self) -> bool:
        """Whether the device of one of them is lost to this process."""
        return self._lost or any(
            isinstance(one, DeviceRunner) and one.lost() for one in list(self._made.values())
        )

    def close(self) -> None:
        with self._lock:
            executors = list(self._made.values())
            self._made.clear()
            self._of.clear()
            self._all_of.clear()
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
                executor.store = self._store
                executor.partner = self._made.__getitem__
        return executor

    def _close_unused(self) -> None:
        """Close executors without a plan, unless none has one: then the last keeps what it may need again."""
        with self._lock:
            users = {id(executor) for of in self._all_of.values() for executor in of}
            unused = [
                executor
                for name, executor in self._made.items()
                if users and id(executor) not in users and not self._asked[name]
            ]
            for executor in unused:
                del self._made[executor.name]
        for executor in unused:
            executor.close()


def _require_shared_slots(bound: BoundPlan, executors: Mapping[str, Executor]) -> None:
    """Raises:
    ExecutorError: executors of one plan keep tensors where the others cannot read them, or know nothing of
        memory nodes and of several ways to run a block.
    """
    several = len(bound.variants) > len(bound.combined) or any(one.memory for one in bound.plan.resources)
    for name, executor in executors.items():
        if isinstance(executor, HostExecutor) and executor.passes_slots and not several:
            continue
        if several and not (isinstance(executor, HostExecutor) and executor.knows_nodes):
            raise ExecutorError(
                f"executor {name!r} knows no memory nodes, and one way to run each block",
                remedy="use an executor on sessions: onnx or openvino",
            )
        if not several and len(executors) > 1:
            raise ExecutorError(
                f"executor {name!r} cannot share a plan with {', '.join(executors.keys() - {name})}",
                remedy="use one executor for all of the plan's blocks",
            )

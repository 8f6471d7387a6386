"""`torch_cpu`: lowered models on the processor, on the same buffers and with the same waits as on CUDA."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from stageloom.edge_agent.executor.base import Rows, StepFeeds, StepResult, bucket_of, check_feeds, padded
from stageloom.edge_agent.executor.cuda.recipe import BoundProgram, BufferRole
from stageloom.edge_agent.executor.host import HostExecutor
from stageloom.edge_agent.executor.torch.kernels import Lap
from stageloom.edge_agent.executor.torch.plans import LoadedPlan, TorchPlans
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import (
    InstanceId,
    MoveInstance,
    PlanKey,
    ProgramKey,
    Step,
    StepMember,
)
from stageloom.shared.ids import StepId, TensorId
from stageloom.shared.plan import Member


@dataclass(slots=True)
class Border:
    """Where an instance's tensors lie: in the buffers of this plan, behind this member's block."""

    plan: PlanKey
    member: Member
    rows: int


class TorchCpuExecutor(TorchPlans, HostExecutor[LoadedPlan, BoundProgram, Border]):
    """Kernels take the first alternative of each unit: results must not depend on a measurement here.

    Programs are bound to their buffers. What another executor of the plan hands over is copied into them, and
    what it takes is copied out: an instance may move to another plan, and its buffers are then written again.
    """

    name = "torch_cpu"
    passes_slots = True
    precisions = (Precision.FP32, Precision.FP16)

    def __init__(self, *, channels_last: bool = False) -> None:
        HostExecutor.__init__(self)
        TorchPlans.__init__(self, torch.device("cpu"), channels_last=channels_last)
        self._moves = PendingMoves(self._carry_out)

    # Plans and programs

    def _check_options(self, bound: BoundPlan) -> None:
        torch.set_num_threads(self._options(bound).intra_op_threads)

    def _build(self, key: ProgramKey) -> BoundProgram:
        plan = self._plans[key.plan]
        with torch.inference_mode():
            return plan.bind(plan.recipe_for(key))

    def _alone(self, step: Step, member: StepMember) -> BoundProgram:
        return self._plans[step.program.plan].alone(step, member)

    def unload(self, key: PlanKey) -> None:
        """As the bases; moves that nothing holds up any more are carried out first."""
        self._between_steps()
        HostExecutor.unload(self, key)
        TorchPlans.unload(self, key)

    # Steps

    def issue(self, step: Step, feeds: StepFeeds) -> None:
        """Take the step in; it runs in `wait`.

        Raises:
            ExecutorError: an input is missing or has the wrong shape or type.
        """
        check_feeds(self._plans[step.program.plan].bound, step, feeds)
        super().issue(step, feeds)

    def wait(self, step: StepId) -> StepResult:
        """Run the step on this thread; see the base."""
        with torch.inference_mode():
            return super().wait(step)

    def _between_steps(self) -> None:
        self._moves.advance(self.order.running)

    def _run_item(self, program: BoundProgram, index: int, slots: Mapping[int, Border]) -> None:
        with torch.inference_mode():  # a mode of the thread, which may be the pool's
            for call in program.by_item[index]:
                for launch in program.launches[call]:
                    launch()

    def _arrive(self, step: Step, member: StepMember, rows: Rows) -> Border:
        """Copy the tasks' rows to the input buffers."""
        plan, bucket = self._plans[step.program.plan], bucket_of(step, member)
        graph = plan.bound.models[member.member.model].graph
        filled = padded(rows, bucket)
        for tensor in graph.inputs:
            buffer = plan.buffers.at(BufferRole.LANDING, member.member, tensor, bucket)
            arrays = [row[graph.tensors[tensor].name] for row in filled]
            targets = [buffer] if bucket == 1 else [buffer[row : row + 1] for row in range(bucket)]
            for target, array in zip(targets, arrays, strict=True):
                target.copy_(_as_tensor(array))
        return Border(step.program.plan, member.member, bucket)

    def _gather(self, step: Step, member: StepMember, feeds: StepFeeds) -> Border:
        """As the base; what another executor kept is copied to the slot's buffers."""
        slot: object = super()._gather(step, member, feeds)
        if isinstance(slot, Border):
            return slot
        plan, bucket = self._plans[step.program.plan], bucket_of(step, member)
        for tensor, array in cast("Mapping[TensorId, np.ndarray]", slot).items():
            target = plan.buffers.at(BufferRole.HOME, member.member, tensor, bucket)
            target.copy_(_as_tensor(array))
        return Border(step.program.plan, member.member, bucket)

    def give_away(self, instance: InstanceId) -> object:
        """The instance's tensors behind its last block here, by tensor."""
        self._between_steps()  # it may have moved
        slot: object = super().give_away(instance)
        return self._taken_out(slot) if isinstance(slot, Border) else slot

    def _taken_out(self, slot: Border) -> dict[TensorId, np.ndarray]:
        """Copies of what lies at a border, in the graph's types."""
        plan = self._plans[slot.plan]
        model = plan.bound.models[slot.member.model]
        return {
            tensor: _as_array(
                plan.buffers.at(BufferRole.HOME, slot.member, tensor, slot.rows),
                model.graph.tensors[tensor].dtype,
            )
            for tensor in model.blocks[slot.member.block].live_out
        }

    def _settle(
        self, step: Step, member: StepMember, slot: Border, *, wanted: bool
    ) -> Mapping[str, np.ndarray]:
        """Copies in the graph's types: the buffers serve the next instance soon."""
        slot.plan, slot.member, slot.rows = step.program.plan, member.member, bucket_of(step, member)
        if not wanted:
            return {}
        plan = self._plans[step.program.plan]
        model = plan.bound.models[member.member.model]
        crossing = ((t, model.graph.tensors[t]) for t in model.blocks[member.member.block].live_out)
        return {
            described.name: _as_array(self._crossing(plan, member, tensor), described.dtype)
            for tensor, described in crossing
        }

    def move(self, action: MoveInstance) -> None:
        """Copy the instance's tensors over once the steps that it follows have ended."""
        self._moves.add(action, self.order.running)

    def _carry_out(self, action: MoveInstance) -> None:
        slot = self._slots.get(action.instance)
        if not isinstance(slot, Border):
            return  # another executor has it, or it lies in no buffer
        (old_key, old), (new_key, new) = action.old, action.new
        if not self._plans[new_key].runs(new.model):
            self._slots[action.instance] = cast(Border, self._taken_out(slot))
            return
        models = self._plans[old_key].bound.models[old.model], self._plans[new_key].bound.models[new.model]
        rows = min(model.plan.batch for model in models)
        with torch.inference_mode():
            for tensor in models[0].blocks[old.block].live_in:
                target, source = self._slots_of(action, tensor, rows)
                target.copy_(source)
        slot.plan, slot.member = new_key, new._replace(block=new.block - 1)

    def _lap(self) -> Lap:
        def lap(launch: Callable[[], object], _: bool) -> float:
            began_s = time.perf_counter()
            launch()
            return time.perf_counter() - began_s

        return lap


def _as_tensor(array: np.ndarray) -> Tensor:
    """The array's own memory, read and never written."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _as_array(tensor: Tensor, dtype: str) -> np.ndarray:
    own = tensor.detach().contiguous(memory_format=torch.contiguous_format).numpy()
    return own.astype(dtype, copy=True, order="C")


class PendingMoves:
    """Instances that go over to a new plan, in issue order until they are carried out. Thread-safe.

    A move comes in issue order while steps that it must follow may still run, and before steps that touch
    the same slots; those name the former among their own. So a move is carried out by the thread that first
    finds, at the begin or the end of a step, that all it waits for has ended.
    """

    def __init__(self, carry_out: Callable[[MoveInstance], None]) -> None:
        self._carry_out = carry_out
        self._pending: list[MoveInstance] = []
        self._lock = threading.Lock()

    def add(self, action: MoveInstance, running: Callable[[StepId], bool]) -> None:
        """Take in a move; it happens at once if nothing is in its way."""
        with self._lock:
            self._pending.append(action)
        self.advance(running)

    def advance(self, running: Callable[[StepId], bool]) -> None:
        """Carry out the moves whose steps have ended; an instance that moves twice does so in order."""
        if not self._pending:
            return
        with self._lock:
            waiting: list[MoveInstance] = []
            held = set()
            for action in self._pending:
                if action.instance in held or any(running(step) for step in action.after):
                    held.add(action.instance)
                    waiting.append(action)
                else:
                    self._carry_out(action)
            self._pending = waiting

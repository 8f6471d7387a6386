"""`torch_cpu`: lowered models on the processor, on the same buffers and with the same waits as on CUDA."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stageloom.edge_agent.executor.base import (
    GroupTime,
    OperatorTime,
    Rows,
    StepFeeds,
    StepResult,
    TimingRequest,
    bucket_of,
    check_feeds,
    lost_tensors,
    padded,
)
from stageloom.edge_agent.executor.cuda.recipe import BoundProgram, BufferRole
from stageloom.edge_agent.executor.host import HostExecutor
from stageloom.edge_agent.executor.slot_store import HOST
from stageloom.edge_agent.executor.torch.kernels import Lap
from stageloom.edge_agent.executor.torch.plans import LoadedPlan, TorchPlans
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.shared.artifact import Artifact
from stageloom.shared.engine.steps import (
    InstanceId,
    MoveInstance,
    PlanKey,
    ProgramKey,
    Step,
    StepMember,
)
from stageloom.shared.graph import Graph
from stageloom.shared.ids import StepId, TensorId
from stageloom.shared.plan import Member

_computing = threading.local()


def compute_on(threads: int) -> None:
    """Have what the calling thread computes from now on run on so many threads.

    Torch keeps the number by calling thread: plans of other numbers may be loaded, and run in other lanes.
    """
    if getattr(_computing, "threads", 0) != threads:
        torch.get_num_threads()  # or a thread that is new to torch takes the process's number over this one
        torch.set_num_threads(threads)
        _computing.threads = threads


@dataclass(slots=True)
class Border:
    """Where an instance's tensors lie: in the buffers of this plan, behind this member's block."""

    plan: PlanKey
    member: Member
    rows: int


class TorchCpuExecutor(TorchPlans, HostExecutor[LoadedPlan, BoundProgram, Border]):
    """Kernels take the first alternative of each unit: results must not depend on a measurement here.

    Programs are bound to their buffers. Where other executors share a plan, what a block reads is copied into
    them, and what it makes out of them.
    """

    name = "torch_cpu"
    passes_slots = True
    splits = True
    precisions = (Precision.FP32, Precision.FP16)

    def __init__(self, *, channels_last: bool = False) -> None:
        HostExecutor.__init__(self)
        TorchPlans.__init__(self, torch.device("cpu"), channels_last=channels_last)
        self._moves = PendingMoves(self._carry_out)

    # Plans and programs

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

    def _body(
        self, step: Step, program: BoundProgram, slots: Mapping[int, Border], groups: list[GroupTime]
    ) -> Callable[[int], None]:
        run = super()._body(step, program, slots, groups)
        bound = self._plans[step.program.plan].bound
        threads = bound.executor_of(step.program.combined, step.program.variant).intra_op_threads

        def run_on_threads(index: int) -> None:
            compute_on(threads)
            run(index)

        return run_on_threads

    def time_operators(
        self, artifact: Artifact, request: TimingRequest, idle: Callable[[], bool]
    ) -> tuple[OperatorTime, ...]:
        """As the base, on as many threads as are asked for."""
        compute_on(request.intra_op_threads)
        return super().time_operators(artifact, request, idle)

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

    def _in_store(self, plan: PlanKey) -> bool:
        """Whether other executors run blocks of the plan: then tensors pass through the store."""
        return len(self._plans[plan].bound.executor_names) > 1

    def _gather(self, step: Step, member: StepMember, feeds: StepFeeds) -> Border:
        """As the base; where others share the plan what the block reads is copied to its buffers."""
        if not self._in_store(step.program.plan):
            return super()._gather(step, member, feeds)
        plan, bucket = self._plans[step.program.plan], bucket_of(step, member)
        model = plan.bound.models[member.member.model]
        if not member.member.block:
            border = self._arrive(step, member, feeds[member.instance])
            landed = {
                tensor: plan.buffers.at(BufferRole.LANDING, member.member, tensor, bucket)
                for tensor in model.graph.inputs
            }
            self._store_copies(member.instance, model.graph, landed)
            return border
        try:
            values = self.store.read(member.instance, HOST, model.blocks[member.member.block].reads)
        except KeyError:
            raise lost_tensors(member.instance) from None
        for tensor, array in values.items():
            plan.buffers.at(BufferRole.HOME, member.member, tensor, bucket).copy_(_as_tensor(array))
        return Border(step.program.plan, member.member, bucket)

    def _store_copies(self, instance: InstanceId, graph: Graph, found: Mapping[TensorId, Tensor]) -> None:
        """Copies in the graph's types."""
        copies = {tensor: _as_array(one, graph.tensors[tensor].dtype) for tensor, one in found.items()}
        self.store.put(instance, HOST, copies)

    def _keep(self, instance: InstanceId, slot: Border) -> None:
        if not self._in_store(slot.plan):
            super()._keep(instance, slot)

    def drop(self, instance: InstanceId) -> None:
        """Let go of the instance's tensors."""
        super().drop(instance)
        self.store.drop(instance)

    def _settle(
        self, step: Step, member: StepMember, slot: Border, *, wanted: bool
    ) -> Mapping[str, np.ndarray]:
        """Copies in the graph's types: the buffers serve the next instance soon."""
        slot.plan, slot.member, slot.rows = step.program.plan, member.member, bucket_of(step, member)
        plan, tasks = self._plans[step.program.plan], len(member.tasks)
        model = plan.bound.models[member.member.model]
        block = model.blocks[member.member.block]
        if self._in_store(step.program.plan):
            # Programs of other executors take whole buckets, too.
            made = {tensor: self._crossing(plan, member, tensor, slot.rows) for tensor in block.makes}
            self._store_copies(member.instance, model.graph, made)
            self.store.keep(member.instance, block.live_out)
            crossing = self.store.peek(member.instance, block.live_out) if wanted else {}
            return {
                model.graph.tensors[tensor].name: array if model.plan.batch == 1 else array[:tasks]
                for tensor, array in crossing.items()
            }
        if not wanted:
            return {}
        return {
            model.graph.tensors[tensor].name: _as_array(
                self._crossing(plan, member, tensor, tasks), model.graph.tensors[tensor].dtype
            )
            for tensor in block.live_out
        }

    def move(self, action: MoveInstance) -> None:
        """Copy the instance's tensors over once the steps that it follows have ended."""
        self._moves.add(action, self.order.running)

    def _carry_out(self, action: MoveInstance) -> None:
        slot = self._slots.get(action.instance)
        if slot is None:
            return  # it lies in the store, or nowhere any more
        (old_key, old), (new_key, new) = action.old, action.new
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
    """The array's own memory, read and never written; of what torch cannot view a copy.

    That is read-only memory, strides that are negative or no multiple of an element, another byte order.
    """
    steps = all(step >= 0 and not step % array.itemsize for step in array.strides)
    if array.flags.behaved and array.dtype.isnative and steps:
        return torch.from_numpy(array)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


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

"""`torch_cpu`: the lowered models on the processor, on the same buffers and with the same waits as on CUDA.

A step runs inside `wait`, on the lane's own thread; the streams beside its first one run on a pool.
"""

import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from stageloom.edge_agent.executor.base import (
    BlockTap,
    GroupTime,
    Rows,
    StepFeeds,
    StepResult,
    bucket_of,
    check_feeds,
    one_line,
    split_rows,
)
from stageloom.edge_agent.executor.cuda.recipe import NO_GROUP, BoundProgram, BufferRole
from stageloom.edge_agent.executor.threads import MAX_THREADS, StepOrder, StreamPool
from stageloom.edge_agent.executor.torch.kernels import Lap
from stageloom.edge_agent.executor.torch.plans import LoadedPlan, TorchPlans
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, MoveInstance, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import StepId


class TorchCpuExecutor(TorchPlans):
    """Kernels take the first alternative of each unit: results must not depend on a measurement here."""

    name = "torch_cpu"
    precisions = (Precision.FP32, Precision.FP16)

    def __init__(self, *, channels_last: bool = False) -> None:
        super().__init__(torch.device("cpu"), channels_last=channels_last)
        self.tracing = False
        self.tap: BlockTap | None = None
        self.pause: Callable[[], None] | None = None
        self._order = StepOrder()
        self._pool = StreamPool()
        self._programs: dict[ProgramKey, BoundProgram] = {}
        self._issued: dict[StepId, tuple[Step, StepFeeds]] = {}
        self._live: set[InstanceId] = set()  # whose slots hold what the last step made
        self._moves = PendingMoves(self._carry_out)

    def _check_options(self, bound: BoundPlan) -> None:
        torch.set_num_threads(bound.plan.executor.intra_op_threads)

    def prepare(self, program: ProgramKey) -> None:
        """Bind the program and have a thread for each of its streams.

        Raises:
            ExecutorError: the program does not fit into the plan's memory.
        """
        if program in self._programs:
            return
        plan = self._plans[program.plan]
        with torch.inference_mode():
            built = plan.bind(plan.recipe_for(program))
        self._pool.grow(plan.bound.plan.lanes * min(built.threading.threads - 1, MAX_THREADS))
        self._programs[program] = built

    def issue(self, step: Step, feeds: StepFeeds) -> None:
        """Take the step in; it runs in `wait`.

        Raises:
            ExecutorError: an input is missing or has the wrong shape or type.
        """
        check_feeds(self._plans[step.program.plan].bound, step, feeds)
        self._order.issue(step)
        self._issued[step.id] = (step, feeds)

    def wait(self, step: StepId) -> StepResult:
        """Run the step on this thread.

        Raises:
            ExecutorError: a kernel failed, or an instance lacks a tensor because an earlier step failed.
        """
        issued, feeds = self._issued.pop(step)
        self._order.begin(issued)
        self._moves.advance(self._order.running)
        self._pool.begin()
        started_s = time.monotonic()
        try:
            with torch.inference_mode():
                for member in issued.members:
                    if member.member.block and member.instance not in self._live:
                        raise ExecutorError(f"instance {member.instance} lost its tensors in a failed step")
                groups = self._run(issued, feeds)
                plan = self._plans[issued.program.plan]
                outputs = {m.instance: self._leave(plan, m) for m in issued.members if m.last}
            for member in issued.members:
                (self._live.discard if member.last else self._live.add)(member.instance)
        except Exception as error:  # a kernel's: torch raises many kinds
            self._live.difference_update(member.instance for member in issued.members)
            if isinstance(error, ExecutorError):
                raise
            raise ExecutorError(f"step {step} failed: {one_line(error)}") from error
        finally:
            self._pool.end()
            self._order.end(issued)
            self._moves.advance(self._order.running)
        return StepResult(started_s, time.monotonic(), outputs, tuple(groups))

    def _run(self, step: Step, feeds: StepFeeds) -> list[GroupTime]:
        plan = self._plans[step.program.plan]
        groups: list[GroupTime] = []
        for member in step.members:
            if member.member.block == 0:
                self._arrive(plan, member, bucket_of(step, member), feeds[member.instance])
        if step.fallback:
            for member in step.members:
                alone = plan.alone(step, member)
                body = self._body(alone, groups)
                for item in range(len(alone.recipe.items)):
                    body(item)
                self._show(plan, member)
            return groups
        program = self._programs[step.program]
        self._pool.run(program.threading, self._body(program, groups))
        for member in step.members:
            self._show(plan, member)
        return groups

    def _body(self, program: BoundProgram, groups: list[GroupTime]) -> Callable[[int], None]:
        tracing, pause = self.tracing, self.pause

        def item(index: int) -> None:
            group = program.recipe.groups[index]
            if pause is not None and group != NO_GROUP:
                pause()
            started_s = time.monotonic() if tracing else 0.0
            with torch.inference_mode():
                for call in program.by_item[index]:
                    for launch in program.launches[call]:
                        launch()
            if tracing and group != NO_GROUP:
                stream = program.recipe.items[index].stream
                groups.append(GroupTime(group, stream, started_s, time.monotonic()))

        return item

    @staticmethod
    def _arrive(plan: LoadedPlan, member: StepMember, bucket: int, rows: Rows) -> None:
        """Copy the tasks' rows to the input buffers; padding repeats the first row."""
        graph = plan.bound.models[member.member.model].graph
        filled = [*rows, *[rows[0]] * (bucket - len(rows))]
        for tensor in graph.inputs:
            buffer = plan.buffers.at(BufferRole.LANDING, member.member, tensor, bucket)
            arrays = [row[graph.tensors[tensor].name] for row in filled]
            targets = [buffer] if bucket == 1 else [buffer[row : row + 1] for row in range(bucket)]
            for target, array in zip(targets, arrays, strict=True):
                target.copy_(_as_tensor(array))

    def _show(self, plan: LoadedPlan, member: StepMember) -> None:
        if self.tap is not None:
            self.tap(member.instance, member.member, self._arrays(plan, member))

    def _leave(self, plan: LoadedPlan, member: StepMember) -> Rows:
        model = plan.bound.models[member.member.model]
        return split_rows(model, len(member.tasks), self._arrays(plan, member))

    def _arrays(self, plan: LoadedPlan, member: StepMember) -> dict[str, np.ndarray]:
        """Copies in the graph's types: the buffers serve the next instance soon."""
        model = plan.bound.models[member.member.model]
        crossing = ((t, model.graph.tensors[t]) for t in model.blocks[member.member.block].live_out)
        return {
            described.name: _as_array(self._crossing(plan, member, tensor), described.dtype)
            for tensor, described in crossing
        }

    def move(self, action: MoveInstance) -> None:
        """Copy the instance's tensors over once the steps that it follows have ended."""
        self._moves.add(action, self._order.running)

    def _carry_out(self, action: MoveInstance) -> None:
        (old_key, old), (new_key, new) = action.old, action.new
        models = self._plans[old_key].bound.models[old.model], self._plans[new_key].bound.models[new.model]
        rows = min(model.plan.batch for model in models)
        with torch.inference_mode():
            for tensor in models[0].blocks[old.block].live_in:
                target, source = self._slots(action, tensor, rows)
                target.copy_(source)

    def drop(self, instance: InstanceId) -> None:
        """Nothing of the instance is useful any more; its slots belong to the next one."""
        self._live.discard(instance)

    def unload(self, key: PlanKey) -> None:
        """As the base, with the plan's programs."""
        self._moves.advance(self._order.running)
        for program in [program for program in list(self._programs) if program.plan == key]:
            del self._programs[program]
        super().unload(key)

    def close(self) -> None:
        """Free everything and end the pool."""
        for key in list(self._plans):
            self.unload(key)
        self._live.clear()
        self._pool.close()

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

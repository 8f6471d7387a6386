"""`torch_cpu`: the lowered models on the processor, on the same buffers and with the same waits as on CUDA.

A step runs inside `wait`, on the lane's own thread; the streams beside its first one run on a pool.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from stageloom.edge_agent.executor.base import GroupTime, Rows, StepResult
from stageloom.edge_agent.executor.on_device.feeds import bucket_of, check_feeds
from stageloom.edge_agent.executor.order import StepOrder
from stageloom.edge_agent.executor.streams import MAX_THREADS, StreamPool
from stageloom.edge_agent.executor.torch.executor import TorchExecutor, landing_rows, one_line, split_rows
from stageloom.edge_agent.executor.torch.loaded import LoadedPlan
from stageloom.edge_agent.executor.torch.moves import PendingMoves
from stageloom.edge_agent.executor.torch.operator_times import Lap
from stageloom.edge_agent.executor.torch.program import Program
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, MoveInstance, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import StepId


class TorchCpuExecutor(TorchExecutor):
    """Kernels take the first alternative of each unit: results must not depend on a measurement here."""

    name = "torch_cpu"
    precisions = (Precision.FP32, Precision.FP16)

    def __init__(self, *, channels_last: bool = False) -> None:
        super().__init__(torch.device("cpu"), channels_last=channels_last)
        self._order = StepOrder()
        self._pool = StreamPool()
        self._programs: dict[ProgramKey, Program] = {}
        self._issued: dict[StepId, tuple[Step, Mapping[InstanceId, Rows]]] = {}
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

    def issue(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
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
                self._check_members(issued)
                groups = self._run(issued, feeds)
                plan = self._plans[issued.program.plan]
                outputs = {m.instance: self._leave(plan, issued, m) for m in issued.members if m.last}
            self._advance(issued)
        except Exception as error:  # a kernel's: torch raises many kinds
            self._lose(issued)
            if isinstance(error, ExecutorError):
                raise
            raise ExecutorError(f"step {step} failed: {one_line(error)}") from error
        finally:
            self._pool.end()
            self._order.end(issued)
            self._moves.advance(self._order.running)
        return StepResult(started_s, time.monotonic(), outputs, tuple(groups))

    def _run(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> list[GroupTime]:
        plan = self._plans[step.program.plan]
        groups: list[GroupTime] = []
        for member in step.members:
            if member.member.block == 0:
                self._arrive(plan, member, bucket_of(step, member), feeds[member.instance])
        if step.fallback:
            for member in step.members:
                program = plan.alone(step, member)
                body = self._body(program, groups)
                for item in range(len(program.recipe.items)):
                    body(item)
                self._show(plan, step, member)
            return groups
        program = self._programs[step.program]
        self._pool.run(program.threading, self._body(program, groups))
        for member in step.members:
            self._show(plan, step, member)
        return groups

    def _body(self, program: Program, groups: list[GroupTime]) -> Callable[[int], None]:
        tracing, pause = self.tracing, self.pause

        def item(index: int) -> None:
            ours = index not in program.groups
            if pause is not None and not ours:
                pause()
            started_s = time.monotonic() if tracing else 0.0
            with torch.inference_mode():
                for call in program.by_item[index]:
                    for launch in program.launches[call]:
                        launch()
            if tracing and not ours:
                stream = program.recipe.items[index].stream
                groups.append(GroupTime(index - 1, stream, started_s, time.monotonic()))

        return item

    @staticmethod
    def _arrive(plan: LoadedPlan, member: StepMember, bucket: int, rows: Rows) -> None:
        for buffer, arrays in landing_rows(plan, member, bucket, rows):
            if len(arrays) == 1:
                buffer.copy_(_as_tensor(arrays[0]))
            else:
                for row, array in enumerate(arrays):
                    buffer[row : row + 1].copy_(_as_tensor(array))

    def _show(self, plan: LoadedPlan, step: Step, member: StepMember) -> None:
        if self.tap is not None:
            self.tap(member.instance, member.member, self._arrays(plan, step, member))

    def _leave(self, plan: LoadedPlan, step: Step, member: StepMember) -> Rows:
        model = plan.bound.models[member.member.model]
        return split_rows(model, len(member.tasks), self._arrays(plan, step, member))

    def _arrays(self, plan: LoadedPlan, step: Step, member: StepMember) -> dict[str, np.ndarray]:
        """Copies in the graph's types: the buffers serve the next instance soon."""
        graph = plan.bound.models[member.member.model].graph
        dtypes = {tensor.name: tensor.dtype for tensor in graph.tensors}
        crossing = self._crossing(plan, step, member)
        return {name: _as_array(tensor, dtypes[name]) for name, tensor in crossing.items()}

    def move(self, action: MoveInstance) -> None:
        """Copy the instance's tensors over once the steps that it follows have ended."""
        self._moves.add(action, self._order.running)

    def _carry_out(self, action: MoveInstance) -> None:
        with torch.inference_mode():
            for target, source in self._copies_of(action):
                target.copy_(source)

    def unload(self, key: PlanKey) -> None:
        """As the base, with the plan's programs."""
        self._moves.advance(self._order.running)
        for program in [program for program in list(self._programs) if program.plan == key]:
            del self._programs[program]
        super().unload(key)

    def close(self) -> None:
        """Free everything and end the pool."""
        super().close()
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

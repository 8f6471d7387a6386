"""What both torch executors share: loading, what instances hold, tensors in and out.

A step's members read and write the plan's border buffers; an instance is nothing but the right to what lies
in its slots. So there is nothing to free when one is dropped, and it only has to be remembered whose slots
hold something useful.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from stageloom.edge_agent.executor.base import BlockTap, OperatorTime, Rows, StepResult, TimingRequest
from stageloom.edge_agent.executor.torch.kernels import KernelChoices
from stageloom.edge_agent.executor.torch.loaded import LoadedPlan
from stageloom.edge_agent.executor.torch.operator_times import Lap, time_units
from stageloom.edge_agent.executor.torch.recipe import Role
from stageloom.edge_agent.executor.torch.stated import stated_plan_bytes, stated_weight_bytes
from stageloom.edge_agent.executor.torch.weights import SharedModels
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.edge_agent.lowering.model import ModelLowering
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.engine.steps import InstanceId, MoveInstance, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import ExecutorError, StageloomError
from stageloom.shared.ids import Digest, StepId, TensorId

log = logging.getLogger(__name__)


class TorchExecutor:
    """Base of the executors that run lowered models; see docs/executors.md."""

    name = ""
    precisions: tuple[Precision, ...] = ()

    def __init__(self, device: torch.device, *, channels_last: bool) -> None:
        self.tracing = False
        self.tap: BlockTap | None = None
        self.pause: Callable[[], None] | None = None
        self.choices = KernelChoices()
        self._device = device
        self._channels_last = channels_last
        self._models = SharedModels(device, channels_last=channels_last)
        self._plans: dict[PlanKey, LoadedPlan] = {}
        self._live: set[InstanceId] = set()  # whose slots hold what the last step made

    # Plans

    def stated_bytes(self, bound: BoundPlan, *, alone: bool = False) -> int:
        """Weights that no loaded plan has, and the plan's own borders and arenas.

        Raises:
            ExecutorError: the precision is unknown.
        """
        self._precision(bound)
        weights = stated_weight_bytes(bound)
        missing = sum(size for key, size in weights.items() if alone or key not in self._models)
        return missing + stated_plan_bytes(bound)

    @property
    def held_bytes(self) -> int:
        """Weights and buffers of the loaded plans as they are on the device."""
        return self._models.nbytes + sum(plan.buffers.nbytes for plan in list(self._plans.values()))

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """Lower the models, allocate every buffer, and bind what runs members one by one.

        Raises:
            ExecutorError: an option is unknown, an artifact is missing, or a model cannot be lowered.
        """
        precision = self._precision(bound)
        self._check_options(bound)
        if missing := {m.plan.artifact for m in bound.models} - artifacts.keys():
            raise ExecutorError(f"artifact {min(missing)[:12]} is not here", remedy="fetch it first")
        try:
            lowerings = [self._models.hold(key, artifacts[m.plan.artifact], precision) for m in bound.models]
            plan = LoadedPlan(key, bound, lowerings, self.choices, self._device)
        except BaseException as error:
            self._models.release(key)
            if isinstance(error, RuntimeError):  # torch's own, out of memory for one
                raise ExecutorError(f"the plan cannot be loaded: {one_line(error)}") from error
            raise
        self._report_foreign(bound, lowerings)
        self._plans[key] = plan

    def _precision(self, bound: BoundPlan) -> Precision:
        wanted = bound.plan.executor.precision
        for known in self.precisions:
            if known.value == wanted:
                return known
        raise ExecutorError(
            f"the {self.name} executor does not know the precision {wanted!r}",
            remedy=f"use one of {', '.join(one.value for one in self.precisions)}",
        )

    def _check_options(self, bound: BoundPlan) -> None:
        """Refuse what this executor cannot honour."""

    def _report_foreign(self, bound: BoundPlan, lowerings: Sequence[ModelLowering]) -> None:
        for model, lowering in zip(bound.models, lowerings, strict=True):
            for one in lowering.at_batch(model.buckets[-1]).foreign:
                log.warning(
                    "model %s: operator %d (%s) runs in onnxruntime: %s",
                    model.plan.name,
                    one.op,
                    one.kind,
                    one.reason,
                )

    def prepare(self, program: ProgramKey) -> None:
        """Build what `issue` needs; see the executors."""
        raise NotImplementedError

    def issue(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
        """Start a step; see the executors."""
        raise NotImplementedError

    def wait(self, step: StepId) -> StepResult:
        """Block until an issued step has ended; see the executors."""
        raise NotImplementedError

    def move(self, action: MoveInstance) -> None:
        """Carry out a move in issue order; see the executors."""
        raise NotImplementedError

    def unload(self, key: PlanKey) -> None:
        """Free a plan's programs and buffers, and the weights that no other plan uses."""
        self._plans.pop(key, None)
        self._models.release(key)

    def drop(self, instance: InstanceId) -> None:
        """Nothing of the instance is useful any more; its slots belong to the next one."""
        self._live.discard(instance)

    def drop_idle(self) -> None:
        """Nothing is kept for plans that are not loaded."""

    def close(self) -> None:
        """Free everything."""
        for key in list(self._plans):
            self.unload(key)
        self._live.clear()

    def time_operators(
        self, artifact: Artifact, request: TimingRequest, idle: Callable[[], bool]
    ) -> tuple[OperatorTime, ...]:
        """Time of each operator run alone in float32; see `operator_times`. [num_operators]

        Raises:
            ExecutorError: an operator cannot run alone.
        """
        lowering = ModelLowering(
            artifact, device=self._device, precision=Precision.FP32, channels_last=self._channels_last
        )
        return time_units(lowering, request, idle, self._lap())

    def _lap(self) -> Lap:
        """How to time one launch."""
        raise NotImplementedError

    # What instances hold

    def _check_members(self, step: Step) -> None:
        """Raises:
        ExecutorError: the instance of a member lost its tensors.
        """
        for member in step.members:
            if member.member.block and member.instance not in self._live:
                raise ExecutorError(f"instance {member.instance} lost its tensors in a failed step")

    def _advance(self, step: Step) -> None:
        """The step's members have moved on by one block."""
        for member in step.members:
            if member.last:
                self._live.discard(member.instance)
            else:
                self._live.add(member.instance)

    def _lose(self, step: Step) -> None:
        """The step failed: its members' slots hold nothing useful."""
        self._live.difference_update(member.instance for member in step.members)

    # Tensors in and out

    def _crossing(self, plan: LoadedPlan, step: Step, member: StepMember) -> dict[str, Tensor]:
        """The border behind a member's block as the tasks' rows, by name: views of buffers on the device."""
        model = plan.bound.models[member.member.model]
        block = model.blocks[member.member.block]
        role = Role.ANSWER if member.last else Role.HOME
        rows = len(member.tasks)
        return {
            model.graph.tensors[t].name: plan.buffers.at(role, member.member, t, rows) for t in block.live_out
        }

    def _live_at(self, plan: LoadedPlan, action: MoveInstance) -> tuple[TensorId, ...]:
        member = action.old[1]
        return plan.bound.models[member.model].blocks[member.block].live_in

    def _copies_of(self, action: MoveInstance) -> list[tuple[Tensor, Tensor]]:
        """(target, source) of every tensor that goes over to the new plan."""
        old, new = self._plans[action.old[0]], self._plans[action.new[0]]
        old_model = old.bound.models[action.old[1].model]
        new_model = new.bound.models[action.new[1].model]
        rows = min(old_model.plan.batch, new_model.plan.batch)
        found = []
        for tensor in self._live_at(old, action):
            source = old.buffers.at(Role.HOME, action.old[1], tensor, rows)
            target = new.buffers.at(Role.HOME, action.new[1], tensor, rows)
            found.append((target, source))
        return found


def landing_rows(
    plan: LoadedPlan, member: StepMember, bucket: int, rows: Rows
) -> list[tuple[Tensor, Sequence[np.ndarray]]]:
    """Per input its buffer and the arrays that fill it, row by row; padding repeats the first row.

    It repeats real data, since zeros can be slow (denormals) or outside what a model accepts.
    """
    graph = plan.bound.models[member.member.model].graph
    filled = [*rows, *[rows[0]] * (bucket - len(rows))]
    return [
        (
            plan.buffers.at(Role.LANDING, member.member, tensor, bucket),
            [row[graph.tensors[tensor].name] for row in filled],
        )
        for tensor in graph.inputs
    ]


def split_rows(model: BoundModel, tasks: int, arrays: Mapping[str, np.ndarray]) -> Rows:
    """Per task its outputs, each with the graph's batch-1 shape."""
    if model.plan.batch == 1:
        return [dict(arrays)] * tasks
    return [{name: array[row : row + 1] for name, array in arrays.items()} for row in range(tasks)]


def one_line(error: BaseException) -> str:
    """A library's error as one line."""
    if isinstance(error, StageloomError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

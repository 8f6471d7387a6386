"""Plans on lowered models: what `torch_cpu` and `torch_cuda` share."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import torch
from torch import Tensor

from stageloom.edge_agent.executor.base import (
    OperatorTime,
    SharedTable,
    TimingRequest,
    bucket_of,
    one_line,
    require_artifacts,
    require_options,
    require_pinned,
    require_whole,
    sole_options,
)
from stageloom.edge_agent.executor.cuda.recipe import BufferRole, arenas_for, recipes_alone
from stageloom.edge_agent.executor.cuda.streams import Nature, streams_per_lane
from stageloom.edge_agent.executor.onnx.split_model import split_artifact
from stageloom.edge_agent.executor.torch.kernels import KernelChoices, KernelSite, Lap, time_units
from stageloom.edge_agent.executor.torch.memory import (
    BufferSource,
    PlanBuffers,
    TorchProgram,
    bind_recipe,
    models_of,
    stated_plan_bytes,
    stated_weight_bytes,
)
from stageloom.edge_agent.executor.torch.recipe import TorchRecipe, make_recipe
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.edge_agent.lowering.model import ModelLowering
from stageloom.edge_agent.lowering.out_of_memory import is_out_of_memory
from stageloom.edge_agent.lowering.program import Alternative, Unit
from stageloom.shared.artifact import Artifact
from stageloom.shared.bitmask import bits
from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.engine.steps import MoveInstance, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import BackendUnavailable, ExecutorError
from stageloom.shared.ids import Digest, OpId, TensorId
from stageloom.shared.plan import ExecutorOptions, IssueOrder
from stageloom.shared.schedule import resources_named

log = logging.getLogger(__name__)

ModelKey = tuple[Digest, Precision]
"""Models are shared by artifact and precision."""


def not_loaded(error: RuntimeError) -> ExecutorError:
    """What `load` raises for an error of torch's own; a want of memory may pass."""
    kind = BackendUnavailable if is_out_of_memory(error) else ExecutorError
    return kind(f"the plan cannot be loaded: {one_line(error)}")


class LoadedPlan:
    """Everything but graphs. Programs for single members are there from the start: they are the fallback."""

    def __init__(
        self,
        bound: BoundPlan,
        blocks: Sequence[int],
        precision: Precision,
        lowerings: Mapping[int, ModelLowering],
        choices: KernelChoices,
        device: torch.device,
        *,
        streams: int,
        issue: IssueOrder,
    ) -> None:
        """`blocks` are the combined blocks that are run here, `lowerings` those of their models, `streams` a
        lane's.

        Raises:
            ExecutorError: a model cannot be lowered.
        """
        self.bound = bound
        self.precision = precision
        self.streams = streams
        self._issue = issue
        self._lowerings = lowerings
        self._choices = choices
        largest = {
            index: lowering.at_batch(bound.models[index].buckets[-1]) for index, lowering in lowerings.items()
        }
        alone = recipes_alone(bound, partial(self.recipe, in_turn=True), blocks)
        needed = arenas_for(bound, alone, self.recipe)
        self.buffers = PlanBuffers(bound, largest, device, needed)
        self._alone = {place: self.bind(recipe) for place, recipe in alone.items()}

    def recipe(self, combined: int, buckets: Mapping[int, int], *, in_turn: bool = False) -> TorchRecipe:
        """The recipe for active members at their buckets, by position."""
        members = self.bound.combined[combined].members
        lowered = {
            position: self._lowerings[members[position].model].at_batch(bucket)
            for position, bucket in buckets.items()
        }
        natures: dict[tuple[int, OpId], Nature] = {}
        for position, bucket in buckets.items():
            known = self._choices.natures(self._lowerings[members[position].model], bucket)
            natures.update({(position, op): nature for op, nature in known.items()})

        def several(position: int, ops: Sequence[OpId], merge: bool) -> Unit | None:
            lowering = self._lowerings[members[position].model]
            return self._choices.several(lowering, buckets[position], ops, merge=merge)

        return make_recipe(
            self.bound,
            combined,
            lowered,
            several,
            streams=self.streams,
            natures=natures,
            in_turn=in_turn,
            issue=self._issue,
        )

    def recipe_for(self, program: ProgramKey, *, in_turn: bool = False) -> TorchRecipe:
        """The recipe of a program that the engine asks for."""
        buckets = dict(zip(bits(program.mask), program.buckets, strict=True))
        return self.recipe(program.combined, buckets, in_turn=in_turn)

    @property
    def alone_places(self) -> Sequence[tuple[int, int, int]]:
        """All that runs members by themselves: combined block, position, bucket."""
        return tuple(self._alone)

    def runs(self, model: int) -> bool:
        """Whether a block of the model is run here."""
        return model in self._lowerings

    def lowering(self, model: int) -> ModelLowering:
        return self._lowerings[model]

    def bind(self, recipe: TorchRecipe, memory: BufferSource | None = None) -> TorchProgram:
        """Bind a recipe to this plan's memory, or to other memory.

        Raises:
            ExecutorError: the memory is too small.
        """

        def way(position: int, unit: Unit, reads: Sequence[Tensor], makes: Sequence[Tensor]) -> Alternative:
            part = recipe.parts[position]
            lowering = self._lowerings[part.member.model]
            return self._choices.way(KernelSite(lowering, part.batch, unit, reads, makes))

        return bind_recipe(recipe, self.buffers if memory is None else memory, way)

    def alone(self, step: Step, member: StepMember) -> TorchProgram:
        """What runs one member by itself, on one stream."""
        return self._alone[step.program.combined, member.position, bucket_of(step, member)]


class TorchPlans:
    """The part of both torch executors that loads plans, states what they take and times operators."""

    name: ClassVar[str]
    precisions: ClassVar[tuple[Precision, ...]]
    issues: ClassVar[tuple[IssueOrder, ...]] = (IssueOrder.DEVICE,)
    splits: ClassVar[bool] = False
    """It runs groups on the resources that they name."""

    def __init__(self, device: torch.device, *, channels_last: bool) -> None:
        self.choices = KernelChoices()
        self._device = device
        self._channels_last = channels_last
        self._models = SharedTable[ModelKey, ModelLowering]()
        self._plans: dict[PlanKey, LoadedPlan] = {}

    def stated_bytes(self, bound: BoundPlan, *, alone: bool = False) -> int:
        """Weights that no loaded plan has, and the plan's own borders and arenas.

        Raises:
            ExecutorError: the precision is unknown, or not one for all of its blocks.
        """
        precision, blocks = self._precision(bound), tuple(index for index, _ in bound.run_by(self.name))
        weights = stated_weight_bytes(bound, precision, blocks)
        missing = sum(size for key, size in weights.items() if alone or self._models.get(key) is None)
        return missing + stated_plan_bytes(bound, precision, blocks, self._streams_per_lane(bound))

    @property
    def held_bytes(self) -> int:
        """Weights and buffers of the loaded plans as they are on the device."""
        return self.weight_bytes + sum(plan.buffers.nbytes for plan in list(self._plans.values()))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on the device."""
        return sum(lowering.weights.held_bytes for lowering in self._models.values())

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """Lower the models, allocate every buffer, and bind what runs members one by one.

        Raises:
            ExecutorError: an option is unknown, an artifact is missing, or a model cannot be lowered.
        """
        precision = self._precision(bound)
        self._check_options(bound)
        require_pinned(bound, self.name)
        self._check_groups(bound)
        require_artifacts(bound, artifacts)
        blocks = tuple(index for index, _ in bound.run_by(self.name))
        try:
            lowerings = {
                index: self._lowering(key, bound.models[index], artifacts, precision)
                for index in models_of(bound, blocks)
            }
            plan = LoadedPlan(
                bound,
                blocks,
                precision,
                lowerings,
                self.choices,
                self._device,
                streams=self._streams_per_lane(bound),
                issue=self._options(bound).issue,
            )
        except BaseException as error:
            self._models.release(key)
            if isinstance(error, RuntimeError):  # torch's own, out of memory for one
                raise not_loaded(error) from error
            raise
        self._report_foreign(bound, lowerings)
        self._plans[key] = plan

    def _lowering(
        self,
        plan: PlanKey,
        model: BoundModel,
        artifacts: Mapping[Digest, Artifact],
        precision: Precision,
    ) -> ModelLowering:
        """The model, shared with every other plan that has it in that precision and splits it alike."""

        def lowered(artifact: Artifact) -> ModelLowering:
            return ModelLowering(
                artifact, device=self._device, precision=precision, channels_last=self._channels_last
            )

        def make() -> ModelLowering:
            artifact = artifacts[model.plan.artifact]
            if not model.origins:
                return lowered(artifact)
            with TemporaryDirectory(prefix="stageloom-split-") as folder:  # it is mapped once it is lowered
                return lowered(split_artifact(model, artifact, Path(folder) / "model"))

        return self._models.hold(plan, (model.graph_key, precision), make)

    def _check_groups(self, bound: BoundPlan) -> None:
        """Raises:
        ExecutorError: groups of a block are to be run by another executor, or on resources at all.
        """
        if not self.splits:
            require_whole(bound, self.name)
        for index, variant in bound.run_by(self.name):
            for resource in resources_named(bound.combined[index].plan.variants[variant][1]):
                other = bound.group_executor(index, variant, resource).name
                if other != self.name:
                    raise ExecutorError(
                        f"executor {other!r} does not run groups of blocks that {self.name} runs",
                        remedy="use executors on sessions: onnx or openvino",
                    )

    def _precision(self, bound: BoundPlan) -> Precision:
        known = [precision.value for precision in self.precisions]
        require_options(bound, self.name, known, issues=self.issues)
        return Precision(self._options(bound).precision)

    def _options(self, bound: BoundPlan) -> ExecutorOptions:
        """What the plan tells this executor.

        Raises:
            ExecutorError: it tells several things, or has no block for it.
        """
        return sole_options(bound, self.name)

    def _streams_per_lane(self, bound: BoundPlan) -> int:
        return streams_per_lane(bound.plan.lanes)

    def _check_options(self, bound: BoundPlan) -> None:
        """Refuse what this executor cannot honour."""

    def _report_foreign(self, bound: BoundPlan, lowerings: Mapping[int, ModelLowering]) -> None:
        for index, lowering in lowerings.items():
            model = bound.models[index]
            for unit in lowering.at_batch(model.buckets[-1]).foreign:
                (op,) = unit.ops
                kind, name = model.graph.operators[op].kind, model.plan.name
                log.warning(
                    "model %s: operator %d (%s) runs in onnxruntime: %s", name, op, kind, unit.foreign
                )

    def unload(self, key: PlanKey) -> None:
        """Free a plan's programs and buffers, and the weights that no other plan uses."""
        self._plans.pop(key, None)
        self._models.release(key)

    def drop_idle(self) -> None:
        """Nothing is kept for plans that are not loaded."""

    def time_operators(
        self, artifact: Artifact, request: TimingRequest, idle: Callable[[], bool]
    ) -> tuple[OperatorTime, ...]:
        """Time of each operator run alone in float32; see `time_units`. [num_operators]

        Raises:
            ExecutorError: an operator cannot run alone.
        """
        lowering = ModelLowering(
            artifact, device=self._device, precision=Precision.FP32, channels_last=self._channels_last
        )
        return time_units(lowering, request, idle, self._lap())

    def _lap(self) -> Lap:
        raise NotImplementedError

    def _crossing(self, plan: LoadedPlan, member: StepMember, tensor: TensorId, rows: int) -> Tensor:
        """The first rows of a tensor at the border behind a member's block: a view of a buffer."""
        role = BufferRole.ANSWER if member.last else BufferRole.HOME
        return plan.buffers.at(role, member.member, tensor, rows)

    def _slots_of(self, action: MoveInstance, tensor: TensorId, rows: int) -> tuple[Tensor, Tensor]:
        """(target, source) of a tensor that goes over to the new plan."""
        source, target = (
            self._plans[key].buffers.at(BufferRole.HOME, member, tensor, rows)
            for key, member in (action.old, action.new)
        )
        return target, source

"""A loaded plan: its lowered models, its memory, and the programs bound to it."""

import threading
from collections.abc import Mapping, Sequence

import torch

from stageloom.edge_agent.executor.on_device.feeds import bucket_of
from stageloom.edge_agent.executor.on_device.memory_plan import masks_to_hold
from stageloom.edge_agent.executor.on_device.streams import streams_per_lane
from stageloom.edge_agent.executor.torch.buffers import Memory, PlanBuffers
from stageloom.edge_agent.executor.torch.issue_order import Nature
from stageloom.edge_agent.executor.torch.kernels import KernelChoices
from stageloom.edge_agent.executor.torch.program import Program, bind_recipe
from stageloom.edge_agent.executor.torch.recipe import Recipe, make_recipe
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.edge_agent.lowering.model import ModelLowering
from stageloom.edge_agent.lowering.program import Unit
from stageloom.shared.bitmask import bits
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.ids import OpId


class LoadedPlan:
    """Everything but graphs. Programs for single members are there from the start: they are the fallback."""

    def __init__(
        self,
        key: PlanKey,
        bound: BoundPlan,
        lowerings: Sequence[ModelLowering],
        choices: KernelChoices,
        device: torch.device,
    ) -> None:
        """`lowerings` is per model of the plan.

        Raises:
            ExecutorError: a model cannot be lowered.
        """
        self.key = key
        self.bound = bound
        self.precision = Precision(bound.plan.executor.precision)
        self.device = device
        self.streams = streams_per_lane(bound.plan.lanes)
        self._lowerings = tuple(lowerings)
        self._choices = choices
        self._lock = threading.Lock()
        self._alone: dict[tuple[int, int, int], Program] = {}
        largest = [
            lowering.at_batch(model.buckets[-1])
            for lowering, model in zip(lowerings, bound.models, strict=True)
        ]
        alone = {
            (index, position, bucket): self.recipe(index, {position: bucket}, in_turn=True)
            for index, combined in enumerate(bound.combined)
            for position, member in enumerate(combined.members)
            for bucket in bound.models[member.model].buckets
        }
        needed = [0] * len(bound.combined)
        for (index, _, _), recipe in alone.items():
            needed[index] = max(needed[index], recipe.arena_bytes)
        for index, combined in enumerate(bound.combined):
            largest_of = {p: bound.models[m.model].buckets[-1] for p, m in enumerate(combined.members)}
            for mask in masks_to_hold(len(combined.members)):
                buckets = {position: largest_of[position] for position in bits(mask)}
                needed[index] = max(needed[index], self.recipe(index, buckets).arena_bytes)
        self.buffers = PlanBuffers(bound, largest, device, needed)
        self._alone = {place: bind_recipe(recipe, self.buffers) for place, recipe in alone.items()}

    def recipe(self, combined: int, buckets: Mapping[int, int], *, in_turn: bool = False) -> Recipe:
        """The recipe for active members at their buckets, by position."""
        members = self.bound.combined[combined].members
        lowered = {
            position: self._choices.applied(self._lowerings[members[position].model], bucket)
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
        )

    def recipe_for(self, program: ProgramKey, *, in_turn: bool = False) -> Recipe:
        """The recipe of a program that the engine asks for."""
        buckets = dict(zip(bits(program.mask), program.buckets, strict=True))
        return self.recipe(program.combined, buckets, in_turn=in_turn)

    def lowering(self, model: int) -> ModelLowering:
        """A model of the plan."""
        return self._lowerings[model]

    def bind(self, recipe: Recipe, memory: Memory | None = None) -> Program:
        """Bind a recipe to this plan's memory, or to other memory.

        Raises:
            ExecutorError: the memory is too small.
        """
        return bind_recipe(recipe, self.buffers if memory is None else memory)

    def alone(self, step: Step, member: StepMember) -> Program:
        """What runs one member by itself, on one stream."""
        return self._alone[step.program.combined, member.position, bucket_of(step, member)]

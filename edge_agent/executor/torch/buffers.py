"""The memory of one loaded plan: every border's buffer of every replica, and the arenas of its programs.

All of it is allocated when the plan is loaded and stays where it is, since captured graphs hold addresses.
A slot needs no second buffer for run-ahead: the core lets it be overwritten only after its last reader. A
second one (aside) is there where a step may read a slot and fill it at once.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from stageloom.edge_agent.executor.on_device.slots import staged
from stageloom.edge_agent.executor.torch.layout import Kind
from stageloom.edge_agent.executor.torch.recipe import Part, Recipe, Role, Value, changes_form, form_of
from stageloom.edge_agent.lowering.dtypes import TORCH_OF_NAME
from stageloom.edge_agent.lowering.model import LoweredModel
from stageloom.edge_agent.lowering.node import Spec
from stageloom.edge_agent.lowering.trace import empty
from stageloom.shared.bound import BoundPlan
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import TensorId
from stageloom.shared.plan import Member

_Place: TypeAlias = tuple[int, int, TensorId]  # model, replica, tensor


class Memory(Protocol):
    """What a recipe is bound to."""

    def border(self, part: Part, value: Value) -> Tensor:
        """The buffer of a border's value, with the bucket's rows."""

    def arena(self, recipe: Recipe) -> Tensor:
        """Bytes for the inner tensors, at least `recipe.arena_bytes`."""


class PlanBuffers:
    """See the module's text."""

    def __init__(
        self,
        bound: BoundPlan,
        models: Sequence[LoweredModel],
        device: torch.device,
        arena_bytes: Sequence[int],
    ) -> None:
        """`models` are lowered at their largest bucket, `arena_bytes` is per combined block."""
        self._bound = bound
        self._device = device
        self._places: dict[Role, dict[_Place, Tensor]] = {role: {} for role in Role}
        for index, (model, lowered) in enumerate(zip(bound.models, models, strict=True)):
            for replica in range(model.plan.replicas):
                part = Part(0, Member(index, replica, 0), model, lowered)
                self._add_replica(part)
        for combined in bound.combined:
            for position, member in enumerate(combined.members):
                if staged(combined, bound.models, combined.full_mask, position):
                    self._add_asides(bound, member, models[member.model])
        # One lane runs one step at a time, so that its programs can share; lanes cannot (P2).
        shared = bound.plan.lanes == 1
        sizes = [max(arena_bytes, default=0)] if shared else arena_bytes
        arenas = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        self._arenas = arenas * len(bound.combined) if shared else arenas

    def _add_replica(self, part: Part) -> None:
        graph, lowered = part.model.graph, part.lowered

        def at(tensor: TensorId) -> _Place:
            return part.member.model, part.member.replica, tensor

        for tensor in sorted({t for block in part.model.blocks for t in block.live_in}):
            self._places[Role.HOME][at(tensor)] = self._zeros(lowered.specs[tensor])
        for tensor in graph.inputs:
            home = self._places[Role.HOME][at(tensor)]
            outside = self._outside(part, tensor)
            landing = self._zeros(outside) if changes_form(part, tensor) else home
            self._places[Role.LANDING][at(tensor)] = landing
        for tensor in graph.outputs:
            self._places[Role.ANSWER][at(tensor)] = self._zeros(self._outside(part, tensor))

    def _add_asides(self, bound: BoundPlan, member: Member, lowered: LoweredModel) -> None:
        model = bound.models[member.model]
        for tensor in model.blocks[member.block].makes:
            place = (member.model, member.replica, tensor)
            self._places[Role.ASIDE][place] = self._zeros(lowered.specs[tensor])

    @staticmethod
    def _outside(part: Part, tensor: TensorId) -> Spec:
        dtype = TORCH_OF_NAME[part.model.graph.tensors[tensor].dtype]
        return Spec(part.lowered.specs[tensor].shape, dtype)

    def _zeros(self, spec: Spec) -> Tensor:
        return empty(spec, self._device).zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, each once."""
        tensors = [t for places in self._places.values() for t in places.values()] + self._arenas
        return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())

    def at(self, role: Role, member: Member, tensor: TensorId, rows: int) -> Tensor:
        """The buffer of a border's tensor; its first rows where the model runs in batches."""
        found = self._places[role][member.model, member.replica, tensor]
        return found if self._bound.models[member.model].plan.batch == 1 else found[:rows]

    def border(self, part: Part, value: Value) -> Tensor:
        """As `Memory`."""
        return self.at(value.role, part.member, value.tensor, part.lowered.batch)

    def arena_room(self, recipe: Recipe) -> int:
        """Bytes that the plan has for the recipe's inner tensors."""
        return self._arenas[recipe.combined].numel()

    def arena(self, recipe: Recipe) -> Tensor:
        """As `Memory`.

        Raises:
            ExecutorError: the recipe needs more than the plan has room for.
        """
        found = self._arenas[recipe.combined]
        if recipe.arena_bytes > self.arena_room(recipe):
            raise ExecutorError(
                f"a program needs {recipe.arena_bytes} bytes where its plan has {found.numel()}",
                remedy="its members run one after another",
            )
        return found


class ScratchBuffers:
    """Memory that no other program uses, for warming up and measuring beside what serves. All zeros."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._borders: dict[Value, Tensor] = {}

    def border(self, part: Part, value: Value) -> Tensor:
        """As `Memory`."""
        if value not in self._borders:
            spec = part.lowered.specs[value.tensor]
            if value.role in (Role.LANDING, Role.ANSWER):
                spec = Spec(spec.shape, TORCH_OF_NAME[part.model.graph.tensors[value.tensor].dtype])
            self._borders[value] = empty(spec, self._device).zero_()
        return self._borders[value]

    def arena(self, recipe: Recipe) -> Tensor:
        """As `Memory`."""
        return torch.zeros(recipe.arena_bytes, dtype=torch.uint8, device=self._device)


def tensors_of(recipe: Recipe, memory: Memory) -> Mapping[Value, Tensor]:
    """Every value of a recipe as a tensor; views are made by running them, which launches nothing.

    Raises:
        ExecutorError: what the lowering calls a view is none.
    """
    arena = memory.arena(recipe)
    offsets = recipe.layout.plan.offsets
    made: dict[Value, Tensor] = {}

    def tensor(value: Value) -> Tensor:
        if value not in made:
            made[value] = place(value)
        return made[value]

    def place(value: Value) -> Tensor:
        part = recipe.parts[value.position]
        if value.role is not Role.INNER:
            return memory.border(part, value)
        spec = part.lowered.specs[value.tensor]
        within = recipe.layout.slices.get(value)
        if within is not None:
            return tensor(within.of).narrow(within.axis, within.start, spec.shape[within.axis])
        form = form_of(spec)
        start = offsets[recipe.layout.pieces[value]]
        flat = arena[start : start + form.nbytes].view(spec.dtype)
        return flat.as_strided(form.shape, form.strides)

    for call, unit in zip(recipe.calls, recipe.units, strict=True):
        if call.kind is Kind.VIEW:
            assert unit is not None
            source = tensor(call.reads[0])
            for value, view in zip(call.makes, unit.run([source]), strict=True):
                if view.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
                    raise ExecutorError(f"operator {unit.ops[0]} copies, though it was lowered as a view")
                made[value] = view
            continue
        for value in (*call.reads, *call.makes):
            tensor(value)
    return made

"""The memory of one loaded plan, programs bound to it, and what a plan will take before it is lowered.

All of it is allocated when the plan is loaded and stays where it is, since captured graphs hold addresses.
A slot needs no second buffer for run-ahead: the core lets it be overwritten only after its last reader.
Where a step may read a slot and fill it at once, the new contents wait in the arena.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from stageloom.edge_agent.executor.cuda.device import Launch
from stageloom.edge_agent.executor.cuda.layout import Call, CallKind, TensorForm, lay_out
from stageloom.edge_agent.executor.cuda.memory_plan import masks_to_hold
from stageloom.edge_agent.executor.cuda.recipe import (
    BoundProgram,
    BufferRole,
    MemberTensor,
    Places,
    with_ends,
)
from stageloom.edge_agent.executor.cuda.streams import fold_streams
from stageloom.edge_agent.executor.torch.recipe import TorchRecipe, changes_form, form_of
from stageloom.edge_agent.lowering.batch import LoweredModel
from stageloom.edge_agent.lowering.dtypes import TORCH_OF_NAME, Precision
from stageloom.edge_agent.lowering.node import Spec
from stageloom.edge_agent.lowering.program import Alternative, Unit
from stageloom.edge_agent.lowering.trace import empty
from stageloom.shared.bound import BoundCombined, BoundModel, BoundPlan
from stageloom.shared.errors import ExecutorError
from stageloom.shared.graph import ITEM_BYTES, Graph, Operator
from stageloom.shared.ids import Digest, OpId, TensorId
from stageloom.shared.launch_list import LaunchList
from stageloom.shared.merge import merged
from stageloom.shared.plan import Member
from stageloom.shared.schedule import StageSchedule

_Place: TypeAlias = tuple[int, int, TensorId]  # model, replica, tensor


Way: TypeAlias = Callable[[int, Unit, Sequence[Tensor], Sequence[Tensor]], Alternative]
"""The kernel for a unit of the member at a position, which reads and makes these tensors."""


class BufferSource(Protocol):
    """What a recipe is bound to."""

    def border(self, recipe: TorchRecipe, value: MemberTensor) -> Tensor:
        """The buffer of a border's value, with the bucket's rows."""

    def arena(self, recipe: TorchRecipe) -> Tensor:
        """Bytes for the inner tensors, at least `recipe.arena_bytes`."""


class PlanBuffers:
    """Every border's buffer of every replica, and an arena per combined block, or one for all."""

    def __init__(
        self,
        bound: BoundPlan,
        models: Mapping[int, LoweredModel],
        device: torch.device,
        arena_bytes: Sequence[int],
    ) -> None:
        """`models` are those that are run here, lowered at their largest bucket. [num_combined] bytes of
        arenas."""
        self._bound = bound
        self._device = device
        self._places: dict[BufferRole, dict[_Place, Tensor]] = {role: {} for role in BufferRole}
        for index, lowered in models.items():
            for replica in range(bound.models[index].plan.replicas):
                self._add_replica(index, replica, lowered)
        # One lane runs one step at a time, so that its programs can share; lanes cannot (P2).
        shared = bound.plan.lanes == 1
        sizes = [max(arena_bytes, default=0)] if shared else arena_bytes
        arenas = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        self._arenas = arenas * len(bound.combined) if shared else arenas

    def _add_replica(self, index: int, replica: int, lowered: LoweredModel) -> None:
        model, places = self._bound.models[index], self._places
        for tensor in sorted({t for block in model.blocks for t in block.live_in}):
            places[BufferRole.HOME][index, replica, tensor] = self._zeros(lowered.specs[tensor])
        for tensor in model.graph.inputs:
            place = (index, replica, tensor)
            changed = changes_form(model, lowered, tensor)
            home = places[BufferRole.HOME][place]
            places[BufferRole.LANDING][place] = (
                self._zeros(_outside(model, lowered, tensor)) if changed else home
            )
        for tensor in model.graph.outputs:
            answer = self._zeros(_outside(model, lowered, tensor))
            places[BufferRole.ANSWER][index, replica, tensor] = answer

    def _zeros(self, spec: Spec) -> Tensor:
        return empty(spec, self._device).zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, each once."""
        tensors = [t for places in self._places.values() for t in places.values()] + self._arenas
        return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())

    def at(self, role: BufferRole, member: Member, tensor: TensorId, rows: int) -> Tensor:
        """The buffer of a border's tensor; its first rows where the model runs in batches."""
        found = self._places[role][member.model, member.replica, tensor]
        return found if self._bound.models[member.model].plan.batch == 1 else found[:rows]

    def border(self, recipe: TorchRecipe, value: MemberTensor) -> Tensor:
        """The plan's own buffer."""
        part = recipe.parts[value.position]
        return self.at(value.role, part.member, value.tensor, part.batch)

    def arena_room(self, recipe: TorchRecipe) -> int:
        """Bytes that the plan has for the recipe's inner tensors."""
        return self._arenas[recipe.combined].numel()

    def arena(self, recipe: TorchRecipe) -> Tensor:
        """The plan's own arena.

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
        self._borders: dict[MemberTensor, Tensor] = {}

    def border(self, recipe: TorchRecipe, value: MemberTensor) -> Tensor:
        """A buffer that is made when it is first asked for."""
        if value not in self._borders:
            model, lowered = recipe.parts[value.position].model, recipe.lowered[value.position]
            outside = value.role in (BufferRole.LANDING, BufferRole.ANSWER)
            spec = _outside(model, lowered, value.tensor) if outside else lowered.specs[value.tensor]
            self._borders[value] = empty(spec, self._device).zero_()
        return self._borders[value]

    def arena(self, recipe: TorchRecipe) -> Tensor:
        """A new arena."""
        return torch.zeros(recipe.arena_bytes, dtype=torch.uint8, device=self._device)


def _outside(model: BoundModel, lowered: LoweredModel, tensor: TensorId) -> Spec:
    """How a graph input or output looks to the host."""
    return Spec(lowered.specs[tensor].shape, TORCH_OF_NAME[model.graph.tensors[tensor].dtype])


def tensors_of(recipe: TorchRecipe, memory: BufferSource) -> Mapping[MemberTensor, Tensor]:
    """Every value of a recipe as a tensor; views are made by running them, which launches nothing.

    Raises:
        ExecutorError: what the lowering calls a view is none.
    """
    arena = memory.arena(recipe)
    made: dict[MemberTensor, Tensor] = {}
    for call, unit in zip(recipe.calls, recipe.kernels, strict=True):
        if call.kind is CallKind.VIEW:
            assert unit is not None
            source = _placed(call.reads[0], recipe, memory, arena, made)
            for value, view in zip(call.makes, unit.run([source]), strict=True):
                if view.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
                    raise ExecutorError(f"operator {unit.ops[0]} copies, though it was lowered as a view")
                made[value] = view
            continue
        for value in (*call.reads, *call.makes):
            _placed(value, recipe, memory, arena, made)
    return made


def _placed(
    value: MemberTensor,
    recipe: TorchRecipe,
    memory: BufferSource,
    arena: Tensor,
    made: dict[MemberTensor, Tensor],
) -> Tensor:
    """The value's tensor, in `made` from now on.

    Not a function within `tensors_of`: one that calls itself refers to itself, and would keep the memory of
    plans that are gone until Python looks for such circles.
    """
    if value in made:
        return made[value]
    if value.role is not BufferRole.INNER:
        made[value] = memory.border(recipe, value)
        return made[value]
    spec = recipe.lowered[value.position].specs[value.tensor]
    within = recipe.layout.slices.get(value)
    if within is not None:
        whole = _placed(within.of, recipe, memory, arena, made)
        made[value] = whole.narrow(within.axis, within.start, spec.shape[within.axis])
    else:
        form, start = form_of(spec), recipe.layout.offsets[value]
        flat = arena[start : start + form.nbytes].view(spec.dtype)
        made[value] = flat.as_strided(form.shape, form.strides)
    return made[value]


@dataclass(frozen=True)
class TorchProgram(BoundProgram):
    """A program of units, with the tensors that they read and make."""

    recipe: TorchRecipe
    tensors: Mapping[MemberTensor, Tensor]

    def arguments(self, call: int) -> tuple[list[Tensor], list[Tensor]]:
        """What a call reads and what it makes."""
        described = self.recipe.calls[call]
        return [self.tensors[v] for v in described.reads], [self.tensors[v] for v in described.makes]


def bind_recipe(recipe: TorchRecipe, memory: BufferSource, way: Way) -> TorchProgram:
    """Bind a recipe to memory, and every unit to the kernel that `way` says.

    Raises:
        ExecutorError: the memory is too small, or a view is none.
    """
    tensors = tensors_of(recipe, memory)
    launches = tuple(
        tuple(_launches(call, unit, recipe, tensors, way))
        for call, unit in zip(recipe.calls, recipe.kernels, strict=True)
    )
    return TorchProgram(recipe, launches, tensors)


def _launches(
    call: Call[MemberTensor],
    unit: Unit | None,
    recipe: TorchRecipe,
    tensors: Mapping[MemberTensor, Tensor],
    way: Way,
) -> Sequence[Launch]:
    reads = [tensors[value] for value in call.reads]
    makes = [tensors[value] for value in call.makes]
    if unit is None:
        return [partial(makes[0].copy_, reads[0])]
    if call.kind is CallKind.VIEW:
        return []
    if call.kind is CallKind.CONCAT and any(value in recipe.layout.slices for value in call.reads):
        return _leftovers(call, recipe, tensors)
    return [partial(way(position_of(call), unit, reads, makes).run_into, reads, makes)]


def position_of(call: Call[MemberTensor]) -> int:
    """The position of the member that a call belongs to."""
    return (*call.makes, *call.reads)[0].position


def _leftovers(
    call: Call[MemberTensor], recipe: TorchRecipe, tensors: Mapping[MemberTensor, Tensor]
) -> list[Launch]:
    """Copies of what was not written into its place in the concatenation."""
    joined = tensors[call.makes[0]]
    start = 0
    copies: list[Launch] = []
    for value in call.reads:
        source = tensors[value]
        extent = source.shape[call.axis]
        if value not in recipe.layout.slices:
            copies.append(partial(joined.narrow(call.axis, start, extent).copy_, source))
        start += extent
    return copies


def models_of(bound: BoundPlan, blocks: Sequence[int]) -> tuple[int, ...]:
    """The models with a member in one of these combined blocks, ascending."""
    return tuple(sorted({member.model for index in blocks for member in bound.combined[index].members}))


def stated_weight_bytes(
    bound: BoundPlan, precision: Precision, blocks: Sequence[int]
) -> dict[tuple[Digest, Precision], int]:
    """Bytes of the weights of every artifact with a member in these combined blocks.

    In half precision float32 weights take half of what the file has; others (integers, or float16 from the
    start) take as much as before.
    """
    found = {}
    for model in (bound.models[index] for index in models_of(bound, blocks)):
        weights = [
            one.weight_bytes // 2
            if precision is Precision.FP16 and _weights_in_float32(model.graph, one)
            else one.weight_bytes
            for one in model.graph.operators
        ]
        whole = sum(one.weight_bytes for one in model.graph.operators)
        once = model.graph.weight_bytes(range(len(model.graph.operators)))
        found[model.graph_key, precision] = sum(weights) if once == whole else sum(weights) * once // whole
    return found


def _weights_in_float32(graph: Graph, operator: Operator) -> bool:
    """Whether an operator's weights are taken to be float32, as a graph does not say it of weights.

    They are where all that it reads and makes is, in a model without a tensor of eight or sixteen bits.
    """
    known = {graph.tensors[tensor].dtype for tensor in (*operator.inputs, *operator.outputs)}
    small = any(ITEM_BYTES[tensor.dtype] < 4 and tensor.dtype != "bool" for tensor in graph.tensors)
    return known == {"float32"} and not small


@lru_cache(maxsize=32)
def stated_plan_bytes(bound: BoundPlan, precision: Precision, blocks: tuple[int, ...], streams: int) -> int:
    """Bytes of borders and arenas, and of the stacked kernels of merge stages, worked out from the graphs.

    The executor knows more after lowering (views, concatenations in place), so that what it takes is at most
    this, but for scratch memory inside kernels.
    """
    models = [bound.models[index] for index in models_of(bound, blocks)]
    borders = sum(model.plan.replicas * _border_bytes(model) for model in models)
    arenas = [_arena_bytes(bound, index, streams) for index in blocks]
    buffers = borders + (max(arenas) if bound.plan.lanes == 1 else sum(arenas))
    return buffers + _merged_bytes(bound, precision, blocks)


def _merged_bytes(bound: BoundPlan, precision: Precision, blocks: Sequence[int]) -> int:
    """Kernels and biases of every merge stage of these combined blocks; replicas share them."""
    stages: dict[tuple[int, tuple[OpId, ...]], int] = {}
    for combined in (bound.combined[index] for index in blocks):
        schedule = combined.plan.schedule
        for stage in schedule.stages if isinstance(schedule, StageSchedule) else ():
            if not stage.merge:
                continue
            model = combined.members[combined.graph.member_of[stage.operators[0]]].model
            graph = bound.models[model].graph
            ops = tuple(sorted(combined.graph.model_op(op) for op in stage.operators))
            merge = merged(graph, ops)
            source = graph.tensors[merge.input]
            item_bytes = 2 if precision is Precision.FP16 and source.dtype == "float32" else 4
            elements = sum(merge.filters) * (source.shape[1] * prod(merge.convolution.kernel) + 1)
            stages[model, ops] = item_bytes * elements
    return sum(stages.values())


def _border_bytes(model: BoundModel) -> int:
    graph = model.graph
    slots = {t for block in model.blocks for t in block.live_in}
    return model.plan.batch * sum(graph.tensors[t].nbytes for t in (*slots, *graph.inputs, *graph.outputs))


def _arena_bytes(bound: BoundPlan, index: int, most: int) -> int:
    """What any mask needs at its largest batch, or a member alone where that is more."""
    combined = bound.combined[index]
    streams = dict.fromkeys(masks_to_hold(len(combined.members)), most)
    alone = {1 << position: 1 for position in range(len(combined.members))}
    return max(
        _laid_out(bound, combined, fold_streams(bound.launches(index, mask), limit))
        for mask, limit in (*streams.items(), *alone.items())
    )


def _laid_out(bound: BoundPlan, combined: BoundCombined, items: LaunchList) -> int:
    """Bytes of what lies between borders, with a buffer for every tensor."""
    batches = {item.member: bound.models[combined.members[item.member].model].plan.batch for item in items}
    places = Places(bound.models, combined, batches)
    ended = with_ends(items)
    calls: list[Call[MemberTensor]] = []
    for index, item in enumerate(ended):
        for op in item.ops:
            part = places.parts[item.member]
            operator = part.model.graph.operators[combined.graph.model_op(op)]
            reads = tuple(places.read(part, tensor) for tensor in operator.inputs)
            makes = tuple(places.made(part, tensor) for tensor in operator.outputs)
            calls.append(Call(index, CallKind.KERNEL, reads, makes))
    calls += places.settlements(len(ended) - 1)
    values = {value for call in calls for value in (*call.reads, *call.makes)}
    borders = {value for value in values if value.role is not BufferRole.INNER}
    forms = {value: _form(places.parts[value.position].model, value.tensor) for value in values}
    return lay_out(ended, calls, borders, forms).nbytes


def _form(model: BoundModel, tensor: TensorId) -> TensorForm:
    described = model.graph.tensors[tensor]
    return TensorForm(described.shape, (), model.plan.batch * described.nbytes)

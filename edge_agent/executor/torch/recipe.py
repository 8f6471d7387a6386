"""What a program does, before it has any memory: calls on streams, where their tensors lie, issue order.

A recipe is made from a combined block under one mask, with one lowered model per active member. Binding it to
buffers gives a program; the same recipe is bound to scratch memory to warm up and to measure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import TypeAlias

from stageloom.edge_agent.executor.base import NO_GROUP
from stageloom.edge_agent.executor.cuda.layout import Call, CallKind, TensorForm, lay_out
from stageloom.edge_agent.executor.cuda.recipe import (
    BufferRole,
    MemberTensor,
    Part,
    Places,
    Recipe,
    with_ends,
)
from stageloom.edge_agent.executor.cuda.streams import Nature, fold_streams, issue_order, scheduled_order
from stageloom.edge_agent.lowering.batch import LoweredModel
from stageloom.edge_agent.lowering.dtypes import TORCH_OF_NAME
from stageloom.edge_agent.lowering.node import Spec
from stageloom.edge_agent.lowering.program import Unit
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.bound import BoundCombined, BoundModel, BoundPlan
from stageloom.shared.ids import OpId, TensorId
from stageloom.shared.launch_list import Item, LaunchList
from stageloom.shared.plan import IssueOrder
from stageloom.shared.schedule import StreamSchedule
from stageloom.shared.split_graph import SplitRole

Several: TypeAlias = Callable[[int, Sequence[OpId], bool], "Unit | None"]
"""Of the member at a position: operators as one unit, merged as siblings or joined as a chain; or None."""


@dataclass(frozen=True)
class TorchRecipe(Recipe[Unit]):
    """A recipe whose calls run units of lowered models."""

    lowered: Mapping[int, LoweredModel]  # by position

    @property
    def capturable(self) -> bool:
        """Whether all of it runs on the device: what waits for the host cannot be captured."""
        return not any(unit.foreign for unit in self.kernels if unit is not None)


def make_recipe(
    bound: BoundPlan,
    combined: int,
    lowered: Mapping[int, LoweredModel],
    several: Several,
    *,
    streams: int,
    natures: Mapping[tuple[int, OpId], Nature] | None = None,
    in_turn: bool = False,
    issue: IssueOrder = IssueOrder.DEVICE,
) -> TorchRecipe:
    """The recipe for the members in `lowered`, by position; `streams` bounds its streams.

    `several` makes one unit of operators where that is possible. `in_turn` puts everything on one stream: the
    form to keep where it is faster. `natures` says what is known of operators, by position and operator.
    """
    block = bound.combined[combined]
    items = bound.launches(combined, sum(1 << position for position in lowered))
    if in_turn:
        items = tuple(replace(item, stream=0, waits=()) for item in items)
    places = Places(bound.models, block, {position: model.batch for position, model in lowered.items()})
    draft = _Draft(block.graph, places, lowered, with_ends(fold_streams(items, streams)), several)
    calls, units = draft.all_calls()
    layout = lay_out(draft.items, calls, draft.borders, draft.forms(calls))
    if issue is IssueOrder.SCHEDULE and not in_turn:
        script = _scheduled(draft.items, calls, units, _places_of(block))
    else:
        script = _script(draft.items, calls, units, natures or {})
    groups = (NO_GROUP, *range(len(items)), NO_GROUP)
    return TorchRecipe(combined, draft.items, groups, calls, units, layout, script, places.parts, lowered)


class _Draft:
    """The calls of a recipe, item by item."""

    def __init__(
        self,
        graph: CombinedGraph,
        places: Places,
        lowered: Mapping[int, LoweredModel],
        items: LaunchList,
        several: Several,
    ) -> None:
        self.items = items
        self._several = several
        self.borders: set[MemberTensor] = set()
        self._graph = graph
        self._places = places
        self._parts = places.parts
        self._lowered = lowered

    def all_calls(self) -> tuple[tuple[Call[MemberTensor], ...], tuple[Unit | None, ...]]:
        """Inputs to their slots, the operators, outputs on their way, staged results to their slots."""
        drafted: list[tuple[Call[MemberTensor], Unit | None]] = []
        for part in self._parts.values():
            drafted += [(call, None) for call in self._arrivals(part)]
        for index, item in enumerate(self.items):
            drafted += [(self._call(index, item.member, unit), unit) for unit in self._units(item)]
        end = len(self.items) - 1
        for part in self._parts.values():
            drafted += [(call, None) for call in self._departures(end, part)]
        drafted += [(call, None) for call in self._places.settlements(end)]
        calls = tuple(call for call, _ in drafted)
        self.borders = {
            v for call in calls for v in (*call.reads, *call.makes) if v.role is not BufferRole.INNER
        }
        return calls, tuple(unit for _, unit in drafted)

    def forms(self, calls: Sequence[Call[MemberTensor]]) -> dict[MemberTensor, TensorForm]:
        """What every value looks like."""
        values = {value for call in calls for value in (*call.reads, *call.makes)}
        return {v: form_of(self._lowered[v.position].specs[v.tensor]) for v in values}

    def _units(self, item: Item) -> list[Unit]:
        if not item.ops:
            return []
        lowered = self._lowered[item.member]
        ops = [self._graph.model_op(op) for op in item.ops]
        if item.merge:
            merged = self._several(item.member, ops, True)
            return [lowered.units[op] for op in ops] if merged is None else [merged]
        graph = self._parts[item.member].model.graph
        units: list[Unit] = []
        for _, run in groupby(ops, key=lambda op: graph.operators[op].fused_unit):
            chain = list(run)
            joined = None
            if len(chain) > 1 and not any(lowered.units[op].foreign for op in chain):
                joined = self._several(item.member, chain, False)
            units += [lowered.units[op] for op in chain] if joined is None else [joined]
        return units

    def _call(self, item: int, position: int, unit: Unit) -> Call[MemberTensor]:
        part = self._parts[position]
        reads = tuple(self._read(part, tensor) for tensor in unit.inputs)
        makes = tuple(self._made(part, tensor) for tensor in unit.outputs)
        # What is made aside is written out: the slot that a view would look into may change before the end.
        stays = all(value.role is BufferRole.INNER for value in makes)
        stays &= part.last or set(unit.outputs).isdisjoint(part.block.makes)
        if unit.view and len(reads) == 1 and stays:
            return Call(item, CallKind.VIEW, reads, makes)
        axis = concat_axis(part.model, unit)
        if axis is not None:
            return Call(item, CallKind.CONCAT, reads, makes, axis)
        return Call(item, CallKind.KERNEL, reads, makes)

    def _read(self, part: Part, tensor: TensorId) -> MemberTensor:
        value = self._places.read(part, tensor)
        return self._made(part, tensor) if value.role is BufferRole.INNER else value

    def _made(self, part: Part, tensor: TensorId) -> MemberTensor:
        value = self._places.made(part, tensor)
        leaves = part.last and tensor in part.block.makes
        if leaves and not changes_form(part.model, self._lowered[part.position], tensor):
            return value._replace(role=BufferRole.ANSWER)
        return value

    def _arrivals(self, part: Part) -> list[Call[MemberTensor]]:
        if part.member.block:
            return []
        return [
            _copy(
                0,
                MemberTensor(part.position, tensor, BufferRole.LANDING),
                MemberTensor(part.position, tensor, BufferRole.HOME),
            )
            for tensor in part.model.graph.inputs
            if changes_form(part.model, self._lowered[part.position], tensor)
        ]

    def _departures(self, end: int, part: Part) -> list[Call[MemberTensor]]:
        if not part.last:
            return []
        made = {tensor: self._read(part, tensor) for tensor in part.model.graph.outputs}
        return [
            _copy(end, value, MemberTensor(part.position, tensor, BufferRole.ANSWER))
            for tensor, value in made.items()
            if value.role is not BufferRole.ANSWER
        ]


def _copy(item: int, source: MemberTensor, target: MemberTensor) -> Call[MemberTensor]:
    return Call(item, CallKind.KERNEL, (source,), (target,))


def changes_form(model: BoundModel, lowered: LoweredModel, tensor: TensorId) -> bool:
    """Whether a graph input or output looks different inside: another type or order in memory.

    The same at every bucket: only the dimensions behind the batch decide.
    """
    spec = lowered.specs[tensor]
    reordered = spec.channels_last and spec.shape[1] > 1 and prod(spec.shape[2:]) > 1
    return reordered or spec.dtype != TORCH_OF_NAME[model.graph.tensors[tensor].dtype]


def concat_axis(model: BoundModel, unit: Unit) -> int | None:
    """Along which axis the unit joins its inputs, in order and with nothing in between; None if it does not.

    The shapes say it: of two and more inputs that are not empty only one axis can add up.
    """
    operator = model.graph.operators[unit.ops[0]]
    role = model.origin(unit.ops[0]).role
    if role in (SplitRole.FIRST, SplitRole.SECOND):
        return None  # half of a Concat reads parts of its inputs
    whole = len(operator.nodes) == 1 or (role is SplitRole.JOIN and len(unit.outputs) == 1)
    if operator.kind != "Concat" or not whole or len(unit.ops) != 1 or len(unit.inputs) < 2:
        return None
    joined = unit.output_specs[0]
    shapes = [spec.shape for spec in unit.input_specs]
    if any(spec.dtype != joined.dtype for spec in unit.input_specs) or 0 in joined.shape:
        return None
    for axis, extent in enumerate(joined.shape):
        others = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
        if sum(shape[axis] for shape in shapes) == extent and len(others) == 1:
            return axis
    return None


def form_of(spec: Spec) -> TensorForm:
    """Shape, strides and bytes of a tensor in the memory order that a spec asks for."""
    order = list(range(len(spec.shape)))
    if spec.channels_last:
        order = [0, *order[2:], 1]
    strides = [0] * len(order)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(1, spec.shape[axis])
    empty = 0 in spec.shape
    return TensorForm(spec.shape, tuple(strides), 0 if empty else step * spec.dtype.itemsize)


def _script(
    items: LaunchList,
    calls: Sequence[Call[MemberTensor]],
    units: Sequence[Unit | None],
    natures: Mapping[tuple[int, OpId], Nature],
) -> tuple[tuple[int, int | None], ...]:
    numbers: list[list[int | None]] = [[] for _ in items]
    known: list[list[Nature]] = [[] for _ in items]
    for index, (call, unit) in enumerate(zip(calls, units, strict=True)):
        numbers[call.item].append(index)
        known[call.item].append(_nature(call, unit, natures))
    for own in numbers:
        own.append(None)
    return tuple((item, numbers[item][at]) for item, at in issue_order(items, known))


def _places_of(block: BoundCombined) -> dict[tuple[int, OpId], int]:
    """Where the block's schedule lists an operator, by the member's position and its own number."""
    schedule, graph = block.plan.schedule, block.graph
    if isinstance(schedule, StreamSchedule):
        listed = [launch.op for launch in schedule.launches]
    else:
        listed = [op for stage in schedule.stages for group in stage.groups for op in group]
    return {(graph.member_of[op], graph.model_op(op)): place for place, op in enumerate(listed)}


def _scheduled(
    items: LaunchList,
    calls: Sequence[Call[MemberTensor]],
    units: Sequence[Unit | None],
    places: Mapping[tuple[int, OpId], int],
) -> tuple[tuple[int, int | None], ...]:
    """Arrivals come before all operators, what leaves after all of them."""
    numbers: list[list[int | None]] = [[] for _ in items]
    listed: list[list[float]] = [[] for _ in items]
    for index, (call, unit) in enumerate(zip(calls, units, strict=True)):
        place = float(len(places)) if call.item + 1 == len(items) else -1.0
        if unit is not None:
            position = call.makes[0].position
            place = float(max(places[position, op] for op in unit.ops))
        numbers[call.item].append(index)
        listed[call.item].append(place)
    for own in numbers:
        own.append(None)
    return tuple((item, numbers[item][at]) for item, at in scheduled_order(items, listed))


def _nature(
    call: Call[MemberTensor], unit: Unit | None, natures: Mapping[tuple[int, OpId], Nature]
) -> Nature:
    if unit is None or call.kind is CallKind.VIEW:
        return Nature(seconds=0.0, memory_bound=True)
    known = [natures[at] for op in unit.ops if (at := (call.makes[0].position, op)) in natures]
    if not known:
        return Nature()
    longest = max(known, key=lambda nature: nature.seconds)
    return replace(longest, seconds=sum(nature.seconds for nature in known))

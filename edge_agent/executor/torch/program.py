"""A recipe bound to memory: functions without arguments that only have to be called in a right order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor

from stageloom.edge_agent.executor.streams import Threading, assign
from stageloom.edge_agent.executor.torch.buffers import Memory, tensors_of
from stageloom.edge_agent.executor.torch.layout import Call, Kind
from stageloom.edge_agent.executor.torch.recipe import Recipe, Value
from stageloom.edge_agent.lowering.program import Unit

Launch: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class Program:
    """What runs a combined block under one mask on fixed memory."""

    recipe: Recipe
    launches: tuple[tuple[Launch, ...], ...]  # per call [num_calls][...]
    by_item: tuple[tuple[int, ...], ...]  # per item its calls [num_items][...]
    threading: Threading
    tensors: Mapping[Value, Tensor]

    def arguments(self, call: int) -> tuple[list[Tensor], list[Tensor]]:
        """What a call reads and what it makes."""
        found = self.recipe.calls[call]
        return [self.tensors[v] for v in found.reads], [self.tensors[v] for v in found.makes]

    @property
    def groups(self) -> range:
        """The items that come from the schedule; the one before and the one after are ours."""
        return range(1, len(self.recipe.items) - 1)


def bind_recipe(recipe: Recipe, memory: Memory) -> Program:
    """Bind a recipe to memory.

    Raises:
        ExecutorError: the memory is too small, or a view is none.
    """
    tensors = tensors_of(recipe, memory)
    launches = tuple(
        tuple(_launches(call, unit, recipe, tensors))
        for call, unit in zip(recipe.calls, recipe.units, strict=True)
    )
    by_item: list[list[int]] = [[] for _ in recipe.items]
    for index, call in enumerate(recipe.calls):
        if launches[index]:
            by_item[call.item].append(index)
    return Program(recipe, launches, tuple(map(tuple, by_item)), assign(recipe.items), tensors)


def _launches(
    call: Call[Value], unit: Unit | None, recipe: Recipe, tensors: Mapping[Value, Tensor]
) -> Sequence[Launch]:
    reads = [tensors[value] for value in call.reads]
    makes = [tensors[value] for value in call.makes]
    if unit is None:
        return [partial(makes[0].copy_, reads[0])]
    if call.kind is Kind.VIEW:
        return []
    if call.kind is Kind.CONCAT and any(value in recipe.layout.slices for value in call.reads):
        return _leftovers(call, recipe, tensors)
    return [partial(unit.alternatives[0].run_into, reads, makes)]


def _leftovers(call: Call[Value], recipe: Recipe, tensors: Mapping[Value, Tensor]) -> list[Launch]:
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

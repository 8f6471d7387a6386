"""Where every tensor of a program lies: in a border's buffer, in the arena, or inside another tensor.

A view lies in what it views. What only a concatenation reads is written straight into its place in the
result, so that joining costs nothing; a concatenation of concatenations nests. Everything else gets memory of
its own in the arena, shared over time where the launch list allows it.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from stageloom.edge_agent.executor.cuda.memory_plan import (
    Lifetime,
    launches_before,
    plan_memory,
    shared_wrongly,
)
from stageloom.shared.launch_list import Item

V = TypeVar("V", bound=Hashable)
"""How the caller names a tensor."""


class CallKind(Enum):
    """What matters of a call for where tensors lie."""

    KERNEL = "kernel"  # writes its results into memory that it is given
    VIEW = "view"  # launches nothing: every result lies in the first value that it reads
    CONCAT = "concat"


@dataclass(frozen=True, slots=True)
class Call(Generic[V]):
    """One operator, or one copy, of an item."""

    item: int
    kind: CallKind
    reads: tuple[V, ...]  # repeats are possible
    makes: tuple[V, ...]
    axis: int = 0  # of a concatenation


@dataclass(frozen=True, slots=True)
class Slice(Generic[V]):
    """A part of another tensor."""

    of: V
    axis: int
    start: int


@dataclass(frozen=True, slots=True)
class MemoryLayout(Generic[V]):
    """A value is in `slices`, in `offsets`, in a border's buffer, or a view of one that is."""

    slices: Mapping[V, Slice[V]]
    offsets: Mapping[V, int]  # where a value with a piece of its own begins in the arena, in bytes
    nbytes: int  # of the arena


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a value that is not a view looks like in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements, dense in some order of the dimensions
    nbytes: int


def lay_out(
    items: Sequence[Item],
    calls: Sequence[Call[V]],
    borders: Collection[V],
    forms: Mapping[V, TensorForm],
    *,
    concat_in_place: bool = True,
) -> MemoryLayout[V]:
    """Place what the calls make; `borders` are the values that have buffers of their own.

    Calls are ordered by item, and within an item as they run. `forms` holds at least every value that a
    kernel or a concatenation makes.
    """
    slices = _slices(calls, borders, forms) if concat_in_place else {}
    roots = _roots(calls, slices, borders)
    uses: dict[V, int] = defaultdict(int)
    for index, call in enumerate(calls):
        for value in (*call.reads, *call.makes):
            uses[roots[value]] |= 1 << index
    pieces = [value for value in uses if value not in borders]
    lifetimes = [Lifetime(forms[value].nbytes, uses[value]) for value in pieces]
    counts = [0] * len(items)
    for call in calls:
        counts[call.item] += 1
    before = launches_before(items, counts)
    plan = plan_memory(lifetimes, before)
    assert shared_wrongly(plan, lifetimes, before) is None
    return MemoryLayout(slices, dict(zip(pieces, plan.offsets, strict=True)), plan.nbytes)


def _slices(
    calls: Sequence[Call[V]], borders: Collection[V], forms: Mapping[V, TensorForm]
) -> dict[V, Slice[V]]:
    """What can be written into its place in a concatenation: made here, and read by nothing else."""
    readers: dict[V, int] = defaultdict(int)
    viewed: set[V] = set()
    for call in calls:
        for value in call.reads:
            readers[value] += 1
        if call.kind is CallKind.VIEW:
            viewed.update(call.makes)
    made = {value for call in calls for value in call.makes}
    slices: dict[V, Slice[V]] = {}
    for call in calls:
        if call.kind is not CallKind.CONCAT:
            continue
        (joined,) = call.makes
        start = 0
        for value in call.reads:
            if readers[value] == 1 and value in made and value not in borders and value not in viewed:
                slices[value] = Slice(joined, call.axis, start)
            start += _extent(value, call, forms)
    return slices


def _extent(value: V, call: Call[V], forms: Mapping[V, TensorForm]) -> int:
    return forms[value].shape[call.axis]


def _roots(calls: Sequence[Call[V]], slices: Mapping[V, Slice[V]], borders: Collection[V]) -> dict[V, V]:
    """Per value the one whose memory it lies in."""
    viewed: dict[V, V] = {}
    for call in calls:
        if call.kind is CallKind.VIEW:
            viewed.update(dict.fromkeys(call.makes, call.reads[0]))
    roots: dict[V, V] = {}

    def root(value: V) -> V:
        while value not in borders and (value in slices or value in viewed):
            value = slices[value].of if value in slices else viewed[value]
        return value

    for call in calls:
        for value in (*call.reads, *call.makes):
            roots[value] = root(value)
    return roots

"""What a program does, before it has memory: calls on streams, where their tensors lie, in which order they
are issued. Bound to memory it is a program, and `issue_program` puts that on the streams of a device.

A recipe is made of a combined block under one mask. A kernel provider decides what a call runs: a session of
onnxruntime, or a unit of a model lowered to torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from stageloom.edge_agent.executor.base import NO_GROUP
from stageloom.edge_agent.executor.cuda.device import Event, Launch, Stream, StreamDevice
from stageloom.edge_agent.executor.cuda.layout import Call, CallKind, MemoryLayout
from stageloom.edge_agent.executor.cuda.memory_plan import masks_to_hold
from stageloom.edge_agent.executor.threads import Threading, assign
from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import Block
from stageloom.shared.bound import BoundCombined, BoundModel, BoundPlan
from stageloom.shared.ids import TensorId
from stageloom.shared.launch_list import Item, LaunchList
from stageloom.shared.plan import Member

KernelT = TypeVar("KernelT")
"""What a provider runs in one call."""


class BufferRole(IntEnum):
    """Which of a tensor's buffers is meant."""

    INNER = 0  # made and used up inside the step: in the arena
    HOME = 1  # in its slot
    LANDING = 2  # an input as it arrived
    ANSWER = 3  # an output as it leaves


class MemberTensor(NamedTuple):
    """A tensor of an active member, in one of its buffers."""

    position: int
    tensor: TensorId
    role: BufferRole = BufferRole.INNER


@dataclass(frozen=True, slots=True)
class Part:
    """One active member at its batch."""

    position: int
    member: Member
    model: BoundModel
    batch: int

    @property
    def block(self) -> Block:
        return self.model.blocks[self.member.block]

    @property
    def last(self) -> bool:
        """Whether it is the model's last block."""
        return self.member.block + 1 == len(self.model.blocks)


@dataclass(frozen=True)
class Recipe(Generic[KernelT]):
    """Calls without memory. The first item begins and the last one ends everything, on stream 0."""

    combined: int  # which combined block of the plan
    items: LaunchList
    groups: tuple[int, ...]  # per item the one of the schedule's launch list that it belongs to, or NO_GROUP
    calls: tuple[Call[MemberTensor], ...]  # by item
    kernels: tuple[KernelT | None, ...]  # per call what it runs, None for a copy [num_calls]
    layout: MemoryLayout[MemberTensor]
    script: tuple[tuple[int, int | None], ...]  # (item, call) in issue order; None where the item ends
    parts: Mapping[int, Part]  # by position

    @property
    def arena_bytes(self) -> int:
        """What its inner tensors need."""
        return self.layout.nbytes

    @property
    def streams(self) -> int:
        return len({item.stream for item in self.items})

    @cached_property
    def awaited(self) -> frozenset[int]:
        """The items that others wait for."""
        return frozenset(wait for item in self.items for wait in item.waits)

    @cached_property
    def last_of_group(self) -> Mapping[int, int]:
        return {group: index for index, group in enumerate(self.groups)}

    @cached_property
    def stream_of_group(self) -> Mapping[int, int]:
        """Per group the stream of its first item."""
        pairs = zip(self.groups, self.items, strict=True)
        return {group: item.stream for group, item in reversed(list(pairs))}


class Places:
    """Where the tensors of a step's active members lie, while a recipe is drafted.

    A member's result goes to the slot of the next block at once, unless another active member reads that slot
    (`aside`): then it waits in the arena until the last item copies it there.
    """

    def __init__(
        self, models: Sequence[BoundModel], combined: BoundCombined, batches: Mapping[int, int]
    ) -> None:
        """`batches` are the active members' by position."""
        active = [combined.members[position] for position in batches]
        self.parts = {
            position: Part(position, member, models[member.model], batches[position])
            for position, member in zip(batches, active, strict=True)
        }
        self.aside = frozenset(
            part.position
            for part in self.parts.values()
            if any(
                part.member.block + 1 in models[other.model].slot_reads[other.block]
                for other in active
                if (other.model, other.replica) == (part.member.model, part.member.replica)
                and other.block > part.member.block
            )
        )

    def read(self, part: Part, tensor: TensorId) -> MemberTensor:
        """What an operator of the member reads."""
        if tensor in part.block.live_in:
            return MemberTensor(part.position, tensor, BufferRole.HOME)
        return self.made(part, tensor)

    def made(self, part: Part, tensor: TensorId) -> MemberTensor:
        """What an operator of the member makes."""
        crosses = tensor in part.block.makes and not part.last
        home = crosses and part.position not in self.aside
        return MemberTensor(part.position, tensor, BufferRole.HOME if home else BufferRole.INNER)

    def settlements(self, item: int) -> list[Call[MemberTensor]]:
        """Copies of what was made aside to the slots, in an item after all others."""
        return [
            Call(item, CallKind.KERNEL, (value,), (value._replace(role=BufferRole.HOME),))
            for position in sorted(self.aside)
            for tensor in self.parts[position].block.makes
            for value in [MemberTensor(position, tensor)]
        ]


Make: TypeAlias = Callable[[int, Mapping[int, int]], Recipe[Any]]
"""The recipe of a combined block for members at their batches, by position."""


def recipes_alone(
    bound: BoundPlan, make: Make, blocks: Sequence[int] | None = None
) -> dict[tuple[int, int, int], Any]:
    """What runs each member of some blocks (None: of all) by itself: by combined block, position, batch."""
    return {
        (index, position, bucket): make(index, {position: bucket})
        for index in (range(len(bound.combined)) if blocks is None else blocks)
        for position, member in enumerate(bound.combined[index].members)
        for bucket in bound.models[member.model].buckets
    }


def largest_batches(bound: BoundPlan, combined: int, mask: int) -> dict[int, int]:
    """The largest batch of each member in `mask`, by position."""
    members = bound.combined[combined].members
    return {position: bound.models[members[position].model].buckets[-1] for position in bits(mask)}


def arenas_for(
    bound: BoundPlan, alone: Mapping[tuple[int, int, int], Recipe[Any]], make: Make
) -> tuple[int, ...]:
    """Bytes that each combined block needs of an arena: for any mask that has to fit, and each member alone.

    0 for those that have no recipe in `alone`: another executor runs them. [num_combined]
    """
    needed = [0] * len(bound.combined)
    for (index, _, _), recipe in alone.items():
        needed[index] = max(needed[index], recipe.arena_bytes)
    for index in sorted({index for index, _, _ in alone}):
        for mask in masks_to_hold(len(bound.combined[index].members)):
            recipe = make(index, largest_batches(bound, index, mask))
            needed[index] = max(needed[index], recipe.arena_bytes)
    return tuple(needed)


def with_ends(items: Sequence[Item]) -> LaunchList:
    """The same between an item that all others come after and one that comes after all others."""
    begin = Item(0, (), 0, (), -1)
    shifted = []
    seen = {0}
    for item in items:
        waits = tuple(wait + 1 for wait in item.waits)
        if item.stream not in seen:
            seen.add(item.stream)
            waits = waits or (0,)
        shifted.append(replace(item, waits=waits))
    last = {item.stream: index for index, item in enumerate(shifted, start=1)}
    last.pop(0, None)
    return (begin, *shifted, Item(0, (), 0, tuple(sorted(last.values())), len(items)))


@dataclass(frozen=True)
class BoundProgram:
    """A recipe bound to memory: functions without arguments that only have to be called in a right order."""

    recipe: Recipe[Any]
    launches: tuple[tuple[Launch, ...], ...]  # per call [num_calls][...]

    @property
    def items(self) -> LaunchList:
        """The recipe's."""
        return self.recipe.items

    @property
    def groups(self) -> tuple[int, ...]:
        """The recipe's. [num_items]"""
        return self.recipe.groups

    @cached_property
    def by_item(self) -> tuple[tuple[int, ...], ...]:
        """Per item the calls that launch something. [num_items][...]"""
        calls: list[list[int]] = [[] for _ in self.recipe.items]
        for index, call in enumerate(self.recipe.calls):
            if self.launches[index]:
                calls[call.item].append(index)
        return tuple(map(tuple, calls))

    @cached_property
    def threading(self) -> Threading:
        """How threads of the host share the items."""
        return assign(self.recipe.items)


Marks: TypeAlias = dict[int, tuple[Event, Event]]
"""Per item of the schedule's launch list the events at its begin and its end."""


def issue_program(
    program: BoundProgram,
    device: StreamDevice,
    streams: Sequence[Stream],
    *,
    before_group: Callable[[Stream], None] | None = None,
    marks: Marks | None = None,
    captured: bool = False,
) -> None:
    """Issue everything in the recipe's order: it begins on the first stream and has joined there in the end.

    Every wait between streams is an event, and the host waits for nothing. With `marks` every group's begin
    and end are recorded there; `captured` keeps them events of the graph. `before_group` may put something on
    a group's stream first.
    """
    recipe = program.recipe
    ended: dict[int, Event] = {}
    began: dict[int, Event] = {}
    opened: set[int] = set()  # items
    begun = {NO_GROUP}
    for index, call in recipe.script:
        item, group = recipe.items[index], recipe.groups[index]
        stream = streams[item.stream]
        if index not in opened:
            opened.add(index)
            for wait in item.waits:
                device.wait(stream, ended[wait])
            if group not in begun:
                begun.add(group)
                if before_group is not None:
                    before_group(stream)
                if marks is not None:
                    began[group] = device.record(stream, timed=True, external=captured)
        if call is not None:
            for launch in program.launches[call]:
                device.launch(stream, launch)
            continue
        if group in began and recipe.last_of_group[group] == index:
            assert marks is not None
            marks[group] = (began[group], device.record(stream, timed=True, external=captured))
        if index in recipe.awaited:
            ended[index] = device.record(stream)

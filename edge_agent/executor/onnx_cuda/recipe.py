"""What a step does, before it has any memory: runs of sessions on streams, and where their tensors lie.

onnxruntime fixes a session's stream when the session is made, so that streams belong to combined blocks and
not to lanes: every operator of a combined block has a *home*, the stream on which the full mask runs it, and
keeps it under every mask and in a fallback. So no weights are there twice for the sake of a mask. Two
combined blocks have streams of their own as far as there are some, where lanes may run both at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from stageloom.edge_agent.executor.on_device.happens_before import launches_before
from stageloom.edge_agent.executor.on_device.memory_plan import (
    ALIGNMENT_BYTES,
    Lifetime,
    masks_to_hold,
    plan_memory,
)
from stageloom.edge_agent.executor.on_device.slots import staged
from stageloom.edge_agent.executor.on_device.streams import MAX_STREAMS, fold_streams, streams_per_lane
from stageloom.edge_agent.executor.onnx_program import CombinedPrograms
from stageloom.edge_agent.executor.onnx_sessions import SessionKey, borders
from stageloom.shared.bitmask import bits
from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.ids import TensorId
from stageloom.shared.launch_list import Item, lower
from stageloom.shared.plan import Member

NO_ITEM = -1
"""The launches before and after all others come from no item of the launch list."""


class Value(NamedTuple):
    """A tensor of an active member: in its slot, or in the arena for as long as the step needs it."""

    position: int
    tensor: TensorId
    in_slot: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of a session; the first and the last launch of a step run nothing."""

    stream: int  # of the device
    waits: tuple[int, ...]  # earlier launches, on other streams, that must have ended
    item: int = NO_ITEM  # of the launch list under the step's mask
    key: SessionKey | None = None
    reads: tuple[Value, ...] = ()  # in the order of the session's inputs
    makes: tuple[Value, ...] = ()  # in the order of its outputs


@dataclass(frozen=True)
class Recipe:
    """One combined block under one mask; the first launch comes before all others, the last after them."""

    combined: int
    bucket_of: Mapping[int, int]  # by position
    launches: tuple[Launch, ...]
    items: int  # of the launch list
    offsets: Mapping[Value, int]  # in the arena
    arena_bytes: int
    settles: tuple[Value, ...]  # in the arena; the last launch copies them to their slots

    @property
    def stream(self) -> int:
        """Where it begins and ends."""
        return self.launches[0].stream

    @cached_property
    def streams(self) -> tuple[int, ...]:
        """All that it uses, ascending."""
        return tuple(sorted({launch.stream for launch in self.launches}))

    @cached_property
    def keys(self) -> frozenset[SessionKey]:
        """The sessions that it runs."""
        return frozenset(launch.key for launch in self.launches if launch.key is not None)


class PlanRecipes:
    """The recipes of one plan, and how much memory they need."""

    def __init__(self, bound: BoundPlan) -> None:
        self.bound = bound
        self.tf32 = bound.plan.executor.precision == "tf32"
        self._programs = tuple(CombinedPrograms(bound, combined) for combined in bound.combined)
        self._homes = tuple(self._home_streams(index) for index in range(len(bound.combined)))
        self.alone = {
            (index, position, bucket): self.recipe(index, {position: bucket})
            for index, combined in enumerate(bound.combined)
            for position, member in enumerate(combined.members)
            for bucket in bound.models[member.model].buckets
        }

    def recipe(self, combined: int, bucket_of: Mapping[int, int]) -> Recipe:
        """The recipe for the members in `bucket_of`, by position."""
        mask = sum(1 << position for position in bucket_of)
        program = self._programs[combined].program(mask, dict(bucket_of))
        draft = _Draft(self.bound, combined, mask, self._base(combined))
        for index, (item, keys) in enumerate(zip(program.items, program.sessions, strict=True)):
            for number, key in enumerate(keys):
                home = self._homes[combined][item.member, key.ops[0]]
                draft.add(index, item, replace(key, stream=home, tf32=self.tf32), first=number == 0)
        launches = draft.finished()
        settles = draft.settles()
        offsets, arena_bytes = self._lay_out(combined, launches, settles, bucket_of)
        return Recipe(combined, dict(bucket_of), launches, len(program.items), offsets, arena_bytes, settles)

    def _base(self, combined: int) -> int:
        """The combined block's first stream; one lane runs one step at a time, so that all may share."""
        if self.bound.plan.lanes == 1:
            return 0
        width = streams_per_lane(self.bound.plan.lanes)
        return combined % (MAX_STREAMS // width) * width

    def _home_streams(self, index: int) -> dict[tuple[int, int], int]:
        """By position and operator of the model its stream on the device."""
        combined = self.bound.combined[index]
        full = lower(
            combined.plan.schedule, combined.graph, combined.full_mask, barrier=self.bound.plan.barrier
        )
        folded = fold_streams(full, streams_per_lane(self.bound.plan.lanes))
        return {
            (item.member, combined.graph.model_op(op)): self._base(index) + item.stream
            for item in folded
            for op in item.ops
        }

    def _lay_out(
        self,
        combined: int,
        launches: Sequence[Launch],
        settles: Sequence[Value],
        bucket_of: Mapping[int, int],
    ) -> tuple[dict[Value, int], int]:
        """Where in the arena everything lies that is no slot's."""
        uses: dict[Value, int] = {}
        for index, launch in enumerate(launches):
            for value in (*launch.reads, *launch.makes):
                if not value.in_slot:
                    uses[value] = uses.get(value, 0) | 1 << index
        end = 1 << len(launches) - 1
        members = self.bound.combined[combined].members
        leaving = [value for value in uses if self._leaves(members[value.position], value.tensor)]
        for value in (*settles, *leaving):
            uses[value] |= end
        values = sorted(uses)
        pieces = [
            Lifetime(self._nbytes(members[v.position], v.tensor, bucket_of[v.position]), uses[v])
            for v in values
        ]
        plan = plan_memory(pieces, launches_before(launches, [1] * len(launches)))
        return dict(zip(values, plan.offsets, strict=True)), plan.nbytes

    def _leaves(self, member: Member, tensor: TensorId) -> bool:
        model = self.bound.models[member.model]
        return member.block + 1 == len(model.blocks) and tensor in model.graph.outputs

    def _nbytes(self, member: Member, tensor: TensorId, bucket: int) -> int:
        return bucket * self.bound.models[member.model].graph.tensors[tensor].nbytes

    @cached_property
    def full(self) -> tuple[Recipe, ...]:
        """Per combined block its full mask at the largest buckets."""
        return tuple(
            self.recipe(
                index,
                {p: self.bound.models[m.model].buckets[-1] for p, m in enumerate(combined.members)},
            )
            for index, combined in enumerate(self.bound.combined)
        )

    @cached_property
    def arena_bytes(self) -> tuple[int, ...]:
        """Per combined block what any of its masks needs, or a member alone where that is more."""
        needed = [recipe.arena_bytes for recipe in self.full]
        for index, combined in enumerate(self.bound.combined):
            members = combined.members
            for mask in masks_to_hold(len(members))[1:]:
                largest = {p: self.bound.models[members[p].model].buckets[-1] for p in bits(mask)}
                needed[index] = max(needed[index], self.recipe(index, largest).arena_bytes)
        for (index, _, _), recipe in self.alone.items():
            needed[index] = max(needed[index], recipe.arena_bytes)
        return tuple(needed)

    def slots(self) -> Iterator[tuple[tuple[int, int, TensorId], int]]:
        """Model, replica and tensor of everything that lies in a slot, with its bytes at the full batch."""
        for index, model in enumerate(self.bound.models):
            for replica in range(model.plan.replicas):
                for tensor in sorted({t for block in model.blocks for t in block.live_in}):
                    nbytes = model.plan.batch * model.graph.tensors[tensor].nbytes
                    yield (index, replica, tensor), nbytes

    @cached_property
    def memory_bytes(self) -> int:
        """What slots and arenas take."""
        shared = self.bound.plan.lanes == 1
        arenas = max(self.arena_bytes) if shared else sum(map(aligned, self.arena_bytes))
        return sum(aligned(nbytes) for _, nbytes in self.slots()) + aligned(arenas)

    @cached_property
    def keys(self) -> frozenset[SessionKey]:
        """Every session that fallbacks and full masks want at any bucket."""
        return frozenset(key for recipe in self.alone.values() for key in recipe.keys).union(
            *(recipe.keys for recipe in self.full)
        )


@lru_cache(maxsize=32)
def recipes_of(bound: BoundPlan) -> PlanRecipes:
    """The recipes of a plan: stating its bytes and loading it ask for the same ones."""
    return PlanRecipes(bound)


def aligned(nbytes: int) -> int:
    """Rounded up to what an address must be a multiple of."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _Draft:
    """The launches of a recipe, in issue order."""

    def __init__(self, bound: BoundPlan, combined: int, mask: int, base: int) -> None:
        self._bound = bound
        self._combined = bound.combined[combined]
        self._mask = mask
        self._base = base
        self._launches = [Launch(base, ())]
        self._latest: dict[int, int] = {base: 0}  # per stream of the device its latest launch
        self._last_of: dict[int, int] = {}  # per item its last launch
        self._tail: dict[int, int] = {}  # per stream of the schedule its latest launch

    def add(self, index: int, item: Item, key: SessionKey, *, first: bool) -> None:
        """One more session of an item; it comes after the one before it, and the first after the item's
        waits and what came before it on the schedule's stream."""
        assert key.stream is not None
        before = [] if item.stream not in self._tail else [self._tail[item.stream]]
        if first:
            before += [self._last_of[wait] for wait in item.waits]
        if key.stream not in self._latest:
            before.append(0)
        waits = sorted({b for b in before if self._launches[b].stream != key.stream})
        reads, makes = borders(self._model(item.member).graph, key.ops)
        self._tail[item.stream] = self._last_of[index] = self._latest[key.stream] = len(self._launches)
        self._launches.append(
            Launch(
                key.stream,
                tuple(waits),
                index,
                key,
                tuple(self._read(item.member, tensor) for tensor in reads),
                tuple(self._made(item.member, tensor) for tensor in makes),
            )
        )

    def finished(self) -> tuple[Launch, ...]:
        """With the launch that comes after all others."""
        waits = sorted(at for stream, at in self._latest.items() if stream != self._base)
        return (*self._launches, Launch(self._base, tuple(waits)))

    def settles(self) -> tuple[Value, ...]:
        """What was made aside, since another member of the step still reads its slot."""
        return tuple(
            Value(position, tensor, in_slot=False)
            for position, member in enumerate(self._combined.members)
            if self._mask >> position & 1 and self._staged(position)
            for tensor in self._bound.models[member.model].blocks[member.block].makes
        )

    def _model(self, position: int) -> BoundModel:
        return self._bound.models[self._combined.members[position].model]

    def _staged(self, position: int) -> bool:
        return staged(self._combined, self._bound.models, self._mask, position)

    def _read(self, position: int, tensor: TensorId) -> Value:
        block = self._model(position).blocks[self._combined.members[position].block]
        return Value(position, tensor, True) if tensor in block.live_in else self._made(position, tensor)

    def _made(self, position: int, tensor: TensorId) -> Value:
        model = self._model(position)
        index = self._combined.members[position].block
        crosses = tensor in model.blocks[index].makes and index + 1 < len(model.blocks)
        return Value(position, tensor, crosses and not self._staged(position))

"""What a step does: runs of sessions on streams, and a plan's memory that they are bound to.

onnxruntime fixes a session's stream when the session is made, so that streams belong to combined blocks and
not to lanes: every operator of a combined block has a *home*, the stream on which the full mask runs it, and
keeps it under every mask and in a fallback. So no weights are there twice for the sake of a mask. Two
combined blocks have streams of their own as far as there are some, where lanes may run both at once.

Every session is an item of its own in a recipe, because two sessions of one item of the launch list may have
different homes.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache

from stageloom.edge_agent.executor.base import NO_GROUP
from stageloom.edge_agent.executor.cuda.device import SessionDevice
from stageloom.edge_agent.executor.cuda.layout import Call, CallKind, TensorForm, lay_out
from stageloom.edge_agent.executor.cuda.memory_plan import aligned
from stageloom.edge_agent.executor.cuda.recipe import (
    BufferRole,
    MemberTensor,
    Places,
    Recipe,
    arenas_for,
    largest_batches,
    recipes_alone,
    with_ends,
)
from stageloom.edge_agent.executor.cuda.streams import MAX_STREAMS, fold_streams, streams_per_lane
from stageloom.edge_agent.executor.onnx.cache import SessionKey, borders
from stageloom.edge_agent.executor.onnx.half import with_half_graphs
from stageloom.edge_agent.executor.onnx.program import CombinedPrograms
from stageloom.shared.bound import BoundPlan
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import TensorId
from stageloom.shared.launch_list import Item
from stageloom.shared.plan import Member

SessionRecipe = Recipe[SessionKey]


def block_keys(recipe: SessionRecipe) -> frozenset[SessionKey]:
    """Those of its sessions that run all operators of a member's block."""
    found = set()
    for call, key in zip(recipe.calls, recipe.kernels, strict=True):
        if key is not None and not key.merge:
            part = recipe.parts[(*call.reads, *call.makes)[0].position]
            if len(key.ops) == len(part.block.operators):
                found.add(key)
    return frozenset(found)


def session_keys(recipe: SessionRecipe) -> frozenset[SessionKey]:
    """The sessions that a recipe runs."""
    return frozenset(key for key in recipe.kernels if key is not None)


class PlanRecipes:
    """The recipes of one plan, and how much memory they need."""

    def __init__(self, bound: BoundPlan) -> None:
        """Models that the plan wants in half precision have the graphs of those from here on."""
        self.bound = bound = with_half_graphs(bound)
        self.width = streams_per_lane(bound.plan.lanes)
        self._programs = tuple(CombinedPrograms(bound, index) for index in range(len(bound.combined)))
        self._homes = tuple(self._home_streams(index) for index in range(len(bound.combined)))
        self._recipes: dict[tuple[int, tuple[tuple[int, int], ...]], SessionRecipe] = {}
        self.alone: dict[tuple[int, int, int], SessionRecipe] = recipes_alone(bound, self.recipe)

    def recipe(self, combined: int, bucket_of: Mapping[int, int]) -> SessionRecipe:
        """The recipe for the members in `bucket_of`, by position; made once."""
        place = (combined, tuple(bucket_of.items()))
        if place not in self._recipes:
            self._recipes[place] = self._made(combined, bucket_of)
        return self._recipes[place]

    def _made(self, combined: int, bucket_of: Mapping[int, int]) -> SessionRecipe:
        block = self.bound.combined[combined]
        mask = sum(1 << position for position in bucket_of)
        program = self._programs[combined].program(mask, dict(bucket_of))
        draft = _Draft(Places(self.bound.models, block, bucket_of))
        first = self.first_stream(combined)
        for index, (item, keys) in enumerate(zip(program.items, program.sessions, strict=True)):
            for number, key in enumerate(keys):
                home = self._homes[combined][item.member, key.ops[0]]
                own = replace(key, stream=first + home)
                draft.add(index, item, own, home, first=number == 0)
        return draft.recipe(combined)

    def first_stream(self, combined: int) -> int:
        """The combined block's first stream; one lane runs one step at a time, so that all may share."""
        if self.bound.plan.lanes == 1:
            return 0
        return combined % (MAX_STREAMS // self.width) * self.width

    def _home_streams(self, index: int) -> dict[tuple[int, int], int]:
        """By position and operator of the model its stream, counted from the combined block's first."""
        combined = self.bound.combined[index]
        full = self.bound.launches(index, combined.full_mask)
        return {
            (item.member, combined.graph.model_op(op)): item.stream
            for item in fold_streams(full, self.width)
            for op in item.ops
        }

    @cached_property
    def full(self) -> tuple[SessionRecipe, ...]:
        """Per combined block its full mask at the largest buckets."""
        return tuple(
            self.recipe(index, largest_batches(self.bound, index, combined.full_mask))
            for index, combined in enumerate(self.bound.combined)
        )

    @cached_property
    def arena_bytes(self) -> tuple[int, ...]:
        """Per combined block what its arena holds."""
        return arenas_for(self.bound, self.alone, self.recipe)

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
        return frozenset().union(*map(session_keys, (*self.alone.values(), *self.full)))

    @cached_property
    def blocks(self) -> frozenset[SessionKey]:
        """Those of `keys` that run all operators of a member's block."""
        return frozenset().union(*map(block_keys, (*self.alone.values(), *self.full)))


@lru_cache(maxsize=32)
def recipes_of(bound: BoundPlan) -> PlanRecipes:
    """The recipes of a plan: stating its bytes and loading it ask for the same ones."""
    return PlanRecipes(bound)


class _Draft:
    """The sessions of a recipe, in issue order."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._parts = places.parts
        self._items: list[Item] = []
        self._groups: list[int] = []
        self._calls: list[Call[MemberTensor]] = []
        self._keys: list[SessionKey | None] = []
        self._last_of: dict[int, int] = {}  # per group its last item
        self._tail: dict[int, int] = {}  # per stream of the schedule its latest item

    def add(self, group: int, item: Item, key: SessionKey, stream: int, *, first: bool) -> None:
        """One more session of an item of the launch list, which comes after the one before it.

        The first also comes after the item's waits and what came before it on the schedule's stream.
        """
        before = [self._tail[item.stream]] if item.stream in self._tail else []
        if first:
            before += [self._last_of[wait] for wait in item.waits]
        waits = sorted({index for index in before if self._items[index].stream != stream})
        part = self._parts[item.member]
        reads, makes = borders(part.model.graph, key.ops)
        self._tail[item.stream] = self._last_of[group] = len(self._items)
        self._items.append(Item(item.member, key.ops, stream, tuple(waits), item.stage))
        self._groups.append(group)
        self._keys.append(key)
        self._calls.append(
            Call(
                len(self._items),  # one further on with the item that begins
                CallKind.KERNEL,
                tuple(self._places.read(part, tensor) for tensor in reads),
                tuple(self._places.made(part, tensor) for tensor in makes),
            )
        )

    def recipe(self, combined: int) -> SessionRecipe:
        """All of it. The last item copies to the slots what was made aside, and keeps outputs until then."""
        items = with_ends(self._items)
        end = len(items) - 1
        inner = sorted({value for call in self._calls for value in call.makes if _inner(value)})
        last = self._places.settlements(end)
        last += [Call(end, CallKind.VIEW, (value,), ()) for value in inner if self._leaves(value)]
        calls = (*self._calls, *last)
        values = {value for call in calls for value in (*call.reads, *call.makes)}
        layout = lay_out(
            items,
            calls,
            {value for value in values if not _inner(value)},
            {value: TensorForm((), (), self._nbytes(value)) for value in values},
        )
        issued: dict[int, list[int | None]] = defaultdict(list)
        for index, call in enumerate(calls):
            issued[call.item].append(index)
        return Recipe(
            combined=combined,
            items=items,
            groups=(NO_GROUP, *self._groups, NO_GROUP),
            calls=calls,
            kernels=(*self._keys, *[None] * len(last)),
            layout=layout,
            script=tuple((index, call) for index in range(len(items)) for call in (*issued[index], None)),
            parts=self._parts,
        )

    def _leaves(self, value: MemberTensor) -> bool:
        part = self._parts[value.position]
        return part.last and value.tensor in part.model.graph.outputs

    def _nbytes(self, value: MemberTensor) -> int:
        part = self._parts[value.position]
        return part.batch * part.model.graph.tensors[value.tensor].nbytes


def _inner(value: MemberTensor) -> bool:
    return value.role is BufferRole.INNER


class PlanMemory:
    """The memory of one loaded plan on a device: a place for every tensor in every slot, and the arenas.

    All of it is one piece that is taken when the plan is loaded and stays where it is, so that sessions are
    bound once. A slot needs no second place for run-ahead: the core lets it be overwritten only after its
    last reader.
    """

    def __init__(self, recipes: PlanRecipes, device: SessionDevice) -> None:
        self._device = device
        self._bound = recipes.bound
        self.nbytes = recipes.memory_bytes
        self._begin = address = device.allocate(max(1, self.nbytes))
        self._slots: dict[tuple[int, int, TensorId], int] = {}
        for place, nbytes in recipes.slots():
            self._slots[place] = address
            address += aligned(nbytes)
        # One lane runs one step at a time, so that its steps can share an arena; lanes cannot.
        self._arenas: list[int] = []
        self._room = list(recipes.arena_bytes)
        shared = self._bound.plan.lanes == 1
        for index, nbytes in enumerate(recipes.arena_bytes):
            self._arenas.append(address)
            if shared:
                self._room[index] = max(recipes.arena_bytes)
            else:
                address += aligned(nbytes)

    def slot(self, member: Member, tensor: TensorId) -> int:
        """The address of a tensor in the slots of a replica."""
        return self._slots[member.model, member.replica, tensor]

    def check(self, recipe: SessionRecipe) -> None:
        """Raises:
        ExecutorError: the recipe needs more than the plan has room for.
        """
        if recipe.arena_bytes > self._room[recipe.combined]:
            raise ExecutorError(
                f"a program needs {recipe.arena_bytes} bytes where its plan has "
                f"{self._room[recipe.combined]}",
                remedy="its members run one after another",
            )

    def address(self, recipe: SessionRecipe, value: MemberTensor) -> int:
        """Where a value lies."""
        if not _inner(value):
            return self.slot(recipe.parts[value.position].member, value.tensor)
        return self._arenas[recipe.combined] + recipe.layout.offsets[value]

    def free(self) -> None:
        """Give it back; nothing on the device uses it any more."""
        self._device.free(self._begin)

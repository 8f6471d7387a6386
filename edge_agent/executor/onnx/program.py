"""From a plan's schedules to runs of sessions: which session computes what, on which thread.

An *atom* is a run of operators that no mask separates, a merge, or half of operators that are split; it is
one session. So the same sessions run under every mask and in a fallback, and every mask can run as soon as
the plan is loaded. The join of two halves is an atom without a session.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import TypeAlias

from stageloom.edge_agent.executor.onnx.cache import SessionKey
from stageloom.edge_agent.executor.threads import Threading, assign
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.bound import BoundPlan
from stageloom.shared.graph import ITEM_BYTES, Graph
from stageloom.shared.ids import Digest, TensorId
from stageloom.shared.launch_list import Item
from stageloom.shared.partition import AxisRange
from stageloom.shared.split_graph import SplitOrigin, SplitRole

Atom = tuple[int, ...]
"""Operators in the combined block's numbering, in run order."""


@dataclass(frozen=True, slots=True)
class HalfRun:
    """The session of one half of operators that are split: what it makes becomes tensors of the halves."""

    key: SessionKey
    made: tuple["HalfOutput", ...]


@dataclass(frozen=True, slots=True)
class HalfOutput:
    """What a half makes of an output, and where that lies in the output as it is joined."""

    joined: TensorId
    half: TensorId
    shape: tuple[int, ...]  # joined
    dtype: str
    place: AxisRange

    @property
    def in_place(self) -> bool:
        """Whether the half is written into the joined output, of which it is one piece: the join is free.

        Not where that costs more than the copy of little that it saves.
        """
        dim = self.place.dim
        nbytes = ITEM_BYTES[self.dtype] * prod(self.shape[dim + 1 :]) * self.place.extent
        return prod(self.shape[:dim]) == 1 and nbytes >= _LEAST_IN_PLACE_BYTES


@dataclass(frozen=True, slots=True)
class JoinRun:
    """Both halves of operators that are split become one."""

    dim: int
    halves: tuple[tuple[TensorId, TensorId, TensorId], ...]  # per output its tensor and those of its halves


_LEAST_IN_PLACE_BYTES = 1 << 16
"""Binding an output to memory costs some 20 us, as copying this much does."""

SessionRun: TypeAlias = SessionKey | HalfRun | JoinRun


def key_of(run: SessionRun) -> SessionKey | None:
    """The session that a run needs; a join needs none."""
    if isinstance(run, HalfRun):
        return run.key
    return None if isinstance(run, JoinRun) else run


@dataclass(frozen=True, slots=True)
class SessionProgram:
    """One combined block under one mask, with a bucket per active member."""

    items: tuple[Item, ...]
    runs: tuple[tuple[SessionRun, ...], ...]  # per item, in order [num_items][...]
    threading: Threading
    dead: tuple[tuple[TensorId, ...], ...]  # per item the tensors no later item reads; on one thread only

    @property
    def sessions(self) -> tuple[tuple[SessionKey, ...], ...]:
        """Per item the sessions that it runs, in order. [num_items][...]"""
        return tuple(tuple(key for run in runs if (key := key_of(run)) is not None) for runs in self.runs)

    @property
    def groups(self) -> range:
        """Every item is one of the schedule's launch list."""
        return range(len(self.items))


class CombinedPrograms:
    """The atoms of one combined block in one of its variants."""

    def __init__(
        self, bound: BoundPlan, combined: int, variant: int = 0, *, one_caller: bool = False
    ) -> None:
        """`one_caller`: a session runs in one lane at a time; replicas in several lanes want copies of it, as
        they do of one that has threads of its own."""
        self._bound = bound
        self._copies = copies_of(bound)
        self._one_caller = one_caller
        self._combined = bound.combined[combined]
        self._executor = bound.executor_of(combined, variant)
        self._on = partial(bound.group_executor, combined, variant)
        self._lowered = partial(bound.launches, combined, variant=variant)
        self._full = self._lowered(self._combined.full_mask)
        self._atom_at = {atom[0]: atom for item in self._full for atom in self._atoms(item)}

    @cached_property
    def _begins(self) -> frozenset[int]:
        """Operators that begin an item where their member runs alone.

        There a stream schedule may need a wait that the operators of others imply as long as they run, too.
        Any mask separates only what the full one or this one does.
        """
        alone = (self._lowered(1 << position) for position in range(len(self._combined.members)))
        return frozenset(item.ops[0] for items in alone for item in items)

    def _atoms(self, item: Item) -> Iterator[Atom]:
        first = 0
        for position in range(1, len(item.ops) + 1):
            if (
                position == len(item.ops)
                or item.ops[position] in self._begins
                or SplitRole.WHOLE is not self._origin(item, item.ops[position]).role
                or SplitRole.WHOLE is not self._origin(item, item.ops[position - 1]).role
            ):
                yield item.ops[first:position]
                first = position

    def _origin(self, item: Item, op: int) -> SplitOrigin:
        """What an operator is of its artifact's graph."""
        model = self._bound.models[self._combined.members[item.member].model]
        return model.origin(self._combined.graph.model_op(op))

    def keys(self, bucket_of: dict[int, int]) -> Iterator[SessionKey]:
        """The sessions of the atoms of the members in `bucket_of`, each at its member's bucket."""
        for item in self._full:
            if item.member in bucket_of:
                for atom in self._atoms(item):
                    key = key_of(self._run(item, atom, bucket_of[item.member]))
                    if key is not None:
                        yield key

    def program(self, mask: int, bucket_of: dict[int, int]) -> SessionProgram:
        """Lower the schedule under a mask. Cheap: no session is made."""
        items = self._lowered(mask)
        runs = tuple(
            tuple(self._run(item, ops, bucket_of[item.member]) for ops in self._cover(item.ops))
            for item in items
        )
        threading = assign(items)
        dead = self._dead(items) if threading.alone else ((),) * len(items)
        return SessionProgram(items, runs, threading, dead)

    def _cover(self, ops: Atom) -> Iterator[Atom]:
        """The atoms that make up an item."""
        position = 0
        while position < len(ops):
            atom = self._atom_at[ops[position]]
            yield atom
            position += len(atom)

    def _run(self, item: Item, ops: Atom, bucket: int) -> SessionRun:
        member = self._combined.members[item.member]
        model = self._bound.models[member.model]
        origins = [self._origin(item, op) for op in ops]
        first = origins[0]
        if first.role is SplitRole.JOIN:
            return JoinRun(first.dim, first.halves)
        executor = self._on(item.resource)
        beside = executor.name != self._executor.name
        own = self._one_caller or beside or executor.intra_op_threads > 1  # else callers share its threads
        copy = self._copies[member.model, member.replica] if own else 0
        key = SessionKey(
            artifact=model.plan.artifact,
            ops=tuple(sorted(op for origin in origins for op in origin.ops)),
            batch=bucket,
            intra_op_threads=executor.intra_op_threads,
            merge=item.merge,
            precision=executor.precision,
            copy=copy,
            half=None if first.role is SplitRole.WHOLE else (first.dim, first.boundary, first.second),
            executor=executor.name if beside else "",
        )
        if key.half is None:
            return key
        return HalfRun(key, tuple(self._half_output(model.graph, first, row, bucket) for row in first.halves))

    @staticmethod
    def _half_output(
        graph: Graph, origin: SplitOrigin, row: tuple[TensorId, TensorId, TensorId], bucket: int
    ) -> HalfOutput:
        joined, half = graph.tensors[row[0]], row[2 if origin.second else 1]
        shape = tuple(joined.batched(bucket))
        bounds = (origin.boundary, shape[origin.dim]) if origin.second else (0, origin.boundary)
        return HalfOutput(row[0], half, shape, joined.dtype, AxisRange(origin.dim, *bounds))

    def _dead(self, items: tuple[Item, ...]) -> tuple[tuple[TensorId, ...], ...]:
        """Per item the tensors of its member that it is the last to touch and that do not leave the block."""
        last: dict[tuple[int, TensorId], int] = {}
        for index, item in enumerate(items):
            for tensor in self._touched(item, self._combined.graph):
                last[item.member, tensor] = index
        dead: list[list[TensorId]] = [[] for _ in items]
        for (position, tensor), index in last.items():
            member = self._combined.members[position]
            if tensor not in self._bound.models[member.model].blocks[member.block].live_out:
                dead[index].append(tensor)
        return tuple(map(tuple, dead))

    def _touched(self, item: Item, graph: CombinedGraph) -> set[TensorId]:
        operators = self._bound.models[self._combined.members[item.member].model].graph.operators
        return {
            tensor
            for op in item.ops
            for tensor in (*operators[graph.model_op(op)].inputs, *operators[graph.model_op(op)].outputs)
        }


def copies_of(bound: BoundPlan) -> dict[tuple[int, int], int]:
    """Per replica of a model the copy of its artifact's sessions that it runs.

    An artifact has as many copies as it has replicas, but no more than there are lanes. Replicas that share
    one take turns.
    """
    replicas: dict[Digest, int] = {}
    copies = {}
    for index, model in enumerate(bound.models):
        for replica in range(model.plan.replicas):
            number = replicas.get(model.plan.artifact, 0)
            copies[index, replica] = number % bound.plan.lanes
            replicas[model.plan.artifact] = number + 1
    return copies

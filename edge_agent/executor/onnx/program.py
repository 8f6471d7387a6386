"""From a plan's schedules to runs of sessions: which session computes what, on which thread.

An *atom* is a run of operators that no mask separates, or a merge; it is one session. So the same sessions
run under every mask and in a fallback, and every mask can run as soon as the plan is loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from stageloom.edge_agent.executor.onnx.cache import SessionKey
from stageloom.edge_agent.executor.threads import Threading, assign
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.bound import BoundPlan
from stageloom.shared.ids import Digest, TensorId
from stageloom.shared.launch_list import Item

Atom = tuple[int, ...]
"""Operators in the combined block's numbering, in run order."""


@dataclass(frozen=True, slots=True)
class SessionProgram:
    """One combined block under one mask, with a bucket per active member."""

    items: tuple[Item, ...]
    sessions: tuple[tuple[SessionKey, ...], ...]  # per item what it runs, in order [num_items][...]
    threading: Threading
    dead: tuple[tuple[TensorId, ...], ...]  # per item the tensors no later item reads; on one thread only

    @property
    def groups(self) -> range:
        """Every item is one of the schedule's launch list."""
        return range(len(self.items))


class CombinedPrograms:
    """The atoms of one combined block in one of its variants."""

    def __init__(
        self, bound: BoundPlan, combined: int, variant: int = 0, *, one_caller: bool = False
    ) -> None:
        """`one_caller`: a session runs in one lane at a time; replicas in several lanes want copies of it."""
        self._bound = bound
        self._copies = copies_of(bound) if one_caller else {}
        self._combined = bound.combined[combined]
        self._executor = bound.executor_of(combined, variant)
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
            if position == len(item.ops) or item.ops[position] in self._begins:
                yield item.ops[first:position]
                first = position

    def keys(self, bucket_of: dict[int, int]) -> Iterator[SessionKey]:
        """The sessions of the atoms of the members in `bucket_of`, each at its member's bucket."""
        for item in self._full:
            if item.member in bucket_of:
                for atom in self._atoms(item):
                    yield self._key(item, atom, bucket_of[item.member])

    def program(self, mask: int, bucket_of: dict[int, int]) -> SessionProgram:
        """Lower the schedule under a mask. Cheap: no session is made."""
        items = self._lowered(mask)
        sessions = tuple(
            tuple(self._key(item, ops, bucket_of[item.member]) for ops in self._cover(item.ops))
            for item in items
        )
        threading = assign(items)
        dead = self._dead(items) if threading.threads == 1 else ((),) * len(items)
        return SessionProgram(items, sessions, threading, dead)

    def _cover(self, ops: Atom) -> Iterator[Atom]:
        """The atoms that make up an item."""
        position = 0
        while position < len(ops):
            atom = self._atom_at[ops[position]]
            yield atom
            position += len(atom)

    def _key(self, item: Item, ops: Atom, bucket: int) -> SessionKey:
        member = self._combined.members[item.member]
        model = self._bound.models[member.model]
        graph = self._combined.graph
        return SessionKey(
            artifact=model.plan.artifact,
            ops=tuple(sorted(graph.model_op(op) for op in ops)),
            batch=bucket,
            intra_op_threads=self._executor.intra_op_threads,
            merge=item.merge,
            precision=self._executor.precision,
            copy=self._copies.get((member.model, member.replica), 0),
        )

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

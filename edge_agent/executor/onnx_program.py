"""From a plan's schedules to runs of sessions: which session computes what, on which thread.

An *atom* is a run of operators that the full mask never separates, or a merge; it is one session. Under a
smaller mask and in a fallback the same sessions run, so every mask can run as soon as the plan is loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from edge_agent.executor.onnx_sessions import SessionKey
from edge_agent.executor.streams import Threading, assign
from shared.blocks import CombinedGraph
from shared.bound import BoundCombined, BoundPlan
from shared.ids import TensorId
from shared.launch_list import Item, lower

Atom = tuple[int, ...]
"""Operators in the combined block's numbering, in run order."""


@dataclass(frozen=True, slots=True)
class Program:
    """One combined block under one mask, with a bucket per active member."""

    items: tuple[Item, ...]
    sessions: tuple[tuple[SessionKey, ...], ...]  # per item what it runs, in order [num_items][...]
    threading: Threading
    dead: tuple[tuple[TensorId, ...], ...]  # per item the tensors no later item reads; on one thread only


class CombinedPrograms:
    """The atoms of one combined block."""

    def __init__(self, bound: BoundPlan, combined: BoundCombined) -> None:
        self._bound = bound
        self._combined = combined
        full = lower(combined.plan.schedule, combined.graph, combined.full_mask, barrier=bound.plan.barrier)
        self._full = full
        self._atom_at = {item.ops[0]: item.ops for item in full}

    def keys(self, bucket_of: dict[int, int]) -> Iterator[SessionKey]:
        """The sessions of the atoms of the members in `bucket_of`, each at its member's bucket."""
        for item in self._full:
            if item.member in bucket_of:
                yield self._key(item, item.ops, bucket_of[item.member])

    def program(self, mask: int, bucket_of: dict[int, int]) -> Program:
        """Lower the schedule under a mask. Cheap: no session is made."""
        combined = self._combined
        items = lower(combined.plan.schedule, combined.graph, mask, barrier=self._bound.plan.barrier)
        sessions = tuple(
            tuple(self._key(item, ops, bucket_of[item.member]) for ops in self._cover(item.ops))
            for item in items
        )
        threading = assign(items)
        dead = self._dead(items) if threading.threads == 1 else ((),) * len(items)
        return Program(items, sessions, threading, dead)

    def _cover(self, ops: Atom) -> Iterator[Atom]:
        """The atoms that make up an item; what no atom fits becomes a run of its own."""
        position = 0
        while position < len(ops):
            atom = self._atom_at.get(ops[position])
            if atom is None or ops[position : position + len(atom)] != atom:
                atom = ops[position:]
            yield atom
            position += len(atom)

    def _key(self, item: Item, ops: Atom, bucket: int) -> SessionKey:
        model = self._bound.models[self._combined.members[item.member].model]
        graph = self._combined.graph
        return SessionKey(
            artifact=model.plan.artifact,
            ops=tuple(sorted(graph.model_op(op) for op in ops)),
            batch=bucket,
            intra_op_threads=self._bound.plan.executor.intra_op_threads,
            merge=item.merge,
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

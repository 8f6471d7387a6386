"""Blocks of a model, combined blocks of several, and the one graph over a combined block's operators."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from stageloom.shared.bitmask import bits
from stageloom.shared.graph import Graph, reverse, transitive
from stageloom.shared.ids import OpId, TensorId
from stageloom.shared.merge import merge_key


@dataclass(frozen=True, slots=True)
class Block:
    """The operators `start <= op < stop` of one model, between two cuts."""

    index: int
    start: int
    stop: int
    live_in: tuple[TensorId, ...]  # what its slot holds: every tensor live across the cut at `start`
    live_out: tuple[TensorId, ...]  # what the next slot holds; the graph's outputs after the last block
    makes: tuple[TensorId, ...]  # the part of live_out that this block computes
    reads: tuple[TensorId, ...]  # the part of live_in that this block's own operators read

    @property
    def operators(self) -> range:
        """Operator ids of the model, ascending."""
        return range(self.start, self.stop)


def split(graph: Graph, cuts: Sequence[int]) -> tuple[Block, ...]:
    """Cut a model at `cuts` (ascending, among its base cuts) into blocks."""
    borders = (0, *cuts, len(graph.operators))
    blocks = []
    for index, (start, stop) in enumerate(pairwise(borders)):
        last = stop == len(graph.operators)
        live_in = graph.live_at(start)
        live_out = graph.outputs if last else graph.live_at(stop)
        read = {t for op in range(start, stop) for t in graph.operators[op].inputs}
        blocks.append(
            Block(
                index=index,
                start=start,
                stop=stop,
                live_in=live_in,
                live_out=live_out,
                makes=tuple(t for t in live_out if start <= graph.producer[t] < stop),
                reads=tuple(t for t in live_in if t in read),
            )
        )
    return tuple(blocks)


def slot_reads(graph: Graph, blocks: Sequence[Block]) -> tuple[tuple[int, ...], ...]:
    """Per block the slots in which the tensors lie that it reads, ascending. [num_blocks][...]

    A tensor lies in the slot after the block that makes it (a graph input in slot 0) and is passed through
    later slots by reference, so a block may read slots of earlier blocks. A graph output that lies in a slot
    counts as read by the last block, which hands it out.
    """
    block_of = [block.index for block in blocks for _ in block.operators]
    reads: list[set[int]] = [set() for _ in blocks]
    outputs = set(graph.outputs)
    for tensor, made in enumerate(graph.producer):
        slot = 0 if made < 0 else block_of[made] + 1
        if slot == len(blocks):
            continue
        for op in graph.consumers[tensor]:
            if block_of[op] >= slot:
                reads[block_of[op]].add(slot)
        if tensor in outputs:
            reads[-1].add(slot)
    return tuple(tuple(sorted(slots)) for slots in reads)


def slot_readers(graph: Graph, blocks: Sequence[Block]) -> tuple[int, ...]:
    """Per slot the last block that reads a tensor lying in it, at least the slot's own. [num_blocks]

    Slot b may be given to the next instance once block `slot_readers[b]` has been issued.
    """
    last_reader = list(range(len(blocks)))
    for block, slots in enumerate(slot_reads(graph, blocks)):
        for slot in slots:
            last_reader[slot] = max(last_reader[slot], block)
    return tuple(last_reader)


@dataclass(frozen=True)
class CombinedGraph:
    """The disjoint union of the members' operators, numbered member by member in each block's order.

    Operator i of member m is `offsets[m] + i`; the numbering is topological. Edges between two members do
    not exist: they hold different instances, even when they are blocks of one model.
    """

    offsets: tuple[int, ...]  # [num_members + 1], the last entry is the number of operators
    starts: tuple[int, ...]  # per member the model's operator id of its first operator [num_members]
    predecessors: tuple[int, ...]  # per operator a mask, within the member only [num_ops]
    merge_class: tuple[int, ...] = ()
    """Per operator a number that those share which may run as one launch (`stageloom.shared.merge`); -1: it
    never merges. [num_ops]; empty: none does."""
    members: tuple[tuple[Graph, Block], ...] = field(default=(), compare=False, repr=False)
    """What it was combined from, for who reads more of an operator than its edges; may be absent."""

    @property
    def size(self) -> int:
        """Number of operators."""
        return self.offsets[-1]

    @property
    def num_members(self) -> int:
        """Number of sub-blocks."""
        return len(self.starts)

    @cached_property
    def successors(self) -> tuple[int, ...]:
        """Per operator the mask of operators that read its output. [num_ops]"""
        return reverse(self.predecessors)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Per operator the mask of all operators that must run before it. [num_ops]"""
        return transitive(self.predecessors)

    @cached_property
    def member_of(self) -> tuple[int, ...]:
        """Per operator its member. [num_ops]"""
        return tuple(
            member
            for member in range(self.num_members)
            for _ in range(self.offsets[member], self.offsets[member + 1])
        )

    def model_op(self, op: int) -> OpId:
        """The operator's id in its own model."""
        member = self.member_of[op]
        return OpId(self.starts[member] + op - self.offsets[member])

    def member_mask(self, member: int) -> int:
        """The operators of one member."""
        return (1 << self.offsets[member + 1]) - (1 << self.offsets[member])

    def may_merge(self, ops: Sequence[int]) -> bool:
        """Whether two or more different operators may run as one launch."""
        classes = {self.merge_class[op] for op in ops} if self.merge_class else {-1}
        return len(set(ops)) == len(ops) >= 2 and len(classes) == 1 and -1 not in classes

    def active_ops(self, mask: int) -> int:
        """The operators of the active members in `mask`."""
        ops = 0
        for member in bits(mask):
            ops |= self.member_mask(member)
        return ops


def combine(members: Sequence[tuple[Graph, Block]]) -> CombinedGraph:
    """The graph over several blocks that are scheduled together."""
    offsets = [0]
    predecessors: list[int] = []
    classes: dict[Hashable, int] = {}
    merge_class: list[int] = []
    for member, (graph, block) in enumerate(members):
        window = (1 << block.stop) - (1 << block.start)
        shift = offsets[-1] - block.start
        for op in block.operators:
            inside = graph.predecessors[op] & window
            predecessors.append(inside << shift if shift >= 0 else inside >> -shift)
            key = merge_key(graph, OpId(op))
            merge_class.append(-1 if key is None else classes.setdefault((member, key), len(classes)))
        offsets.append(offsets[-1] + len(block.operators))
    return CombinedGraph(
        offsets=tuple(offsets),
        starts=tuple(block.start for _, block in members),
        predecessors=tuple(predecessors),
        merge_class=tuple(merge_class),
        members=tuple(members),
    )

"""The graph that a plan's splits make of a model's: first half, second half and join in place of operators.

Tensors keep their numbers, those of the halves follow them, and so slots, blocks and cuts are what they were.
Operators are numbered anew, in place: a split of operators i to j becomes three, and all behind it move up.
What passes inside a split from one operator to the next is made by no operator here, and read by none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from stageloom.shared.graph import Graph, Operator, Tensor
from stageloom.shared.ids import OpId, TensorId
from stageloom.shared.partition import Split, dimension_of

JOIN_KIND = "Concat"
"""What a join is to whoever reads kinds of operators."""


class SplitRole(Enum):
    """What an operator of the derived graph is of the artifact's."""

    WHOLE = "whole"
    FIRST = "first"
    SECOND = "second"
    JOIN = "join"


@dataclass(frozen=True, slots=True)
class SplitOrigin:
    """Where an operator of the derived graph comes from: operators `ops` of the artifact's graph."""

    ops: tuple[OpId, ...]
    role: SplitRole = SplitRole.WHOLE
    dim: int = 0  # along which the outputs are joined
    boundary: int = 0
    halves: tuple[tuple[TensorId, TensorId, TensorId], ...] = ()
    """Per output its tensor, and those of its first and its second half."""

    @property
    def second(self) -> bool:
        """Whether it is the second half."""
        return self.role is SplitRole.SECOND


@dataclass(frozen=True)
class DerivedGraph:
    """A graph with splits, and per operator where it comes from. [num_ops]"""

    graph: Graph
    origins: tuple[SplitOrigin, ...]
    positions: tuple[int, ...]  # per cut of the artifact's graph, 0 and its end included, the one here

    def cuts(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """Cuts of the artifact's graph in the numbering of this one."""
        return tuple(self.positions[cut] for cut in cuts)


def split_dimension(graph: Graph, split: Split) -> int | None:
    """The dimension of the last operator's outputs that it is split along; None where it has none."""
    last = graph.operators[split.last]
    if not last.outputs:
        return None
    return dimension_of(split.axis, last.kind, len(graph.tensors[last.outputs[0]].shape))


def derive(graph: Graph, splits: Sequence[Split]) -> DerivedGraph:
    """The graph of a model that is split; `splits` are legal (`stageloom.shared.legality`) and ascending."""
    tensors = list(graph.tensors)
    operators: list[Operator] = []
    origins: list[SplitOrigin] = []
    positions: list[int] = []
    at = {split.first: split for split in splits}
    units = 1 + max(operator.fused_unit for operator in graph.operators)
    op = 0
    while op < len(graph.operators):
        split = at.get(op)
        if split is None:
            positions.append(len(operators))
            operators.append(graph.operators[op])
            origins.append(SplitOrigin((OpId(op),)))
            op += 1
            continue
        positions += [len(operators)] * (split.last + 1 - split.first)
        for operator, origin in _three(graph, split, tensors):
            # Units of their own: what fuses with another operator does not lie on another resource.
            operators.append(replace(operator, fused_unit=units))
            origins.append(origin)
            units += 1
        op = split.last + 1
    positions.append(len(operators))
    inside = {cut for split in splits for cut in range(split.first + 1, split.last + 1)}
    derived = replace(
        graph,
        tensors=tuple(tensors),
        operators=tuple(operators),
        base_cuts=tuple(positions[cut] for cut in graph.base_cuts if cut not in inside),
        partitions=(),
    )
    return DerivedGraph(derived, tuple(origins), tuple(positions))


def _three(graph: Graph, split: Split, tensors: list[Tensor]) -> Iterator[tuple[Operator, SplitOrigin]]:
    """The operators that a split becomes; the tensors of its halves are appended to `tensors`."""
    ops = tuple(OpId(op) for op in range(split.first, split.last + 1))
    run = [graph.operators[op] for op in ops]
    last = run[-1]
    dim = split_dimension(graph, split)
    if dim is None:
        raise ValueError(f"operators {split.first} to {split.last} have no axis {split.axis.value}")
    made = {tensor for operator in run for tensor in operator.outputs}
    reads = tuple(dict.fromkeys(t for operator in run for t in operator.inputs if t not in made))
    halves = []
    for tensor in last.outputs:
        pair = []
        for number, (start, stop) in enumerate(_bounds(graph.tensors[tensor].shape[dim], split.boundary)):
            pair.append(TensorId(len(tensors)))
            tensors.append(_half(graph.tensors[tensor], dim, stop - start, number))
        halves.append((tensor, pair[0], pair[1]))
    extent = graph.tensors[last.outputs[0]].shape[dim]
    whole = replace(
        last,
        nodes=tuple(sorted(node for operator in run for node in operator.nodes)),
        inputs=reads,
        flop=sum(operator.flop for operator in run),
        weight_bytes=sum(operator.weight_bytes for operator in run),
        convolution=None,
    )
    for number, role in enumerate((SplitRole.FIRST, SplitRole.SECOND)):
        start, stop = _bounds(extent, split.boundary)[number]
        half = replace(
            whole,
            name=f"{last.name}/{role.value}",
            outputs=tuple(row[1 + number] for row in halves),
            flop=whole.flop * (stop - start) // extent,
            weight_bytes=whole.weight_bytes * (stop - start) // extent,
        )
        yield half, SplitOrigin(ops, role, dim, split.boundary, tuple(halves))
    join = Operator(
        kind=JOIN_KIND,
        name=f"{last.name}/join",
        nodes=(),
        inputs=tuple(tensor for row in halves for tensor in row[1:]),
        outputs=last.outputs,
        flop=0,
        weight_bytes=0,
        fused_unit=last.fused_unit,
    )
    yield join, SplitOrigin(ops, SplitRole.JOIN, dim, split.boundary, tuple(halves))


def _bounds(extent: int, boundary: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (0, boundary), (boundary, extent)


def _half(tensor: Tensor, dim: int, extent: int, number: int) -> Tensor:
    shape = (*tensor.shape[:dim], extent, *tensor.shape[dim + 1 :])
    return Tensor(f"{tensor.name}/{('first', 'second')[number]}", tensor.dtype, shape)

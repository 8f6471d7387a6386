"""The operators of one model with their tensors, as frozen values; the importer makes them, once.

Operators are numbered in an order that is topological *and* in which every base cut is a prefix: cutting
at position p puts operators 0..p-1 before the cut. A block is therefore a range of operators.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from shared.bitmask import bits
from shared.digest import digest_of
from shared.errors import DecodeError
from shared.ids import Digest, TensorId

GRAPH_VERSION = 1

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes per element of every tensor type that a graph may hold, by numpy's name."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value computed at run time: a graph input or an operator's output. Weights are not tensors here."""

    name: str
    dtype: str  # numpy's name, a key of ITEM_BYTES
    shape: tuple[int, ...]  # pinned; () is a scalar

    @property
    def nbytes(self) -> int:
        """Bytes of one instance of batch 1."""
        return ITEM_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True, slots=True)
class Operator:
    """One schedule unit in the papers' count: a Conv with its activation, a pool, a concat, an Add..."""

    kind: str  # ONNX operator type of the leading node
    name: str  # name of the leading node, for people
    nodes: tuple[int, ...]  # indices of its nodes in the normalised ONNX file
    inputs: tuple[TensorId, ...]  # run-time tensors read, without repeats
    outputs: tuple[TensorId, ...]  # tensors that another operator reads or that are graph outputs
    flop: int  # multiply and add counted as two
    weight_bytes: int
    fused_unit: int  # units after fusing Add+Relu and the like share a number
    opaque: str = ""  # why this operator could not be cut further; empty for an ordinary one


@dataclass(frozen=True)
class Graph:
    """The operators of one model; see the module's text for their order.

    `base_cuts` are ascending positions p with 0 < p < len(operators). `partitions` names choices among them:
    `whole` (no cut), `base` (all of them) and, where the file carries borders, `paper`.
    """

    name: str
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]
    base_cuts: tuple[int, ...] = ()
    partitions: tuple[tuple[str, tuple[int, ...]], ...] = ()
    batchable: bool = False  # re-pinning to a batch b > 1 was tried and b rows equal b single runs

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """Per tensor the operator that makes it, -1 for a graph input. [num_tensors]"""
        made = [-1] * len(self.tensors)
        for op, operator in enumerate(self.operators):
            for tensor in operator.outputs:
                made[tensor] = op
        return tuple(made)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Per tensor the operators that read it, ascending. [num_tensors][...]"""
        read: list[list[int]] = [[] for _ in self.tensors]
        for op, operator in enumerate(self.operators):
            for tensor in operator.inputs:
                read[tensor].append(op)
        return tuple(tuple(ops) for ops in read)

    @cached_property
    def predecessors(self) -> tuple[int, ...]:
        """Per operator the mask of operators whose output it reads. [num_ops]"""
        masks = []
        for operator in self.operators:
            mask = 0
            for tensor in operator.inputs:
                if self.producer[tensor] >= 0:
                    mask |= 1 << self.producer[tensor]
            masks.append(mask)
        return tuple(masks)

    @cached_property
    def successors(self) -> tuple[int, ...]:
        """Per operator the mask of operators that read its output. [num_ops]"""
        masks = [0] * len(self.operators)
        for op, before in enumerate(self.predecessors):
            for predecessor in bits(before):
                masks[predecessor] |= 1 << op
        return tuple(masks)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Per operator the mask of all operators that must run before it. [num_ops]"""
        return transitive(self.predecessors)

    def live_at(self, cut: int) -> tuple[TensorId, ...]:
        """Tensors that cross the cut at position `cut`: made before it (inputs are), needed at or after it.

        Graph outputs are needed until the end. `live_at(0)` are the graph inputs, read or not.
        """
        if cut == 0:
            return self.inputs
        wanted = set(self.outputs)
        return tuple(
            TensorId(tensor)
            for tensor, made in enumerate(self.producer)
            if made < cut
            and (tensor in wanted or (self.consumers[tensor] and self.consumers[tensor][-1] >= cut))
        )

    def partition(self, name: str) -> tuple[int, ...]:
        """The cuts of a named partition.

        Raises:
            KeyError: the graph offers no partition of that name.
        """
        return dict(self.partitions)[name]

    @cached_property
    def fused_units(self) -> int:
        """Units left after fusing Add+Relu and the like."""
        return len({operator.fused_unit for operator in self.operators})

    @cached_property
    def digest(self) -> Digest:
        """Digest of the canonical form."""
        return digest_of(graph_to_wire(self))


def transitive(direct: Sequence[int]) -> tuple[int, ...]:
    """Close masks that only name smaller indices (a topological numbering) under reachability."""
    closed: list[int] = []
    for mask in direct:
        reach = mask
        for op in bits(mask):
            reach |= closed[op]
        closed.append(reach)
    return tuple(closed)


def graph_to_wire(graph: Graph) -> list[Any]:
    """Positional lists of strings and integers; the canonical form behind the digest."""
    return [
        GRAPH_VERSION,
        graph.name,
        [[t.name, t.dtype, list(t.shape)] for t in graph.tensors],
        [
            [o.kind, o.name, list(o.nodes), list(o.inputs), list(o.outputs), o.flop, o.weight_bytes,
             o.fused_unit, o.opaque]
            for o in graph.operators
        ],
        list(graph.inputs),
        list(graph.outputs),
        list(graph.base_cuts),
        [[name, list(cuts)] for name, cuts in graph.partitions],
        graph.batchable,
    ]  # fmt: skip


def graph_from_wire(wire: Any) -> Graph:
    """Rebuild and check a graph.

    Raises:
        DecodeError: the value has another version or shape, or the graph breaks an invariant.
    """
    try:
        version, name, tensors, operators, inputs, outputs, base_cuts, partitions, batchable = wire
        if version != GRAPH_VERSION:
            raise DecodeError(
                f"graph format {version!r} is not {GRAPH_VERSION}", remedy="import the model again"
            )
        graph = Graph(
            name=str(name),
            tensors=tuple(Tensor(str(n), str(d), tuple(int(x) for x in s)) for n, d, s in tensors),
            operators=tuple(_operator_from_wire(row) for row in operators),
            inputs=tuple(TensorId(int(t)) for t in inputs),
            outputs=tuple(TensorId(int(t)) for t in outputs),
            base_cuts=tuple(int(c) for c in base_cuts),
            partitions=tuple((str(n), tuple(int(c) for c in cuts)) for n, cuts in partitions),
            batchable=bool(batchable),
        )
    except (TypeError, ValueError) as error:
        raise DecodeError(f"not a graph: {error}", remedy="import the model again") from error
    if problem := graph_problem(graph):
        raise DecodeError(f"not a graph: {problem}", remedy="import the model again")
    return graph


def _operator_from_wire(row: Any) -> Operator:
    kind, name, nodes, inputs, outputs, flop, weight_bytes, fused_unit, opaque = row
    return Operator(
        kind=str(kind),
        name=str(name),
        nodes=tuple(int(n) for n in nodes),
        inputs=tuple(TensorId(int(t)) for t in inputs),
        outputs=tuple(TensorId(int(t)) for t in outputs),
        flop=int(flop),
        weight_bytes=int(weight_bytes),
        fused_unit=int(fused_unit),
        opaque=str(opaque),
    )


def graph_problem(graph: Graph) -> str:
    """The first broken invariant in words, or an empty string."""
    count = len(graph.tensors)
    for tensor in graph.tensors:
        if tensor.dtype not in ITEM_BYTES or any(d < 0 for d in tensor.shape):
            return f"tensor {tensor.name!r} has type {tensor.dtype!r} and shape {tensor.shape}"
    made: set[int] = set(graph.inputs)
    for op, operator in enumerate(graph.operators):
        for tensor_id in operator.inputs:
            if tensor_id not in made:
                return f"operator {op} reads tensor {tensor_id} before it is made"
        for tensor_id in operator.outputs:
            if not 0 <= tensor_id < count or tensor_id in made:
                return f"operator {op} makes tensor {tensor_id}, which is unknown or made twice"
            made.add(tensor_id)
    if not set(graph.outputs) <= made or any(not 0 <= t < count for t in graph.inputs):
        return "a graph output is never made, or an input is unknown"
    cuts = graph.base_cuts
    if list(cuts) != sorted({c for c in cuts if 0 < c < len(graph.operators)}):
        return "base cuts are not ascending positions inside the graph"
    for name, chosen in graph.partitions:
        if list(chosen) != sorted(set(chosen) & set(cuts)):
            return f"partition {name!r} is not a choice among the base cuts"
    return ""

"""The operators of one model with their tensors, as frozen values; the importer makes them, once.

Operators are numbered in an order that is topological *and* in which every base cut is a prefix: cutting
at position p puts operators 0..p-1 before the cut. A block is therefore a range of operators.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from stageloom.shared.attributes import Attributes
from stageloom.shared.bitmask import bits
from stageloom.shared.convolution import Convolution
from stageloom.shared.digest import digest_of
from stageloom.shared.errors import DecodeError
from stageloom.shared.ids import Digest, TensorId
from stageloom.shared.shape_ranges import ShapeRanges, middle_shape, within

GRAPH_VERSION = 2
MAX_OPERATORS = 1 << 16
MAX_RANK = 64  # numpy's bound
MAX_SIGNATURE_CHARS = 512  # of an input's or output's name, as applications are told it
MAX_SIGNATURE_RANK = 32
MAX_TENSOR_BYTES = 1 << 40

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

    def batched(self, batch: int) -> tuple[int, ...]:
        """The shape at a batch, which lies along axis 0; at batch 1 that axis need not be there."""
        return self.shape if batch == 1 else (batch, *self.shape[1:])


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
    convolution: Convolution | None = None  # what merging with others needs to know; None: it never merges
    attributes: Attributes = Attributes()  # noqa: RUF009 (frozen); what a learned policy reads


@dataclass(frozen=True)
class Graph:
    """The operators of one model; see the module's text for their order.

    With `ranges` dimensions of the inputs are open: the model is one operator, which no cut divides.

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
    ranges: ShapeRanges | None = None
    file_bytes: int = field(default=0, compare=False)  # of the ONNX file; 0: none is known

    def weight_bytes(self, ops: Iterable[int]) -> int:
        """Bytes of these operators' weights, at most: several may read the same, which the file has once."""
        weights = sum(self.operators[op].weight_bytes for op in ops)
        return min(weights, self.file_bytes) if self.file_bytes else weights

    def shares_weights(self, ops: Iterable[int]) -> bool:
        """Whether some of these operators surely read the same weights, as in a loop that was unrolled."""
        return 0 < self.file_bytes < sum(self.operators[op].weight_bytes for op in ops)

    def takes(self, tensor: TensorId, shape: Sequence[int]) -> bool:
        """Whether an input may have this shape."""
        return within(shape, self.smallest(tensor), self.tensors[tensor].shape)

    def smallest(self, tensor: TensorId) -> tuple[int, ...]:
        """The smallest shape of a tensor: its only one where no dimension is open."""
        return self.tensors[tensor].shape if self.ranges is None else self.ranges.smallest[tensor]

    def middle(self, tensor: TensorId) -> tuple[int, ...]:
        """The shape that plans take a task's tensor to have; see `middle_shape`."""
        return middle_shape(self.smallest(tensor), self.tensors[tensor].shape)

    @property
    def largest_tensor_bytes(self) -> int:
        """Bytes of the largest value that a run of batch 1 makes or reads."""
        largest = max(tensor.nbytes for tensor in self.tensors)
        return largest if self.ranges is None else max(largest, self.ranges.largest_tensor_bytes)

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
        return reverse(self.predecessors)

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


def reverse(edges: Sequence[int]) -> tuple[int, ...]:
    """Turn masks of predecessors into masks of successors, and the other way round."""
    masks = [0] * len(edges)
    for op, others in enumerate(edges):
        for other in bits(others):
            masks[other] |= 1 << op
    return tuple(masks)


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
             o.fused_unit, o.opaque, _convolution_to_wire(o.convolution), o.attributes.to_wire()]
            for o in graph.operators
        ],
        list(graph.inputs),
        list(graph.outputs),
        list(graph.base_cuts),
        [[name, list(cuts)] for name, cuts in graph.partitions],
        graph.batchable,
        *([] if graph.ranges is None else [graph.ranges.to_wire()]),
    ]  # fmt: skip


def _convolution_to_wire(found: Convolution | None) -> list[Any]:
    if found is None:
        return []
    return [
        list(found.kernel), list(found.strides), list(found.dilations), list(found.pads), found.activation,
    ]  # fmt: skip


def graph_from_wire(wire: Any) -> Graph:
    """Rebuild and check a graph. Nothing is converted: only what `graph_to_wire` writes is read.

    Raises:
        DecodeError: the value has another version or shape, or the graph breaks an invariant.
    """
    try:
        version, name, tensors, operators, inputs, outputs, base_cuts, partitions, batchable, *further = wire
        if type(version) is not int or version != GRAPH_VERSION:
            raise ValueError(f"its format is not {GRAPH_VERSION}")
        if type(batchable) is not bool:
            raise ValueError("batchable is not a boolean")
        graph = Graph(
            name=_text(name),
            tensors=tuple(Tensor(_text(n), _text(d), _numbers(s)) for n, d, s in tensors),
            operators=tuple(_operator_from_wire(row) for row in operators),
            inputs=_tensor_ids(inputs),
            outputs=_tensor_ids(outputs),
            base_cuts=_numbers(base_cuts),
            partitions=tuple((_text(n), _numbers(cuts)) for n, cuts in partitions),
            batchable=batchable,
            ranges=ShapeRanges.from_wire(*further) if further else None,
        )
    except (TypeError, ValueError) as error:
        raise DecodeError(f"not a graph: {str(error)[:200]}", remedy="import the model again") from error
    if problem := graph_problem(graph):
        raise DecodeError(f"not a graph: {problem}", remedy="import the model again")
    return graph


def _operator_from_wire(row: Any) -> Operator:
    (
        kind, name, nodes, inputs, outputs, flop, weight_bytes, fused_unit, opaque, convolution, attributes,
    ) = row  # fmt: skip
    flop, weight_bytes, fused_unit = _numbers([flop, weight_bytes, fused_unit])
    return Operator(
        kind=_text(kind),
        name=_text(name),
        nodes=_numbers(nodes),
        inputs=_tensor_ids(inputs),
        outputs=_tensor_ids(outputs),
        flop=flop,
        weight_bytes=weight_bytes,
        fused_unit=fused_unit,
        opaque=_text(opaque),
        convolution=_convolution_from_wire(convolution),
        attributes=Attributes.from_wire(attributes),
    )


def _convolution_from_wire(row: Any) -> Convolution | None:
    if type(row) is not list:
        raise TypeError("a convolution is no list")
    if not row:
        return None
    kernel, strides, dilations, pads, activation = row
    return Convolution(
        _numbers(kernel), _numbers(strides), _numbers(dilations), _numbers(pads), _text(activation)
    )


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} where a string belongs")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if type(values) is not list or not all(type(value) is int and value >= 0 for value in values):
        raise TypeError("a list of whole numbers is broken")
    return tuple(values)


def _tensor_ids(values: Any) -> tuple[TensorId, ...]:
    return tuple(TensorId(value) for value in _numbers(values))


def graph_problem(graph: Graph) -> str:
    """The first broken invariant in words, or an empty string."""
    if not 0 < len(graph.operators) <= MAX_OPERATORS:
        return f"it has {len(graph.operators)} operators, not 1..{MAX_OPERATORS}"
    return (
        _tensor_problem(graph)
        or _order_problem(graph)
        or _convolution_problem(graph)
        or _cut_problem(graph)
        or _range_problem(graph)
    )


def _tensor_problem(graph: Graph) -> str:
    for tensor in graph.tensors:
        bad_shape = len(tensor.shape) > MAX_RANK or any(d < 0 for d in tensor.shape)
        if tensor.dtype not in ITEM_BYTES or bad_shape or tensor.nbytes > MAX_TENSOR_BYTES:
            return f"tensor {tensor.name[:80]!r} has type {tensor.dtype[:80]!r} and shape {tensor.shape[:16]}"
    for what, ids in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        if len(set(ids)) != len(ids) or any(not 0 <= t < len(graph.tensors) for t in ids):
            return f"its {what} repeat a tensor or name an unknown one"
    return ""


def _order_problem(graph: Graph) -> str:
    made: set[int] = set(graph.inputs)
    for op, operator in enumerate(graph.operators):
        if len(set(operator.inputs)) != len(operator.inputs):
            return f"operator {op} names an input twice"
        for tensor_id in operator.inputs:
            if tensor_id not in made:
                return f"operator {op} reads tensor {tensor_id} before it is made"
        for tensor_id in operator.outputs:
            if not 0 <= tensor_id < len(graph.tensors) or tensor_id in made:
                return f"operator {op} makes tensor {tensor_id}, which is unknown or made twice"
            made.add(tensor_id)
    if len(made) != len(graph.tensors):
        return f"{len(graph.tensors) - len(made)} of its tensors are never made"
    return ""


def _convolution_problem(graph: Graph) -> str:
    for op, operator in enumerate(graph.operators):
        if operator.convolution is None:
            continue
        if operator.opaque or len(operator.inputs) != 1 or len(operator.outputs) != 1:
            return f"operator {op} is described as a convolution, and is none"
        data, made = graph.tensors[operator.inputs[0]], graph.tensors[operator.outputs[0]]
        if problem := operator.convolution.problem(data.shape, made.shape):
            return f"operator {op} is no such convolution: {problem}"
    return ""


def _cut_problem(graph: Graph) -> str:
    cuts = graph.base_cuts
    if list(cuts) != sorted({c for c in cuts if 0 < c < len(graph.operators)}):
        return "base cuts are not ascending positions inside the graph"
    for name, chosen in graph.partitions:
        if list(chosen) != sorted(set(chosen) & set(cuts)):
            return f"partition {name[:80]!r} is not a choice among the base cuts"
    if len(dict(graph.partitions)) != len(graph.partitions):
        return "two partitions share a name"
    return ""


def _range_problem(graph: Graph) -> str:
    ranges = graph.ranges
    if ranges is None:
        return ""
    if len(graph.operators) != 1 or graph.batchable:
        return "a model with open dimensions is one operator and takes no batch"
    if ranges.largest_tensor_bytes > MAX_TENSOR_BYTES:
        return f"a value inside has {ranges.largest_tensor_bytes} bytes"
    return ranges.problem([tensor.shape for tensor in graph.tensors])

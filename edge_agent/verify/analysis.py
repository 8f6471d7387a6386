"""What the structure of a model says about its tensors: final heads, and what rounding may do to a value.

A head is a final operator that hides what it reads: behind a saturated Sigmoid every answer looks the same. A
Sigmoid far from zero gives 1e-8 or 1 whatever it reads, so a wrong schedule passes; and its kernel rounds
1e-8 to any number near it, so a correct schedule fails. Therefore the tensor that the head reads is compared,
and `with_probes` makes the model return it. Only operators that rearrange may lie between a head and an
output.

Behind a quantisation, a comparison or an ArgMax one rounding error may flip an element. That happens on few
inputs and is large; rounding elsewhere happens on all inputs and is small.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stageloom.shared.graph import Graph, Tensor
from stageloom.shared.ids import OpId, TensorId
from stageloom.shared.importer.nodes import captured_names
from stageloom.shared.importer.operators import SHAPE_ONLY
from stageloom.shared.importer.values import ELEMENT_TYPES, Value

if TYPE_CHECKING:
    import numpy as np
    import onnx


SATURATING = frozenset({"Sigmoid", "HardSigmoid", "Softmax", "Tanh", "Erf"})
"""Heads with results in -1..1: a change of what they read may vanish."""

CHOOSING = frozenset({"ArgMax", "ArgMin", "TopK"})
"""Heads whose results are indices: they depend only on the order of the values."""

_REARRANGING = SHAPE_ONLY | {
    "Transpose", "Cast", "Slice", "Split", "Expand", "Concat", "QuantizeLinear", "DequantizeLinear",
}  # fmt: skip
"""Operators whose results are elements that they read, at most in another type."""

_MAX_STEPS = 1000  # nodes looked at behind one tensor


@dataclass(frozen=True, slots=True)
class Head:
    """A final operator that hides what it reads."""

    kind: str
    reads: str  # the tensor to judge instead
    makes: str


@dataclass(frozen=True, slots=True)
class Ending:
    """The heads behind a tensor, seen through operators that only rearrange."""

    heads: tuple[Head, ...]
    only_heads: bool  # nothing else is in it

    def of_shown(self, names: Collection[str]) -> "Ending":
        """Return it without the heads whose input is none of `names`: these are judged by what they make."""
        heads = tuple(head for head in self.heads if head.reads in names)
        return Ending(heads, self.only_heads and heads == self.heads)


def makers_of(model: "onnx.ModelProto") -> "dict[str, onnx.NodeProto]":
    """Return the node that makes each value of the main graph."""
    return {name: node for node in model.graph.node for name in node.output if name}


def ending_of(makers: "Mapping[str, onnx.NodeProto]", tensor: str) -> Ending:
    """Return the heads behind one tensor; `makers` comes from `makers_of`."""
    heads: dict[str, Head] = {}
    only_heads = True
    waiting, seen = [tensor], {tensor}
    while waiting:
        name = waiting.pop()
        node = makers.get(name)
        kind = node.op_type.removeprefix("QLinear") if node is not None else ""
        if node is None or len(seen) > _MAX_STEPS:
            only_heads = False
        elif kind in SATURATING or (node.op_type in CHOOSING and name == node.output[-1]):
            heads[name] = Head(kind, node.input[0], name)
        elif node.op_type in _REARRANGING:
            reads = node.input if node.op_type == "Concat" else node.input[:1]
            waiting.extend(read for read in reads if read not in seen)
            seen.update(reads)
        else:
            only_heads = False
    return Ending(tuple(heads[name] for name in sorted(heads)), only_heads and bool(heads))


def slope(head: Head, made: "np.ndarray") -> float:
    """Bound the relative effect of a small change of the head's input on its output `made`.

    Norms of the Jacobians: y (1 - y) of the Sigmoid, at most its largest probability of the Softmax and never
    more than 1/2. The others' are bounded by their steepest point.
    """
    if head.kind == "Sigmoid":
        return float((made.astype("float64") * (1.0 - made.astype("float64"))).max(initial=0.0))
    if head.kind == "Softmax":
        return min(0.5, float(made.max(initial=0.0)))
    return {"HardSigmoid": 0.2, "Tanh": 1.0, "Erf": 2.0 / math.sqrt(math.pi)}[head.kind]


_JUMPING = frozenset({
    "QuantizeLinear", "DynamicQuantizeLinear", "QGemm", "ArgMax", "ArgMin", "TopK", "NonMaxSuppression",
    "NonZero", "Unique", "Round", "Floor", "Ceil", "Sign", "Mod", "Greater", "GreaterOrEqual", "Less",
    "LessOrEqual", "Equal",
})  # fmt: skip
_FAMILIES = ("QLinear", "DynamicQuantize", "QAttention", "QEmbed", "MatMulInteger", "ConvInteger")
_ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rounding may have done to a value."""

    unit: float = 0.0  # the coarsest unit in the last place of what it is made from; 0 for float32 and finer
    jumps: bool = False  # it, or what it is made from, may jump


def rounding_of(model: "onnx.ModelProto", values: Mapping[str, Value]) -> dict[str, Rounding]:
    """Return the rounding of each value of the main graph; `values` are their types."""
    roundings: dict[str, Rounding] = {
        value.name: Rounding(unit=_unit(values, value.name)) for value in model.graph.input
    }
    for node in model.graph.node:
        reads = [name for name in (*node.input, *captured_names(node)) if name]
        before = [roundings[name] for name in reads if name in roundings]
        jumps = any(rounding.jumps for rounding in before) or _jumps(node, values)
        unit = max((rounding.unit for rounding in before), default=0.0)
        for name in node.output:
            roundings[name] = Rounding(max(unit, _unit(values, name)), jumps)
    return roundings


def _unit(values: Mapping[str, Value], name: str) -> float:
    return _ROUNDING.get(values.get(name, Value()).dtype, 0.0)


def _jumps(node: "onnx.NodeProto", values: Mapping[str, Value]) -> bool:
    if node.op_type == "Cast":
        made = values.get(node.output[0], Value()).dtype
        return bool(made) and made not in _FLOATS and _reads_floats(node, values)
    return (node.op_type in _JUMPING and _reads_floats(node, values)) or node.op_type.startswith(_FAMILIES)


def _reads_floats(node: "onnx.NodeProto", values: Mapping[str, Value]) -> bool:
    """Rounding flips no integers; a value of unknown type may be a float."""
    return values.get(node.input[0], Value()).dtype in (*_FLOATS, "")


def with_probes(
    graph: Graph, model: "onnx.ModelProto", names: Iterable[str], values: Mapping[str, Value]
) -> Graph:
    """Let the model also return the named values of known shape, in place; return the graph of that.

    A value inside an operator (between a Conv and its Sigmoid) becomes another output of that operator, which
    then no longer merges with its siblings. Identifiers of tensors and operators stay.
    """
    from onnx import helper

    for name in names:
        value = values.get(name)
        known = {tensor.name: TensorId(index) for index, tensor in enumerate(graph.tensors)}
        if name in known:
            graph = _returned(graph, known[name])
        elif value is not None and not value.unfit and (maker := _maker(graph, model, name)) is not None:
            graph = _shown(graph, maker, Tensor(name, value.dtype, value.shape))
        else:
            continue
        tensor = next(tensor for tensor in graph.tensors if tensor.name == name)
        if name not in {output.name for output in model.graph.output}:
            kind = ELEMENT_TYPES[tensor.dtype]
            model.graph.output.append(helper.make_tensor_value_info(name, kind, tensor.shape))
    return graph


def _returned(graph: Graph, tensor: TensorId) -> Graph:
    if tensor in graph.outputs or graph.producer[tensor] < 0:
        return graph
    return replace(graph, outputs=(*graph.outputs, tensor))


def _shown(graph: Graph, maker: OpId, tensor: Tensor) -> Graph:
    """`graph` with one more tensor, made by `maker`, as an output."""
    new = TensorId(len(graph.tensors))
    operators = list(graph.operators)
    operators[maker] = replace(operators[maker], outputs=(*operators[maker].outputs, new), convolution=None)
    return replace(
        graph,
        tensors=(*graph.tensors, tensor),
        operators=tuple(operators),
        outputs=(*graph.outputs, new),
        batchable=graph.batchable and tensor.shape[:1] == (1,),
    )


def _maker(graph: Graph, model: "onnx.ModelProto", name: str) -> OpId | None:
    node = next((i for i, node in enumerate(model.graph.node) if name in node.output), None)
    return next((OpId(op) for op, operator in enumerate(graph.operators) if node in operator.nodes), None)

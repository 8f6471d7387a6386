"""Final operators that hide what they read: behind a saturated Sigmoid every answer looks the same.

A Sigmoid far from zero gives 1e-8 or 1 whatever comes in, so a wrong schedule passes; and its kernel rounds
1e-8 to anything near it, so a right one fails. Both go away where the tensor is judged that the operator
reads. `ending_of` finds these operators behind a tensor; only operators that rearrange may lie between.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stageloom.shared.importer.operators import SHAPE_ONLY

if TYPE_CHECKING:
    import numpy as np
    import onnx

SATURATING = frozenset({"Sigmoid", "HardSigmoid", "Softmax", "Tanh", "Erf"})
"""Their results lie in -1..1, and a change of what they read may vanish."""

CHOOSING = frozenset({"ArgMax", "ArgMin", "TopK"})
"""Their results are indices: they stay while the order stays, whatever happens to the values."""

_REARRANGING = SHAPE_ONLY | {
    "Transpose", "Cast", "Slice", "Split", "Expand", "Concat", "QuantizeLinear", "DequantizeLinear",
}  # fmt: skip
"""Their results are elements that they read, at most in another type."""

_MAX_STEPS = 1000  # nodes looked at behind one tensor


@dataclass(frozen=True, slots=True)
class Head:
    """One such operator."""

    kind: str
    reads: str  # the tensor to judge instead
    makes: str


@dataclass(frozen=True, slots=True)
class Ending:
    """What a tensor is made of, seen through operators that only rearrange."""

    heads: tuple[Head, ...]
    only_heads: bool  # nothing else is in it


def makers_of(model: "onnx.ModelProto") -> "dict[str, onnx.NodeProto]":
    """Per value of the main graph the node that makes it."""
    return {name: node for node in model.graph.node for name in node.output if name}


def ending_of(makers: "Mapping[str, onnx.NodeProto]", tensor: str) -> Ending:
    """The heads behind one tensor; `makers` is `makers_of` the model."""
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
    """How much of a small change of what the head reads comes out of it at most; `made` is what it makes.

    Norms of the Jacobians: y (1 - y) of the Sigmoid, at most its largest probability of the Softmax and never
    more than 1/2. The others' are bounded by their steepest point.
    """
    if head.kind == "Sigmoid":
        return float((made.astype("float64") * (1.0 - made.astype("float64"))).max(initial=0.0))
    if head.kind == "Softmax":
        return min(0.5, float(made.max(initial=0.0)))
    return {"HardSigmoid": 0.2, "Tanh": 1.0, "Erf": 2.0 / math.sqrt(math.pi)}[head.kind]

"""What rounding may do to each value of a model: which are made in half precision, and which may jump. Pure.

Behind a quantisation, a comparison or an ArgMax one rounding error may flip an element. That happens seldom
and shows plainly, where rounding otherwise shows always and hardly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stageloom.shared.importer.nodes import captured_names
from stageloom.shared.importer.values import Value

if TYPE_CHECKING:
    import onnx

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
    """What a value has been through."""

    unit: float = 0.0  # the coarsest unit in the last place of what it is made from; 0 for float32 and finer
    jumps: bool = False  # it, or what it is made from, may jump


_NOTHING = Rounding()


def rounding_of(model: "onnx.ModelProto", values: Mapping[str, Value]) -> dict[str, Rounding]:
    """Per value of the main graph; nodes are in topological order, `values` are their types."""
    found: dict[str, Rounding] = {
        value.name: Rounding(unit=_unit(values, value.name)) for value in model.graph.input
    }
    for node in model.graph.node:
        reads = [name for name in (*node.input, *captured_names(node)) if name]
        before = [found[name] for name in reads if name in found]
        jumps = any(one.jumps for one in before) or _jumps(node, values)
        unit = max((one.unit for one in before), default=0.0)
        for name in node.output:
            found[name] = Rounding(max(unit, _unit(values, name)), jumps)
    return found


def _unit(values: Mapping[str, Value], name: str) -> float:
    return _ROUNDING.get(values.get(name, Value()).dtype, 0.0)


def _jumps(node: "onnx.NodeProto", values: Mapping[str, Value]) -> bool:
    if node.op_type == "Cast":
        made = values.get(node.output[0], Value()).dtype
        return bool(made) and made not in _FLOATS and _reads_floats(node, values)
    return (node.op_type in _JUMPING and _reads_floats(node, values)) or node.op_type.startswith(_FAMILIES)


def _reads_floats(node: "onnx.NodeProto", values: Mapping[str, Value]) -> bool:
    """Integers have no rounding to flip them; a value of unknown type may be a float."""
    return values.get(node.input[0], Value()).dtype in (*_FLOATS, "")

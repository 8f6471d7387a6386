"""What OpenVINO would compute in fewer bits inside a model than the model says.

It computes float64 in float32, and uint32, uint64 and int64 in int32. Some operators it computes in float32
whatever integers they are on, which holds 24 bits of them: quotients, remainders, powers, comparisons, sums
and extremes along an axis (2026.4). Values that follow from constants and shapes alone are exact: OpenVINO
computes them once, as it compiles.

Integers are what exporters write for indices, positions and masks, which these bits hold. So they are judged
by ranges: from those of a session's inputs follows in which range the result of each integer operator lies.
No claim is made about what comes of floating point, about bodies of control flow, or about results of
operators without a rule here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from stageloom.edge_agent.executor.openvino.model import openvino

Range: TypeAlias = tuple[int, int]
"""The least and the greatest value, both included."""

Transfer: TypeAlias = Callable[..., Range | None]
"""From the ranges that an operator reads to that of its result; None: no claim."""

Exact: TypeAlias = Callable[[Sequence[Range], Range], bool]
"""Whether OpenVINO computes an operator as the model says, from what it reads and its result."""

_T: Final = openvino.Type
_NARROWED: Final = {_T.f64: "float64", _T.u64: "uint64", _T.u32: "uint32"}
_WIDE: Final = {_T.i32: 32, _T.i64: 64}
"""Integers whose ranges are followed, in bits."""

_SMALL: Final[Mapping[Any, Range]] = {
    _T.boolean: (0, 1),
    _T.i8: (-(1 << 7), (1 << 7) - 1),
    _T.u8: (0, (1 << 8) - 1),
    _T.i16: (-(1 << 15), (1 << 15) - 1),
    _T.u16: (0, (1 << 16) - 1),
}
_INT32: Final[Range] = (-(1 << 31), (1 << 31) - 1)
_FLOAT32: Final[Range] = (1 - (1 << 24), (1 << 24) - 1)
"""Integers that float32 tells apart, from each other and from all larger ones."""

_LEAST: Final[Range] = (0, 1)
"""What an input is taken to hold before one is known: a mask."""

_MOST_EXPONENT: Final = 64
_HUGE: Final = 1 << _MOST_EXPONENT


def narrowed(model: Any) -> str:
    """An element type that OpenVINO would narrow, of a value that depends on an input; empty: none."""
    for inner in _with_bodies(model):
        found = [node for node in inner.get_ops() if any(kind in _NARROWED for kind in _types(node))]
        if not found:
            continue
        dependent = _dependent(inner)
        for node in found:
            if node.get_name() in dependent:
                return next(_NARROWED[kind] for kind in _types(node) if kind in _NARROWED)
    return ""


class Integers:
    """The integers that a model computes, with ranges that follow from those of its inputs."""

    def __init__(self, model: Any) -> None:
        self._places: dict[tuple[str, int], int] = {}  # of a node's output among the ranges
        self._known: dict[int, Range | None] = {}  # ranges that no input changes
        self._inputs: dict[int, int] = {}  # by place the number of a model's input
        self._steps: list[tuple[int, tuple[int, ...], Transfer, int, str, Exact | None]] = []
        """In order: place of the result, places that are read, rule, bits, operator, when that is exact."""
        nodes = model.get_ordered_ops()
        if any(_exactness(node) is not None for node in nodes):
            numbers = {port.get_node().get_name(): number for number, port in enumerate(model.inputs)}
            dependent = _dependent(model)
            for node in nodes:
                self._add(node, numbers, node.get_name() in dependent)
            self._keep_what_is_read()

    @property
    def reads(self) -> frozenset[int]:
        """Numbers of the model's inputs whose ranges matter."""
        return frozenset(self._inputs.values())

    def inexact(self, given: Mapping[int, Range]) -> str:
        """The type of the first operator that OpenVINO may compute with too few bits; empty: there is none.

        `given`: ranges of the model's inputs by number; those that are missing are taken to be masks.
        """
        ranges = dict(self._known)
        for place, number in self._inputs.items():
            ranges[place] = given.get(number, _LEAST)
        for place, read, transfer, bits, kind, exact in self._steps:
            operands = [known for one in read if (known := ranges[one]) is not None]
            made = transfer(*operands) if len(operands) == len(read) else None
            if made is None:
                made = (0, 1) if bits == 1 else None
            else:
                if exact is not None and not exact(operands, made):
                    return kind
                if bits == 32 and not _within(made, _INT32):
                    made = _INT32  # int32 wraps around in the model, too
            ranges[place] = made
        return ""

    def _add(self, node: Any, numbers: Mapping[str, int], depends: bool) -> None:
        kind = node.get_type_name()
        for index, element in enumerate(_types(node)):
            place = self._places[node.get_name(), index] = len(self._places)
            if kind == "Parameter" and element in _WIDE:
                self._inputs[place] = numbers[node.get_name()]
            elif kind == "Constant" and element in _WIDE:
                self._known[place] = _range_of(node.data)
            elif (rule := _rule(node, index)) is not None and (element in _WIDE or _exactness(node)):
                read, transfer = rule
                sources = [node.input_value(at) for at in read]
                places = tuple(self._places[s.get_node().get_name(), s.get_index()] for s in sources)
                exact = _exactness(node) if depends else None
                self._steps.append((place, places, transfer, _WIDE.get(element, 1), kind, exact))
            else:
                self._known[place] = _SMALL.get(element)

    def _keep_what_is_read(self) -> None:
        """Forget what no checked result follows from."""
        wanted: set[int] = set()
        steps = []
        for step in reversed(self._steps):
            place, read, *_, exact = step
            if exact is not None or place in wanted:
                wanted.update(read)
                steps.append(step)
        self._steps = steps[::-1]
        self._known = {place: known for place, known in self._known.items() if place in wanted}
        self._inputs = {place: number for place, number in self._inputs.items() if place in wanted}
        self._places.clear()


def _with_bodies(model: Any) -> Iterator[Any]:
    """A model and the bodies of its control flow."""
    yield model
    for node in model.get_ops():
        match node.get_type_name():
            case "If":
                yield from _with_bodies(node.get_then_body())
                yield from _with_bodies(node.get_else_body())
            case "Loop" | "TensorIterator":
                yield from _with_bodies(node.get_function())


def _dependent(model: Any) -> set[str]:
    """Names of the nodes whose values depend on what inputs hold, and not on their shapes alone."""
    found: set[str] = set()
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "Parameter" or (
            kind != "ShapeOf" and any(value.get_node().get_name() in found for value in node.input_values())
        ):
            found.add(node.get_name())
    return found


def _types(node: Any) -> list[Any]:
    return [port.get_element_type() for port in node.outputs()]


def _range_of(array: np.ndarray) -> Range | None:
    return (int(array.min()), int(array.max())) if array.size else None


def _within(one: Range, other: Range) -> bool:
    return other[0] <= one[0] and one[1] <= other[1]


# What each operator does to ranges


def _same(one: Range) -> Range:
    return one


def _union(*given: Range) -> Range:
    return min(low for low, _ in given), max(high for _, high in given)


def _add(one: Range, other: Range) -> Range:
    return one[0] + other[0], one[1] + other[1]


def _subtract(one: Range, other: Range) -> Range:
    return one[0] - other[1], one[1] - other[0]


def _multiply(one: Range, other: Range) -> Range:
    corners = [a * b for a in one for b in other]
    return min(corners), max(corners)


def _power(base: Range, exponent: Range) -> Range | None:
    if exponent[0] < 0:
        return None
    largest = _largest(base)
    most = largest ** min(exponent[1], _MOST_EXPONENT) if largest > 1 else 1
    return (0 if base[0] >= 0 else -min(most, _HUGE)), min(most, _HUGE)


def _divide(one: Range, other: Range) -> Range:
    if one[0] >= 0 and other[0] > 0:
        return 0, one[1] // other[0]
    return -_largest(one), _largest(one)


def _modulo(one: Range, other: Range) -> Range | None:
    most = _largest(other) - 1
    if most < 0:
        return None
    if one[0] >= 0 and other[0] > 0:
        return 0, min(one[1], most)
    return -most, most


def _minimum(one: Range, other: Range) -> Range:
    return min(one[0], other[0]), min(one[1], other[1])


def _maximum(one: Range, other: Range) -> Range:
    return max(one[0], other[0]), max(one[1], other[1])


def _clamp(least: float, most: float, one: Range) -> Range:
    low, high = (min(max(end, least), most) for end in one)
    return int(low), int(high)


def _either(one: Range, other: Range) -> Range:
    return 0, 1


def _sum_of(count: int, one: Range) -> Range:
    """Of up to `count` values."""
    return min(0, one[0] * count), max(0, one[1] * count)


def _largest(one: Range) -> int:
    return max(abs(one[0]), abs(one[1]))


_ARITHMETIC: Final = frozenset({"Add", "CumSum", "Multiply", "Subtract"})
"""Computed in int32."""

_IN_FLOAT: Final = frozenset(
    {"Clamp", "Divide", "FloorMod", "Mod", "Power", "ReduceMax", "ReduceMin", "ReduceSum"}
)
_COMPARED: Final = frozenset({"Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"})
"""Both computed in float32."""


def _exactness(node: Any) -> Exact | None:
    """When OpenVINO computes an operator on integers as the model says; None: always, or no claim."""
    kind = node.get_type_name()
    if kind in _ARITHMETIC and node.get_output_element_type(0) == _T.i64:
        return _held_by_int32
    if kind in _IN_FLOAT and node.get_output_element_type(0) in _WIDE:
        return _held_by_float32
    if kind in ("Maximum", "Minimum") and node.get_output_element_type(0) in _WIDE:
        return _made_in_float32  # one behind the other they become a Clamp
    if kind in _COMPARED and node.get_input_element_type(0) in _WIDE:
        return _told_apart
    return None


def _held_by_int32(read: Sequence[Range], made: Range) -> bool:
    return _within(made, _INT32)


def _held_by_float32(read: Sequence[Range], made: Range) -> bool:
    return all(_within(one, _FLOAT32) for one in (*read, made))


def _made_in_float32(read: Sequence[Range], made: Range) -> bool:
    return _within(made, _FLOAT32)


def _told_apart(read: Sequence[Range], made: Range) -> bool:
    return any(_within(one, _FLOAT32) for one in read)


_OF_TWO: Final[Mapping[str, Transfer]] = {
    "Add": _add,
    "Divide": _divide,
    "FloorMod": _modulo,
    "Maximum": _maximum,
    "Minimum": _minimum,
    "Mod": _modulo,
    "Multiply": _multiply,
    "Power": _power,
    "Range": _union,  # from, to
    "Subtract": _subtract,
}
_REARRANGING: Final = frozenset(
    {
        "Broadcast", "Convert", "Gather", "GatherElements", "GatherND", "ReduceMax", "ReduceMin", "Reshape",
        "ReverseSequence", "Roll", "Slice", "Split", "Squeeze", "StridedSlice", "Tile", "Transpose",
        "Unsqueeze", "VariadicSplit",
    }
)  # fmt: skip
"""Of their first input."""


def _rule(node: Any, output: int) -> tuple[Sequence[int], Transfer] | None:
    """Which inputs of an operator say in which range an output lies, and how; None: no claim."""
    kind = node.get_type_name()
    if kind in _REARRANGING:
        return (0,), _same
    if kind in _OF_TWO:
        return (0, 1), _OF_TWO[kind]
    if kind in _COMPARED:
        return (0, 1), _either
    match kind:
        case "Clamp":
            ends = node.get_attributes()
            return (0,), partial(_clamp, ends["min"], ends["max"])
        case "Concat":
            return range(node.get_input_size()), _union
        case "Select":
            return (1, 2), _union
        case "ScatterUpdate":
            return (0, 2), _union
        case "TopK" if not output:
            return (0,), _same
        case "TopK" | "NonZero" if (most := _most_extent(node)) is not None:
            return (), partial(_index_into, most)
        case "CumSum" if (most := _most_extent(node)) is not None:
            return (0,), partial(_sum_of, most)
        case "ReduceSum" if (count := _summed(node)) is not None:
            return (0,), partial(_sum_of, count)
    return None


def _index_into(extent: int) -> Range:
    return 0, max(extent - 1, 0)


def _most_extent(node: Any) -> int | None:
    """The longest dimension of an operator's first input, if all are known."""
    shape = node.input_value(0).get_partial_shape()
    return max((int(size) for size in shape.to_shape()), default=1) if shape.is_static else None


def _summed(node: Any) -> int | None:
    """Over how many elements a sum goes, if that is known."""
    read, made = node.input_value(0).get_partial_shape(), node.output(0).get_partial_shape()
    if not (read.is_static and made.is_static):
        return None
    return prod(map(int, read.to_shape())) // max(prod(map(int, made.to_shape())), 1)

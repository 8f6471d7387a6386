"""Arithmetic, comparison, logic and bits, element by element with numpy's broadcasting; casts."""

from collections.abc import Callable

import torch
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import UNSIGNED
from stageloom.edge_agent.lowering.errors import Unsupported
from stageloom.edge_agent.lowering.node import Kernel, Node
from stageloom.edge_agent.lowering.registry import Lowered, operator


def _no_axis(node: Node) -> None:
    """Opsets before 7 align shapes by attributes; such models cannot be imported."""
    if node.attribute("axis") is not None and node.opset < 7:
        raise Unsupported(f"{node.kind} of opset {node.opset} with an axis")


@operator("Add", wide=True)
def add(node: Node) -> Lowered:
    _no_axis(node)
    if node.dtype(0) == torch.bool:
        return torch.logical_or
    return Kernel(torch.add, lambda out, x, y: torch.add(x, y, out=out), lambda x, y: x.add_(y))


@operator("Sub", wide=True)
def sub(node: Node) -> Lowered:
    _no_axis(node)
    return Kernel(torch.sub, lambda out, x, y: torch.sub(x, y, out=out), lambda x, y: x.sub_(y))


@operator("Mul", wide=True)
def mul(node: Node) -> Lowered:
    _no_axis(node)
    return Kernel(torch.mul, lambda out, x, y: torch.mul(x, y, out=out), lambda x, y: x.mul_(y))


@operator("Div", wide=True)
def div(node: Node) -> Lowered:
    """Integers are cut towards zero."""
    _no_axis(node)
    if not node.dtype(0).is_floating_point:
        return lambda x, y: torch.div(x, y, rounding_mode="trunc")
    return Kernel(torch.div, lambda out, x, y: torch.div(x, y, out=out), lambda x, y: x.div_(y))


@operator("Pow", wide=True)
def power(node: Node) -> Lowered:
    """The result has the base's type, whatever the exponent's."""
    dtype = node.dtype(0)
    if node.is_constant(1) and node.constant(1).size == 1 and node.rank(1) <= node.rank(0):
        exponent = node.constant(1).item()
        if dtype.is_floating_point or (isinstance(exponent, int) and exponent >= 0):
            return lambda x, _=None: x.pow(exponent)
        return lambda x, _=None: x.double().pow(exponent).to(dtype)

    def run(x: Tensor, y: Tensor) -> Tensor:
        if dtype.is_floating_point:
            return torch.pow(x, y.to(dtype) if not y.dtype.is_floating_point else y).to(dtype)
        return torch.pow(x.double(), y.double()).to(dtype)

    return run


@operator("Mod", wide=True)
def mod(node: Node) -> Lowered:
    return torch.fmod if node.integer("fmod", 0) else torch.remainder


@operator("Sum", wide=True)
def total(node: Node) -> Lowered:
    return _fold(torch.add)


@operator("Max", wide=True)
def maximum(node: Node) -> Lowered:
    return _fold(torch.maximum)


@operator("Min", wide=True)
def minimum(node: Node) -> Lowered:
    return _fold(torch.minimum)


@operator("Mean")
def mean(node: Node) -> Lowered:
    count = len(node.inputs)

    def run(*args: Tensor) -> Tensor:
        made: Tensor = _summed(*args) / count
        return made

    return run


def _summed(*args: Tensor) -> Tensor:
    result = args[0]
    for other in args[1:]:
        result = result + other
    return result


def _fold(function: Callable[..., Tensor]) -> Lowered:
    def run(*args: Tensor) -> Tensor:
        result = args[0]
        for other in args[1:]:
            result = function(result, other)
        return result

    def into(out: Tensor, *args: Tensor) -> None:
        if len(args) == 1:
            out.copy_(args[0])
            return
        function(args[0], args[1], out=out)
        for other in args[2:]:
            function(out, other, out=out)

    return Kernel(run, into)


@operator("Neg", wide=True)
def neg(node: Node) -> Lowered:
    return torch.neg


@operator("Abs", wide=True)
def absolute(node: Node) -> Lowered:
    return torch.abs


@operator("Sign", wide=True)
def sign(node: Node) -> Lowered:
    return torch.sign


@operator("Sqrt")
def sqrt(node: Node) -> Lowered:
    return Kernel(torch.sqrt, lambda out, x: torch.sqrt(x, out=out), lambda x: x.sqrt_())


@operator("Reciprocal")
def reciprocal(node: Node) -> Lowered:
    return torch.reciprocal


@operator("Exp")
def exp(node: Node) -> Lowered:
    return Kernel(torch.exp, lambda out, x: torch.exp(x, out=out), lambda x: x.exp_())


@operator("Log")
def log(node: Node) -> Lowered:
    return torch.log


_PLAIN: dict[str, Callable[..., Tensor]] = {
    "Ceil": torch.ceil, "Floor": torch.floor, "Round": torch.round, "Sin": torch.sin, "Cos": torch.cos,
    "Tan": torch.tan, "Asin": torch.asin, "Acos": torch.acos, "Atan": torch.atan, "Sinh": torch.sinh,
    "Cosh": torch.cosh, "Asinh": torch.asinh, "Acosh": torch.acosh, "Atanh": torch.atanh,
    "IsNaN": torch.isnan, "Not": torch.logical_not, "BitwiseNot": torch.bitwise_not,
}  # fmt: skip


@operator(*_PLAIN, wide=True)
def plain(node: Node) -> Lowered:
    return _PLAIN[node.kind]


_COMPARE: dict[str, Callable[..., Tensor]] = {
    "Equal": torch.eq, "Less": torch.lt, "LessOrEqual": torch.le, "Greater": torch.gt,
    "GreaterOrEqual": torch.ge, "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
    "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip


@operator(*_COMPARE, wide=True)
def compare(node: Node) -> Lowered:
    return _COMPARE[node.kind]


@operator("BitShift", wide=True)
def bit_shift(node: Node) -> Lowered:
    """Only unsigned types. As int64, what a right shift brings in from above is zero."""
    dtype = node.dtype(0)
    left = node.text("direction", "LEFT") == "LEFT"
    if dtype == torch.uint64:
        return _shift_64(left=left)

    def run(x: Tensor, y: Tensor) -> Tensor:
        wide, by = x.to(torch.int64), y.to(torch.int64)
        made = wide << by.clamp(max=63) if left else wide >> by.clamp(max=63)
        return made if dtype in UNSIGNED else made.to(dtype)

    return run


def _shift_64(*, left: bool) -> Lowered:
    """int64 shifts arithmetically: the bits that it copies from the sign are masked away."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        by = y.clamp(0, 63)
        if left:
            return x << by
        kept = torch.where(
            by == 0, torch.full_like(by, -1), (torch.ones_like(by) << (64 - by).clamp(max=63)) - 1
        )
        return (x >> by) & kept

    return run


@operator("IsInf")
def is_inf(node: Node) -> Lowered:
    negative, positive = bool(node.integer("detect_negative", 1)), bool(node.integer("detect_positive", 1))
    if negative and positive:
        return torch.isinf
    if positive:
        return torch.isposinf
    if negative:
        return torch.isneginf
    return lambda x: torch.zeros_like(x, dtype=torch.bool)


@operator("Where", wide=True)
def where(node: Node) -> Lowered:
    return lambda condition, x, y: torch.where(condition, x, y)


@operator("Cast")
def cast(node: Node) -> Lowered:
    saturate = bool(node.integer("saturate", 1))
    return casting(node.dtype(0), node.real(node.integer("to", 0)), saturate=saturate)


@operator("CastLike")
def cast_like(node: Node) -> Lowered:
    run = casting(node.dtype(0), node.dtype(1), saturate=bool(node.integer("saturate", 1)))
    return lambda x, _like: run(x)


_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def casting(source: torch.dtype, target: torch.dtype, *, saturate: bool) -> Callable[[Tensor], Tensor]:
    """Values of another type: floating point to integers is cut towards zero; float8 saturates if asked."""
    if source == target:
        return lambda x: x
    if target in _FLOAT8:
        return _to_float8(target, saturate=saturate)
    if source.is_floating_point and target in (torch.uint16, torch.uint32, torch.uint64):
        return lambda x: x.to(torch.int64).to(target)
    return lambda x: x.to(target)


_OVERFLOW = 464.0
"""Half way from float8_e4m3fn's largest value to the next, which it does not have; torch saturates there."""


def _to_float8(target: torch.dtype, *, saturate: bool) -> Callable[[Tensor], Tensor]:
    """Beyond its largest value a float8 type holds that value (`saturate`), else infinity or NaN."""
    top, nan = torch.finfo(target).max, target == torch.float8_e4m3fn

    def run(x: Tensor) -> Tensor:
        wide = x.float()
        if not saturate:
            made = wide.to(target)
            return torch.where(wide.abs() > _OVERFLOW, torch.nan, made.float()).to(target) if nan else made
        clamped = torch.where(wide.isnan(), wide, wide.clamp(-top, top))
        return clamped.to(target)

    return run

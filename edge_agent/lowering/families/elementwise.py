"""Element by element, with numpy's broadcasting: arithmetic, comparison, logic, bits, activations, casts."""

import math
from collections.abc import Callable
from functools import reduce

import torch
import torch.nn.functional as functional
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import UNSIGNED, Unsupported
from stageloom.edge_agent.lowering.node import Kernel, Lowered, Node, operator

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

_OVERFLOW = 464.0
"""Midway between float8_e4m3fn's largest value and the next step, where torch saturates."""


def _three_ways(function: Callable[..., Tensor], inplace: Callable[..., Tensor]) -> Kernel:
    """Return the kernel of a torch function that takes `out` and has an in-place form."""
    return Kernel(function, lambda out, *args: function(*args, out=out), inplace)


_ARITHMETIC: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "Add": (torch.add, Tensor.add_), "Sub": (torch.sub, Tensor.sub_), "Mul": (torch.mul, Tensor.mul_),
    "Div": (torch.div, Tensor.div_),
}  # fmt: skip


@operator(*_ARITHMETIC, wide=True)
def arithmetic(node: Node) -> Lowered:
    """Integer quotients are cut towards zero. Opsets before 7 align shapes by an attribute."""
    if node.attribute("axis") is not None and node.opset < 7:
        raise Unsupported(f"{node.kind} of opset {node.opset} with an axis")
    if node.kind == "Add" and node.dtype(0) == torch.bool:
        return torch.logical_or
    if node.kind == "Div" and not node.dtype(0).is_floating_point:
        return lambda x, y: torch.div(x, y, rounding_mode="trunc")
    return _three_ways(*_ARITHMETIC[node.kind])


_IN_PLACE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "Sqrt": (torch.sqrt, torch.sqrt_), "Exp": (torch.exp, torch.exp_), "Tanh": (torch.tanh, torch.tanh_),
    "Sigmoid": (torch.sigmoid, torch.sigmoid_),
}  # fmt: skip


@operator(*_IN_PLACE)
def function_in_place(node: Node) -> Lowered:
    return _three_ways(*_IN_PLACE[node.kind])


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "Reciprocal": torch.reciprocal, "Log": torch.log, "HardSwish": functional.hardswish,
    "Softsign": functional.softsign, "Mish": functional.mish,
}  # fmt: skip


@operator(*_FUNCTIONS)
def function(node: Node) -> Lowered:
    return _FUNCTIONS[node.kind]


_WIDE_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "Neg": torch.neg, "Abs": torch.abs, "Sign": torch.sign,
    "Ceil": torch.ceil, "Floor": torch.floor, "Round": torch.round, "Sin": torch.sin, "Cos": torch.cos,
    "Tan": torch.tan, "Asin": torch.asin, "Acos": torch.acos, "Atan": torch.atan, "Sinh": torch.sinh,
    "Cosh": torch.cosh, "Asinh": torch.asinh, "Acosh": torch.acosh, "Atanh": torch.atanh,
    "IsNaN": torch.isnan, "Not": torch.logical_not, "BitwiseNot": torch.bitwise_not,
    "Equal": torch.eq, "Less": torch.lt, "LessOrEqual": torch.le, "Greater": torch.gt,
    "GreaterOrEqual": torch.ge, "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
    "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
    "Where": torch.where,
}  # fmt: skip


@operator(*_WIDE_FUNCTIONS, wide=True)
def wide_function(node: Node) -> Lowered:
    return _WIDE_FUNCTIONS[node.kind]


@operator("Pow", wide=True)
def power(node: Node) -> Lowered:
    """The result has the base's type, whatever the exponent's."""
    dtype = node.dtype(0)
    if node.is_constant(1) and math.prod(node.shape(1)) == 1 and node.rank(1) <= node.rank(0):
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


_VARIADIC: dict[str, Callable[..., Tensor]] = {"Sum": torch.add, "Max": torch.maximum, "Min": torch.minimum}


@operator(*_VARIADIC, wide=True)
def variadic(node: Node) -> Lowered:
    function = _VARIADIC[node.kind]

    def into(out: Tensor, *args: Tensor) -> None:
        if len(args) == 1:
            out.copy_(args[0])
            return
        function(
            reduce(function, args[:-1]), args[-1], out=out
        )  # only the last has the result's shape surely

    return Kernel(lambda *args: reduce(function, args), into)


@operator("Mean")
def mean(node: Node) -> Lowered:
    return lambda *args: reduce(torch.add, args) / len(args)


@operator("BitShift", wide=True)
def bit_shift(node: Node) -> Lowered:
    """Unsigned types only, so that a right shift of int64 brings in zeros."""
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
    """int64 shifts arithmetically: the copies of the sign bit are masked away."""

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


@operator("Cast")
def cast(node: Node) -> Lowered:
    saturate = bool(node.integer("saturate", 1))
    return casting(node.dtype(0), node.real(node.integer("to", 0)), saturate=saturate)


@operator("CastLike")
def cast_like(node: Node) -> Lowered:
    run = casting(node.dtype(0), node.dtype(1), saturate=bool(node.integer("saturate", 1)))
    return lambda x, _like: run(x)


def casting(source: torch.dtype, target: torch.dtype, *, saturate: bool) -> Callable[[Tensor], Tensor]:
    """Return a cast; floating point to integer is cut towards zero, float8 saturates if asked."""
    if source == target:
        return lambda x: x
    if target in _FLOAT8:
        return _to_float8(target, saturate=saturate)
    if source.is_floating_point and target in (torch.uint16, torch.uint32, torch.uint64):
        return lambda x: x.to(torch.int64).to(target)
    return lambda x: x.to(target)


def _to_float8(target: torch.dtype, *, saturate: bool) -> Callable[[Tensor], Tensor]:
    """Return a cast to float8: beyond its largest value that value (`saturate`), else infinity or NaN."""
    top, nan = torch.finfo(target).max, target == torch.float8_e4m3fn

    def run(x: Tensor) -> Tensor:
        wide = x.float()
        if not saturate:
            made = wide.to(target)
            return torch.where(wide.abs() > _OVERFLOW, torch.nan, made.float()).to(target) if nan else made
        clamped = torch.where(wide.isnan(), wide, wide.clamp(-top, top))
        return clamped.to(target)

    return run


@operator("Relu")
def relu(node: Node) -> Lowered:
    if not node.dtype(0).is_floating_point:
        return lambda x: x.clamp(min=0)
    return Kernel(
        torch.relu, into=lambda out, x: torch.clamp(x, min=0.0, out=out), inplace=torch.relu_
    )  # a NaN stays one in both


_ACTIVATIONS: dict[str, tuple[dict[str, float], Callable[..., Tensor]]] = {
    "LeakyRelu": ({"alpha": 0.01}, functional.leaky_relu),
    "Elu": ({"alpha": 1.0}, functional.elu),
    "Celu": ({"alpha": 1.0}, functional.celu),
    "Selu": (
        {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875},
        lambda x, alpha, gamma: gamma * functional.elu(x, alpha),
    ),
    "ThresholdedRelu": ({"alpha": 1.0}, lambda x, alpha: torch.where(x > alpha, x, torch.zeros_like(x))),
    "HardSigmoid": (
        {"alpha": 0.2, "beta": 0.5},
        lambda x, alpha, beta: (x * alpha + beta).clamp_(0.0, 1.0),
    ),
    "Softplus": ({}, lambda x: torch.logaddexp(x, torch.zeros_like(x))),
    "SwiGLU": ({"alpha": 1.0}, lambda gate, x, alpha: gate * torch.sigmoid(alpha * gate) * x),
}
"""Per operator its attributes with their defaults, and the function of its inputs and their values."""

_ACTIVATIONS_IN_PLACE: dict[str, Callable[..., Tensor]] = {
    "LeakyRelu": functional.leaky_relu_, "Elu": functional.elu_,
}  # fmt: skip


@operator(*_ACTIVATIONS)
def activation(node: Node) -> Lowered:
    defaults, function = _ACTIVATIONS[node.kind]
    values = [node.number(name, default) for name, default in defaults.items()]
    inplace = _ACTIVATIONS_IN_PLACE.get(node.kind)
    return Kernel(
        lambda *args: function(*args, *values),
        inplace=None if inplace is None else lambda x: inplace(x, *values),
    )


@operator("PRelu")
def prelu(node: Node) -> Lowered:
    zero = 0.0 if node.dtype(0).is_floating_point else 0
    return lambda x, slope: torch.where(x < zero, x * slope, x)


@operator("Swish")
def swish(node: Node) -> Lowered:
    alpha = node.number("alpha", 1.0)
    if alpha == 1.0:
        return functional.silu
    return lambda x: x * torch.sigmoid(alpha * x)


@operator("Gelu")
def gelu(node: Node) -> Lowered:
    mode = node.text("approximate", "none")
    return lambda x: functional.gelu(x, approximate=mode)


@operator("Erf")
def erf(node: Node) -> Lowered:
    if not node.dtype(0).is_floating_point:
        dtype = node.dtype(0)
        return lambda x: torch.erf(x.double()).to(dtype)
    return Kernel(torch.erf, lambda out, x: torch.erf(x, out=out), lambda x: x.erf_())


@operator("Shrink")
def shrink(node: Node) -> Lowered:
    bias, limit = node.number("bias", 0.0), node.number("lambd", 0.5)
    dtype = node.dtype(0)

    def run(x: Tensor) -> Tensor:
        wide = x if dtype.is_floating_point else x.double()
        zero = torch.zeros_like(wide)
        return torch.where(wide < -limit, wide + bias, torch.where(wide > limit, wide - bias, zero)).to(dtype)

    return run


@operator("Clip")
def clip(node: Node) -> Lowered:
    """Bounds are attributes up to opset 10 and inputs since; constant ones cost nothing."""
    if node.opset < 11:
        low, high = node.number("min", -math.inf), node.number("max", math.inf)
        return _clamp(_held(low, node), _held(high, node))
    if all(not node.has(i) or node.is_constant(i) for i in (1, 2)):
        low_bound = _held(node.constant(1).item(), node) if node.has(1) else None
        high_bound = _held(node.constant(2).item(), node) if node.has(2) else None
        return _clamp(low_bound, high_bound)

    def run(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
        x = x if low is None else torch.maximum(x, low)
        return x if high is None else torch.minimum(x, high)

    return run


def _held(bound: float, node: Node) -> float | None:
    """Return a bound; None if the type cannot hold it, as float32's largest value in float16."""
    dtype = node.dtype(0)
    return None if dtype.is_floating_point and abs(bound) > torch.finfo(dtype).max else bound


def _clamp(low: float | None, high: float | None) -> Lowered:
    """Clamp; where the bounds cross, the upper one wins. Constant bounds are passed again, as None."""
    if low is None and high is None:
        return lambda x, *_: x
    return Kernel(
        lambda x, *_: x.clamp(low, high),
        lambda out, x, *_: torch.clamp(x, low, high, out=out),
        lambda x, *_: x.clamp_(low, high),
    )

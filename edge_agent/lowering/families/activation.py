"""Activations: pointwise functions of one input that networks put behind linear operators."""

import math

import torch
import torch.nn.functional as functional
from torch import Tensor

from stageloom.edge_agent.lowering.node import Kernel, Node
from stageloom.edge_agent.lowering.registry import Lowered, operator


@operator("Relu")
def relu(node: Node) -> Lowered:
    if not node.dtype(0).is_floating_point:
        return lambda x: x.clamp(min=0)
    return Kernel(
        torch.relu, into=lambda out, x: torch.clamp(x, min=0.0, out=out), inplace=torch.relu_
    )  # a NaN stays one in both


@operator("LeakyRelu")
def leaky_relu(node: Node) -> Lowered:
    slope = node.number("alpha", 0.01)
    return Kernel(
        lambda x: functional.leaky_relu(x, slope),
        inplace=lambda x: functional.leaky_relu_(x, slope),
    )


@operator("PRelu")
def prelu(node: Node) -> Lowered:
    zero = 0.0 if node.dtype(0).is_floating_point else 0
    return lambda x, slope: torch.where(x < zero, x * slope, x)


@operator("Elu")
def elu(node: Node) -> Lowered:
    alpha = node.number("alpha", 1.0)
    return Kernel(lambda x: functional.elu(x, alpha), inplace=lambda x: functional.elu_(x, alpha))


@operator("Celu")
def celu(node: Node) -> Lowered:
    alpha = node.number("alpha", 1.0)
    return lambda x: functional.celu(x, alpha)


@operator("Selu")
def selu(node: Node) -> Lowered:
    alpha = node.number("alpha", 1.67326319217681884765625)
    gamma = node.number("gamma", 1.05070102214813232421875)
    return lambda x: gamma * functional.elu(x, alpha)


@operator("ThresholdedRelu")
def thresholded_relu(node: Node) -> Lowered:
    alpha = node.number("alpha", 1.0)
    return lambda x: torch.where(x > alpha, x, torch.zeros_like(x))


@operator("Sigmoid")
def sigmoid(node: Node) -> Lowered:
    return Kernel(torch.sigmoid, lambda out, x: torch.sigmoid(x, out=out), torch.sigmoid_)


@operator("Tanh")
def tanh(node: Node) -> Lowered:
    return Kernel(torch.tanh, lambda out, x: torch.tanh(x, out=out), torch.tanh_)


@operator("HardSigmoid")
def hard_sigmoid(node: Node) -> Lowered:
    alpha, beta = node.number("alpha", 0.2), node.number("beta", 0.5)
    return lambda x: (x * alpha + beta).clamp_(0.0, 1.0)


@operator("HardSwish")
def hard_swish(node: Node) -> Lowered:
    return functional.hardswish


@operator("Softplus")
def softplus(node: Node) -> Lowered:
    return lambda x: torch.logaddexp(x, torch.zeros_like(x))


@operator("Softsign")
def softsign(node: Node) -> Lowered:
    return functional.softsign


@operator("Mish")
def mish(node: Node) -> Lowered:
    return functional.mish


@operator("Swish")
def swish(node: Node) -> Lowered:
    alpha = node.number("alpha", 1.0)
    if alpha == 1.0:
        return functional.silu
    return lambda x: x * torch.sigmoid(alpha * x)


@operator("SwiGLU")
def swiglu(node: Node) -> Lowered:
    """The first input's Swish gates the second."""
    alpha = node.number("alpha", 1.0)
    return lambda gate, x: gate * torch.sigmoid(alpha * gate) * x


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
    """A bound, or None where it lies beyond what the type holds: float32's largest value, in float16."""
    dtype = node.dtype(0)
    return None if dtype.is_floating_point and abs(bound) > torch.finfo(dtype).max else bound


def _clamp(low: float | None, high: float | None) -> Lowered:
    """Where the bounds cross, the upper one wins, in torch too. Constant bounds arrive as None again."""
    if low is None and high is None:
        return lambda x, *_: x
    return Kernel(
        lambda x, *_: x.clamp(low, high),
        lambda out, x, *_: torch.clamp(x, low, high, out=out),
        lambda x, *_: x.clamp_(low, high),
    )

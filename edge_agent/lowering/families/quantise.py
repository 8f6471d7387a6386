"""Linear quantisation, and products of quantised values."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from stageloom.edge_agent.lowering.convolve import convolve
from stageloom.edge_agent.lowering.dtypes import Unsupported
from stageloom.edge_agent.lowering.families.convolution import spatial_rank, window_of
from stageloom.edge_agent.lowering.families.elementwise import casting
from stageloom.edge_agent.lowering.node import Lowered, Node, operator

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)


class _Spread:
    """Expands a scale or zero point to the input's shape: one for all, per channel, or per block."""

    def __init__(self, node: Node, index: int) -> None:
        self.rank = node.rank(0)
        self.axis = node.axis("axis", 1) if self.rank else 0
        self.block = node.integer("block_size", 0)
        self.extent = node.shape(0)[self.axis] if self.rank else 1
        self.single = node.rank(index) == 0 or (node.rank(index) == 1 and node.shape(index) == (1,))

    def __call__(self, value: Tensor) -> Tensor:
        if self.single:
            return value.reshape(())
        if self.block:
            return value.repeat_interleave(self.block, self.axis).narrow(self.axis, 0, self.extent)
        along = [1] * self.rank
        along[self.axis] = -1
        return value.reshape(along)


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp values to the range of an integer type and convert them."""
    info = torch.iinfo(dtype)
    clamped = x.clamp(info.min, info.max)
    return clamped.to(torch.int32).to(dtype) if dtype == torch.uint16 else clamped.to(dtype)


@operator("QuantizeLinear")
def quantize(node: Node) -> Lowered:
    """round(x / scale) + zero point, halves to even, saturated."""
    spread = _Spread(node, 1)
    code = node.integer("output_dtype", 0)
    if node.has(2):
        dtype = node.dtype(2)
    else:
        dtype = node.real(code) if code else torch.uint8
    if not dtype.is_floating_point and dtype not in _INTEGERS:
        raise Unsupported(f"QuantizeLinear to {dtype}")
    saturate = bool(node.integer("saturate", 1))
    to_float8 = casting(torch.float32, dtype, saturate=saturate) if dtype.is_floating_point else None

    def run(x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        ratio = x / spread(scale).to(x.dtype if x.dtype.is_floating_point else scale.dtype)
        if to_float8 is not None:
            return to_float8(ratio.float())
        places = torch.round(ratio.float())
        if zero is not None:
            places = places + spread(zero.to(torch.float32))
        return saturated(places, dtype)

    return run


@operator("DequantizeLinear")
def dequantize(node: Node) -> Lowered:
    spread = _Spread(node, 1)
    code = node.integer("output_dtype", 0)
    dtype = node.real(code) if code else node.dtype(1)

    def run(x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        wide = x.to(torch.float32)
        if zero is not None:
            wide = wide - spread(zero.to(torch.float32))
        return (wide * spread(scale).to(torch.float32)).to(dtype)

    return run


@operator("DynamicQuantizeLinear")
def dynamic_quantize(node: Node) -> Lowered:
    """Scale and zero point from the range of the input, which always holds zero."""

    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high = x.amin().clamp(max=0.0), x.amax().clamp(min=0.0)
        scale = torch.where(high == low, 1.0, (high - low) / 255.0)
        zero = torch.round((0.0 - low) / scale).clamp(0, 255)
        places = torch.round(x / scale) + zero
        return saturated(places, torch.uint8), scale, zero.to(torch.uint8)

    return run


def _centred(x: Tensor, zero: Tensor | None, *, rows: bool) -> Tensor:
    """x - zero in float64, which holds sums of such products exactly; a vector counts per row or column."""
    wide = x.double()
    if zero is None:
        return wide
    if zero.ndim == 1 and zero.numel() > 1 and rows:
        return wide - zero.double().unsqueeze(-1)
    return wide - (zero.double().reshape(()) if zero.numel() == 1 else zero.double())


@operator("MatMulInteger")
def matmul_integer(node: Node) -> Lowered:
    def run(a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None) -> Tensor:
        product = torch.matmul(_centred(a, a_zero, rows=True), _centred(b, b_zero, rows=False))
        return product.to(torch.int32)

    return run


@operator("QLinearMatMul")
def quantised_matmul(node: Node) -> Lowered:
    dtype = node.dtype(7)

    def run(
        a: Tensor, a_scale: Tensor, a_zero: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor,
        scale: Tensor, zero: Tensor,
    ) -> Tensor:  # fmt: skip
        product = torch.matmul(_centred(a, a_zero, rows=True), _centred(b, b_zero, rows=False))
        factor = _per_row(a_scale) * b_scale.double() / scale.double()
        return saturated(torch.round(product * factor) + zero.double(), dtype)

    return run


def _per_row(scale: Tensor) -> Tensor:
    return (
        scale.double().unsqueeze(-1) if scale.ndim == 1 and scale.numel() > 1 else scale.double().reshape(())
    )


@operator("ConvInteger")
def convolution_of_integers(node: Node) -> Lowered:
    convolve = _IntegerConvolution(node, weight=1)

    def run(x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None) -> Tensor:
        return convolve(x, w, x_zero, w_zero).to(torch.int32)

    return run


@operator("QLinearConv")
def quantised_convolution(node: Node) -> Lowered:
    convolve, dtype = _IntegerConvolution(node, weight=3), node.dtype(7)
    along = (1, -1, *[1] * (node.rank(0) - 2))

    def run(
        x: Tensor, x_scale: Tensor, x_zero: Tensor, w: Tensor, w_scale: Tensor, w_zero: Tensor,
        scale: Tensor, zero: Tensor, bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        total = convolve(x, w, x_zero, w_zero)
        if bias is not None:
            total = total + bias.double().view(along)
        factor = x_scale.double() * w_scale.double() / scale.double()
        factor = factor.view(along) if factor.numel() > 1 else factor.reshape(())
        return saturated(torch.round(total * factor) + zero.double(), dtype)

    return run


class _IntegerConvolution:
    """A convolution of centred integers; padding stands for the zero point, so it is zero here."""

    def __init__(self, node: Node, *, weight: int) -> None:
        size = node.shape(weight)[2:]
        self.window = window_of(node, size)
        self.groups = node.integer("group", 1)
        self.unpadded = (0,) * spatial_rank(node, weight)

    def __call__(self, x: Tensor, w: Tensor, x_zero: Tensor | None, w_zero: Tensor | None) -> Tensor:
        wide = x.double() - (0.0 if x_zero is None else x_zero.double().reshape(()))
        kernel = w.double()
        if w_zero is not None:
            along = (-1, *[1] * (w.ndim - 1)) if w_zero.numel() > 1 else ()
            kernel = kernel - w_zero.double().reshape(along)
        padded = functional.pad(wide, self.window.borders)
        window = self.window
        return convolve(padded, kernel, None, window.stride, self.unpadded, window.dilation, self.groups)

"""Matrix products, determinants, Fourier transforms and their windows."""

import math

import torch
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import Unsupported
from stageloom.edge_agent.lowering.node import Kernel, Lowered, Node, operator


@operator("MatMul")
def matmul(node: Node) -> Lowered:
    if not node.dtype(0).is_floating_point:
        return _integer_matmul(node)
    weight = node.take(1)

    def run(x: Tensor, w: Tensor | None) -> Tensor:
        return torch.matmul(x, weight if w is None else w)  # type: ignore[arg-type]

    def into(out: Tensor, x: Tensor, w: Tensor | None) -> None:
        torch.matmul(x, weight if w is None else w, out=out)  # type: ignore[arg-type]

    return Kernel(run, into)


def _integer_matmul(node: Node) -> Lowered:
    """CUDA has no integer product; float64 holds sums of int32 products below 2^53 exactly."""
    dtype = node.dtype(0)
    return lambda x, y: torch.matmul(x.double(), y.double()).to(dtype)


@operator("Gemm")
def gemm(node: Node) -> Lowered:
    """alpha * A' B' + beta * C."""
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    left, right = bool(node.integer("transA", 0)), bool(node.integer("transB", 0))
    weight, bias = node.take(1), node.take(2)
    dtype = node.dtype(0)

    def operands(x: Tensor, w: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        w = weight if w is None else w
        assert w is not None
        return (x.T if left else x), (w.T if right else w), (bias if b is None else b)

    def run_integers(x: Tensor, w: Tensor | None, b: Tensor | None = None) -> Tensor:
        x, w, b = operands(x, w, b)
        made = alpha * (x.double() @ w.double())
        return (made if b is None else made + beta * b).to(dtype)

    if not dtype.is_floating_point:
        return run_integers

    def run(x: Tensor, w: Tensor | None, b: Tensor | None = None) -> Tensor:
        x, w, b = operands(x, w, b)
        if b is None:
            return torch.mm(x, w) if alpha == 1.0 else alpha * torch.mm(x, w)
        return torch.addmm(b, x, w, beta=beta, alpha=alpha)

    def into(out: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None = None) -> None:
        x, w, b = operands(x, w, b)
        if b is not None:
            torch.addmm(b, x, w, beta=beta, alpha=alpha, out=out)
            return
        torch.mm(x, w, out=out)
        if alpha != 1.0:
            out.mul_(alpha)

    return Kernel(run, into)


@operator("Det")
def determinant(node: Node) -> Lowered:
    if node.dtype(0) == torch.float16:
        raise Unsupported("Det in float16")
    return lambda x: torch.linalg.det(x)


@operator("Einsum")
def einsum(node: Node) -> Lowered:
    equation = node.text("equation", "").replace(" ", "")
    return lambda *args: torch.einsum(equation, *args)


def _complex(x: Tensor) -> Tensor:
    """[..., 1 or 2] -> [...], real or complex."""
    return x[..., 0] if x.shape[-1] == 1 else torch.complex(x[..., 0], x[..., 1])


@operator("DFT")
def dft(node: Node) -> Lowered:
    """Real and imaginary part lie in the last dimension. The axis is an attribute before opset 20."""
    rank = node.rank(0)
    if node.opset < 20:
        axis = node.integer("axis", 1) % rank
    else:
        axis = (int(node.scalar(2)) if node.has(2) else -2) % rank
    inverse, onesided = bool(node.integer("inverse", 0)), bool(node.integer("onesided", 0))
    length = int(node.scalar(1)) if node.has(1) else None
    if node.dtype(0) not in (torch.float32, torch.float64):
        raise Unsupported(f"DFT in {node.dtype(0)}")

    def run(x: Tensor, *_: Tensor | None) -> Tensor:
        signal = _complex(x)
        if inverse and onesided:
            real: Tensor = torch.fft.irfft(signal, length, axis).unsqueeze(-1)
            return real
        made = torch.fft.ifft(signal, length, axis) if inverse else torch.fft.fft(signal, length, axis)
        if onesided:
            made = made.narrow(axis, 0, made.shape[axis] // 2 + 1)
        return torch.view_as_real(made.contiguous())

    return run


@operator("STFT")
def stft(node: Node) -> Lowered:
    """Frames of the signal [batch, length, 1 or 2] times the window, each transformed."""
    step = int(node.scalar(1))
    onesided = bool(node.integer("onesided", 1))
    if node.has(3):
        length = int(node.scalar(3))
    else:
        length = node.shape(2)[0] if node.has(2) else node.shape(0)[1]
    if node.dtype(0) not in (torch.float32, torch.float64):
        raise Unsupported(f"STFT in {node.dtype(0)}")

    def run(x: Tensor, _: Tensor | None, window: Tensor | None = None, __: Tensor | None = None) -> Tensor:
        frames = _complex(x).unfold(1, length, step)  # [batch, frames, length]
        made = torch.fft.fft(frames if window is None else frames * window, dim=-1)
        if onesided:
            made = made[..., : length // 2 + 1]
        return torch.view_as_real(made.contiguous())

    return run


_COEFFICIENTS = {
    "HannWindow": (0.5, 0.5, 0.0),
    "HammingWindow": (25 / 46, 21 / 46, 0.0),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}


@operator(*_COEFFICIENTS)
def window(node: Node) -> Lowered:
    size = int(node.scalar(0))
    period = size if node.integer("periodic", 1) else size - 1
    angle = 2.0 * math.pi * torch.arange(size, dtype=torch.float64) / period
    a, b, c = _COEFFICIENTS[node.kind]
    values = a - b * torch.cos(angle) + c * torch.cos(2.0 * angle)
    return (values.to(node.real(node.integer("output_datatype", 1))),)

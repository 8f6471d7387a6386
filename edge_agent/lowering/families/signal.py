"""Fourier transforms and windows."""

import math

import torch
from torch import Tensor

from stageloom.edge_agent.lowering.errors import Unsupported
from stageloom.edge_agent.lowering.node import Known, Node
from stageloom.edge_agent.lowering.registry import Lowered, operator


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
        axis = (int(node.constant(2).reshape(())) if node.has(2) else -2) % rank
    inverse, onesided = bool(node.integer("inverse", 0)), bool(node.integer("onesided", 0))
    length = int(node.constant(1).reshape(())) if node.has(1) else None
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
    step = int(node.constant(1).reshape(()))
    onesided = bool(node.integer("onesided", 1))
    if node.has(3):
        length = int(node.constant(3).reshape(()))
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
    size = int(node.constant(0).reshape(()))
    period = size if node.integer("periodic", 1) else size - 1
    angle = 2.0 * math.pi * torch.arange(size, dtype=torch.float64) / period
    a, b, c = _COEFFICIENTS[node.kind]
    values = a - b * torch.cos(angle) + c * torch.cos(2.0 * angle)
    return Known((values.to(node.real(node.integer("output_datatype", 1))),))

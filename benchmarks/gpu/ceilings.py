"""What this device reaches at best: products, copies, and a launch that depends on the one before.

Measured and not taken from a data sheet, since the three distances are taken from them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.device import Device, per_run_s
from benchmarks.gpu.networks import Subject, dtype_of

_CHAIN = 50  # units of the dependent chain


@dataclass(frozen=True)
class Ceilings:
    """Rates in SI units; times of one link of a dependent chain."""

    flop_per_s: float
    bytes_per_s: float
    chain_eager_s: float
    chain_graph_s: float


def product_flop_per_s(device: Device, precision: str, side: int, seconds: float) -> float:
    """Square products of random matrices: zeros would draw less power and run faster."""
    dtype = dtype_of(precision)
    left, right = (torch.randn(side, side, device=device.torch, dtype=dtype) for _ in range(2))
    made = torch.empty_like(left)

    def work() -> None:
        torch.mm(left, right, out=made)

    return 2.0 * side**3 / per_run_s(device, work, seconds=seconds)


def copy_bytes_per_s(device: Device, nbytes: int, seconds: float) -> float:
    """Bytes read plus bytes written by a copy that no cache holds."""
    source = torch.randn(nbytes // 4, device=device.torch)
    target = torch.empty_like(source)

    def work() -> None:
        target.copy_(source)

    return 2.0 * nbytes / per_run_s(device, work, seconds=seconds)


def smallest(subjects: Sequence[Subject]) -> tuple[int, int]:
    """Channels and side of what the convolution with the fewest operations makes."""
    made = [
        (operator.flop, subject.artifact.graph.tensors[operator.outputs[0]].shape)
        for subject in subjects
        for operator in subject.artifact.graph.operators
        if operator.kind == "Conv"
    ]
    _, (_, channels, side, _) = min(made)
    return channels, side


def chain(device: Device, precision: str, channels: int, side: int) -> Callable[[], None]:
    """A dependent chain of a convolution of that size, 1x1 with bias and Relu."""
    dtype = dtype_of(precision)
    weight = torch.randn(channels, channels, 1, 1, device=device.torch, dtype=dtype) / channels**0.5
    weight = weight.contiguous(memory_format=torch.channels_last)
    bias = torch.zeros(channels, device=device.torch, dtype=dtype)
    first = torch.randn(1, channels, side, side, device=device.torch, dtype=dtype)
    first = first.contiguous(memory_format=torch.channels_last)

    def work() -> None:
        value: Tensor = first
        with torch.inference_mode():
            for _ in range(_CHAIN):
                value = fused(value, weight, bias)

    return work


def fused(
    value: Tensor, weight: Tensor, bias: Tensor, stride: int = 1, pad: tuple[int, int] = (0, 0)
) -> Tensor:
    """Convolution, bias and Relu as one kernel where cudnn offers that, else as two calls."""
    if value.device.type == "cuda":
        return torch.cudnn_convolution_relu(value, weight, bias, (stride, stride), pad, (1, 1), 1)
    return torch.relu_(torch.nn.functional.conv2d(value, weight, bias, stride, pad))


def measure(device: Device, subjects: Sequence[Subject], precision: str, *, quick: bool) -> Ceilings:
    """All of them; about three seconds."""
    seconds = 0.02 if quick else 0.4
    work = chain(device, precision, *smallest(subjects))
    graph = device.capture(work)
    return Ceilings(
        product_flop_per_s(device, precision, 256 if quick else 8192, seconds),
        copy_bytes_per_s(device, 1 << 22 if quick else 1 << 30, seconds),
        per_run_s(device, work, seconds=seconds) / _CHAIN,
        per_run_s(device, graph.replay, seconds=seconds) / _CHAIN,
    )

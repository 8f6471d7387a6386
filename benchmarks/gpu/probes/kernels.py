"""Kernel choices: fused against unfused convolutions, and concatenation by writing into slices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu.ceilings import fused
from benchmarks.gpu.device import Device, Work, per_run_s
from benchmarks.gpu.networks import Network, Subject, dtype_of

_REPEATS: Final = 10  # in one graph: a launch is longer than a small kernel

Shape = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Input, weight, stride and padding."""


@dataclass(frozen=True)
class Unit:
    """One convolution with Relu, both ways; times in microseconds."""

    shape: Shape
    count: int  # units of that shape in all models
    fused_us: float
    unfused_us: float

    @property
    def gain(self) -> float:
        """Above 1: the fused kernel is faster."""
        return self.unfused_us / self.fused_us


def convolutions(subjects: Sequence[Subject], networks: Sequence[Network]) -> dict[Shape, int]:
    """The shapes of all convolutions that a Relu follows, and how often each occurs."""
    found: dict[Shape, int] = {}
    for subject, network in zip(subjects, networks, strict=True):
        shapes = {tensor.name: tensor.shape for tensor in subject.artifact.graph.tensors}
        shapes[network.image] = subject.image.shape
        relus = {reads[0] for node, reads in zip(network.nodes, network.reads, strict=True) if _is_relu(node)}
        for node, reads, makes in zip(network.nodes, network.reads, network.makes, strict=True):
            if isinstance(node, nn.Conv2d) and makes in relus and node.groups == 1:
                pad = tuple(int(one) for one in node.padding)
                key = (shapes[reads[0]], tuple(node.weight.shape), tuple(node.stride), pad)
                found[key] = found.get(key, 0) + 1
    return found


def _is_relu(node: nn.Module) -> bool:
    return isinstance(node, nn.ReLU)


def both_ways(device: Device, precision: str, shape: Shape, count: int, seconds: float) -> Unit:
    """One shape, each way in a graph of its own."""
    source, kernel, stride, pad = shape
    value, weight = random(device, precision, *source), random(device, precision, *kernel)
    bias = torch.zeros(kernel[0], device=device.torch, dtype=dtype_of(precision))
    pads = (pad[0], pad[1])

    def with_relu() -> None:
        fused(value, weight, bias, stride[0], pads)

    def then_relu() -> None:
        torch.relu_(functional.conv2d(value, weight, bias, stride[0], pads))

    return Unit(shape, count, graphed_us(device, with_relu, seconds), graphed_us(device, then_relu, seconds))


def random(device: Device, precision: str, *shape: int) -> Tensor:
    """Random numbers in channels-last."""
    made = torch.randn(*shape, device=device.torch, dtype=dtype_of(precision))
    return made.contiguous(memory_format=torch.channels_last)


def graphed_us(device: Device, call: Work, seconds: float) -> float:
    """Microseconds of one call among several in a graph."""

    def work() -> None:
        with torch.inference_mode():
            for _ in range(_REPEATS):
                call()

    return per_run_s(device, device.capture(work).replay, seconds=seconds) / _REPEATS * 1e6


def concat_ways(
    device: Device, precision: str, *, channels: Sequence[int], reads: int, side: int, seconds: float
) -> dict[str, float]:
    """1x1 convolutions of one input and their concatenation in channels-last, in microseconds.

    `concat`: fused convolutions, then torch.cat. `copied`: fused convolutions, each copied into its slice.
    `sliced`: convolutions whose Relu writes into its slice, so that nothing is copied.
    """
    source = random(device, precision, 1, reads, side, side)
    weights = [random(device, precision, one, reads, 1, 1) for one in channels]
    biases = [torch.zeros(one, device=device.torch, dtype=source.dtype) for one in channels]
    joined = random(device, precision, 1, sum(channels), side, side)
    slices = list(torch.split(joined, list(channels), dim=1))

    def concat() -> None:
        parts = [fused(source, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        torch.cat(parts, 1, out=joined)

    def copied() -> None:
        for target, weight, bias in zip(slices, weights, biases, strict=True):
            target.copy_(fused(source, weight, bias))

    def sliced() -> None:
        for target, weight, bias in zip(slices, weights, biases, strict=True):
            torch.clamp_min(functional.conv2d(source, weight, bias), 0, out=target)

    ways: dict[str, Work] = {"concat": concat, "copied": copied, "sliced": sliced}
    return {name: graphed_us(device, way, seconds) for name, way in ways.items()}

"""What probes run on and with, and the ceilings that distances are counted from.

Ceilings (products, copies, a launch that depends on the one before) are measured and not taken from a data
sheet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.device import Device, Work, per_run_s
from benchmarks.gpu.networks import Subject, dtype_of
from benchmarks.gpu.results import Results, Settings

CHILD_S: Final = 60.0
_CHAIN: Final = 50  # units of the dependent chain
_REPEATS: Final = 10  # in one graph: a launch is longer than a small kernel


@dataclass(frozen=True)
class Ceilings:
    """Rates in SI units; times of one link of a dependent chain of the smallest convolution."""

    flop_per_s: float
    bytes_per_s: float
    chain_eager_s: float
    chain_graph_s: float

    def add_to(self, results: Results) -> None:
        """What everything is compared with, as a row."""
        row = {
            "tflop_per_s": self.flop_per_s / 1e12,
            "gbyte_per_s": self.bytes_per_s / 1e9,
            "chain_eager_us": self.chain_eager_s * 1e6,
            "chain_graph_us": self.chain_graph_s * 1e6,
        }
        results.add(
            {f"ceiling.{key}": value for key, value in row.items()}, part="probe", name="ceilings", **row
        )


@dataclass(frozen=True)
class Bench:
    """What probes run on and with."""

    device: Device
    subjects: Sequence[Subject]
    settings: Settings

    @property
    def seconds(self) -> float:
        """Of one measurement."""
        return 0.01 if self.settings.quick else 0.1

    def random(self, *shape: int) -> Tensor:
        """Random numbers in channels-last: zeros would draw less power and run faster."""
        made = torch.randn(*shape, device=self.device.torch, dtype=dtype_of(self.settings.precision))
        return made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made

    def graphed_us(self, call: Work) -> float:
        """Microseconds of one call among several in a graph."""

        def work() -> None:
            with torch.inference_mode():
                for _ in range(_REPEATS):
                    call()

        taken_s = per_run_s(self.device, self.device.capture(work), seconds=self.seconds)
        return taken_s / _REPEATS * 1e6

    def chain(self) -> Work:
        """A dependent chain of the convolution with the fewest operations, as 1x1 with bias and Relu."""
        _, (_, channels, side, _) = min(
            (operator.flop, subject.artifact.graph.tensors[operator.outputs[0]].shape)
            for subject in self.subjects
            for operator in subject.artifact.graph.operators
            if operator.kind == "Conv"
        )
        weight, first = self.random(channels, channels, 1, 1), self.random(1, channels, side, side)
        weight /= channels**0.5
        bias = torch.zeros_like(weight[:, 0, 0, 0])

        def work() -> None:
            value = first
            with torch.inference_mode():
                for _ in range(_CHAIN):
                    value = fused(value, weight, bias)

        return work


def fused(value: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolution, bias and Relu as one kernel where cudnn offers that, else as two calls."""
    if value.device.type == "cuda":
        return torch.cudnn_convolution_relu(value, weight, bias, (1, 1), (0, 0), (1, 1), 1)
    return torch.relu_(functional.conv2d(value, weight, bias))


def measure_ceilings(bench: Bench) -> Ceilings:
    """All of them; about three seconds."""
    quick, device = bench.settings.quick, bench.device
    seconds = 0.02 if quick else 0.4
    side, count = (256, 1 << 20) if quick else (8192, 1 << 28)
    left, right, product = (bench.random(side, side) for _ in range(3))
    source = torch.randn(count, device=device.torch)
    target = torch.empty_like(source)
    chain = bench.chain()
    graph = device.capture(chain)
    product_s = per_run_s(device, lambda: torch.mm(left, right, out=product), seconds=seconds)
    copy_s = per_run_s(device, lambda: target.copy_(source), seconds=seconds)
    return Ceilings(
        flop_per_s=2.0 * side**3 / product_s,
        bytes_per_s=2.0 * source.nbytes / copy_s,  # read and written; no cache holds them
        chain_eager_s=per_run_s(device, chain, seconds=seconds) / _CHAIN,
        chain_graph_s=per_run_s(device, graph, seconds=seconds) / _CHAIN,
    )

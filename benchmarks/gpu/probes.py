"""What this device reaches at best, and questions about it whose answers the executor's design rests on.

Ceilings (products, copies, a launch that depends on the one before) are measured and not taken from a
data sheet, since distances are counted from them. Each probe of `PROBES` answers one question, is a row, and
says why where it cannot run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.child import in_child
from benchmarks.gpu.device import STREAMS, Device, Work, fork, join, make_device, per_run_s, require_cuda
from benchmarks.gpu.networks import Subject, dtype_of
from benchmarks.gpu.results import Results, Settings, Skip
from stageloom.edge_agent.executor.cuda.streams import CONNECTIONS

_CHAIN: Final = 50  # units of the dependent chain
_REPEATS: Final = 10  # in one graph: a launch is longer than a small kernel
_COUNTS: Final = (8, 32)  # of connections
_CYCLES: Final = 200_000  # about 0.1 ms of one thread that spins
_LINKS: Final = 4
_CHILD_S: Final = 60.0
_cuda: Any = torch.cuda


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


# Streams


def first_alias(bench: Bench) -> dict[str, float | None]:
    """The number of the first stream whose handle an earlier one had; None where the first 64 differ."""
    require_cuda(bench.device)
    streams = [_cuda.Stream() for _ in range(64)]  # kept: a stream that was freed could come again
    handles = [stream.cuda_stream for stream in streams]
    aliases = [number for number, handle in enumerate(handles, 1) if handle in handles[: number - 1]]
    return {"first_alias_stream": aliases[0] if aliases else None}


def connections(bench: Bench) -> dict[str, float | None]:
    """Chains at once under few and under many connections; CUDA reads their number when it starts."""
    require_cuda(bench.device)
    if not bench.settings.children:
        raise Skip("needs child processes")
    figures: dict[str, float | None] = {}
    for count in _COUNTS:
        environment = {CONNECTIONS: str(count)}
        chains = in_child(chains_at_once, bench.device.kind, limit_s=_CHILD_S, **environment)
        figures |= {f"chains_at_once.{count}.{how}": many for how, many in chains.items()}
    return figures


def chains_at_once(kind: str) -> dict[str, float]:
    """Chains of spinning threads on several streams: how many chains ran at once.

    Issued chain by chain (`depth`), where too few connections put one chain behind another, and link by link
    (`breadth`).
    """
    device = make_device(kind)
    used = list(device.streams)

    def issue(order: Sequence[Any]) -> None:
        fork(device, used)
        for stream in order:
            with device.on(stream):
                _spin()
        join(device, used)

    orders = {"depth": [stream for stream in used for _ in range(_LINKS)], "breadth": used * _LINKS}
    link_s = per_run_s(device, _spin, seconds=0.02)
    return {
        name: STREAMS * _LINKS * link_s / per_run_s(device, partial(issue, order), seconds=0.05)
        for name, order in orders.items()
    }


def _spin() -> None:
    _cuda._sleep(_CYCLES)


# Kernels


_CONCATENATIONS: Final = {
    # branches' channels, channels read, side: SqueezeNet's last fire module, Inception's first mixed block
    "squeezenet": ((256, 256), 64, 13),
    "inception": ((64, 64, 96, 32), 192, 25),
}


def concatenations(bench: Bench) -> dict[str, float | None]:
    """1x1 convolutions of one input and their concatenation in channels-last, in microseconds.

    `concat`: fused convolutions, then torch.cat. `sliced`: convolutions whose Relu writes into its slice.
    """
    figures: dict[str, float | None] = {}
    for name, (channels, reads, side) in _CONCATENATIONS.items():
        ways = _ways_to_concatenate(bench, channels, reads, side)
        figures |= {f"concat.{name}.{way}_us": bench.graphed_us(call) for way, call in ways.items()}
    return figures


def _ways_to_concatenate(bench: Bench, channels: Sequence[int], reads: int, side: int) -> dict[str, Work]:
    source, joined = bench.random(1, reads, side, side), bench.random(1, sum(channels), side, side)
    weights = [bench.random(count, reads, 1, 1) for count in channels]
    biases = [torch.zeros_like(weight[:, 0, 0, 0]) for weight in weights]
    branches = list(zip(torch.split(joined, list(channels), dim=1), weights, biases, strict=True))

    def concat() -> None:
        torch.cat([fused(source, weight, bias) for _, weight, bias in branches], 1, out=joined)

    def sliced() -> None:
        for target, weight, bias in branches:
            torch.clamp_min(functional.conv2d(source, weight, bias), 0, out=target)

    return {"concat": concat, "sliced": sliced}


PROBES: Final[Mapping[str, Callable[[Bench], Mapping[str, float | None]]]] = {
    "the 33rd stream": first_alias,
    "connections": connections,
    "concatenation in place": concatenations,
}


def run_probes(bench: Bench, results: Results) -> None:
    """All of them, each a row of its own; one that fails or cannot run here says why."""
    for name, probe in PROBES.items():
        with results.attempt("probe", name):
            row = probe(bench)
            results.add({f"probe.{key}": value for key, value in row.items()}, part="probe", name=name, **row)

"""What this device reaches at best, and questions about it whose answers the executor's design rests on.

Ceilings (products, copies, a launch that depends on the one before) are measured and not taken from a
data sheet, since distances are counted from them. Each probe of `PROBES` answers one question, is a row, and
says why where it cannot run.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.child import in_child
from benchmarks.gpu.device import STREAMS, Device, Work, fork, join, make_device, per_run_s, require_cuda
from benchmarks.gpu.networks import Subject, dtype_of
from benchmarks.gpu.results import Results, Settings, Skip
from stageloom.edge_agent.executor.cuda.streams import CONNECTIONS
from stageloom.edge_agent.executor.torch.cuda import driver
from stageloom.edge_agent.lowering.cudnn_graph import FusedConvolution, library

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


_SLICED: Final = ((64, 64, 3, 28), (192, 64, 1, 35), (160, 192, 7, 17))
"""Channels read and made, side of the kernel and of the image: of the papers' three networks."""

_OFFSETS: Final = (0, 64, 3)  # channels before the slice: aligned as a Concat's usually are, and not


def strided_outputs(bench: Bench) -> dict[str, float | None]:
    """Errors of torch's convolution into a slice, after a packed buffer of the same sizes was written.

    Its plans are kept by sizes, types and alignment, without the strides of what they write into. What is
    wrong there can end the process's use of the device, so it runs in one of its own.
    """
    require_cuda(bench.device)
    if not bench.settings.children:
        raise Skip("needs child processes")
    figures: dict[str, float | None] = {}
    for number in range(len(_SLICED)):
        row = f"strided.{'x'.join(map(str, _SLICED[number]))}"
        try:
            errors = in_child(strided_errors, number, bench.settings.precision, limit_s=_CHILD_S)
        except RuntimeError:
            figures[f"{row}.lost_the_device"] = 1.0
            continue
        figures |= {f"{row}.offset_{offset}_error": error for offset, error in errors.items()}
    return figures


def strided_errors(number: int, precision: str) -> dict[int, float]:
    """By offset the relative error of a convolution into a slice. What was not written counts as wrong."""
    torch.manual_seed(number)
    channels, filters, side, image = _SLICED[number]
    dtype, order = dtype_of(precision), torch.channels_last
    source = torch.randn(1, channels, image, image, device="cuda", dtype=dtype)
    weight = torch.randn(filters, channels, side, side, device="cuda", dtype=dtype) / (channels**0.5 * side)
    source, weight = (one.contiguous(memory_format=order) for one in (source, weight))
    wanted = functional.conv2d(source.double(), weight.double(), padding=side // 2)
    settings = ((side // 2,) * 2, (1, 1), (1, 1), 1, False, False, precision == "tf32")
    packed = torch.empty_like(wanted, dtype=dtype, memory_format=order)
    torch.ops.aten.cudnn_convolution.out(source, weight, *settings, out=packed)
    errors = {}
    for offset in _OFFSETS:
        whole = torch.zeros(1, filters + 128, image, image, device="cuda", dtype=dtype)
        slice_ = whole.contiguous(memory_format=order).narrow(1, offset, filters)
        torch.ops.aten.cudnn_convolution.out(source, weight, *settings, out=slice_)
        errors[offset] = float((slice_.double() - wanted).norm() / wanted.norm())
    return errors


def fused_kernels(bench: Bench) -> dict[str, float | None]:
    """Microseconds of a model's convolutions, one after another, each with bias and Relu into packed memory.

    `unfused`: torch's convolution, then Relu into the buffer; `fused`: cudnn's fused kernel by torch, and a
    copy; `graph`: the first plan of cudnn's graph API, straight into the buffer. Each signature counts as
    often as the model has it.
    """
    require_cuda(bench.device)
    figures: dict[str, float | None] = {}
    for subject in bench.subjects:
        sums: dict[str, float] = {}
        for signature, count in _convolutions(subject).items():
            for way, call in _ways_to_convolve(bench, *signature).items():
                sums[way] = sums.get(way, 0.0) + count * bench.graphed_us(call)
        figures |= {f"fused.{subject.name}.{way}_us": total for way, total in sums.items()}
    return figures


_Convolution: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Shapes of source and weight; stride and padding."""


def _convolutions(subject: Subject) -> Counter[_Convolution]:
    """The model's convolutions that torch pads by itself."""
    network = subject.network(torch.device("cpu"), "fp32")
    shapes: Counter[_Convolution] = Counter()

    def note(module: Any, inputs: tuple[Tensor, ...]) -> None:
        shapes[tuple(inputs[0].shape), tuple(module.weight.shape), module.stride, module.padding] += 1

    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(note)
    with torch.inference_mode():
        network(torch.from_numpy(subject.image))
    return shapes


def _ways_to_convolve(
    bench: Bench,
    source_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> dict[str, Work]:
    source, weight = bench.random(*source_shape), bench.random(*weight_shape)
    bias = bench.random(weight_shape[0])
    made = functional.conv2d(source, weight, bias, stride, padding)
    target = torch.empty_like(made, memory_format=torch.channels_last)

    def unfused() -> None:
        torch.clamp_min(functional.conv2d(source, weight, bias, stride, padding), 0, out=target)

    def fused_and_copied() -> None:
        target.copy_(torch.cudnn_convolution_relu(source, weight, bias, stride, padding, (1, 1), 1))

    ways: dict[str, Work] = {"unfused": unfused, "fused": fused_and_copied}
    if library() is not None:
        fused = FusedConvolution(weight, bias, True, stride, padding, (1, 1))
        ways["graph"] = partial(fused.run_into, 0, source, None, target)
    return ways


def child_graphs(bench: Bench) -> dict[str, float | None]:
    """Spinning kernels in child graphs of one graph, side by side: how many run at once.

    Were it fewer than there are, a schedule could not be wired from graphs that were captured before.
    """
    require_cuda(bench.device)
    cuda = driver()
    if cuda is None:
        raise Skip("cuda-bindings is not installed")
    once_s = per_run_s(bench.device, bench.device.capture(_spin), seconds=0.05)
    held = [_kept_graph(bench.device) for _ in range(_CHILDREN)]
    parent = _checked(cuda, cuda.cuGraphCreate(0))
    for graph in held:
        _checked(cuda, cuda.cuGraphAddChildGraphNode(parent, [], 0, cuda.CUgraph(graph.raw_cuda_graph())))
    runnable = _checked(cuda, cuda.cuGraphInstantiate(parent, 0))
    stream = bench.device.current().cuda_stream

    def launch() -> None:
        _checked(cuda, cuda.cuGraphLaunch(runnable, stream))

    return {"child_graphs_at_once": _CHILDREN * once_s / per_run_s(bench.device, launch, seconds=0.05)}


_CHILDREN: Final = 4


def _kept_graph(device: Device) -> Any:
    graph = _cuda.CUDAGraph(keep_graph=True)
    with device.on(device.streams[0]):
        graph.capture_begin(capture_error_mode="thread_local")
        _spin()
        graph.capture_end()
    return graph


def _checked(cuda: Any, answer: tuple[Any, ...]) -> Any:
    """
    Raises:
        RuntimeError: the driver says why.
    """
    error, *results = answer
    if error != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(str(error))
    return results[0] if results else None


PROBES: Final[Mapping[str, Callable[[Bench], Mapping[str, float | None]]]] = {
    "the 33rd stream": first_alias,
    "connections": connections,
    "concatenation in place": concatenations,
    "strided outputs": strided_outputs,
    "fused kernels": fused_kernels,
    "child graphs": child_graphs,
}


def run_probes(bench: Bench, results: Results) -> None:
    """All of them, each a row of its own; one that fails or cannot run here says why."""
    for name, probe in PROBES.items():
        with results.attempt("probe", name):
            row = probe(bench)
            results.add({f"probe.{key}": value for key, value in row.items()}, part="probe", name=name, **row)

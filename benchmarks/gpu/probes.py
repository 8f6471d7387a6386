"""What this device reaches at best, and questions about it whose answers the executor's design rests on.

Ceilings (products, copies, a launch that depends on the one before) are measured and not taken from a
data sheet, since distances are counted from them. Each probe answers one question: how many streams there
really are, and how many of them run at once under 8 and under 32 connections; whether a fused convolution
is faster than two kernels; whether concatenation in place is; whether child graphs run at once; what a
condition costs. A plan's programs could be captured once per member and composed, so that a new schedule
is wired without a capture; or one graph could hold every member under a condition, in place of one graph
per mask.

Traces by torch's profiler say what ran at the same time, and what every operator asks of a
multiprocessor. Operators are traced in a child process: a process that was profiled once launches more
slowly afterwards.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu.device import STREAMS, Device, Graph, Work, fork, join, per_run_s
from benchmarks.gpu.networks import Network, Subject, dtype_of
from benchmarks.gpu.profiled_kernels import (
    OPERATOR_PREFIX,
    OperatorResources,
    Rates,
    kernels_by_operator,
    operator_resources,
)
from benchmarks.gpu.results import Deadline, Results, Settings, Zoo
from benchmarks.gpu.rivals import run_child
from stageloom.edge_agent.executor.cuda.device import Multiprocessor
from stageloom.edge_agent.executor.cuda.streams import CONNECTIONS
from stageloom.edge_agent.executor.torch.cuda import multiprocessor as cuda_multiprocessor

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


def measure_ceilings(device: Device, subjects: Sequence[Subject], precision: str, *, quick: bool) -> Ceilings:
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


COUNTS: Final = (8, 32)
_CYCLES: Final = 200_000  # about 0.1 ms of one thread that spins
_LINKS: Final = 4
_CHILD_S: Final = 60.0
_cuda: Any = torch.cuda


def first_alias() -> int | None:
    """The number of the first stream whose handle an earlier one had; None where the first 64 differ."""
    handles: list[int] = []
    kept = []  # a stream that was freed could come again
    for number in range(1, 65):
        stream = _cuda.Stream()
        kept.append(stream)
        if stream.cuda_stream in handles:
            return number
        handles.append(stream.cuda_stream)
    return None


def sleep(device: Device, cycles: int = _CYCLES) -> None:
    """Keep one thread of the device busy on the current stream."""
    if device.kind == "cuda":
        _cuda._sleep(cycles)


def at_once(device: Device, *, streams: int = STREAMS, links: int = _LINKS) -> dict[str, float]:
    """Chains of spinning threads on several streams: how many chains ran at once.

    Issued chain by chain (`depth`), where too few connections put one chain behind another, and link by link
    (`breadth`); and as one captured graph (`graph`).
    """
    used = list(device.streams[:streams])

    def issue(pairs: list[tuple[Any, int]]) -> None:
        fork(device, used)
        for stream, _ in pairs:
            with device.on(stream):
                sleep(device)
        join(device, used)

    by_depth = [(stream, link) for stream in used for link in range(links)]
    by_breadth = [(stream, link) for link in range(links) for stream in used]
    one_s = per_run_s(device, lambda: sleep(device), seconds=0.02)
    found = {}
    graph = device.capture(lambda: issue(by_depth[links:]), stream=used[0])  # the capturing stream is one
    for name, work, chains in (
        ("depth", lambda: issue(by_depth), streams),
        ("breadth", lambda: issue(by_breadth), streams),
        ("graph", graph.replay, streams - 1),
    ):
        found[name] = chains * links * one_s / per_run_s(device, work, seconds=0.05)
    return found


def connections_child(device: Device) -> None:
    """One count of connections, in a process of its own: CUDA reads the variable when it starts."""
    print(json.dumps(at_once(device)))


def with_connections(kind: str, connections: int) -> dict[str, float]:
    """`at_once` in a child under so many connections."""
    found: dict[str, float] = run_child(
        "connections", "--device", kind, limit_s=_CHILD_S, **{CONNECTIONS: str(connections)}
    )
    return found


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


_MEMBERS: Final = 4


def no_bindings(device: Device) -> str:
    """Why no graph can be composed here, empty if one can."""
    if device.kind != "cuda":
        return "needs CUDA"
    return "" if find_spec("cuda") and find_spec("cuda.bindings") else "cuda-bindings are not installed"


class Composed:
    """A graph made by hand from captured ones; instantiated, and freed by `close`."""

    def __init__(self) -> None:
        self._runtime: Any = import_module("cuda.bindings.runtime")
        self._graph = self._checked(self._runtime.cudaGraphCreate(0))
        self._run: Any = None

    def _checked(self, result: tuple[Any, ...]) -> Any:
        """What a call gave, behind its error code.

        Raises:
            RuntimeError: the call failed.
        """
        error, *found = result
        if error != self._runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"CUDA: {error}")
        return found[0] if found else None

    def child(self, captured: Graph, after: Sequence[Any] = (), inside: Any = None) -> Any:
        """Add a captured graph (kept when it was made) as one node; the node."""
        raw = self._runtime.cudaGraph_t(captured.graph.raw_cuda_graph())
        graph = self._graph if inside is None else inside
        before = list(after) or None
        return self._checked(self._runtime.cudaGraphAddChildGraphNode(graph, before, len(after), raw))

    def condition(self, captured: Graph, holds: bool) -> None:
        """Add a captured graph under a condition whose value is set anew at every launch."""
        cuda = self._runtime
        flags = int(cuda.cudaGraphConditionalHandleFlags.cudaGraphCondAssignDefault)
        handle = self._checked(cuda.cudaGraphConditionalHandleCreate(self._graph, int(holds), flags))
        node = cuda.cudaGraphNodeParams()
        node.type = cuda.cudaGraphNodeType.cudaGraphNodeTypeConditional
        node.conditional.handle = handle
        node.conditional.type = cuda.cudaGraphConditionalNodeType.cudaGraphCondTypeIf
        node.conditional.size = 1
        self._checked(cuda.cudaGraphAddNode(self._graph, None, None, 0, node))
        self.child(captured, inside=node.conditional.phGraph_out[0])

    def ready(self) -> None:
        self._run = self._checked(self._runtime.cudaGraphInstantiate(self._graph, 0))

    def replay(self) -> None:
        """Issue it on the current stream."""
        stream = self._runtime.cudaStream_t(torch.cuda.current_stream().cuda_stream)
        self._checked(self._runtime.cudaGraphLaunch(self._run, stream))

    def close(self) -> None:
        torch.cuda.synchronize()
        if self._run is not None:
            self._runtime.cudaGraphExecDestroy(self._run)
        self._runtime.cudaGraphDestroy(self._graph)


def _members(device: Device, precision: str, size: tuple[int, int]) -> list[Any]:
    """Dependent chains that take no room on the chip, captured each on a stream of its own."""
    return [
        device.capture(chain(device, precision, *size), stream=device.streams[index], keep=True)
        for index in range(_MEMBERS)
    ]


def _timed_us(device: Device, made: Composed, seconds: float) -> float:
    try:
        made.ready()
        made.replay()
        torch.cuda.synchronize()
        return per_run_s(device, made.replay, seconds=seconds) * 1e6
    finally:
        made.close()


def children(device: Device, precision: str, size: tuple[int, int], seconds: float) -> dict[str, float]:
    """Members as children side by side, one after another, and each launched by itself, in microseconds."""
    members = _members(device, precision, size)
    beside, in_turn = Composed(), Composed()
    last: list[Any] = []
    for member in members:
        beside.child(member)
        last = [in_turn.child(member, last)]

    def launched() -> None:
        for member in members:
            member.replay()

    return {
        "beside": _timed_us(device, beside, seconds),
        "in_turn": _timed_us(device, in_turn, seconds),
        "launched": per_run_s(device, launched, seconds=seconds) * 1e6,
    }


def conditions(device: Device, precision: str, size: tuple[int, int], seconds: float) -> dict[str, float]:
    """Members under conditions that hold, that do not, and without any, side by side, in microseconds."""
    members = _members(device, precision, size)
    found = {}
    for name in ("plain", "holds", "skipped"):
        made = Composed()
        for member in members:
            if name == "plain":
                made.child(member)
            else:
                made.condition(member, name == "holds")
        found[name] = _timed_us(device, made, seconds)
    found["one"] = per_run_s(device, members[0].replay, seconds=seconds) * 1e6
    return found


_PART = "probe"
_KERNELS_SHARE = 0.06  # of the time left
_CONCATENATIONS = {
    # branches' channels, channels read, side: SqueezeNet's last fire module, Inception's first mixed block
    "squeezenet fire9": ((256, 256), 64, 13),
    "inception mixed_5b": ((64, 64, 96, 32), 192, 25),
}


def run_probes(
    device: Device, subjects: Sequence[Subject], settings: Settings, results: Results, deadline: Deadline
) -> None:
    """All of them, each a row of its own; one that fails says why."""
    seconds = 0.01 if settings.quick else 0.1
    size = smallest(subjects)

    def add(name: str, figures: Mapping[str, float | None], **columns: Any) -> None:
        results.add(figures, part=_PART, name=name, **columns)

    with results.attempt(_PART, name := "the 33rd stream"):
        if device.kind != "cuda":
            results.skip(_PART, name, "needs CUDA")
        else:
            number = first_alias()
            figure = None if number is None else float(number)
            add(name, {"probe.first_alias_stream": figure}, first_alias=number)
    with results.attempt(_PART, name := "connections"):
        if device.kind != "cuda" or not settings.children:
            results.skip(_PART, name, "needs CUDA and child processes")
        else:
            for connections in COUNTS:
                chains = with_connections(device.kind, connections)
                figures = {f"probe.chains_at_once.{connections}.{how}": many for how, many in chains.items()}
                add(f"{connections} connections, 16 streams: chains at once", figures, **chains)
    with results.attempt(_PART, name := "fused and unfused convolutions"):
        limit_s = deadline.share_s(_KERNELS_SHARE)
        units, shapes = fused_and_unfused(device, subjects, settings, seconds / 10, limit_s)
        slower = sum(unit.gain < 1.0 for unit in units)
        worst = min(units, key=lambda unit: unit.gain)
        chosen_us = sum(unit.count * min(unit.fused_us, unit.unfused_us) for unit in units)
        fused_us = sum(unit.count * unit.fused_us for unit in units)
        unfused_us = sum(unit.count * unit.unfused_us for unit in units)
        add(
            name,
            {
                "probe.fused_over_unfused": unfused_us / fused_us,
                "probe.chosen_over_fused": fused_us / chosen_us,
                "probe.fused_slower_shapes": float(slower),
            },
            shapes=len(units),
            of=shapes,
            fused_us=fused_us,
            unfused_us=unfused_us,
            chosen_us=chosen_us,
            median_gain=median(unit.gain for unit in units),
            fused_is_slower=slower,
            worst_gain=worst.gain,
            worst_shape=str(worst.shape),
        )
    with results.attempt(_PART, "concatenation in place"):
        for name, (channels, reads, side) in _CONCATENATIONS.items():
            ways_us = concat_ways(
                device, settings.precision, channels=channels, reads=reads, side=side, seconds=seconds
            )
            figures = {f"probe.concat.{name.split()[0]}.{way}_us": taken for way, taken in ways_us.items()}
            add(f"concatenation of {name}, us", figures, **ways_us)
    with results.attempt(_PART, name := "child graphs"):
        if reason := no_bindings(device):
            results.skip(_PART, name, reason)
        else:
            times = children(device, settings.precision, size, seconds)
            at_once = times["in_turn"] / times["beside"]
            add("4 child graphs, us", {"probe.child_graphs_at_once": at_once}, **times)
    with results.attempt(_PART, name := "conditional nodes"):
        if reason := no_bindings(device):
            results.skip(_PART, name, reason)
        else:
            times = conditions(device, settings.precision, size, seconds)
            each_us = (times["holds"] - times["plain"]) / _MEMBERS
            add("4 members under conditions, us", {"probe.condition_us": each_us}, **times)


def fused_and_unfused(
    device: Device, subjects: Sequence[Subject], settings: Settings, seconds: float, limit_s: float
) -> tuple[list[Unit], int]:
    """Shapes of the models, the most frequent first, while the time lasts; and how many there are."""
    networks = [subject.network(device.torch, settings.precision) for subject in subjects]
    shapes = sorted(convolutions(subjects, networks).items(), key=lambda shape: -shape[1])
    ends_s = time.monotonic() + limit_s
    units: list[Unit] = []
    for shape, count in shapes[:3] if settings.quick else shapes:
        if time.monotonic() > ends_s and units:
            break
        units.append(both_ways(device, settings.precision, shape, count, seconds))
    return units, len(shapes)


# Traces

_TRACED_RUNS = 3


def trace_of(device: Device, work: Callable[[], None]) -> dict[str, Any]:
    """The work once, with what was before it ended, as Chrome's JSON."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    device.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        device.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return found


def multiprocessor(device: Device) -> Multiprocessor:
    return cuda_multiprocessor(device.torch) if device.kind == "cuda" else Multiprocessor()


class Operators:
    """Runs each operator of a graph alone, on the activations that it really gets."""

    def __init__(self, device: Device, subject: Subject, precision: str) -> None:
        self._device = device
        self._graph = subject.artifact.graph
        self._item_bytes = 2 if precision == "fp16" else 4
        self._network: Network = subject.network(device.torch, precision)
        with torch.inference_mode():
            self._values = self._network.every_value(subject.images(device.torch, precision))

    def run(self, op: int) -> None:
        """The nodes of one operator, one after another."""
        network = self._network
        made: dict[str, torch.Tensor] = {}
        for node in self._graph.operators[op].nodes:
            reads = [made[name] if name in made else self._values[name] for name in network.reads[node]]
            made[network.makes[node]] = network.nodes[node](*reads)

    def resources(self, rates: Rates) -> list[OperatorResources]:
        """Measured over a few runs of each. [num_operators]"""

        def work() -> None:
            for _ in range(_TRACED_RUNS):
                for op in range(len(self._graph.operators)):
                    with torch.profiler.record_function(f"{OPERATOR_PREFIX}{op}"):
                        self.run(op)

        with torch.inference_mode():
            work()
            trace = trace_of(self._device, work)
        found = kernels_by_operator(trace)
        return operator_resources(self._graph, found, rates, runs=_TRACED_RUNS, item_bytes=self._item_bytes)


def operators_child(
    device: Device, subject: Subject, precision: str, flop_per_s: float, bytes_per_s: float
) -> None:
    """The resources of one model's operators as JSON."""
    rates = Rates(flop_per_s=flop_per_s, bytes_per_s=bytes_per_s)
    print(json.dumps([asdict(own) for own in Operators(device, subject, precision).resources(rates)]))


def operators_of(
    model: str, zoo: Zoo, device: str, precision: str, rates: Rates, *, limit_s: float
) -> list[OperatorResources]:
    """The resources of a model's operators, measured in a child.

    Raises:
        RuntimeError, subprocess.TimeoutExpired: see `run_child`.
    """
    found = run_child(
        "operators",
        *("--device", device, "--model", model, "--precision", precision, *zoo.arguments),
        *("--flop-per-s", str(rates.flop_per_s), "--bytes-per-s", str(rates.bytes_per_s)),
        limit_s=limit_s,
    )
    return [OperatorResources(**resources) for resources in found]

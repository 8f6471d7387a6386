"""What kernels need and when they ran, read from a trace of torch's profiler (CUPTI).

The trace is JSON in Chrome's format. A kernel's event carries what the launch asked for: registers per
thread, static and dynamic shared memory per block, threads per block. It says by its correlation number which
call of the runtime launched it, and that call lies inside the host's annotation of the operator it was made
for. Kernels of a captured graph share the correlation number of the graph's launch.

Opara (Chen et al. 2023, sections 3.2 and 3.3) orders launches by these demands and by what bounds an
operator, which it reads off a table of operator classes. Here it is measured: the rates an operator reached,
each as a share of what the device was measured to reach; the larger share bounds it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from stageloom.edge_agent.executor.cuda.device import BlockNeeds, Multiprocessor
from stageloom.shared.graph import Graph
from stageloom.shared.search.streams import OperatorProfile

OPERATOR_PREFIX: Final = "stageloom.op."
"""An annotation's name is this and the operator's number."""

_LAUNCHERS: Final = frozenset({"cuda_runtime", "cuda_driver"})


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of one kernel; times in microseconds on the trace's clock."""

    name: str
    begin_us: float
    end_us: float
    stream: int
    correlation: int
    registers: int = 0  # per thread
    shared_bytes: int = 0  # per block
    threads: int = 0  # per block
    blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the device was measured to reach."""

    flop_per_s: float
    bytes_per_s: float


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """All kernels of a trace in the order in which they began; copies and memsets are none."""
    found = []
    for event in _complete(trace, frozenset({"kernel"})):
        args = event.get("args", {})
        found.append(
            Kernel(
                str(event.get("name", "")),
                float(event["ts"]),
                float(event["ts"]) + float(event["dur"]),
                int(args.get("stream", event.get("tid", 0))),
                int(args.get("correlation", -1)),
                int(args.get("registers per thread", 0)),
                int(args.get("shared memory", 0)),
                _product(args.get("block")),
                _product(args.get("grid")),
            )
        )
    return sorted(found, key=lambda kernel: (kernel.begin_us, kernel.end_us))


def kernels_by_operator(trace: Mapping[str, Any]) -> dict[int, list[Kernel]]:
    """Per operator the kernels that were launched inside its annotations."""
    spans = sorted(
        (
            float(event["ts"]),
            float(event["ts"]) + float(event["dur"]),
            int(event["name"][len(OPERATOR_PREFIX) :]),
        )
        for event in _complete(trace, frozenset({"user_annotation"}))
        if str(event.get("name", "")).startswith(OPERATOR_PREFIX)
    )
    launched_us = {
        int(event["args"]["correlation"]): float(event["ts"])
        for event in _complete(trace, _LAUNCHERS)
        if "correlation" in event.get("args", {})
    }
    found: dict[int, list[Kernel]] = {}
    for kernel in kernels_of(trace):
        at_us = launched_us.get(kernel.correlation, float("-inf"))
        for begin_us, end_us, op in spans:
            if begin_us <= at_us <= end_us:
                found.setdefault(op, []).append(kernel)
                break
    return found


def _complete(trace: Mapping[str, Any], categories: frozenset[str]) -> Iterable[Mapping[str, Any]]:
    for event in trace.get("traceEvents", ()):
        if event.get("ph") == "X" and event.get("cat") in categories and "ts" in event and "dur" in event:
            yield event


def _product(sizes: Any) -> int:
    product = 1
    for size in sizes or (0,):
        product *= int(size)
    return product


# Concurrency


def union_us(kernels: Iterable[Kernel]) -> float:
    """Time in which at least one kernel ran: what NVML calls utilisation, as a time."""
    total_us, open_until_us = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda one: one.begin_us):
        total_us += max(kernel.end_us - max(kernel.begin_us, open_until_us), 0.0)
        open_until_us = max(open_until_us, kernel.end_us)
    return total_us


def concurrency(kernels: Sequence[Kernel]) -> float | None:
    """Kernels that ran at the same time while any ran: the sum of their times over the union's."""
    busy_us = union_us(kernels)
    return sum(one.end_us - one.begin_us for one in kernels) / busy_us if busy_us else None


def busy_share(kernels: Sequence[Kernel]) -> float | None:
    """The union over the time from the first kernel's begin to the last one's end."""
    if not kernels:
        return None
    whole_us = max(one.end_us for one in kernels) - min(one.begin_us for one in kernels)
    return union_us(kernels) / whole_us if whole_us else None


# Operators


@dataclass(frozen=True, slots=True)
class OperatorResources:
    """One operator as it was measured; `bound` is `memory`, `compute`, or `launch` where nothing is known."""

    device_us: float  # of one run
    kernels: int  # of one run
    registers: int  # per thread, of the kernel that took the longest
    shared_bytes: int  # per block of it
    threads: int  # per block of it
    flop_share: float  # of the device's rate
    bytes_share: float

    @property
    def bound(self) -> str:
        """By the larger share."""
        if not self.device_us:
            return "launch"
        return "memory" if self.bytes_share > self.flop_share else "compute"


def operator_resources(
    graph: Graph, kernels: Mapping[int, Sequence[Kernel]], rates: Rates, *, runs: int, item_bytes: int
) -> list[OperatorResources]:
    """Per operator. [num_operators]

    `kernels` are those of `runs` runs; `item_bytes` is the size of an element on the device, where the graph
    counts four bytes.
    """
    return [
        _resources(graph, op, kernels.get(op, ()), rates, runs, item_bytes / 4)
        for op in range(len(graph.operators))
    ]


def _resources(
    graph: Graph, op: int, kernels: Sequence[Kernel], rates: Rates, runs: int, scale: float
) -> OperatorResources:
    if not kernels:
        return OperatorResources(0.0, 0, 0, 0, 0, 0.0, 0.0)
    operator = graph.operators[op]
    tensors = sum(graph.tensors[t].nbytes for t in (*operator.inputs, *operator.outputs))
    moved_bytes = (operator.weight_bytes + tensors) * scale
    device_us = sum(one.end_us - one.begin_us for one in kernels) / runs
    longest = max(kernels, key=lambda one: one.end_us - one.begin_us)
    return OperatorResources(
        device_us,
        round(len(kernels) / runs),
        longest.registers,
        longest.shared_bytes,
        longest.threads,
        operator.flop / (device_us * 1e-6) / rates.flop_per_s,
        moved_bytes / (device_us * 1e-6) / rates.bytes_per_s,
    )


def opara_profile(resources: OperatorResources, multiprocessor: Multiprocessor) -> OperatorProfile:
    """What Opara's launch order reads: a block's shares of a multiprocessor, and what bounds the operator."""
    needs = BlockNeeds(resources.registers, resources.shared_bytes, resources.threads)
    return replace(needs.shares(multiprocessor), memory_intensive=resources.bound == "memory")

"""Questions about a device whose answers the executor's design rests on.

Each probe of `PROBES` answers one question, is a row, and says why where it cannot run.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from benchmarks.gpu.bench import CHILD_S, Bench
from benchmarks.gpu.child import in_child
from benchmarks.gpu.device import STREAMS, Device, fork, join, make_device, per_run_s, require_cuda
from benchmarks.gpu.kernel_probes import concatenations, fused_kernels, strided_outputs
from benchmarks.gpu.results import Results, Skip
from stageloom.edge_agent.executor.cuda.streams import CONNECTIONS
from stageloom.edge_agent.executor.torch.cuda import driver

_COUNTS: Final = (8, 32)  # of connections
_CYCLES: Final = 2_000_000  # about 1 ms of one thread that spins: issuing all chains takes about as long
_LINKS: Final = 4
_CHILDREN: Final = 4
_cuda: Any = torch.cuda


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
        chains = in_child(chains_at_once, bench.device.kind, limit_s=CHILD_S, **environment)
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


# Graphs


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

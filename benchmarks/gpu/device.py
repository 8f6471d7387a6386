"""What the benchmark needs of a device: streams, events, captured graphs, a clock.

`Device` itself is the host: it walks through the same code without a GPU. A stream is a name, an event a
reading of the host's clock, a captured graph a function that is called again. It shows that the code is
whole; its figures mean nothing. Nothing here changes a clock or a setting of a device.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from stageloom.edge_agent.executor.cuda.streams import CONNECTIONS
from stageloom.edge_agent.executor.torch.cuda import first_graph
from stageloom.edge_agent.machine.utilisation import open_nvml

STREAMS: Final = 16
"""Taken once and reused: torch hands out 32 in turn, and the 33rd is the first again."""

Work = Callable[[], None]
_cuda: Any = torch.cuda  # much of it is untyped
_cudnn: Any = torch.backends.cudnn


class Graph:
    """Captured work, with the tensors that only it holds; `replay` issues it on the current stream."""

    def __init__(self, work: Work, graph: Any = None) -> None:
        self.graph = graph
        self._work = work

    def replay(self) -> None:
        if self.graph is None:
            self._work()
        else:
            self.graph.replay()


class HostEvent:
    """An instant of the host's clock; everything before it has ended."""

    at_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.at_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """The host did it."""


class Device:
    """The host in place of a device."""

    kind = "cpu"

    def __init__(self) -> None:
        torch.set_num_threads(1)  # tiny models: a second thread only waits
        self.torch = torch.device("cpu")
        self.streams: Sequence[Any] = [f"stream {index}" for index in range(STREAMS)]

    def on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        """Work in the block goes to the stream."""
        return contextlib.nullcontext()

    def current(self) -> Any:
        """The stream that work goes to."""
        return self.streams[0]

    def event(self, *, timing: bool = False) -> Any:
        """With `record(stream)` and `wait(stream)`; `timing` ones compare by `elapsed_s`."""
        return HostEvent()

    def elapsed_s(self, began: Any, ended: Any) -> float:
        """Between two recorded events with `timing`, after `synchronize`."""
        return max(float(ended.at_s - began.at_s), 1e-9)

    def synchronize(self) -> None:
        """Until everything that was issued has ended."""

    def capture(self, work: Work, *, stream: Any = None, warm: int = 3, keep: bool = False) -> Graph:
        """The work as a graph, its first replay done. `keep`: its nodes can be put into another graph."""
        work()
        return Graph(work)

    def sm_clock_mhz(self) -> float | None:
        """Of the multiprocessors, now."""
        return None

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {"gpu": "none: the host walks through the code, its figures mean nothing"}


class Cuda(Device):
    """CUDA through torch, device 0."""

    kind = "cuda"

    def __init__(self) -> None:
        """
        Raises:
            RuntimeError: torch finds no CUDA device.
        """
        os.environ.setdefault(CONNECTIONS, "32")  # read when CUDA starts; the probe measures 8 as well
        self.torch = torch.device("cuda", 0)
        torch.cuda.set_device(self.torch)
        self.streams = [_cuda.Stream() for _ in range(STREAMS)]
        first_graph()  # ours are captured in inference mode, torch.compile's are not
        uuid = getattr(torch.cuda.get_device_properties(self.torch), "uuid", None)
        self._nvml = (open_nvml(uuid=f"GPU-{uuid}") if uuid else None) or open_nvml()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        entered: contextlib.AbstractContextManager[None] = _cuda.stream(stream)
        return entered

    def current(self) -> Any:
        return torch.cuda.current_stream()

    def event(self, *, timing: bool = False) -> Any:
        return _cuda.Event(enable_timing=timing)

    def elapsed_s(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) * 1e-3

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def capture(self, work: Work, *, stream: Any = None, warm: int = 3, keep: bool = False) -> Graph:
        """
        Warm-up and capture use the same thread, since cudnn keeps what it found per thread. cuBLAS's
        workspace must be the graph's own: it is forgotten before, so that the capture takes one from its
        pool, and after, so that nothing else finds that one. Graphs that run side by side share nothing.
        """
        side = stream if stream is not None else self.streams[0]
        side.wait_stream(torch.cuda.current_stream())
        with _cuda.stream(side):
            for _ in range(warm):
                work()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph(keep_graph=True) if keep else torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            work()
        torch._C._cuda_clearCublasWorkspaces()
        if keep:
            graph.instantiate()
        graph.replay()
        torch.cuda.synchronize()
        return Graph(work, graph)

    def sm_clock_mhz(self) -> float | None:
        return None if self._nvml is None else self._nvml.sm_clock_mhz()

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.torch)
        facts: dict[str, Any] = {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_mib": properties.total_memory >> 20,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": _cudnn.version(),
        }
        if self._nvml is not None:
            facts["power_limit_w"] = self._nvml.power_limit_w()
            facts["throttle_reasons"] = self._nvml.throttle_reasons()
        return facts


def make_device(kind: str) -> Device:
    """`cuda` or `cpu`."""
    return Cuda() if kind == "cuda" else Device()


def fork(device: Device, streams: Sequence[Any]) -> None:
    """The streams go on after what the current one holds."""
    event = device.event()
    event.record(device.current())
    for stream in streams:
        event.wait(stream)


def join(device: Device, streams: Sequence[Any]) -> None:
    """The current stream goes on after what the others hold."""
    for stream in streams:
        event = device.event()
        event.record(stream)
        event.wait(device.current())


def per_run_s(device: Device, work: Work, *, seconds: float, least: int = 5) -> float:
    """Device seconds of one run, back to back for about `seconds`, after one that warms up."""
    work()
    device.synchronize()
    began_s = time.perf_counter()
    work()
    device.synchronize()
    once_s = max(time.perf_counter() - began_s, 1e-7)
    runs = max(least, min(round(seconds / once_s), 100_000))
    first, last = device.event(timing=True), device.event(timing=True)
    first.record(device.current())
    for _ in range(runs):
        work()
    last.record(device.current())
    device.synchronize()
    return device.elapsed_s(first, last) / runs

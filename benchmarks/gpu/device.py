"""What the benchmark needs of a device: streams, captured graphs, a clock.

`Device` itself is the host: it walks through the same code without a GPU. A stream orders nothing, a captured
graph is a function that is called again. It shows that the code is whole; its figures mean nothing. Nothing
here changes a clock or a setting of a device.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from benchmarks.gpu.results import Skip
from stageloom.edge_agent.executor.torch.cuda import CudaGraphDevice
from stageloom.edge_agent.machine.utilisation import open_nvml

STREAMS: Final = 24
_WARM: Final = 3  # runs before a capture

Work = Callable[[], object]
_cuda: Any = torch.cuda  # much of it is untyped
_cudnn: Any = torch.backends.cudnn


@dataclass(frozen=True)
class Held:
    """A run with what it needs and nothing else keeps: the tensors of a graph or of a binding."""

    run: Work
    held: Any

    def __call__(self) -> None:
        self.run()


class HostStream:
    """What it is given has ended when the call returns."""

    def wait_stream(self, other: Any) -> None: ...


class Device:
    """The host in place of a device."""

    kind = "cpu"

    def __init__(self) -> None:
        torch.set_num_threads(1)  # tiny models: a second thread only waits
        self.torch = torch.device("cpu")
        self.streams: Sequence[Any] = [HostStream() for _ in range(STREAMS)]

    def on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        """Work in the block goes to the stream."""
        return contextlib.nullcontext()

    def current(self) -> Any:
        """The stream that work goes to."""
        return self.streams[0]

    def timed_s(self, work: Work) -> float:
        """Seconds from when the device begins with what `work` issues until it has ended."""
        began_s = time.perf_counter()
        work()
        return max(time.perf_counter() - began_s, 1e-9)

    def synchronize(self) -> None:
        """Until everything that was issued has ended."""

    def capture(self, work: Work, *, stream: Any = None) -> Held:
        """The work as a graph that was replayed once."""
        work()
        return Held(work, work)

    def nothing_captured(self) -> contextlib.AbstractContextManager[object]:
        """While inside, no executor prepares programs."""
        return contextlib.nullcontext()

    def sm_clock_mhz(self) -> float | None:
        """Of the multiprocessors, now."""
        return None

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {"gpu": "none: the host walks through the code, its figures mean nothing"}


class Cuda(Device):
    """CUDA through torch, device 0, with the executor's streams and its way to capture."""

    kind = "cuda"

    def __init__(self) -> None:
        """
        Raises:
            ExecutorError: torch finds no CUDA device.
        """
        self._graphs = CudaGraphDevice()
        self.torch = self._graphs.torch_device
        self.streams = [self._graphs.stream(number) for number in range(STREAMS)]
        uuid = getattr(torch.cuda.get_device_properties(self.torch), "uuid", None)
        self._nvml = (open_nvml(uuid=f"GPU-{uuid}") if uuid else None) or open_nvml()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        entered: contextlib.AbstractContextManager[None] = _cuda.stream(stream)
        return entered

    def current(self) -> Any:
        return torch.cuda.current_stream()

    def timed_s(self, work: Work) -> float:
        first, last = (_cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        self.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def capture(self, work: Work, *, stream: Any = None) -> Held:
        """Warm-up and capture use the same thread, since cudnn keeps what it found per thread.

        Every graph has a pool of its own: those that run side by side share nothing.
        """
        side = stream if stream is not None else self.streams[0]
        side.wait_stream(torch.cuda.current_stream())
        with _cuda.stream(side):
            for _ in range(_WARM):
                work()
        torch.cuda.synchronize()

        def body() -> None:
            work()

        graph = self._graphs.capture(self._graphs.new_pool(), [side], body)
        graph.replay()
        torch.cuda.synchronize()
        return Held(graph.replay, work)

    def nothing_captured(self) -> contextlib.AbstractContextManager[object]:
        return self._graphs.preparing()

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


def require_cuda(device: Device) -> None:
    """
    Raises:
        Skip: it is the host.
    """
    if device.kind != "cuda":
        raise Skip("needs CUDA")


def fork(device: Device, streams: Sequence[Any]) -> None:
    """The streams go on after what the current one holds."""
    for stream in streams:
        stream.wait_stream(device.current())


def join(device: Device, streams: Sequence[Any]) -> None:
    """The current stream goes on after what the others hold."""
    for stream in streams:
        device.current().wait_stream(stream)


def per_run_s(device: Device, work: Work, *, seconds: float) -> float:
    """Device seconds of one run, back to back for about `seconds`, after some that warm up."""
    for _ in range(2):
        device.synchronize()
        began_s = time.perf_counter()
        work()
        device.synchronize()
        once_s = max(time.perf_counter() - began_s, 1e-7)
    runs = max(5, min(round(seconds / once_s), 100_000))
    return device.timed_s(lambda: repeat(work, runs)) / runs


def repeat(work: Work, times: int) -> None:
    for _ in range(times):
        work()

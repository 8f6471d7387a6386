"""Every call that needs CUDA. Reviewed against the documentation of torch 2.11 to 2.13, and against
torch 2.5, which JetPack 6 ships.

- Streams come from torch's pool, which hands out 32 of each priority round robin and then begins again (P3):
  they are taken once and never by anybody else here. Since a captured kernel keeps the priority of the stream
  that it was captured on, what serves is captured and launched at a high priority, what is measured beside it
  at the lowest, each on streams of its own, so that no capture ever meets a launch that serves.
- Capture begins and ends by hand: `torch.cuda.graph` would wait for the whole device and give cached memory
  back, which stalls what serves (P14). The mode is `thread_local` (P9).
- cuBLAS keeps a workspace per handle and stream. What is captured holds its address, and resetting another
  graph of the same stream frees it (P5, pytorch issue 193402). So the workspaces are forgotten before a
  capture, which then takes one from its own pool, and after it, so that nothing else ever finds that one.
- The generator of random numbers keeps two tensors as long as any graph lives, made by the first capture in
  that thread's inference mode; up to torch 2.12 no capture outside that mode could fill them. So a graph that
  lives as long as the process is captured first, outside of it.
"""

import ctypes.util
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from stageloom.edge_agent.executor.cuda.device import (
    CAPTURING,
    MOVING,
    PREPARING,
    BlockNeeds,
    Event,
    Graph,
    Launch,
    Multiprocessor,
    Pool,
    Stream,
)
from stageloom.edge_agent.executor.cuda.streams import CONNECTIONS, MAX_GROUP_STREAMS, MAX_STREAMS
from stageloom.edge_agent.executor.cuda.unified_memory import free_device_bytes
from stageloom.edge_agent.lowering.convolve import searching
from stageloom.edge_agent.lowering.dtypes import use_tf32, without_tf32
from stageloom.shared.errors import BackendUnavailable

_SLEEP_PROBE_CYCLES = 10_000_000
_LOWEST, _SERVING, _CAPTURED, _BESIDE = 0, -1, -2, -3  # priorities; torch has a pool of streams for each
_PREPARING = threading.Lock()


def before_cuda_starts(connections: int = MAX_STREAMS) -> None:
    """Hardware queues, unless the environment says otherwise; read once, when CUDA starts (P4)."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if started and CONNECTIONS not in os.environ:
        raise BackendUnavailable(
            f"CUDA has started without {CONNECTIONS}", remedy=f"set {CONNECTIONS}={connections} before"
        )
    os.environ.setdefault(CONNECTIONS, str(connections))


def why_not() -> str:
    """Why this process has no CUDA device, empty where it has one."""
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        driver = ctypes.util.find_library("cuda")
        return "torch finds no usable GPU" if driver else "no NVIDIA driver (libcuda) is installed"
    return ""


class CudaGraphDevice:
    """The current CUDA device as a `GraphDevice`."""

    # torch has them since 2.8
    events_in_graphs = "external" in signature(torch.cuda.Event.__new__).parameters

    def __init__(self) -> None:
        """Raises:
        BackendUnavailable: there is no CUDA device.
        """
        before_cuda_starts()
        if reason := why_not():
            raise BackendUnavailable(
                f"executor 'torch_cuda' cannot run here: {reason}",
                remedy="install a driver and the torch wheel for it, or use the executor torch_cpu",
            )
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._streams = _streams().by_number
        self.most_streams = _streams().most
        first_graph()
        self._cycles_per_s = 0.0

    # Streams and events

    def stream(self, number: int) -> Stream:
        return self._streams[number]

    def launch(self, stream: Stream, work: Launch) -> None:
        """The context manager restores the current stream also after an error (P11)."""
        with torch.cuda.stream(stream):
            work()

    def record(self, stream: Stream, *, timed: bool = False, external: bool = False) -> Event:
        """A thread that waits for the event sleeps, since an edge device has few cores to spin on."""
        how = {"external": True} if external else {}
        event = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=timed, blocking=True, **how
        )
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def settle(self) -> None:
        torch.cuda.current_stream().synchronize()

    def elapsed_s(self, first: Event, second: Event) -> float:
        """torch measures in milliseconds."""
        return float(first.elapsed_time(second)) / 1e3

    # Graphs

    def new_pool(self) -> Pool:
        return torch.cuda.graph_pool_handle()

    def capture(self, pool: Pool, streams: Sequence[Stream], body: Callable[[], None]) -> Graph:
        """An error in `body` ends the capture and is raised."""
        graph = torch.cuda.CUDAGraph()
        _capture(graph, pool, streams[0], body)
        return graph

    def block_needs(self, pool: Pool, stream: Stream, work: Launch) -> Sequence[BlockNeeds]:
        """The work is captured and thrown away; torch hands out captured graphs since 2.8."""
        cuda = driver()
        if cuda is None or not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
            return ()
        graph: Any = torch.cuda.CUDAGraph(keep_graph=True)
        _capture(graph, pool, stream, lambda: self.launch(stream, work))
        return block_needs(cuda, graph.raw_cuda_graph())

    def multiprocessor(self) -> Multiprocessor:
        """Attributes that torch does not know keep a Hopper's values."""
        return multiprocessor(self.torch_device)

    def replay(self, stream: Stream, graph: Graph) -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    # Memory, time, settings

    def host_bytes(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def sleep(self, stream: Stream, seconds: float) -> None:
        """A kernel counts clock cycles."""
        if not self._cycles_per_s:
            self._cycles_per_s = self._measure_clock()
        cycles = max(1, int(seconds * self._cycles_per_s))
        self.launch(stream, partial(_spin, cycles))

    def _measure_clock(self) -> float:
        stream = self._streams[PREPARING]
        for _ in range(2):  # the first loads the kernel
            began = self.record(stream, timed=True)
            self.launch(stream, partial(_spin, _SLEEP_PROBE_CYCLES))
            ended = self.record(stream, timed=True)
            self.synchronize(ended)
        return _SLEEP_PROBE_CYCLES / self.elapsed_s(began, ended)

    def preparing(self) -> AbstractContextManager[object]:
        return _PREPARING

    @contextmanager
    def searching(self) -> Iterator[None]:
        """cudnn tries its kernels once per shape and thread, so that thread must also capture (P6).

        After each search torch would give all cached memory back, for which the whole device waits (P14).
        """
        before = torch._C._cuda_get_conv_benchmark_empty_cache()
        torch._C._cudnn_set_conv_benchmark_empty_cache(False)
        try:
            with searching():
                yield
        finally:
            torch._C._cudnn_set_conv_benchmark_empty_cache(before)

    def use_tf32(self, on: bool) -> None:
        use_tf32(on)

    def without_tf32(self) -> AbstractContextManager[None]:
        return without_tf32()

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved()

    def give_back(self) -> None:
        """To free memory while another thread captures may break that capture."""
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info()
        return free_device_bytes(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


@dataclass(frozen=True)
class _Streams:
    by_number: Mapping[int, torch.cuda.Stream]
    most: int  # that a program may use

    @property
    def distinct(self) -> bool:
        return len({stream.cuda_stream for stream in self.by_number.values()}) == len(self.by_number)


@cache
def _streams() -> _Streams:
    """Made once per process, whoever asks.

    Each kind takes a pool of its own: 32 streams of one priority. A device that has fewer priorities gives
    the same streams again; there all that does not serve shares the pool of the lowest, with fewer streams.
    """
    wide = _made_of(MAX_STREAMS, beside=_BESIDE, captured=_CAPTURED)
    return wide if wide.distinct else _made_of(MAX_GROUP_STREAMS, beside=_LOWEST, captured=_LOWEST)


def _made_of(most: int, *, beside: int, captured: int) -> _Streams:
    kinds = [
        (0, MAX_STREAMS, _SERVING),
        (MOVING, PREPARING - MOVING, beside),
        (PREPARING, most, _LOWEST),
        (CAPTURING, most, captured),
    ]
    return _Streams(
        {first + at: _new_stream(priority) for first, count, priority in kinds for at in range(count)}, most
    )


def _new_stream(priority: int) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]
    return stream


@cache
def first_graph() -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """It is never replayed; see the module's text."""
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(False):
        counted = torch.zeros(1, device="cuda")
        _count(counted)  # loads the kernel, which a capture may not
        torch.cuda.current_stream().synchronize()
        _capture(
            graph, torch.cuda.graph_pool_handle(), _streams().by_number[PREPARING], partial(_count, counted)
        )
    return graph, counted


def _count(counted: Tensor) -> None:
    counted.add_(1.0)


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _forget_workspaces() -> None:
    torch._C._cuda_clearCublasWorkspaces()


def _capture(graph: torch.cuda.CUDAGraph, pool: Pool, stream: Stream, body: Callable[[], None]) -> None:
    """Capture what `body` issues; it begins and joins on the stream."""
    _forget_workspaces()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                body()
            except BaseException:
                _abandon(graph, pool)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                _leave(pool)
                raise
    finally:
        _forget_workspaces()


def multiprocessor(device: torch.device) -> Multiprocessor:
    """What the blocks on one multiprocessor of a CUDA device share."""
    usual, properties = Multiprocessor(), torch.cuda.get_device_properties(device)
    return Multiprocessor(
        registers=getattr(properties, "regs_per_multiprocessor", usual.registers),
        shared_bytes=getattr(properties, "shared_memory_per_multiprocessor", usual.shared_bytes),
        threads=getattr(properties, "max_threads_per_multi_processor", usual.threads),
    )


def _abandon(graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
    """End a capture that failed; what ending it raises says less than what made it fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        try:
            graph.capture_end()
        except RuntimeError:
            _leave(pool)


def _leave(pool: Pool) -> None:
    """What `capture_end` leaves undone where CUDA has given the capture up: allocations still go to its pool.

    The pool must not be captured into again.
    """
    device = torch.cuda.current_device()
    calls: Any = torch._C
    newer = hasattr(calls, "_cuda_endAllocateToPool")  # than torch 2.7
    end = calls._cuda_endAllocateToPool if newer else calls._cuda_endAllocateCurrentStreamToPool
    for undo in (end, calls._cuda_releasePool):
        with suppress(RuntimeError):  # it was done
            undo(device, pool)


def driver() -> ModuleType | None:
    """CUDA's driver API; None where cuda-bindings is not installed."""
    try:
        return import_module("cuda.bindings.driver")
    except ImportError:
        return None


def block_needs(cuda: Any, graph: int) -> tuple[BlockNeeds, ...]:
    """What every kernel node of a captured graph, given by its handle, needs of a multiprocessor.

    Opara (Chen et al. 2023, section 3.2) reads these off a profiler. A profiler in a process that serves
    slows down every launch while it listens; a captured launch says the same of itself, and runs nothing.

    Raises:
        RuntimeError: a call of the driver failed.
    """
    handle = cuda.CUgraph(graph)
    _, count = _checked(cuda, cuda.cuGraphGetNodes(handle, 0))
    nodes, _ = _checked(cuda, cuda.cuGraphGetNodes(handle, count))
    kernel = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    return tuple(
        _needs(cuda, node) for node in nodes if _checked(cuda, cuda.cuGraphNodeGetType(node))[0] == kernel
    )


def _needs(cuda: Any, node: Any) -> BlockNeeds:
    (launch,) = _checked(cuda, cuda.cuGraphKernelNodeGetParams(node))
    function = launch.func
    if not int(function):  # a kernel of a library that no context has loaded yet
        (function,) = _checked(cuda, cuda.cuKernelGetFunction(launch.kern))
    attribute = cuda.CUfunction_attribute
    registers, static = (
        _checked(cuda, cuda.cuFuncGetAttribute(which, function))[0]
        for which in (attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
    )
    threads = launch.blockDimX * launch.blockDimY * launch.blockDimZ
    return BlockNeeds(int(registers), int(static) + int(launch.sharedMemBytes), int(threads))


def _checked(cuda: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *results = answer
    if error != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"reading a captured graph failed: {error}")
    return tuple(results)

"""Every call that needs CUDA, through cuda-bindings. Reviewed against cuda-bindings 13.5.

The runtime of cuda-bindings and the one that onnxruntime brings along share the device's primary context, so
that a stream or an address of one is good for the other. Streams are non-blocking: the default stream, which
libraries fall back to, orders nothing here.
"""

import ctypes
import importlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime

from stageloom.edge_agent.executor.cuda.device import PROFILING, Event, Launch, Stream
from stageloom.edge_agent.executor.cuda.streams import CONNECTIONS, MAX_STREAMS
from stageloom.edge_agent.executor.cuda.unified_memory import free_device_bytes
from stageloom.edge_agent.executor.onnx.half import FP16
from stageloom.edge_agent.machine.jetson import how_to_install
from stageloom.edge_agent.machine.utilisation import is_tegra
from stageloom.shared.errors import BackendUnavailable

PROVIDER = "CUDAExecutionProvider"
ENGINES = "TensorrtExecutionProvider"
ENGINE_WORKSPACE_BYTES = 256 << 20
"""What an engine's kernels may take for scratch, the most that they are chosen with."""

_BINDINGS = "cuda.bindings.runtime"
_NVINFER = "libnvinfer.so.10"
_SMALL_HANDLES_BYTES, _LARGE_HANDLES_BYTES = 8 << 20, 36 << 20
_LARGE_SINCE = 9  # major compute capability
"""A session has handles of cuBLAS, cuBLASLt and cuDNN of its own. cuBLAS takes a workspace of 4 MiB with its
handle, of 32 MiB from Hopper on (its documentation, cublasSetWorkspace); 4 MiB for the others are a guess."""


def why_not() -> tuple[str, str]:
    """Why this process cannot run sessions on CUDA, and what to do about it; empty where it can."""
    if PROVIDER not in onnxruntime.get_available_providers():
        return (
            f"onnxruntime {onnxruntime.__version__} was built without {PROVIDER}",
            f"uninstall it, then {how_to_install('onnx-gpu')}",
        )
    try:
        runtime = importlib.import_module(_BINDINGS)
    except ImportError as error:
        return f"cuda-bindings cannot be loaded: {error}", "install those of the driver's CUDA (onnx-gpu)"
    failed, count = runtime.cudaGetDeviceCount()
    if failed != runtime.cudaError_t.cudaSuccess or not count:
        return (
            f"CUDA finds no usable GPU ({_name(runtime, failed)})",
            "install a driver, or use another executor",
        )
    return "", ""


def engine_builder(architecture: str) -> str:
    """Who would build engines here: versions of onnxruntime and TensorRT, the GPU's architecture.

    Empty where onnxruntime has no provider for TensorRT, or TensorRT is not installed: the wheels of
    onnxruntime-gpu bring the provider without the library.
    """
    if ENGINES not in onnxruntime.get_available_providers():
        return ""
    try:
        library = ctypes.CDLL(_NVINFER)
    except OSError:
        return ""
    return f"onnxruntime {onnxruntime.__version__}, TensorRT {library.getInferLibVersion()}, {architecture}"


class CudaSessionDevice:
    """CUDA device 0 as `device.SessionDevice`; CUDA_VISIBLE_DEVICES says which one that is."""

    kind = "cuda"
    number = 0
    handle_bytes = _SMALL_HANDLES_BYTES
    engine_builder = ""

    def __init__(self) -> None:
        """Raises:
        BackendUnavailable: there is no CUDA device, or something that it takes is missing.
        """
        os.environ.setdefault(CONNECTIONS, str(MAX_STREAMS))
        cause, remedy = why_not()
        if cause:
            raise BackendUnavailable(f"executor 'onnx_cuda' cannot run here: {cause}", remedy=remedy)
        if hasattr(onnxruntime, "preload_dlls"):  # CUDA and cuDNN from wheels, where they came as such
            onnxruntime.preload_dlls()
        self._cuda: Any = importlib.import_module(_BINDINGS)
        self._call(self._cuda.cudaSetDevice, self.number)
        self._pinned: set[int] = set()  # addresses of host memory
        flags = self._cuda.cudaStreamNonBlocking
        self._streams = [
            self._call(self._cuda.cudaStreamCreateWithFlags, flags) for _ in range(PROFILING + 1)
        ]
        self._pause = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
        major, minor = self._capability()
        if major >= _LARGE_SINCE:
            self.handle_bytes = _LARGE_HANDLES_BYTES
        self.engine_builder = engine_builder(f"sm_{major}{minor}")

    def _capability(self) -> tuple[int, int]:
        """The device's compute capability."""
        kinds = self._cuda.cudaDeviceAttr
        which = kinds.cudaDevAttrComputeCapabilityMajor, kinds.cudaDevAttrComputeCapabilityMinor
        major, minor = (int(self._call(self._cuda.cudaDeviceGetAttribute, one, self.number)) for one in which)
        return major, minor

    def _call(self, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
        """The results of a CUDA call.

        Raises:
            BackendUnavailable: it failed, for which no model is to blame.
        """
        error, *results = function(*arguments)
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise BackendUnavailable(f"{function.__name__} failed: {_name(self._cuda, error)}")
        return results[0] if len(results) == 1 else tuple(results)

    # Streams and events

    def stream(self, number: int) -> Stream:
        return self._streams[number]

    def provider(self, stream: Stream, *, tf32: bool) -> tuple[str, Mapping[str, str]]:
        """These settings replace a default: onnxruntime allows TF32, and its arenas grow by powers of two.

        It also lets cudnn search among kernels with any workspace, which on a Jetson is everybody's memory.
        """
        options = {
            "device_id": str(self.number),
            "user_compute_stream": str(int(stream)),
            "use_tf32": str(int(tf32)),
            "arena_extend_strategy": "kSameAsRequested",
        }
        if is_tegra():
            options["cudnn_conv_use_max_workspace"] = "0"
        return PROVIDER, options

    def engine_provider(
        self, stream: Stream, *, precision: str, engine: Path, timings: Path
    ) -> tuple[str, Mapping[str, str]]:
        """TensorRT on the session's stream; half precision is allowed where the model is in it."""
        return ENGINES, {
            "device_id": str(self.number),
            "user_compute_stream": str(int(stream)),
            "trt_fp16_enable": str(int(precision == FP16)),
            "trt_max_workspace_size": str(ENGINE_WORKSPACE_BYTES),
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(engine),
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(timings),
        }

    def launch(self, stream: Stream, work: Callable[[], object]) -> None:
        """A session launches on its own stream."""
        work()

    def copying(self, stream: Stream, target: int, source: int, nbytes: int) -> Launch:
        """cudaMemcpyDefault takes the direction from the addresses."""
        if not nbytes:
            return lambda: None
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault
        return partial(self._call, self._cuda.cudaMemcpyAsync, target, source, nbytes, kind, stream)

    def record(self, stream: Stream, *, timed: bool = False, external: bool = False) -> Event:
        """A thread that waits for the event sleeps, since an edge device has few cores to spin on.

        `external` makes no difference: nothing is captured here.
        """
        event = _Event(self._cuda, self._call, timed=timed)
        self._call(self._cuda.cudaEventRecord, event.handle, stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._call(self._cuda.cudaStreamWaitEvent, stream, event.handle, 0)

    def synchronize(self, event: Event) -> None:
        self._call(self._cuda.cudaEventSynchronize, event.handle)

    def elapsed_s(self, first: Event, second: Event) -> float:
        """CUDA measures in milliseconds."""
        return float(self._call(self._cuda.cudaEventElapsedTime, first.handle, second.handle)) / 1e3

    def sleep(self, stream: Stream, seconds: float) -> None:
        """A host function sleeps, and the stream waits for it."""
        self._call(self._cuda.cudaLaunchHostFunc, stream, self._pause, int(seconds * 1e6))

    # Memory

    def allocate(self, nbytes: int) -> int:
        """cudaMalloc aligns to 256 bytes."""
        address = self._call(self._cuda.cudaMalloc, nbytes)
        self._call(self._cuda.cudaMemset, address, 0, nbytes)
        self._call(self._cuda.cudaStreamSynchronize, 0)
        return int(address)

    def free(self, address: int) -> None:
        self._call(self._cuda.cudaFree, address)

    def host_bytes(self, nbytes: int) -> np.ndarray:
        """Pinned memory."""
        address = int(self._call(self._cuda.cudaHostAlloc, max(1, nbytes), self._cuda.cudaHostAllocDefault))
        self._pinned.add(address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def free_host(self, piece: np.ndarray) -> None:
        self._pinned.discard(piece.ctypes.data)
        self._call(self._cuda.cudaFreeHost, piece.ctypes.data)

    def close(self) -> None:
        """Errors say nothing new: at the end of the process CUDA may be gone already."""
        for stream in self._streams:
            self._cuda.cudaStreamSynchronize(stream)  # of what a failed step has left behind
        while self._pinned:
            self._cuda.cudaFreeHost(self._pinned.pop())
        while self._streams:
            self._cuda.cudaStreamDestroy(self._streams.pop())

    def free_bytes(self) -> int:
        free, _ = self._call(self._cuda.cudaMemGetInfo)
        return free_device_bytes(int(free))


class _Event:
    """A CUDA event that is destroyed with the last reference to it."""

    def __init__(self, runtime: Any, call: Callable[..., Any], *, timed: bool) -> None:
        flags = runtime.cudaEventBlockingSync | (0 if timed else runtime.cudaEventDisableTiming)
        self._destroy = runtime.cudaEventDestroy
        self.handle = call(runtime.cudaEventCreateWithFlags, flags)

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle is not None:
            self._destroy(handle)


def _name(runtime: ModuleType, error: Any) -> str:
    """CUDA's name of an error."""
    _, name = runtime.cudaGetErrorName(error)
    return bytes(name).decode() if isinstance(name, bytes) else str(name)

"""The calls to CUDA without CUDA: they exist, take what they are given, and say why they fail."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from stageloom.edge_agent.executor.onnx_cuda import cuda
from stageloom.edge_agent.executor.onnx_cuda.cuda import PROVIDER, CudaSessionDevice, why_not
from stageloom.shared.errors import ExecutorError

EVENT = SimpleNamespace(handle=0)
CALLS: dict[str, Callable[[CudaSessionDevice], object]] = {
    "cudaEventCreateWithFlags": lambda device: device.record(0),
    "cudaStreamWaitEvent": lambda device: device.wait(0, EVENT),
    "cudaEventSynchronize": lambda device: device.synchronize(EVENT),
    "cudaEventElapsedTime": lambda device: device.elapsed_s(EVENT, EVENT),
    "cudaMemcpyAsync": lambda device: device.copying(0, 256, 512, 64)(),
    "cudaLaunchHostFunc": lambda device: device.sleep(0, 1e-3),
    "cudaMalloc": lambda device: device.allocate(100),
    "cudaFree": lambda device: device.free(256),
    "cudaHostAlloc": lambda device: device.host_bytes(10),
    "cudaMemGetInfo": lambda device: device.free_bytes(),
    "cudaDeviceGetAttribute": lambda device: device._capability(),
}


@pytest.fixture
def runtime() -> Any:
    """cuda-bindings, on a machine without a driver."""
    found = pytest.importorskip("cuda.bindings.runtime")
    if found.cudaGetDeviceCount()[0] == found.cudaError_t.cudaSuccess:
        pytest.skip("this machine has a driver; tests/gpu tries the calls there")
    return found


def _unmade(runtime: Any) -> CudaSessionDevice:
    """A device whose streams were not made."""
    device = object.__new__(CudaSessionDevice)
    device._cuda = runtime
    device._pause = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    return device


@pytest.mark.promise("nothing-takes-place-onnxruntime")
@pytest.mark.parametrize("call", CALLS)
def test_every_call_takes_its_arguments_and_says_why_it_fails(call: str, runtime: Any) -> None:
    with pytest.raises(ExecutorError, match=f"{call} failed: cudaErrorInsufficientDriver"):
        CALLS[call](_unmade(runtime))


def test_an_event_that_was_never_made_is_never_destroyed(
    runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroyed: list[object] = []
    monkeypatch.setattr(runtime, "cudaEventDestroy", destroyed.append)
    with pytest.raises(ExecutorError):
        _unmade(runtime).record(0, timed=True)
    assert destroyed == []


def test_sessions_get_the_stream_and_no_tf32_unless_it_is_asked_for(runtime: Any) -> None:
    stream = runtime.cudaStream_t(4711)
    name, options = _unmade(runtime).provider(stream, tf32=False)
    assert (name, options["user_compute_stream"], options["use_tf32"]) == (PROVIDER, "4711", "0")
    assert _unmade(runtime).provider(stream, tf32=True)[1]["use_tf32"] == "1"
    assert all(isinstance(value, str) for value in options.values())


def test_why_not_names_the_first_thing_that_is_missing(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "was built without CUDAExecutionProvider" in why_not()[0]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [PROVIDER])
    cause, remedy = why_not()
    assert cause == "CUDA finds no usable GPU (cudaErrorInsufficientDriver)" and "driver" in remedy
    monkeypatch.setattr(cuda, "_BINDINGS", "no_such_module")
    cause, remedy = why_not()
    assert "cuda-bindings cannot be loaded" in cause and "onnx-gpu" in remedy
    with pytest.raises(ExecutorError, match="executor 'onnx_cuda' cannot run here: cuda-bindings"):
        CudaSessionDevice()

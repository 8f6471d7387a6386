"""The calls to CUDA without CUDA: they exist, take what they are given, and say why they fail."""

import ctypes
import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from stageloom.edge_agent.executor.base import TimingRequest
from stageloom.edge_agent.executor.onnx_cuda import cuda
from stageloom.edge_agent.executor.onnx_cuda.cuda import PROVIDER, CudaSessionDevice, why_not
from stageloom.shared.engine.steps import InstanceId
from stageloom.shared.errors import ExecutorError
from tests.executor.contract.schedules import StepMaker
from tests.executor.models import artifact_of, random_inputs
from tests.executor.onnx_cuda.simulated import device_of, simulated
from tests.executor.onnx_cuda.test_executor import streamed_plan
from tests.executor.torch.steps import KEY, load

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
    "cudaFreeHost": lambda device: device.free_host(np.zeros(10, np.uint8)),
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
    device._pinned = set()
    device._streams = []
    device._pause = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    return device


class Counting:
    """As much of a CUDA runtime as a device takes to be made and closed; counts what is not given back."""

    cudaError_t = SimpleNamespace(cudaSuccess=0)
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrComputeCapabilityMajor=0, cudaDevAttrComputeCapabilityMinor=1)
    cudaStreamNonBlocking = cudaHostAllocDefault = 0

    def __init__(self) -> None:
        self.streams: set[int] = set()
        self.pinned: dict[int, Any] = {}
        self.asleep: list[int] = []  # streams that were waited for
        self._numbers = itertools.count(1)

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        return 0, 1

    def cudaSetDevice(self, device: int) -> tuple[int]:
        return (0,)

    def cudaDeviceGetAttribute(self, which: int, device: int) -> tuple[int, int]:
        return 0, 9

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        self.streams.add(number := next(self._numbers))
        return 0, number

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        assert stream in self.streams
        self.asleep.append(stream)
        return (0,)

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        self.streams.remove(stream)
        return (0,)

    def cudaHostAlloc(self, nbytes: int, flags: int) -> tuple[int, int]:
        buffer = (ctypes.c_uint8 * nbytes)()
        self.pinned[ctypes.addressof(buffer)] = buffer
        return 0, ctypes.addressof(buffer)

    def cudaFreeHost(self, address: int) -> tuple[int]:
        del self.pinned[address]
        return (0,)


def test_a_closed_device_has_given_back_its_streams_and_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is made for every profile and every way that is measured."""
    counting = Counting()
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [PROVIDER])
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None, raising=False)
    monkeypatch.setitem(sys.modules, "counting_runtime", counting)
    monkeypatch.setattr(cuda, "_BINDINGS", "counting_runtime")
    serving, measuring = CudaSessionDevice(), CudaSessionDevice()
    one_device = len(counting.streams) // 2
    pieces = [device.host_bytes(10) for device in (serving, measuring, measuring)]
    measuring.free_host(pieces.pop())
    assert len(counting.pinned) == 2
    measuring.close()
    assert len(counting.streams) == len(set(counting.asleep)) == one_device
    assert list(counting.pinned) == [pieces[0].ctypes.data], "what the other device has stays"
    measuring.close()
    serving.close()
    assert not counting.streams and not counting.pinned


def test_an_executor_closes_its_device_once_nothing_runs_there() -> None:
    model = artifact_of("squeezenet_bypass")
    executor = simulated()
    device = device_of(executor)
    steps = StepMaker(KEY, load(executor, streamed_plan(model), [model]))
    executor.issue(steps.step(0, {0: (InstanceId(1), 1)}), {InstanceId(1): [random_inputs(model.graph, 1)]})
    assert device.pinned > 0
    executor.close()
    assert (device.closed, device.pinned) == (True, 0)


def test_what_is_copied_to_time_operators_leaves_no_host_memory() -> None:
    model = artifact_of("squeezenet_bypass")
    executor = simulated()
    executor.time_operators(model, TimingRequest(repeats=1), lambda: True)
    assert device_of(executor).pinned == 0
    executor.close()


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

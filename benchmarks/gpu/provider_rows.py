"""Baseline 10: the whole model in onnxruntime on CUDA and on TensorRT, where they are installed.

Inputs and outputs are bound to memory on the device and stay there. A session has a stream of its own, which
begins after the benchmark's and which the benchmark's waits for; the host waits for neither, but in a run of
a captured graph, which onnxruntime ends by waiting. Input and logits are float32, as for our own plans, and
are converted inside. A provider that onnxruntime would quietly replace by another one is a row that says so.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import onnx
import torch
from torch import Tensor

from benchmarks.gpu.device import Device, Work, fork, join
from benchmarks.gpu.networks import Subject
from benchmarks.gpu.rounds import Variant

_CUDA: Final = "CUDAExecutionProvider"
_TENSORRT: Final = "TensorrtExecutionProvider"
_LIBNVINFER: Final = "libnvinfer.so.10"
_WARM: Final = 3  # the first search for kernels, a graph is captured in one, and the last is measured


@dataclass(frozen=True)
class Provider:
    """One row of the table."""

    row: str
    name: str  # onnxruntime's
    options: Mapping[str, str] = field(default_factory=dict)
    converts: bool = False  # to half precision by itself; for others the model is converted beforehand
    build_s: float = 10.0  # what making one session may take; it cannot be interrupted


PROVIDERS: Final = (
    Provider("onnxruntime CUDA", _CUDA),
    Provider("onnxruntime CUDA channels-last", _CUDA, {"prefer_nhwc": "1"}),
    Provider("onnxruntime CUDA graph", _CUDA, {"enable_cuda_graph": "1"}),
    Provider("onnxruntime TensorRT", _TENSORRT, converts=True, build_s=90.0),
    Provider(
        "onnxruntime TensorRT graph", _TENSORRT, {"trt_cuda_graph_enable": "1"}, converts=True, build_s=90.0
    ),
)


def why_not(provider: Provider, device: Device) -> str:
    """Why a row cannot run, empty if it may."""
    if find_spec("onnxruntime") is None:
        return "onnxruntime is not installed"
    import onnxruntime

    if provider.name not in onnxruntime.get_available_providers():
        return f"onnxruntime {onnxruntime.__version__} was built without {provider.name}"
    if device.kind != "cuda":
        return "needs CUDA"
    if (
        provider.name == _TENSORRT and not _has_tensorrt()
    ):  # the wheel brings the provider without the library
        return "TensorRT is not installed"
    return ""


def _has_tensorrt() -> bool:
    try:
        ctypes.CDLL(_LIBNVINFER)
    except OSError:
        return False
    return True


def options_of(provider: Provider, device: Device, stream: Any, precision: str) -> dict[str, str]:
    """onnxruntime's options for a session on the stream."""
    if device.kind != "cuda":
        return dict(provider.options)
    found = {
        "device_id": str(device.torch.index or 0),
        "user_compute_stream": str(stream.cuda_stream),
        **provider.options,
    }
    if provider.name == _CUDA:
        found["use_tf32"] = str(int(precision == "tf32"))
    if provider.converts and precision == "fp16":
        found["trt_fp16_enable"] = "1"
    return found


def model_bytes(provider: Provider, subject: Subject, precision: str) -> bytes:
    """The subject's model, in half precision between a float32 input and float32 logits where asked for."""
    if precision != "fp16" or provider.converts:
        return subject.artifact.onnx_bytes()
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load_model_from_string(subject.artifact.onnx_bytes())
    return bytes(convert_float_to_float16(model, keep_io_types=True).SerializeToString())


def variant(
    device: Device, subject: Subject, provider: Provider, precision: str, stream: Any
) -> tuple[Variant, float]:
    """The variant and its error against the reference.

    Raises:
        RuntimeError: onnxruntime would run it somewhere else.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if device.kind == "cuda":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    chosen = [(provider.name, options_of(provider, device, stream, precision))]
    model = model_bytes(provider, subject, precision)
    session = onnxruntime.InferenceSession(model, options, providers=chosen, enable_fallback=0)
    if session.get_providers()[0] != provider.name:
        raise RuntimeError(f"onnxruntime took {session.get_providers()[0]} instead of {provider.name}")
    image = torch.tensor(subject.image, device=device.torch)
    logits = torch.zeros(subject.expected.shape, dtype=torch.float32, device=device.torch)
    binding = session.io_binding()
    _bind(binding.bind_input, session.get_inputs()[0].name, device, image)
    _bind(binding.bind_output, session.get_outputs()[0].name, device, logits)
    asynchronous = onnxruntime.RunOptions()
    asynchronous.add_run_config_entry("disable_synchronize_execution_providers", "1")
    streams: Sequence[Any] = [stream]

    def run() -> None:
        fork(device, streams)
        session.run_with_iobinding(binding, asynchronous)
        join(device, streams)

    for _ in range(_WARM):
        run()
    device.synchronize()
    error = subject.error_of(logits)
    return Variant(subject.name, provider.row, _Run(run, (image, logits)), 1, precision), error


@dataclass(frozen=True)
class _Run:
    """A run with the tensors that it is bound to."""

    run: Work
    tensors: tuple[Tensor, ...]

    def __call__(self) -> None:
        self.run()


def _bind(bind: Any, name: str, device: Device, tensor: Tensor) -> None:
    bind(name, device.kind, device.torch.index or 0, np.float32, tuple(tensor.shape), tensor.data_ptr())

"""What ours is compared with: plain torch, torch.compile and onnxruntime.

Plain torch: eager, one captured stream, batches, several streams, one joint graph.

torch.compile takes minutes. Child processes do it one after another, since two that autotune at once disturb
each other's timing, while nothing is measured, into Inductor's cache on disk; this process then compiles from
that cache. What was not ready in time is a row that says so; with `--cache DIR` and a run before it is found.

onnxruntime runs the whole model on CUDA and on TensorRT, where they are installed. Inputs and outputs are
bound to memory on the device and stay there. A session has a stream of its own, which begins after the
benchmark's and which the benchmark's waits for; the host waits for neither, but in a run of a captured
graph, which onnxruntime ends by waiting. Input and logits are float32, as for our own plans, and are
converted inside. A provider that onnxruntime would quietly replace by another one is a row that says so.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import numpy as np
import onnx
import torch
from torch import Tensor

from benchmarks.gpu.device import STREAMS, Device, Held, Work, fork, join, make_device
from benchmarks.gpu.networks import Network, Subject
from benchmarks.gpu.results import Settings
from benchmarks.gpu.rounds import Variant
from stageloom.edge_agent.lowering.dtypes import use_tf32

MIX: Final = "mix"
EAGER: Final = "torch eager"
GRAPH: Final = "torch graph"
AGAIN: Final = "torch graph, again"
JOINT: Final = "torch joint graph"
_RUNS_PER_INSTANCE: Final = 4
_STREAMS_APART: Final = 8  # the first streams of two subjects


class Instance:
    """One copy of a network that can run beside others: shared weights, own input, own output."""

    def __init__(self, device: Device, subject: Subject, network: Network, images: Tensor) -> None:
        self.device, self.subject, self.network, self.images = device, subject, network, images
        self.stream: Any = None  # on which it was captured
        self.replay: Work = self.run
        self._logits: Tensor | None = None

    def run(self) -> None:
        """Eagerly, on the current stream."""
        with torch.inference_mode():
            self._logits = self.network(self.images)

    def captured(self, stream: int) -> "Instance":
        """With a graph of its own memory pool, captured on the given one of the device's streams."""
        self.stream = self.device.streams[stream]
        self.replay = self.device.capture(self.run, stream=self.stream)
        return self

    @property
    def error(self) -> float:
        """Of the newest logits; infinite before there are any."""
        return float("inf") if self._logits is None else self.subject.error_of(self._logits)


class TorchRows:
    """Makes the variants of some subjects in one precision; networks are shared, memory pools are not.

    The n-th instance of a subject is captured once and takes part in every variant that needs n or more.
    """

    def __init__(self, device: Device, subjects: Sequence[Subject], precision: str) -> None:
        self.device = device
        self.subjects = subjects
        self.precision = precision
        self._networks = {subject.name: subject.network(device.torch, precision) for subject in subjects}
        self._captured: dict[str, list[Instance]] = {subject.name: [] for subject in subjects}

    def all(self, settings: Settings) -> Iterator[tuple[str, str, Callable[[], Variant]]]:
        """Baselines 1, 2, 7 and 8: subject, name and what makes the row. A mix's unit is an image of each."""
        groups = {subject.name: ([subject], settings.instances) for subject in self.subjects}
        groups[MIX] = ([*self.subjects], settings.mix_instances)
        for group, (subjects, counts) in groups.items():
            for name in (GRAPH, AGAIN):
                yield group, name, partial(self._in_turn, group, name, subjects)
            for count in counts:
                name = f"torch graphs on {count * len(subjects)} streams"
                yield group, name, partial(self._beside, group, name, subjects, count)
        for subject in self.subjects:
            yield subject.name, EAGER, partial(self._eager, subject)
            for size in settings.batches:
                yield subject.name, batch_name(size), partial(self._batch, subject, size)
        yield MIX, JOINT, self._joint

    def _instance(self, subject: Subject, batch: int = 1) -> Instance:
        images = subject.images(self.device.torch, self.precision, batch)
        return Instance(self.device, subject, self._networks[subject.name], images)

    def _instances(self, subjects: Sequence[Subject], count: int) -> list[Instance]:
        """Captured ones. Up to 24 of one subject, or up to 8 of each of three, have streams of their own."""
        instances = []
        for subject in subjects:
            known = self._captured[subject.name]
            shift = _STREAMS_APART * self.subjects.index(subject)
            while len(known) < count:
                known.append(self._instance(subject).captured((shift + len(known)) % STREAMS))
            instances += known[:count]
        return instances

    def _variant(
        self, subject: str, name: str, run: Work, instances: Sequence[Instance], units: int = 1
    ) -> Variant:
        run()
        self.device.synchronize()
        error = max(instance.error for instance in instances)
        return Variant(subject, name, run, units, self.precision, error)

    def _eager(self, subject: Subject) -> Variant:
        instance = self._instance(subject)
        return self._variant(subject.name, EAGER, instance.run, [instance])

    def _batch(self, subject: Subject, size: int) -> Variant:
        """`size` images at once, as a graph; time per image."""
        instance = self._instance(subject, size).captured(0)
        return self._variant(subject.name, batch_name(size), instance.replay, [instance], size)

    def _in_turn(self, subject: str, name: str, subjects: Sequence[Subject]) -> Variant:
        """Whole networks as graphs, one after another on one stream."""
        instances = self._instances(subjects, 1)

        def run() -> None:
            for instance in instances:
                instance.replay()

        return self._variant(subject, name, run, instances)

    def _beside(self, subject: str, name: str, subjects: Sequence[Subject], count: int) -> Variant:
        """`count` instances of each, each a graph on a stream of its own, run a few times without any order
        among streams, which begin and end together."""
        device, instances = self.device, self._instances(subjects, count)
        streams = [instance.stream for instance in instances]

        def run() -> None:
            fork(device, streams)
            for _ in range(_RUNS_PER_INSTANCE):
                for instance in instances:
                    with device.on(instance.stream):
                        instance.replay()
            join(device, streams)

        return self._variant(subject, name, run, instances, count * _RUNS_PER_INSTANCE)

    def _joint(self) -> Variant:
        """One graph with a branch per subject, begun and ended together (POS)."""
        device = self.device
        instances = [self._instance(subject) for subject in self.subjects]
        streams = device.streams[1 : len(instances) + 1]

        def work() -> None:
            fork(device, streams)
            for stream, instance in zip(streams, instances, strict=True):
                with device.on(stream):
                    instance.run()
            join(device, streams)

        replay = device.capture(work, stream=device.streams[0])
        return self._variant(MIX, JOINT, replay, instances)


def batch_name(size: int) -> str:
    return f"torch graph, batch {size}"


def use_precision(precision: str) -> None:
    """How float32 products are taken from here on; kernels are searched for once per shape."""
    torch.backends.cudnn.benchmark = True
    if torch.cuda.is_available():
        use_tf32(precision == "tf32")


CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
_compiler: Any = torch.compiler


def row_name(mode: str) -> str:
    return f"torch.compile {mode}"


def compiled(network: Network, mode: str) -> Any:
    """The network compiled in one mode; compiles when it is first called.

    Dynamo keeps what it compiled per code object, gives up after eight and looks through them at every call,
    so each variant gets a copy of the code for itself.
    """
    forward = Network.forward
    copy = FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__)
    network.__class__ = type("Compiled", (Network,), {"forward": copy})
    return torch.compile(network, mode=None if mode == "default" else mode, dynamic=False)


def compiled_variant(device: Device, subject: Subject, mode: str, precision: str) -> Variant:
    network = subject.network(device.torch, precision)
    images = subject.images(device.torch, precision)
    call = compiled(network, mode)

    def run() -> None:
        # Otherwise CUDA graph trees take the next variant's graph for a continuation of this one.
        _compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            call(images)

    for _ in range(4):  # eager, then recorded, then replayed
        run()
    _compiler.cudagraph_mark_step_begin()
    with torch.no_grad():
        error = subject.error_of(call(images).clone())
    return Variant(subject.name, row_name(mode), run, 1, precision, error)


def compile_child(kind: str, subject: Subject, mode: str, precision: str) -> float:
    """One model in one mode, into the cache; the error of its logits."""
    use_precision(precision)
    return compiled_variant(make_device(kind), subject, mode, precision).error


_CUDA: Final = "CUDAExecutionProvider"
_TENSORRT: Final = "TensorrtExecutionProvider"
_LIBNVINFER: Final = "libnvinfer.so.10"
_WARM: Final = 3  # the first search for kernels, a graph is captured in one, and the last is measured


@dataclass(frozen=True)
class Provider:
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
    if provider.name == _TENSORRT:  # the wheel brings the provider without the library
        try:
            ctypes.CDLL(_LIBNVINFER)
        except OSError:
            return "TensorRT is not installed"
    return ""


def engine_options(subject: Subject) -> dict[str, str]:
    """TensorRT keeps its engines, for its other row and with `--cache` for the next run.

    A folder for each model: engines are named by the graph's structure and not by its weights.
    """
    if CACHE_VARIABLE not in os.environ:
        return {}
    engines = Path(os.environ[CACHE_VARIABLE]) / "tensorrt" / subject.artifact.digest[:32]
    engines.mkdir(parents=True, exist_ok=True)
    return {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(engines),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(engines.parent),
    }


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


def provider_variant(
    device: Device, subject: Subject, provider: Provider, precision: str, stream: Any
) -> Variant:
    """
    Raises:
        RuntimeError: onnxruntime would run it somewhere else.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if device.kind == "cuda":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    engines = engine_options(subject) if provider.name == _TENSORRT else {}
    chosen = [(provider.name, options_of(provider, device, stream, precision) | engines)]
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
    bound = Held(run, (image, logits))
    return Variant(subject.name, provider.row, bound, 1, precision, subject.error_of(logits))


def _bind(bind: Any, name: str, device: Device, tensor: Tensor) -> None:
    bind(name, device.kind, device.torch.index or 0, np.float32, tuple(tensor.shape), tensor.data_ptr())

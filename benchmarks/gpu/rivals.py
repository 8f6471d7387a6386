"""What ours is compared with: plain torch, torch.compile, time slicing and onnxruntime.

Plain torch: eager, one captured stream, batches, several streams, one joint graph.

torch.compile takes minutes, so it is done by child processes side by side while nothing is measured, into
Inductor's cache on disk; this process then compiles from that cache. What was not ready in time is a row
that says so. Several children that autotune at once disturb each other's timing a little; with `--cache
DIR` and a run before, they are found there.

Time slicing: every model in a process of its own, and the driver gives each the device in turn.

onnxruntime runs the whole model on CUDA and on TensorRT, where they are installed. Inputs and outputs are
bound to memory on the device and stay there. A session has a stream of its own, which begins after the
benchmark's and which the benchmark's waits for; the host waits for neither, but in a run of a captured
graph, which onnxruntime ends by waiting. Input and logits are float32, as for our own plans, and are
converted inside. A provider that onnxruntime would quietly replace by another one is a row that says so.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import numpy as np
import onnx
import torch
from torch import Tensor

from benchmarks.gpu.device import STREAMS, Device, Graph, Work, fork, join
from benchmarks.gpu.networks import Network, Subject
from benchmarks.gpu.results import MODES, Zoo
from benchmarks.gpu.rounds import Variant
from stageloom.edge_agent.lowering.dtypes import use_tf32

MIX: Final = "mix"
EAGER: Final = "torch eager"
GRAPH: Final = "torch graph"
AGAIN: Final = "torch graph, again"
IN_TURN: Final = "torch graphs in turn"
IN_TURN_AGAIN: Final = "torch graphs in turn, again"
JOINT: Final = "torch joint graph"
_RUNS_PER_INSTANCE: Final = 4
_STREAMS_APART: Final = 5  # the first streams of two subjects


class Instance:
    """One copy of a network that can run beside others: shared weights, own input, own output."""

    def __init__(self, device: Device, subject: Subject, network: Network, images: Tensor) -> None:
        self.device, self.subject, self.network, self.images = device, subject, network, images
        self.stream: Any = None  # on which it was captured
        self._logits: Tensor | None = None
        self._graph: Graph | None = None

    def run(self) -> None:
        """Eagerly, on the current stream."""
        with torch.inference_mode():
            self._logits = self.network(self.images)

    def captured(self, stream: int) -> "Instance":
        """With a graph of its own memory pool, captured on the given one of the device's streams."""
        self.stream = self.device.streams[stream]
        self._graph = self.device.capture(self.run, stream=self.stream)
        return self

    def replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()

    @property
    def error(self) -> float:
        """Of the newest logits; infinite before there are any."""
        return float("inf") if self._logits is None else self.subject.error_of(self._logits)


class Rows:
    """Makes the variants of some subjects in one precision; networks are shared, memory pools are not.

    The n-th instance of a subject is captured once and takes part in every variant that needs n or more.
    """

    def __init__(self, device: Device, subjects: Sequence[Subject], precision: str) -> None:
        self.device = device
        self.subjects = subjects
        self.precision = precision
        self._networks = {subject.name: subject.network(device.torch, precision) for subject in subjects}
        self._captured: dict[str, list[Instance]] = {subject.name: [] for subject in subjects}

    def _instance(self, subject: Subject, batch: int = 1) -> Instance:
        images = subject.images(self.device.torch, self.precision, batch)
        return Instance(self.device, subject, self._networks[subject.name], images)

    def _instances(self, subject: Subject, count: int) -> list[Instance]:
        """Captured ones. Up to 16 of one subject, or up to 4 of each of three, have streams of their own."""
        known = self._captured[subject.name]
        shift = _STREAMS_APART * self.subjects.index(subject)
        while len(known) < count:
            known.append(self._instance(subject).captured((shift + len(known)) % STREAMS))
        return known[:count]

    def _variant(
        self, subject: str, name: str, run: Work, instances: Sequence[Instance], units: int = 1
    ) -> Variant:
        run()
        self.device.synchronize()
        error = max(instance.error for instance in instances)
        return Variant(subject, name, run, units, self.precision, error)

    def eager(self, subject: Subject) -> Variant:
        """Baseline 1."""
        instance = self._instance(subject)
        return self._variant(subject.name, EAGER, instance.run, [instance])

    def graph(self, subject: Subject, name: str = GRAPH) -> Variant:
        """Baseline 2: the whole network on one stream as one graph."""
        (instance,) = self._instances(subject, 1)
        return self._variant(subject.name, name, instance.replay, [instance])

    def batch(self, subject: Subject, size: int) -> Variant:
        """Baseline 8: `size` images at once, as a graph; time per image."""
        instance = self._instance(subject, size).captured(0)
        return self._variant(subject.name, batch_name(size), instance.replay, [instance], size)

    def streams(self, subject: Subject, count: int) -> Variant:
        """Baseline 7: `count` instances, each one graph on a stream of its own; time per image."""
        return self._beside(subject.name, self._instances(subject, count), count)

    def _beside(self, subject: str, instances: Sequence[Instance], count: int) -> Variant:
        """Every graph a few times on its stream, all streams begun and ended together."""
        device = self.device
        streams = [instance.stream for instance in instances]

        def run() -> None:
            fork(device, streams)
            for _ in range(_RUNS_PER_INSTANCE):
                for instance in instances:
                    with device.on(instance.stream):
                        instance.replay()
            join(device, streams)

        name = streams_name(len(instances))
        return self._variant(subject, name, run, instances, count * _RUNS_PER_INSTANCE)

    # The mix: one image of every subject is one unit.

    def mix_in_turn(self, name: str = IN_TURN) -> Variant:
        """Sequential graphs, one after another on one stream: what the mix is compared with."""
        instances = [self._instances(subject, 1)[0] for subject in self.subjects]

        def run() -> None:
            for instance in instances:
                instance.replay()

        return self._variant(MIX, name, run, instances)

    def mix_streams(self, count: int) -> Variant:
        """`count` instances of every subject, each on its own stream, without any order among them."""
        instances = [instance for subject in self.subjects for instance in self._instances(subject, count)]
        return self._beside(MIX, instances, count)

    def mix_joint(self) -> Variant:
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

        replay = device.capture(work, stream=device.streams[0]).replay
        return self._variant(MIX, JOINT, replay, instances)


def batch_name(size: int) -> str:
    return f"torch graph, batch {size}"


def streams_name(count: int) -> str:
    return f"torch graphs on {count} streams"


def use_precision(precision: str) -> None:
    """How float32 products are taken from here on; kernels are searched for once per shape."""
    torch.backends.cudnn.benchmark = True
    if torch.cuda.is_available():
        use_tf32(precision == "tf32")


CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
_THREADS: Final = 5  # of Inductor in each child
_POLL_S: Final = 0.2
_compiler: Any = torch.compiler


def row_name(mode: str) -> str:
    return f"torch.compile {mode}"


def run_child(part: str, *arguments: str, limit_s: float, **variables: str) -> Any:
    """What a child of this benchmark printed last, decoded.

    Raises:
        RuntimeError: it failed; its last line says why.
        subprocess.TimeoutExpired: it took longer than `limit_s`.
    """
    done = subprocess.run(
        child_command(part, *arguments),
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1][:200])
    return json.loads(done.stdout.strip().splitlines()[-1])


def child_command(part: str, *arguments: str) -> list[str]:
    """A child of this benchmark, in this interpreter."""
    return [sys.executable, "-m", "benchmarks.gpu.child", part, *arguments]


class Compiling:
    """Children that fill the cache."""

    def __init__(self, models: Sequence[str], zoo: Zoo, precision: str, folder: Path) -> None:
        self._began_s = time.monotonic()
        self._logs: dict[tuple[str, str], Path] = {}
        self._children: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self.taken_s: dict[tuple[str, str], float] = {}
        self.failed: dict[tuple[str, str], str] = {}
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(_THREADS)}
        for mode in reversed(MODES):  # the slowest first
            for model in models:
                log = folder / f"compile-{model}-{mode}.log"
                command = child_command(
                    "compile", "--model", model, "--mode", mode, "--precision", precision, *zoo.arguments
                )
                with log.open("wb") as out:
                    self._children[model, mode] = subprocess.Popen(
                        command, env=environment, stdout=out, stderr=out, start_new_session=True
                    )
                self._logs[model, mode] = log

    def wait(self, seconds: float) -> None:
        """Until all have ended or `seconds` since the start have gone by; what runs then is ended."""
        while self._children:
            for key, child in list(self._children.items()):
                if child.poll() is not None:
                    del self._children[key]
                    self._ended(key, child.returncode)
            if self._children and time.monotonic() - self._began_s >= seconds:
                break
            time.sleep(_POLL_S)
        self.close(f"not compiled in {seconds:.0f} s")

    def _ended(self, key: tuple[str, str], returncode: int) -> None:
        if returncode == 0:
            self.taken_s[key] = time.monotonic() - self._began_s
            return
        lines = self._logs[key].read_text(errors="replace").strip().splitlines() or ["no message"]
        self.failed[key] = f"exit code {returncode}: {lines[-1][:200]}"

    def close(self, reason: str = "not waited for") -> None:
        """End what still runs, with its compiler processes."""
        for key, child in self._children.items():
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.wait()
            self.failed[key] = reason
        self._children = {}


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


def compile_child(device: Device, subject: Subject, mode: str, precision: str) -> None:
    """One model in one mode, into the cache."""
    print(f"error {compiled_variant(device, subject, mode, precision).error:.3g}")


SLICING: Final = "time slicing, a process per model"
_PATIENCE_S = 60.0


class Slices:
    """The processes; they wait between windows and take no time on the device then."""

    def __init__(self, kind: str, models: Sequence[str], zoo: Zoo, precision: str) -> None:
        self._precision = precision
        self._children = [
            subprocess.Popen(
                child_command(
                    "slice", "--device", kind, "--model", model, "--precision", precision, *zoo.arguments
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for model in models
        ]

        self.error = float("inf")  # the worst, once they are ready

    def wait_ready(self) -> None:
        """Until every process has its graph; from then on they only wait.

        Raises:
            RuntimeError: a process ended.
        """
        self.error = max(float(self._answer(child)["error"]) for child in self._children)

    def variant(self, runs: int) -> Variant:
        """`runs` images of every model begun together; time per image of each."""

        def run() -> None:
            for child in self._children:
                self._ask(child, runs)
            for child in self._children:
                self._answer(child)

        return Variant(MIX, SLICING, run, runs, self._precision, self.error)

    def _ask(self, child: "subprocess.Popen[str]", runs: int) -> None:
        assert child.stdin is not None
        child.stdin.write(f"{runs}\n")
        child.stdin.flush()

    def _answer(self, child: "subprocess.Popen[str]") -> dict[str, float]:
        assert child.stdout is not None
        ready, _, _ = select.select([child.stdout], [], [], _PATIENCE_S)
        if not ready:
            raise RuntimeError(f"a time slice has not answered in {_PATIENCE_S:.0f} s")
        line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"a time slice ended with exit code {child.wait()}")
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        for child in self._children:
            assert child.stdin is not None and child.stdout is not None
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()


def slice_child(device: Device, subject: Subject, precision: str) -> None:
    """One process: a graph, replayed as often as each line of the input asks for."""
    variant = Rows(device, [subject], precision).graph(subject)
    print(json.dumps({"error": variant.error}), flush=True)
    for line in sys.stdin:
        began_s = time.perf_counter()
        for _ in range(int(line)):
            variant.run()
        device.synchronize()
        print(json.dumps({"seconds": time.perf_counter() - began_s}), flush=True)


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
    bound = _Run(run, (image, logits))
    return Variant(subject.name, provider.row, bound, 1, precision, subject.error_of(logits))


@dataclass(frozen=True)
class _Run:
    """A run with the tensors that it is bound to."""

    run: Work
    tensors: tuple[Tensor, ...]

    def __call__(self) -> None:
        self.run()


def _bind(bind: Any, name: str, device: Device, tensor: Tensor) -> None:
    bind(name, device.kind, device.torch.index or 0, np.float32, tuple(tensor.shape), tensor.data_ptr())

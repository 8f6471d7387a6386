"""Rows that need processes of their own: JAX, and several processes on one device, with and without MPS.

XLA compiles a whole network and launches on streams of its own, which the table's events do not see. So a
child process measures it by turns with torch's sequential graph, both by the host's clock, back to back.

N processes with a graph each are what a machine has that serves every model by a program of its own: by
default the device gives them turns (time slicing); under NVIDIA's Multi-Process Service their kernels run
side by side. The service is an environment: it is started here, in a folder of its own, as the user who
measures, and ended; no setting of the device is changed. A row that cannot run says why.
"""

import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Empty
from random import Random
from statistics import median
from typing import Any, Final

import onnx

from benchmarks.gpu.child import in_child
from benchmarks.gpu.device import Device, make_device
from benchmarks.gpu.jax_network import jax_network
from benchmarks.gpu.networks import Subject
from benchmarks.gpu.results import Deadline, Results, Settings, Skip
from benchmarks.gpu.rivals import GRAPH, Instance, use_precision

PART: Final = "processes"
JAX: Final = "JAX, XLA"
_CONTROL: Final = "nvidia-cuda-mps-control"
_STARTED_S: Final = 60.0  # what a process may take until its graph is captured
_ROUNDS: Final = 15
_WINDOW_S: Final = 0.2
_MATMUL: Final = {"fp32": "highest", "tf32": "tensorfloat32", "fp16": "default"}


def add_process_rows(
    results: Results,
    device: Device,
    subjects: Sequence[Subject],
    settings: Settings,
    deadline: Deadline,
    folder: Path,
) -> None:
    """JAX for every subject, then processes with and without the service for the first."""
    for subject in subjects:
        with results.attempt(PART, f"{subject.name}, {JAX}"):
            _needs(settings, deadline)
            figures = _beside_jax(subject, settings, deadline)
            results.add({}, part=PART, name=f"{subject.name}, {JAX}", **figures)
    for count in settings.instances[:2]:
        for name, serving in (("time slicing", _alone), ("MPS", partial(_service, device, folder))):
            row = f"{subjects[0].name}, {count} processes, {name}"
            with results.attempt(PART, row):
                _needs(settings, deadline)
                with serving() as environment:
                    us = processes_us(subjects[0], count, settings, environment)
                results.add({}, part=PART, name=row, host_us=us)


def _needs(settings: Settings, deadline: Deadline) -> None:
    if not settings.children:
        raise Skip("without processes")
    if deadline.left_s < _STARTED_S:
        raise Skip("the time was up")


def _beside_jax(subject: Subject, settings: Settings, deadline: Deadline) -> dict[str, Any]:
    if find_spec("jax") is None:
        raise Skip("JAX is not installed")
    arguments = (settings.device, subject, settings.precision, settings.quick)
    figures: dict[str, Any] = in_child(
        jax_child,
        *arguments,
        limit_s=deadline.left_s,
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        JAX_PLATFORMS="cuda" if settings.device == "cuda" else "cpu",
    )
    return figures


def jax_child(kind: str, subject: Subject, precision: str, quick: bool) -> dict[str, Any]:
    """Microseconds of an image by JAX and by torch's graph, by turns, and the error of JAX's logits."""
    import jax

    jax.config.update("jax_default_matmul_precision", _MATMUL[precision])
    dtype = "float16" if precision == "fp16" else "float32"
    model = onnx.load_model_from_string(subject.artifact.onnx_bytes())
    forward, parameters = jax_network(model, dtype)
    call, image = jax.jit(forward), jax.numpy.asarray(subject.image, dtype)
    began_s = time.monotonic()
    logits = call(parameters, image).block_until_ready()
    compiled_s = time.monotonic() - began_s
    graph = _graph(kind, subject, precision)
    last: list[Any] = [logits]

    def run() -> None:
        last[0] = call(parameters, image)

    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        JAX: (run, lambda: last[0].block_until_ready()),
        GRAPH: (graph.replay, graph.device.synchronize),
    }
    rounds, window_s = (3, 0.002) if quick else (_ROUNDS, _WINDOW_S)
    taken = _by_turns(ways, rounds, window_s)
    ratios = [there / here for here, there in zip(taken[JAX], taken[GRAPH], strict=True)]
    return {
        "host_us": median(taken[JAX]) * 1e6,
        "torch_graph_host_us": median(taken[GRAPH]) * 1e6,
        "over_torch_graph": round(median(ratios), 3),
        "rounds": rounds,
        "compile_s": round(compiled_s, 1),
        "error": subject.error_of(jax.device_get(logits)),
        "version": jax.__version__,
    }


def _by_turns(
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]],
    rounds: int,
    window_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of a run, back to back, of each way in every round, in an order drawn anew. [rounds]"""
    rng, runs = Random(1), {}
    for name, (run, wait) in ways.items():
        for _ in range(2):
            began_s = clock()
            run()
            wait()
            runs[name] = max(2, round(window_s / max(clock() - began_s, 1e-7)))
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in rng.sample(sorted(ways), len(ways)):
            run, wait = ways[name]
            began_s = clock()
            for _ in range(runs[name]):
                run()
            wait()
            taken[name].append((clock() - began_s) / runs[name])
    return taken


def _graph(kind: str, subject: Subject, precision: str) -> Instance:
    """The network as one captured graph, in this process."""
    use_precision(precision)
    device = make_device(kind)
    network = subject.network(device.torch, precision)
    return Instance(device, subject, network, subject.images(device.torch, precision)).captured(0)


@contextmanager
def _alone() -> Iterator[dict[str, str]]:
    """The environment of processes that take turns."""
    yield {}


@contextmanager
def _service(device: Device, folder: Path) -> Iterator[dict[str, str]]:
    """The environment of processes under a Multi-Process Service, which lives as long.

    Raises:
        Skip: there is none to start.
    """
    control = shutil.which(_CONTROL)
    if device.kind != "cuda":
        raise Skip("needs CUDA")
    if control is None:
        raise Skip(f"{_CONTROL} is not installed")
    pipes = folder / "mps"
    pipes.mkdir(exist_ok=True)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes)}
    tell = partial(
        subprocess.run,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    started = tell([control, "-d"])
    if started.returncode:
        raise Skip(f"{_CONTROL} did not start: {(started.stderr or started.stdout).strip()[:200]}")
    try:
        yield environment
    finally:
        tell([control], input="quit\n")


def processes_us(subject: Subject, count: int, settings: Settings, environment: dict[str, str]) -> float:
    """Microseconds of an image over all of `count` processes that each replay a graph at once.

    Raises:
        RuntimeError: a process ended, or was not ready in time.
    """
    context = multiprocessing.get_context("spawn")
    ready, begin, counts = context.Semaphore(0), context.Event(), context.Queue()
    window_s = 0.05 if settings.quick else 10 * _WINDOW_S
    arguments = (settings.device, subject, settings.precision, window_s, environment, ready, begin, counts)
    processes = [context.Process(target=_replay_for, args=arguments, daemon=True) for _ in range(count)]
    try:
        for process in processes:
            process.start()
        until_s = time.monotonic() + _STARTED_S
        for _ in processes:
            while not ready.acquire(timeout=0.2):
                if any(process.exitcode for process in processes):
                    raise RuntimeError("a process ended before it was ready")
                if time.monotonic() > until_s:
                    raise RuntimeError(f"a process was not ready in {_STARTED_S:.0f} s")
        begin.set()
        answers: list[tuple[int, float]] = [counts.get(timeout=_STARTED_S) for _ in processes]
    except Empty:
        raise RuntimeError("a process ended without an answer") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
    return 1e6 * max(seconds for _, seconds in answers) / sum(images for images, _ in answers)


def _replay_for(
    kind: str,
    subject: Subject,
    precision: str,
    window_s: float,
    environment: dict[str, str],
    ready: Any,
    begin: Any,
    counts: Any,
) -> None:
    """Replay until the window is over; how many images that were, and the seconds with the last one's end."""
    os.environ.update(environment)
    os.dup2(2, 1)  # the parent's stdout is one JSON object
    graph = _graph(kind, subject, precision)
    graph.replay()
    graph.device.synchronize()
    ready.release()
    begin.wait()
    began_s, images = time.perf_counter(), 0
    while time.perf_counter() - began_s < window_s:
        for _ in range(4):
            graph.replay()
        graph.device.synchronize()
        images += 4
    counts.put((images, time.perf_counter() - began_s))
    counts.close()
    counts.join_thread()

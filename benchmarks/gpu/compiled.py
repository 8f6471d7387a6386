"""Baseline 3: torch.compile in three modes.

Compiling takes minutes, so it is done by child processes side by side while nothing is measured, into
Inductor's cache on disk; this process then compiles from that cache. What was not ready in time is a row that
says so. Several children that autotune at once disturb each other's timing a little; with `--cache DIR` and a
run before, they are found there.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch

from benchmarks.gpu.device import Device, make_device
from benchmarks.gpu.networks import Network, Subject
from benchmarks.gpu.rounds import Variant
from benchmarks.gpu.subjects import make_subject
from benchmarks.gpu.torch_rows import use_precision

MODES: Final = ("default", "reduce-overhead", "max-autotune")
CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
_THREADS: Final = 5  # of Inductor in each child
_POLL_S: Final = 0.2
_compiler: Any = torch.compiler


def row_name(mode: str) -> str:
    """In the table."""
    return f"torch.compile {mode}"


@dataclass(frozen=True)
class Zoo:
    """How the models are made, the same way in every process."""

    width: float = 1.0
    size: int | None = None

    @property
    def arguments(self) -> list[str]:
        """For a child's command line."""
        return ["--width", str(self.width), *(["--size", str(self.size)] if self.size else [])]


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


def variant(device: Device, subject: Subject, mode: str, precision: str) -> tuple[Variant, float]:
    """The variant and its error against the reference."""
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
    return Variant(subject.name, row_name(mode), run, 1, precision), error


def compile_child(arguments: argparse.Namespace, folder: Path) -> int:
    """One model in one mode, into the cache."""
    device = make_device(arguments.device)
    use_precision(arguments.precision)
    subject = make_subject(arguments.model, folder, width=arguments.width, size=arguments.size)
    _, error = variant(device, subject, arguments.mode, arguments.precision)
    print(f"error {error:.3g}")
    return 0

"""Traces by torch's profiler: what ran at the same time, and what every operator asks of a multiprocessor.

Operators are traced in a child process: a process that was profiled once launches more slowly afterwards.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.compiled import Zoo, child_command
from benchmarks.gpu.device import Device, make_device
from benchmarks.gpu.networks import Network, Subject
from benchmarks.gpu.profiled_kernels import (
    OPERATOR_PREFIX,
    OperatorResources,
    Rates,
    kernels_by_operator,
    operator_resources,
)
from benchmarks.gpu.subjects import make_subject
from benchmarks.gpu.torch_rows import use_precision
from stageloom.edge_agent.executor.cuda.device import Multiprocessor
from stageloom.edge_agent.executor.torch.cuda import multiprocessor as cuda_multiprocessor

_RUNS = 3


def trace_of(device: Device, work: Callable[[], None]) -> dict[str, Any]:
    """The work once, with what was before it ended, as Chrome's JSON."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    device.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        device.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return found


def multiprocessor(device: Device) -> Multiprocessor:
    """Of this device."""
    return cuda_multiprocessor(device.torch) if device.kind == "cuda" else Multiprocessor()


class Operators:
    """Runs each operator of a graph alone, on the activations that it really gets."""

    def __init__(self, device: Device, subject: Subject, precision: str) -> None:
        self._device = device
        self._graph = subject.artifact.graph
        self._item_bytes = 2 if precision == "fp16" else 4
        self._network: Network = subject.network(device.torch, precision)
        with torch.inference_mode():
            self._values = self._network.every_value(subject.images(device.torch, precision))

    def run(self, op: int) -> None:
        """The nodes of one operator, one after another."""
        network = self._network
        made: dict[str, torch.Tensor] = {}
        for node in self._graph.operators[op].nodes:
            reads = [made[name] if name in made else self._values[name] for name in network.reads[node]]
            made[network.makes[node]] = network.nodes[node](*reads)

    def resources(self, rates: Rates) -> list[OperatorResources]:
        """Measured over a few runs of each. [num_operators]"""

        def work() -> None:
            for _ in range(_RUNS):
                for op in range(len(self._graph.operators)):
                    with torch.profiler.record_function(f"{OPERATOR_PREFIX}{op}"):
                        self.run(op)

        with torch.inference_mode():
            work()
            trace = trace_of(self._device, work)
        found = kernels_by_operator(trace)
        return operator_resources(self._graph, found, rates, runs=_RUNS, item_bytes=self._item_bytes)


def operators_child(arguments: argparse.Namespace, folder: Path) -> int:
    """The resources of one model's operators as JSON."""
    device = make_device(arguments.device)
    use_precision(arguments.precision)
    subject = make_subject(arguments.model, folder, width=arguments.width, size=arguments.size)
    rates = Rates(flop_per_s=arguments.flop_per_s, bytes_per_s=arguments.bytes_per_s)
    found = Operators(device, subject, arguments.precision).resources(rates)
    print(json.dumps([asdict(one) for one in found]))
    return 0


def operators_of(
    model: str, zoo: Zoo, device: str, precision: str, rates: Rates, *, limit_s: float
) -> list[OperatorResources]:
    """The resources of a model's operators, measured in a child.

    Raises:
        RuntimeError: the child failed; its last line says why.
        subprocess.TimeoutExpired: it took longer than `limit_s`.
    """
    done = subprocess.run(
        child_command(
            "operators",
            *("--device", device, "--model", model, "--precision", precision, *zoo.arguments),
            *("--flop-per-s", str(rates.flop_per_s), "--bytes-per-s", str(rates.bytes_per_s)),
        ),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1][:200])
    return [OperatorResources(**one) for one in json.loads(done.stdout.strip().splitlines()[-1])]

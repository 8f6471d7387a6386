"""Traces by torch's profiler: what ran at the same time, and what every operator asks of a multiprocessor."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.networks import Network, Subject
from edge_agent.utilisation.kernels import (
    OPERATOR_PREFIX,
    Multiprocessor,
    OperatorResources,
    Rates,
    kernels_by_operator,
    operator_resources,
)

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
    """Of this device; fields that torch does not know keep a Hopper's values."""
    usual = Multiprocessor()
    if device.kind != "cuda":
        return usual
    found = torch.cuda.get_device_properties(device.torch)
    return Multiprocessor(
        registers=getattr(found, "regs_per_multiprocessor", usual.registers),
        shared_bytes=getattr(found, "shared_memory_per_multiprocessor", usual.shared_bytes),
        threads=getattr(found, "max_threads_per_multi_processor", usual.threads),
    )


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

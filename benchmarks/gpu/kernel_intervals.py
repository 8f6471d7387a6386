"""When kernels ran, read from a trace of torch's profiler (CUPTI), and how many of them at once.

The trace is JSON in Chrome's format. A process that was profiled once launches more slowly afterwards, so
this is measured last. What kernels ask of a multiprocessor is the executor's own measurement: it reads that
from captured graphs, and launches in that order.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.device import Device


class Kernel(NamedTuple):
    """One run of one kernel; microseconds on the trace's clock."""

    begin_us: float
    end_us: float
    name: str = ""


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
        trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return trace


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """All kernels of a trace in the order in which they began; copies and memsets are none."""
    return sorted(
        Kernel(float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event.get("name", "")))
        for event in trace.get("traceEvents", ())
        if event.get("ph") == "X" and event.get("cat") == "kernel" and "ts" in event and "dur" in event
    )


def union_us(kernels: Iterable[Kernel]) -> float:
    """Time in which at least one kernel ran: what NVML calls utilisation, as a time."""
    total_us, open_until_us = 0.0, float("-inf")
    for kernel in sorted(kernels):
        total_us += max(kernel.end_us - max(kernel.begin_us, open_until_us), 0.0)
        open_until_us = max(open_until_us, kernel.end_us)
    return total_us


def concurrency(kernels: Sequence[Kernel]) -> float | None:
    """Kernels that ran at the same time while any ran: the sum of their times over the union's."""
    busy_us = union_us(kernels)
    return sum(kernel.end_us - kernel.begin_us for kernel in kernels) / busy_us if busy_us else None


def busy_share(kernels: Sequence[Kernel]) -> float | None:
    """The union over the time from the first kernel's begin to the last one's end."""
    if not kernels:
        return None
    whole_us = max(kernel.end_us for kernel in kernels) - min(kernel.begin_us for kernel in kernels)
    return union_us(kernels) / whole_us if whole_us else None

"""Two groups of a stage on the onnx executor's threads, in the engine process, under ingest load.

Tasks of a 3x224x224 float32 tensor come from this process as fast as they are answered, some at a time. The
model pools the tensor and then has two tiny operators side by side: a stage of two groups, the second one on
a helper thread. `two_groups_*_us` is what that costs beyond the longer of the two: from the end of the
pooling to the end of the step, less the longer group's own time. Handing the group over, joining, and leaving
the step are in it. It is taken from a trace of the running engine.
"""

import tempfile
import threading
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks.ingest import SHAPE, serving
from benchmarks.report import Report, progress
from stageloom import Client
from stageloom.edge_agent.trace.command import record
from stageloom.edge_agent.worker.recorder import StepEntry

AT_A_TIME = 2
RAMP_UP_S = 0.5


def model() -> onnx.ModelProto:
    """Pooling, then two tiny operators side by side."""
    pooled = (1, SHAPE[1], 1, 1)
    graph = helper.make_graph(
        [
            helper.make_node("GlobalAveragePool", ["input"], ["pooled"]),
            helper.make_node("Sigmoid", ["pooled"], ["left"]),
            helper.make_node("Tanh", ["pooled"], ["right"]),
        ],
        "probe",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, pooled) for name in ("left", "right")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def part(report: Report, quick: bool) -> None:
    """`two_groups_p50_us`, `two_groups_p99_us`."""
    seconds = 2.0 if quick else 10.0
    progress(f"two groups under ingest load for {seconds:g} s")
    with (
        tempfile.TemporaryDirectory(prefix="stageloom-") as folder,
        serving(Path(folder), model(), executor="onnx", scheduler="greedy") as socket,
        Client(socket) as client,
    ):
        stop = threading.Event()
        threads = [threading.Thread(target=_load, args=(client, stop)) for _ in range(AT_A_TIME)]
        for thread in threads:
            thread.start()
        stop.wait(RAMP_UP_S)
        batch, recorded = record(socket, seconds)
        stop.set()
        for thread in threads:
            thread.join()
    found = [_two_groups_us(step) for step in batch.steps if step.began_s >= recorded.began_s]
    spans_us = [span for span, _ in found]
    costs_us = [cost for _, cost in found]
    figures = {
        "two_groups_p50_us": float(np.percentile(costs_us, 50)),
        "two_groups_p99_us": float(np.percentile(costs_us, 99)),
    }
    row = {
        "steps": len(found),
        "tasks_per_s": len(found) / (recorded.ended_s - recorded.began_s),
        "with_the_longer_group_p50_us": float(np.percentile(spans_us, 50)),
        "recorder_share": recorded.own_s / (recorded.ended_s - recorded.began_s),
    }
    report.add(figures, [row])


def _load(client: Client, stop: threading.Event) -> None:
    tensor = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    while not stop.is_set():
        client.run("probe", {"input": tensor}, timeout_s=60.0)


def _two_groups_us(step: StepEntry) -> tuple[float, float]:
    """From the pooling's end to the step's, and that less the longer of the two groups."""
    (_, _, _, pooled_s), *groups = sorted(step.groups)
    if len(groups) != 2 or {stream for _, stream, _, _ in groups} != {0, 1}:
        raise RuntimeError(f"the step ran {len(groups)} groups behind the pooling: {step.groups}")
    span_us = 1e6 * (step.ended_s - pooled_s)
    return span_us, span_us - 1e6 * max(ended_s - began_s for _, _, began_s, ended_s in groups)

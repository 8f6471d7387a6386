"""The engine on a CPU: what a step costs, how much of onnxruntime's speed is left, memory.

    python -m benchmarks.engine_cpu [--quick] [--json] [--only PART]...

- `steps`: `step_overhead_p50_us`, `_p99_us`, `trace_overhead_p50_us`. Several networks on the null
  executor, every block a combined block of its own, one lane, two tasks of each always there. A step's
  overhead is the time from its begin to the next step's begin in the lane: the executor computes nothing,
  so all of it is the engine's, with what a task's end and the next submission cost where a step ends one.
  Steps with and without a trace come in turn, some thousand at a time.
- `memory`: `rss_growth_mib`, what an engine grows by on the null and on the onnx executor; the larger
  counts.
- `groups`: `two_groups_p50_us`, `_p99_us`. Tasks of a 3x224x224 float32 tensor come from this process as
  fast as they are answered, some at a time. The model pools the tensor and then has two tiny operators
  side by side: a stage of two groups, the second one on a helper thread. The figure is what that costs
  beyond the longer of the two: from the end of the pooling to the end of the step, less the longer
  group's own time. It is taken from a trace of the running engine.
- `ratios`: `ratio.WORKLOAD` is the saturated engine with whole models over the best onnxruntime setting;
  `ratio_blocks` cuts at the papers' borders, `ratio_staged` runs the best of the schedules with groups
  side by side (`benchmarks.ratios`).
"""

import argparse
import gc
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from benchmarks.agent_cpu import SHAPE, probe_model, serving
from benchmarks.ratios import BLOCKS, STAGED, WHOLE, Workload, compare_all, plan_of, workloads
from benchmarks.runner import Report, percentile, progress, rss_mib, run
from benchmarks.zoo import noise_for
from stageloom import Client
from stageloom.edge_agent.executor.base import Executor, StepResult
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.trace.command import record
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import TaskDone, WorkerConfig
from stageloom.edge_agent.worker.recorder import Recorder, StepEntry
from stageloom.shared.artifact import open_artifact
from stageloom.shared.engine.steps import Step
from stageloom.shared.importer.api import artifact_path, import_model
from stageloom.shared.search.compose import Combination

MODELS = ("squeezenet", "resnet50", "googlenet", "inception_v3")
SMALL_WIDTH = 0.25
PARTS = ("steps", "memory", "groups", "ratios")

PER_MODEL = 2
WARM_UP = 2_000
CHUNK = 4_000

AT_A_TIME = 2
RAMP_UP_S = 0.5


# Steps and memory


class Loop:
    """A closed loop of tasks on one engine; when each step began."""

    def __init__(
        self, executor: Executor, workload: Workload, *, partition: str = "paper", **how: Any
    ) -> None:
        """`how` is for the plan: see `plan_of`."""
        plan = plan_of(workload, partition, members_max=len(workload), **how)
        self._began_s: list[float] = []
        self._left = 0
        self._open = threading.Semaphore(0)
        self._inputs = {name: noise_for(artifact) for name, artifact in workload.items()}
        self.shell = InProcessEngine(executor, on_step=self._step)
        artifacts = {artifact.digest: artifact for artifact in workload.values()}
        self.shell.activate(self.shell.load(plan, artifacts))

    def run(self, steps: int) -> list[float]:
        """Seconds from step to step, over at least `steps` of them; nothing runs before or after."""
        self._began_s, self._left = [], steps
        tasks = [name for name in self._inputs for _ in range(PER_MODEL)]
        for name in tasks:
            self._submit(name)
        for _ in tasks:
            self._open.acquire()
        return [after - before for before, after in pairwise(self._began_s[:steps])]

    def _step(self, step: Step, result: StepResult) -> None:
        self._began_s.append(result.started_s)

    def _submit(self, name: str) -> None:
        def on_end(end: TaskDone) -> None:
            if len(self._began_s) < self._left:
                self._submit(name)
            else:
                self._open.release()

        self.shell.submit(name, self._inputs[name], on_end=on_end)


def overhead(report: Report, workload: Workload, quick: bool) -> None:
    progress("steps on the null executor")
    for combination in Combination:
        loop = Loop(NullExecutor(), workload, combination=combination)
        loop.run(WARM_UP)
        taken: dict[str, list[float]] = {"plain": [], "traced": []}
        for _ in range(2 if quick else 8):
            taken["plain"] += loop.run(CHUNK)
            recorder, stop = Recorder(), threading.Event()
            writer = threading.Thread(target=_drain, args=(recorder, stop))
            loop.shell.record(recorder)
            writer.start()
            taken["traced"] += loop.run(CHUNK)
            loop.shell.record(None)
            stop.set()
            writer.join()
        loop.shell.close()
        times = {
            f"{name}_p{percent}_us": 1e6 * percentile(values, percent)
            for name, values in taken.items()
            for percent in (50, 99)
        }
        figures = {
            "step_overhead_p50_us": times["plain_p50_us"],
            "step_overhead_p99_us": times["plain_p99_us"],
            "trace_overhead_p50_us": times["traced_p50_us"] - times["plain_p50_us"],
        }
        row = {"steps": len(taken["plain"]), "combination": combination.value, **times}
        report.add(figures if combination is Combination.ALONE else {}, [row])


def _drain(recorder: Recorder, stop: threading.Event) -> None:
    """Take what was recorded as the engine process's main thread does."""
    while not stop.wait(0.02):
        recorder.take()


def growth(report: Report, workload: Workload, tiny: Workload, quick: bool) -> None:
    steps = 8_000 if quick else 100_000
    loops: dict[str, Callable[[], Loop]] = {
        "null": lambda: Loop(NullExecutor(), workload),
        "onnx": lambda: Loop(OnnxExecutor(), tiny, partition="whole", scheduler="greedy"),
    }
    rows = []
    for name, make in loops.items():
        progress(f"memory over {steps} steps, executor {name}")
        loop = make()
        for _ in range(max(steps // 5 // CHUNK, 1)):  # what is kept up to a bound is filled
            loop.run(CHUNK)
        gc.collect()
        before_mib = rss_mib()
        for _ in range(steps // CHUNK):
            loop.run(CHUNK)
        gc.collect()
        rows.append({"executor": name, "steps": steps, "rss_growth_mib": rss_mib() - before_mib})
        loop.shell.close()
    report.add({"rss_growth_mib": max(float(str(row["rss_growth_mib"])) for row in rows)}, rows)


# Two groups of a stage


def two_group_model() -> onnx.ModelProto:
    """Pooling, then two tiny operators side by side."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["input"], ["pooled"]),
        helper.make_node("Sigmoid", ["pooled"], ["left"]),
        helper.make_node("Tanh", ["pooled"], ["right"]),
    ]
    return probe_model(nodes, ("left", "right"))


def two_groups(report: Report, quick: bool) -> None:
    seconds = 2.0 if quick else 10.0
    progress(f"two groups under ingest load for {seconds:g} s")
    with (
        tempfile.TemporaryDirectory(prefix="stageloom-") as folder,
        serving(Path(folder), two_group_model(), executor="onnx", scheduler="greedy") as socket,
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
    times = [two_groups_us(step) for step in batch.steps if step.began_s >= recorded.began_s]
    spans_us, costs_us = zip(*times, strict=True)
    recorded_s = recorded.ended_s - recorded.began_s
    row = {
        "steps": len(times),
        "tasks_per_s": len(times) / recorded_s,
        "with_the_longer_group_p50_us": percentile(spans_us, 50),
        "recorder_share": recorded.own_s / recorded_s,
    }
    report.add({f"two_groups_p{percent}_us": percentile(costs_us, percent) for percent in (50, 99)}, [row])


def _load(client: Client, stop: threading.Event) -> None:
    tensor = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    while not stop.is_set():
        client.run("probe", {"input": tensor}, timeout_s=60.0)


def two_groups_us(step: StepEntry) -> tuple[float, float]:
    """From the pooling's end to the step's, and that less the longer of the two groups."""
    (_, _, _, pooled_s), *groups = sorted(step.groups)
    if len(groups) != 2 or {stream for _, stream, _, _ in groups} != {0, 1}:
        raise RuntimeError(f"the step ran {len(groups)} groups behind the pooling: {step.groups}")
    span_us = 1e6 * (step.ended_s - pooled_s)
    return span_us, span_us - 1e6 * max(ended_s - began_s for _, _, began_s, ended_s in groups)


def measure(report: Report, options: argparse.Namespace) -> None:
    sys.setswitchinterval(WorkerConfig().switch_interval_s)
    parts, quick = options.only or PARTS, options.quick
    with tempfile.TemporaryDirectory() as folder:
        small = workloads(MODELS, Path(folder), width=SMALL_WIDTH)
        if "steps" in parts:
            overhead(report, small["mix"], quick)
        if "memory" in parts:
            file = Path(folder) / "tiny.onnx"  # its steps take little beside what the engine does
            onnx.save(two_group_model(), file)
            digest = import_model(file, shapes={}, out_dir=Path(folder)).digest
            tiny = {"tiny": open_artifact(artifact_path(Path(folder), digest))}
            growth(report, small["mix"], tiny, quick)
        if "groups" in parts:
            two_groups(report, quick)
    if "ratios" in parts:
        kinds = {"ratio": WHOLE, "ratio_blocks": BLOCKS, "ratio_staged": STAGED}
        compare_all(report, MODELS, kinds, quick=quick)


if __name__ == "__main__":
    only = {"action": "append", "choices": PARTS, "help": "measure this part; repeat for more"}
    packages = ("onnxruntime", "numpy", "msgspec", "msgpack", "pyzmq")
    sys.exit(run(measure, packages, options={"--only": only}))

"""Executors on the processor beside each other: time of a task, and memory.

    python -m benchmarks.host_executors [--executor NAME]... [--model NAME]... [--threads N] [--quick]

By default `onnx` and `openvino` on zoo models at full width: whole, and cut at the papers' borders. A name
may carry a precision, as in `openvino:bf16`.

- `{executor}.{model}.{partition}_ms`: median time of a task in an engine that has nothing else to do, one
  lane; tasks of the executors take turns. `_cpu_ms` is this process's processor time, which other programs
  move less. `over.{model}.{partition}`: of two executors the first one's processor time over the second's.
- `{executor}.import_rss_mib`, `.import_mib`: what an interpreter of its own grows by when it makes the
  executor; `.whole_mib` when it then loads the models and runs them. `rss` counts all of it, the others what
  no file holds: pages of files the system takes back. `weights_mib` is what the models' weights take.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import zoo
from benchmarks.runner import Report, anonymous_mib, progress, rss_mib, run
from stageloom.edge_agent.executor.executors import make_executor
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.compose import ModelChoice, compose

EXECUTORS: Final = ("onnx", "openvino")
MODELS: Final = ("squeezenet", "resnet50", "inception_v3")
PARTITIONS: Final = ("whole", "paper")
_RUNS_FOR_MEMORY: Final = 5
_WARM_UP: Final = 3


def engine_of(name: str, workload: Mapping[str, Artifact], partition: str, threads: int) -> InProcessEngine:
    """An engine that serves the models on an executor."""
    choices = [
        ModelChoice(name=model, artifact=artifact.digest, graph=artifact.graph, partition=partition)
        for model, artifact in workload.items()
    ]
    executor, _, precision = name.partition(":")
    options = ExecutorOptions(name=executor, intra_op_threads=threads, precision=precision or "fp32")
    plan = replace(compose(choices), executor=options)
    engine = InProcessEngine(make_executor(executor))
    engine.activate(engine.load(plan, {artifact.digest: artifact for artifact in workload.values()}))
    return engine


def times(
    report: Report, name: str, artifact: Artifact, executors: Sequence[str], threads: int, turns: int
) -> None:
    """One model on every executor, in both partitions."""
    inputs = zoo.noise_for(artifact)
    for partition in PARTITIONS:
        progress(f"{name}, {partition}")
        wall: dict[str, list[float]] = {executor: [] for executor in executors}
        cpu: dict[str, list[float]] = {executor: [] for executor in executors}
        with ExitStack() as stack:
            engines = {
                executor: stack.enter_context(engine_of(executor, {name: artifact}, partition, threads))
                for executor in executors
            }
            for turn in range(-_WARM_UP, turns):
                for executor, engine in engines.items():
                    began_s, began_cpu_s = time.perf_counter(), time.process_time()
                    engine.submit(name, inputs).result(60)
                    if turn >= 0:
                        cpu[executor].append(1e3 * (time.process_time() - began_cpu_s))
                        wall[executor].append(1e3 * (time.perf_counter() - began_s))
        where = f"{name}.{partition}"
        for executor in executors:
            taken = {f"{executor}.{where}_ms": wall[executor], f"{executor}.{where}_cpu_ms": cpu[executor]}
            report.add({figure: median(values) for figure, values in taken.items()})
        if len(executors) == 2:
            first, second = (cpu[executor] for executor in executors)
            report.add({f"over.{where}": median(a / b for a, b in zip(first, second, strict=True))})


def memory(executor: str, files: Mapping[str, str]) -> dict[str, float]:
    """What this process grows by, in MiB; it should have done nothing else before."""
    workload = {name: open_artifact(Path(file)) for name, file in files.items()}
    inputs = {name: zoo.noise_for(artifact) for name, artifact in workload.items()}
    before, before_rss = anonymous_mib(), rss_mib()
    make_executor(executor.partition(":")[0]).close()
    imported, imported_rss = anonymous_mib(), rss_mib()
    with engine_of(executor, workload, "whole", 1) as engine:
        for _ in range(_RUNS_FOR_MEMORY):
            for name, given in inputs.items():
                engine.submit(name, given).result(60)
        loaded = anonymous_mib()
    return {
        "import_rss_mib": imported_rss - before_rss,
        "import_mib": imported - before,
        "whole_mib": loaded - imported,
    }


def measure(report: Report, options: argparse.Namespace) -> None:
    executors, models = options.executor or EXECUTORS, options.model or MODELS
    if options.memory_of:
        print(json.dumps(memory(options.memory_of, json.loads(options.files))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        workload = zoo.artifacts(models, Path(scratch))
        weights = sum(op.weight_bytes for artifact in workload.values() for op in artifact.graph.operators)
        report.add({"weights_mib": weights / (1 << 20)})
        files = json.dumps({name: str(artifact.path) for name, artifact in workload.items()})
        for executor in executors:
            progress(f"memory of {executor}")
            command = [sys.executable, "-m", "benchmarks.host_executors", "--memory-of", executor]
            done = subprocess.run([*command, "--files", files], check=True, stdout=subprocess.PIPE)
            found: dict[str, Any] = json.loads(done.stdout)
            report.add({f"{executor}.{name}": value for name, value in found.items()})
        for name, artifact in workload.items():
            times(report, name, artifact, executors, options.threads, 5 if options.quick else 40)


if __name__ == "__main__":
    own: dict[str, dict[str, Any]] = {
        "--executor": {
            "action": "append",
            "metavar": "NAME[:PRECISION]",
            "help": f"default {' and '.join(EXECUTORS)}",
        },
        "--model": {"action": "append", "choices": tuple(zoo.ZOO), "help": f"default {', '.join(MODELS)}"},
        "--threads": {"type": int, "default": 1, "help": "intra-op threads"},
        "--memory-of": {"help": argparse.SUPPRESS},
        "--files": {"help": argparse.SUPPRESS},
    }
    sys.exit(run(measure, ["onnxruntime", "openvino", "numpy"], options=own))

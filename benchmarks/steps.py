"""What the engine itself costs: a step on the null executor, with and without a trace, and its memory.

Several networks, every block a combined block of its own, one lane, two tasks of each always there. A step's
overhead is the time from its begin to the next step's begin in the lane: the executor computes nothing, so
all of it is the engine's, with what a task's end and the next submission cost where a step ends one. Steps
with and without a trace come in turn, some thousand at a time.
"""

import gc
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.ratios import Workload, zoo_inputs
from benchmarks.report import Report, progress
from stageloom.edge_agent.executor.base import Executor, StepResult
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.executor.onnx import OnnxExecutor
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.edge_agent.worker.recorder import Recorder
from stageloom.shared.engine.steps import Step
from stageloom.shared.search.compose import Combination, ModelChoice, compose

PER_MODEL = 2
WARM_UP = 2_000
CHUNK = 4_000


class Loop:
    """A closed loop of tasks on one engine; when each step began."""

    def __init__(
        self,
        executor: Executor,
        workload: Workload,
        *,
        combination: Combination = Combination.ALONE,
        partition: str = "paper",
        scheduler: str = "sequential",
    ) -> None:
        choices = [
            ModelChoice(name=name, artifact=artifact.digest, graph=artifact.graph, partition=partition)
            for name, artifact in workload.items()
        ]
        plan = compose(choices, scheduler=scheduler, combination=combination, members_max=len(choices))
        self._began_s: list[float] = []
        self._members = 0
        self._left = 0
        self._enough = threading.Event()
        self._open = threading.Semaphore(0)
        self._inputs = {name: zoo_inputs(artifact) for name, artifact in workload.items()}
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
        began_s = self._began_s[:steps]
        return [after - before for before, after in pairwise(began_s)]

    def _step(self, step: Step, result: StepResult) -> None:
        self._began_s.append(result.started_s)

    def _submit(self, name: str) -> None:
        def on_end(end: TaskDone) -> None:
            if len(self._began_s) < self._left:
                self._submit(name)
            else:
                self._open.release()

        self.shell.submit(name, self._inputs[name], on_end=on_end)

    def close(self) -> None:
        """End the engine."""
        self.shell.close()


def overhead(report: Report, workload: Workload, quick: bool) -> None:
    """`step_overhead_*_us`, and `trace_overhead_p50_us`: what recording adds to the median."""
    progress("steps on the null executor")
    rounds = 2 if quick else 8
    for combination in Combination:
        loop = Loop(NullExecutor(), workload, combination=combination)
        loop.run(WARM_UP)
        plain: list[float] = []
        traced: list[float] = []
        for _ in range(rounds):
            plain += loop.run(CHUNK)
            recorder, stop = Recorder(), threading.Event()
            writer = threading.Thread(target=_drain, args=(recorder, stop))
            loop.shell.record(recorder)
            writer.start()
            traced += loop.run(CHUNK)
            loop.shell.record(None)
            stop.set()
            writer.join()
        loop.close()
        _note(report, combination, plain, traced)


def _drain(recorder: Recorder, stop: threading.Event) -> None:
    """Take what was recorded as the engine process's main thread does."""
    while not stop.wait(0.02):
        recorder.take()


def _note(report: Report, combination: Combination, plain: Sequence[float], traced: Sequence[float]) -> None:
    figures = {}
    for name, values in (("plain", plain), ("traced", traced)):
        for percent in (50, 99):
            figures[f"{name}_p{percent}_us"] = 1e6 * float(np.percentile(values, percent))
    row = {"steps": len(plain), "combination": combination.value, **figures}
    if combination is not Combination.ALONE:
        report.add({}, [row])
        return
    named = {
        "step_overhead_p50_us": figures["plain_p50_us"],
        "step_overhead_p99_us": figures["plain_p99_us"],
        "trace_overhead_p50_us": figures["traced_p50_us"] - figures["plain_p50_us"],
    }
    report.add(named, [row])


def growth(report: Report, workload: Workload, tiny: Workload, quick: bool) -> None:
    """`rss_growth_mib`: what an engine grows by, on the null and on the onnx executor; the larger counts."""
    steps = 8_000 if quick else 100_000
    loops: dict[str, Callable[[], Loop]] = {
        "null": lambda: Loop(NullExecutor(), workload),
        "onnx": lambda: Loop(OnnxExecutor(), tiny, partition="whole", scheduler="greedy"),
    }
    grown = {}
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
        grown[name] = rss_mib() - before_mib
        loop.close()
    rows = [{"executor": name, "steps": steps, "rss_growth_mib": value} for name, value in grown.items()]
    report.add({"rss_growth_mib": max(grown.values())}, rows)


def rss_mib() -> float:
    """Resident memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024

"""Swaps between plans with other blocks while tasks come at an even pace: what is lost, and the longest gap.

The stall of a swap is the longest time without a completion within a quarter of a second around it, less the
median time between completions there.
"""

import threading
import time
from collections.abc import Mapping
from itertools import pairwise
from statistics import median

import numpy as np

from benchmarks.ratios import zoo_inputs
from benchmarks.report import Report, progress
from stageloom.edge_agent.executor.onnx import OnnxExecutor
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.shared.artifact import Artifact
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.plan import Plan
from stageloom.shared.search.compose import ModelChoice, compose

PACE_S = 0.01
BETWEEN_S = 0.3
AROUND_S = 0.125


def _plans(name: str, artifact: Artifact) -> tuple[Plan, ...]:
    """The same model whole, and in the papers' blocks with stages of groups."""
    ways: Mapping[str, str] = {"whole": "sequential", "paper": "greedy"}
    return tuple(
        compose(
            [
                ModelChoice(
                    name=name,
                    artifact=artifact.digest,
                    graph=artifact.graph,
                    partition=partition,
                    replicas=2,
                )
            ],
            scheduler=scheduler,
            lanes=2,
        )
        for partition, scheduler in ways.items()
    )


class _Stream:
    """Tasks at an even pace from a thread of its own, and when each ended."""

    def __init__(self, shell: InProcessEngine, name: str, artifact: Artifact) -> None:
        self.ended_s: list[float] = []
        self.submitted = 0
        self.lost = 0
        self._shell, self._name, self._inputs = shell, name, zoo_inputs(artifact)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        next_s = time.monotonic()
        while not self._stop.wait(max(next_s - time.monotonic(), 0.0)):
            next_s += PACE_S
            self.submitted += 1
            self._shell.submit(self._name, self._inputs, on_end=self._end)

    def _end(self, end: TaskDone) -> None:
        if end.outcome is Outcome.COMPLETED:
            self.ended_s.append(end.ended_s)
        else:
            self.lost += 1

    def close(self) -> None:
        """Submit no more and wait for the last end."""
        self._stop.set()
        self._thread.join()
        give_up_s = time.monotonic() + 30.0
        while len(self.ended_s) + self.lost < self.submitted and time.monotonic() < give_up_s:
            time.sleep(0.01)
        self.lost = self.submitted - len(self.ended_s)

    def stall_ms(self, at_s: float) -> float:
        """Of a swap at this instant."""
        gaps = [
            after - before
            for before, after in pairwise(self.ended_s)
            if before < at_s + AROUND_S and after > at_s - AROUND_S
        ]
        return 1e3 * (max(gaps) - median(gaps)) if gaps else float("inf")


def part(report: Report, small: Mapping[str, Artifact], quick: bool) -> None:
    """`swap_lost_tasks` and `swap_stall_p50_ms`, `swap_stall_p99_ms`."""
    swaps = 10 if quick else 100
    progress(f"{swaps} swaps between plans with other blocks")
    name, artifact = next(iter(small.items()))
    with InProcessEngine(OnnxExecutor()) as shell:
        plans = _plans(name, artifact)
        artifacts = {artifact.digest: artifact}
        shell.activate(shell.load(plans[0], artifacts))
        stream = _Stream(shell, name, artifact)
        at_s = []
        for number in range(swaps):
            time.sleep(BETWEEN_S)
            key = shell.load(plans[(number + 1) % len(plans)], artifacts)
            at_s.append(time.monotonic())
            shell.activate(key)
        time.sleep(BETWEEN_S)
        stream.close()
    stalls_ms = [stream.stall_ms(at) for at in at_s]
    calm_ms = [stream.stall_ms(at - BETWEEN_S / 2) for at in at_s[1:]]
    figures = {
        "swap_lost_tasks": float(stream.lost),
        "swap_stall_p50_ms": float(np.percentile(stalls_ms, 50)),
        "swap_stall_p99_ms": float(np.percentile(stalls_ms, 99)),
    }
    between = float(np.percentile(calm_ms, 99))
    row = {"swaps": swaps, "tasks": stream.submitted, "stall_between_swaps_p99_ms": between}
    report.add(figures, [row])

"""TOP's figure 17 on a real agent: the variance of its queues over time, under every contestant's plan.

    python -m benchmarks.backlog [--json] [--quick] [--seconds S]

A planner, an agent and TOP's three models, 1 : 2 : 4 of their tasks, without deadlines, in queues that refuse
nothing. The loads are shares of what `auto`'s plan carries saturated: 0.7, which a good plan keeps up with,
and 1.5, which none does. Every plan meets the same Poisson arrivals. Rivals run on onnxruntime, one thread a
lane, schedulers' plans on as many lanes as there are cores, policies' on their own; `top` combines the
papers' blocks at one depth and searches for their stages; `auto` is what `plan create` makes without a
choice. Of each load and plan: `variance_end` in tasks squared, the mean of the last fifth, and `kept_up`,
tasks completed of those that came. A row per plan has the series, one point a second.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

from benchmarks import zoo
from benchmarks.pays.device import PaysDevice
from benchmarks.pays.load import Application
from benchmarks.runner import Report, progress, run
from stageloom import Client
from stageloom.edge_agent.bench.model_files import ModelUnderTest, prepare
from stageloom.planner.store.telemetry import telemetry_rows
from stageloom.shared.errors import StageloomError
from stageloom.shared.messages.telemetry import QueueSample, RowKind
from stageloom.shared.policy.queues import variance

MODELS: Final = ("inception_v3", "resnet50", "squeezenet")
WEIGHTS: Final = (1, 2, 4)
SHARES: Final = (0.7, 1.5)  # of what auto's plan carries
PROFILE_S: Final = 30.0
SATURATED_S: Final = 4.0
DEEP: Final = "queue-tasks=8192,queue-bytes=8000000000"
_FLUSH_S: Final = 2.5  # until telemetry of the last seconds is stored
_ROWS: Final = 100_000

_POLICIES: Final = ("instances", "synchronised", "round_robin", "batching")
_SCHEDULERS: Final = ("sequential", "ios", "opara", "nimble")
_TOP: Final = ("--scheduler", "beam", "--combine", "aligned")


def contestants() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """By name how models are cut, and what else `plan create` is told."""
    lanes = ("--lanes", str(len(os.sched_getaffinity(0))))
    for name in _SCHEDULERS:
        yield name, "whole", ("--scheduler", name, *lanes)
    for name in _POLICIES:
        yield name, "whole", ("--policy", name)
    yield "top", "paper", (*_TOP, *lanes)


class Arrivals:
    """Poisson arrivals of all models until they are ended, from a thread of its own; what came of them."""

    def __init__(self, client: Client, models: Sequence[ModelUnderTest], rate_per_s: float) -> None:
        self.submitted = self.completed = 0
        self._client, self._models, self._rate_per_s = client, models, rate_per_s
        self._feeds = [model.feeds(4) for model in models]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """No more; what waits is left to whoever closes the client."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        rng, at_s = np.random.default_rng(17), time.monotonic()
        share = np.asarray(WEIGHTS, np.float64) / sum(WEIGHTS)
        while True:
            at_s += float(rng.exponential(1.0 / self._rate_per_s))
            if self._stop.wait(max(at_s - time.monotonic(), 0.0)):
                return
            model = int(rng.choice(len(share), p=share))
            self.submitted += 1
            feeds = self._feeds[model][self.submitted % len(self._feeds[model])]
            try:
                future = self._client.submit(self._models[model].name, feeds)
            except StageloomError:
                continue
            future.add_done_callback(self._done)

    def _done(self, future: Any) -> None:
        self.completed += not future.cancelled() and future.exception() is None


def series(device: PaysDevice, since_us: int, until_us: int) -> tuple[list[float], list[float]]:
    """Seconds since the beginning, and the variance of the queues in tasks squared."""
    rows = device.store.read(
        telemetry_rows, device.device, [RowKind.QUEUE_SAMPLE], since_us=since_us, limit=_ROWS
    )
    waiting: dict[int, list[float]] = {}
    for row in rows:
        if isinstance(row.data, QueueSample) and row.at_us < until_us:
            waiting.setdefault(row.at_us, []).append(float(row.data.tasks))
    moments = sorted(waiting)
    at_s = [round((moment - since_us) / 1e6, 2) for moment in moments]
    return at_s, [float(f"{variance(waiting[moment]):.4g}") for moment in moments]


def observed(device: PaysDevice, plan: str, rate_per_s: float, seconds: float) -> dict[str, Any]:
    """A row of one plan under one load."""
    device.run_plan(plan)
    with Client(device.socket) as client:
        Application(client, device.models, [np.inf] * len(device.models)).warm_up(WEIGHTS)
        began_us = time.time_ns() // 1000
        arrivals = Arrivals(client, device.models, rate_per_s)
        time.sleep(seconds)
        arrivals.end()
        ended_us, completed = time.time_ns() // 1000, arrivals.completed
    time.sleep(_FLUSH_S)
    at_s, found = series(device, began_us, ended_us)
    return {
        "part": "backlog",
        "plan": plan,
        "rate_per_s": rate_per_s,
        "submitted": arrivals.submitted,
        "completed": completed,
        "at_s": at_s,
        "variance_tasks2": found,
        "variance_end": fmean(found[-max(len(found) // 5, 1) :]) if found else 0.0,
    }


def measure(report: Report, options: argparse.Namespace) -> None:
    """All plans under all loads."""
    seconds = options.seconds or (6.0 if options.quick else 25.0)
    with tempfile.TemporaryDirectory(prefix="stageloom-backlog-") as folder:
        models = [_model(name, Path(folder)) for name in MODELS]
        with PaysDevice(Path(folder, "device"), models, PROFILE_S) as device:
            progress("a planner, an agent, profiles")
            device.prepare()
            device.replanning(False)
            plans = ["auto", *_made(device)]
            device.planner("plan", "create", device.device, "--name", "auto", *_deep(device, ""))
            device.run_plan("auto")
            with Client(device.socket) as client:
                deadlines_s = [np.inf] * len(models)
                load = Application(client, models, deadlines_s)
                capacity_per_s = load.saturated_per_s(WEIGHTS, SATURATED_S)
            report.add({"capacity_per_s": capacity_per_s})
            for share in SHARES[1:] if options.quick else SHARES:
                for plan in plans:
                    row = observed(device, plan, share * capacity_per_s, seconds)
                    name = f"{share:g}.{plan}"
                    kept_up = row["completed"] / max(row["submitted"], 1)
                    report.add(
                        {f"variance_end.{name}": row["variance_end"], f"kept_up.{name}": kept_up},
                        [{"share": share, **row}],
                    )
                    progress(f"{name}: {kept_up:.2f} of {row['submitted']}, {row['variance_end']:.3g}")


def _made(device: PaysDevice) -> list[str]:
    """The names of the plans that could be made."""
    names = []
    for name, partition, how in contestants():
        progress(f"a plan by {name}")
        words = ("--device", device.device, "--name", name, "--executor", "onnx", *how)
        device.planner("plan", "create", *words, *_deep(device, f"partition={partition},"))
        names.append(name)
    return names


def _deep(device: PaysDevice, more: str) -> list[str]:
    return [word for model in device.models for word in ("--model", f"{model.name}:{more}{DEEP}")]


def _model(name: str, folder: Path) -> ModelUnderTest:
    file = folder / f"{name}.zoo"
    zoo.write(name, file, width=1.0)
    return prepare(name, file, {}, folder)


if __name__ == "__main__":
    own = {"--seconds": {"type": float, "metavar": "S", "help": "of each plan and load; default 25, quick 6"}}
    sys.exit(run(measure, ("onnxruntime", "openvino"), options=own))

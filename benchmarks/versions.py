"""What a new version of a model costs the tasks that come meanwhile.

    python -m benchmarks.versions [--json] [--quick] [--pairs N] [--seconds S] [--share X]

A planner and an agent serve a network of the zoo in one of two versions, whose weights hardly differ. Tasks
arrive as in `benchmarks.slo`: at a Poisson rate, here `--share` of what saturated lanes carry, and with a
deadline of five times a task's time alone, at least 20 ms. Each pair is three runs on the same arrivals, in
an order drawn anew: `still` nothing is pushed; `push` the other version is, a quarter of the run after its
begin, and activated without a comparison; `compare` it is pushed with `--compare-outputs`, so that both
versions run on inputs of these tasks first. The last two are each other's ablation. It takes half an hour,
with `--quick` five minutes.

`late_share.RUN` is the share of tasks that were answered late or expired, over all runs of that kind;
`late_over_still.RUN` the median over the pairs of that share less that of the run without a push.
`lost.RUN` and `refused.RUN` count tasks, `not_committed.RUN` pushes, those that failed among them.
`active_s.RUN` is the median time from a push until the planner knows that the version is committed, with its
probation of 5 s, and `p99_ms.RUN` the median of each run's 99th percentile, missing where one of them falls
on tasks without a result, whose share is `given_up`.
"""

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks import zoo
from benchmarks.pays.intervals import Tasks, p99_s
from benchmarks.pays.load import Application
from benchmarks.processes import DemoFailed, System
from benchmarks.runner import Report, progress, run
from stageloom import Client
from stageloom.edge_agent.bench.load import deadlines_s
from stageloom.edge_agent.bench.model_files import ModelUnderTest, prepare
from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.schema.plan import PlanPushRequest
from stageloom.planner.store.devices import device_info
from stageloom.shared.errors import StageloomError

RUNS: Final = ("still", "push", "compare")
_MODEL: Final = "net"
_NETWORK: Final = "squeezenet"
_PLANS: Final = ("first", "second")
_ENDS: Final = ("committed", "rejected", "rolled_back", "no_gain")
_TOLERANCE: Final = 0.05
_NUDGE: Final = 1.00001  # of the weights of the second version's first operator
_PATIENCE_S: Final = 120.0
_ALONE_TASKS: Final = 30
_OPTIONS: dict[str, dict[str, Any]] = {
    "--pairs": {"type": int, "metavar": "N", "help": "default 12, quick 2"},
    "--seconds": {"type": float, "metavar": "S", "help": "of each run; default 40, quick 25"},
    "--share": {"type": float, "default": 0.6, "metavar": "X", "help": "of capacity; default %(default)s"},
}


def measure(report: Report, options: argparse.Namespace) -> None:
    """All pairs on one device, whose versions take turns."""
    pairs = options.pairs or (2 if options.quick else 12)
    seconds = options.seconds or (25.0 if options.quick else 40.0)
    order = random.Random(1)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="stageloom-versions-") as folder,
            VersionedDevice(Path(folder)) as device,
        ):
            device.prepare()
            with Client(device.socket) as client:
                load = device.load(client)
                rate_per_s = options.share * load.saturated_per_s([1.0], 3.0)
                progress(f"{rate_per_s:.1f} tasks a second")
                for pair in range(pairs):
                    for kind in order.sample(RUNS, len(RUNS)):
                        row = one_run(device, load, kind, rate_per_s, seconds, pair)
                        progress(f"pair {pair + 1} of {pairs}, {kind}: {row['late_share']:.4f} late")
                        report.add({}, [{"part": "run", **row, "rate_per_s": rate_per_s}])
    finally:
        report.add(figures_of(report.rows))


class VersionedDevice(System):
    """Serves one of two versions of a model."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "bench", {}, patience_s=_PATIENCE_S, STAGELOOM_PLANNER_SEARCH="local")
        self._model: ModelUnderTest | None = None
        self._serving = 0  # index of the plan that runs

    def prepare(self) -> None:
        """Start, import both versions, make a plan of each and run the first.

        Raises:
            DemoFailed: a step did not work.
        """
        self.start()
        self.planner("device", "replan", self.device, "--off")
        files = self.folder / "files"
        first, second = files / "first.onnx", files / "second.onnx"
        zoo.write(_NETWORK, first)
        write_near(first, second)
        self._model = prepare(_MODEL, first, {}, self.folder / "prepared")
        for number, (name, file) in enumerate(zip(_PLANS, (first, second), strict=True), 1):
            self.planner("model", "add", str(file), "--name", _MODEL)
            model = f"{_MODEL}@{number}:replicas=2"
            self.planner("plan", "create", "--model", model, "--lanes", "2", "--name", name)
        self.planner("plan", "push", self.device, _PLANS[0], "--now")
        self.until("the first version to run", lambda: self.state() == "committed")

    def load(self, client: Client) -> Application:
        """The application, with deadlines by what a task takes alone."""
        assert self._model is not None
        feeds = self._model.feeds(1)[0]
        taken_s = []
        for _ in range(_ALONE_TASKS):
            began_s = time.monotonic()
            client.run(_MODEL, feeds)
            taken_s.append(time.monotonic() - began_s)
        found = deadlines_s({_MODEL: median(taken_s)})
        return Application(client, [self._model], [found[_MODEL]])

    def push_other(self, *, compare: bool) -> str:
        """Push the version that does not run, without a process that would disturb; how that ended.

        Raises:
            DemoFailed: the planner did not take it, or it was not decided in time.
            StageloomError: the planner did not answer.
        """
        other = 1 - self._serving
        request = PlanPushRequest(
            plan=_PLANS[other],
            devices=(self.device,),
            compare_outputs=_TOLERANCE if compare else None,
        )
        with PlannerClient(data_dir=self.folder / "planner") as planner:
            pushed = planner.call(routes.PLAN_PUSH, request).pushed[0]
        if pushed.cause:
            raise DemoFailed(pushed.cause)
        self.until("the version to be decided", lambda: self.state(pushed.generation) in _ENDS)
        ended = self.state(pushed.generation)
        if ended == "committed":
            self._serving = other
        return ended

    def state(self, generation: int = 0) -> str:
        """Of this generation, or a later one; empty while the device has said nothing of it."""
        report = self.store.read(device_info, self.device).report
        known = report.generation >= generation and report.state is not None
        return report.state.value if known and report.state is not None else ""


def write_near(file: Path, target: Path) -> None:
    """The same network with slightly other weights."""
    model = onnx.load(file)
    weights = next(one for one in model.graph.initializer if len(one.dims) > 1)
    nudged = numpy_helper.to_array(weights) * np.float32(_NUDGE)
    weights.CopyFrom(numpy_helper.from_array(nudged, weights.name))
    onnx.save(model, target)


def one_run(
    device: VersionedDevice, load: Application, kind: str, rate_per_s: float, seconds: float, pair: int
) -> dict[str, Any]:
    """One run of arrivals; a push decides within it or soon after."""

    def push() -> tuple[str, float | None]:
        if kind == "still":
            return "", None
        time.sleep(seconds / 4)
        began_s = time.monotonic()
        ended = device.push_other(compare=kind == "compare")
        return ended, time.monotonic() - began_s

    before = load.outcomes.copy()
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(push)
        result = load.phase([1.0], rate_per_s, seconds, seed=pair)
        while not pushing.done():
            load.phase([1.0], rate_per_s, 1.0, seed=pair)  # a comparison needs tasks; these count for nothing
        try:
            ended, active_s = pushing.result()
        except (DemoFailed, StageloomError) as error:
            ended, active_s = f"failed: {error}", None
    outcomes = load.outcomes - before
    tasks = Tasks.of(result, load.deadlines_s)
    return {
        "run": kind,
        "pair": pair,
        "tasks": len(tasks.in_time),
        "late": int(np.count_nonzero(~tasks.in_time)),
        "late_share": float(np.mean(~tasks.in_time)),
        "lost": outcomes["lost"],
        "refused": outcomes["refused"],
        "given_up": float(np.mean(~tasks.answered)),
        "p99_ms": 1e3 * p99_s(tasks),
        "ended": ended,
        "active_s": active_s,
    }


def figures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the rows of all runs say together."""
    figures: dict[str, float] = {}
    still = {row["pair"]: row["late_share"] for row in rows if row["run"] == "still"}
    for kind in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == kind]
        figures[f"late_share.{kind}"] = sum(row["late"] for row in own) / sum(row["tasks"] for row in own)
        figures[f"lost.{kind}"] = sum(row["lost"] for row in own)
        figures[f"refused.{kind}"] = sum(row["refused"] for row in own)
        if not any(math.isnan(row["p99_ms"]) for row in own):
            figures[f"p99_ms.{kind}"] = median(row["p99_ms"] for row in own)
        if kind == "still":
            continue
        if more := [row["late_share"] - still[row["pair"]] for row in own if row["pair"] in still]:
            figures[f"late_over_still.{kind}"] = median(more)
        active_s = [row["active_s"] for row in own if row["ended"] == "committed"]
        figures[f"not_committed.{kind}"] = len(own) - len(active_s)
        if active_s:
            figures[f"active_s.{kind}"] = median(active_s)
    return figures


if __name__ == "__main__":
    sys.exit(run(measure, ("onnxruntime", "numpy", "onnx"), options=_OPTIONS))

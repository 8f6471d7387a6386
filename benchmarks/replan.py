"""From a trigger on the device to a proven plan that is active there, on loopback.

    python -m benchmarks.replan [--quick] [--json]

A planner and an agent, as processes. Plan A of two models puts operators side by side and pays for
barriers, plan B does not; both were committed on the device before, so both are proven there. Again and
again: A is pushed by order, a backlog of one model makes the queues diverge and stays, the agent's trigger
fires once it is two seconds old, and the planner answers with B, at launch intervals for the load, unless it
finds a plan that is cheaper still: that one has to win a trial first, and is tried again only after an hour
if it does not.

`proven_active_*_ms` is from the trigger to the first launch under a proven plan, by the device's clock,
as the planner keeps it; rounds with a trial do not count in it. `stall_longest_ms`: a steady stream of tasks
is served all the time; of all swaps, to A and to B, the longest gap between two of its completions that falls
into a second around one, less the stream's median gap. Around those to A the command that pushes it takes
part of the cores. `lost_tasks`: tasks of the stream and of the backlogs that ended in any other way than
completed, and those of the stream that did not end within ten seconds.

From then on nothing else is started here: the planner's store is read in this process now and then,
since a command that starts Python every few milliseconds would take the cores that are measured.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import zoo
from benchmarks.processes import System
from benchmarks.runner import Report, percentile, progress, run
from stageloom import Client
from stageloom.planner.schema.replan import ReplanInfo
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.replans import replan_infos
from stageloom.shared.errors import StageloomError

MODELS = ("heavy", "light")
BACKLOG = 40
STREAM_PER_S = 50.0
PATIENCE_S = 60.0
ANSWER_S = 10.0
AGENT_SETTINGS = {
    "probation_s": 0.3,
    "alarm_threshold": 1e-4,
    "alarm_cooldown_s": 0.1,
    "stats_interval_s": 0.2,
    "guard": {"length_s": 1.0},
}


class Stream:
    """One task after another at an even pace, once it is started; when each completed, by the wall clock in
    microseconds."""

    def __init__(self, client: Client, inputs: dict[str, Any]) -> None:
        self.ended_us: list[int] = []
        self._tasks: list[Future[Any]] = []  # whose fate was not asked for yet
        self._client, self._inputs = client, inputs
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def take_lost(self, within_s: float) -> int:
        """Tasks since the last call that failed, or are not answered within so many seconds from now."""
        tasks = self._tasks[:]
        del self._tasks[: len(tasks)]  # others are appended all the time
        answered, silent = wait(tasks, within_s)
        return len(silent) + sum(one.exception() is not None for one in answered)

    def _take(self, future: "Future[Any]") -> None:
        if future.exception() is None:
            self.ended_us.append(time.time_ns() // 1000)

    def _run(self) -> None:
        while not self._stop.wait(1.0 / STREAM_PER_S):
            self.submit()

    def submit(self) -> None:
        """One task; an error counts as its answer."""
        task: Future[Any] = Future()
        try:
            task = self._client.submit("light", self._inputs)
        except StageloomError as error:
            task.set_exception(error)
        task.add_done_callback(self._take)
        self._tasks.append(task)


def gap_ms(ended_us: Sequence[int], around_us: int, now_us: int) -> float:
    """The longest gap between completions, and from the last one until now, any part of which lies within a
    second around a moment, less the median of all gaps."""
    gaps = list(pairwise([*ended_us, now_us]))
    near = [
        after - before
        for before, after in gaps
        if before < around_us + 1_000_000 and after > around_us - 1_000_000
    ]
    return (max(near) - median(after - before for before, after in gaps)) / 1e3 if near else 0.0


class Backlog:
    """So many tasks of the heavy model are always open, each followed by another one, until it is ended."""

    def __init__(self, client: Client, inputs: dict[str, Any]) -> None:
        self.lost = 0
        self._client, self._inputs = client, inputs
        self._ended = threading.Event()
        self._open = threading.Semaphore(0)
        for _ in range(BACKLOG):
            self._submit()

    def end(self) -> None:
        """No more; returns when the last one has ended.

        Raises:
            TimeoutError: one does not.
        """
        self._ended.set()
        for _ in range(BACKLOG):
            if not self._open.acquire(timeout=PATIENCE_S):
                raise TimeoutError("a task of the backlog did not end")

    def _submit(self) -> None:
        self._client.submit("heavy", self._inputs).add_done_callback(self._done)

    def _done(self, future: "Future[Any]") -> None:
        self.lost += future.exception() is not None
        if self._ended.is_set():
            self._open.release()
        else:
            self._submit()


class Bench(System):
    """The system with plans A and B of two models, both proven."""

    def prepare(self) -> None:
        """Planner, agent, models, plans, profile."""
        self.start()
        for name in MODELS:
            zoo.write("squeezenet", self.folder / f"{name}.onnx", width=0.5 if name == "heavy" else 0.25)
            self.planner("model", "add", f"{name}={self.folder / name}.onnx")
        chosen = [word for model in MODELS for word in ("--model", model)]
        for plan, scheduler in (("A", "greedy"), ("B", "sequential")):
            self.planner("plan", "create", "--name", plan, "--scheduler", scheduler, *chosen)
            self.run_plan(plan)
        self.planner("device", "profile", self.device, "--budget", "10", "--wait")

    def run_plan(self, name: str) -> None:
        """Push a plan without a trial and wait until it is committed."""
        self.committed(self.planner("plan", "push", self.device, name, "--now")["generation"])

    def committed(self, generation: int, ends: tuple[str, ...] = ("committed",)) -> None:
        """Wait until the device has committed a generation, or another of its `ends` came."""

        def is_committed() -> bool:
            report = self.store.read(device_info, self.device).report
            state = report.state.value if report.state is not None else ""
            return report.generation >= generation and state in ends

        self.until(f"generation {generation} to be committed", is_committed)

    def active(self, after: int) -> ReplanInfo | None:
        """The first re-plan after `after` whose plan became active."""
        for found in reversed(self.store.read(replan_infos, self.device, limit=8)):
            if found.replan > after and found.trigger_to_active_ms is not None:
                return found
        return None


def rounds(bench: Bench, count: int) -> Iterator[dict[str, Any]]:
    """Per round the times of one re-plan, and the tasks lost since the one before."""
    with Client(bench.socket) as client:
        inputs = {name: _inputs(client, name) for name in MODELS}
        stream = Stream(client, inputs["light"])
        stream.start()
        for number in range(count):
            bench.planner("device", "replan", bench.device, "--off")
            bench.run_plan("A")
            pushed_us = time.time_ns() // 1000
            stall_back_ms = gap_ms(stream.ended_us, pushed_us, pushed_us)
            after = max(
                (found.replan for found in bench.store.read(replan_infos, bench.device, limit=1)), default=0
            )
            bench.planner("device", "replan", bench.device, "--on")
            backlog = Backlog(client, inputs["heavy"])
            found = bench.until("a better plan to be active", partial(bench.active, after))
            backlog.end()
            active_ms = found.trigger_to_active_ms
            swap_us = found.at_us + round(1e3 * active_ms)
            row = {
                "round": number,
                "plan": found.plan,
                "how": found.how,
                "trigger_to_active_ms": active_ms,
                "stall_ms": gap_ms(stream.ended_us, swap_us, time.time_ns() // 1000),
                "stall_back_ms": stall_back_ms,
            }
            progress(f"round {number}: {active_ms:.0f} ms, {found.how}")
            bench.committed(found.generation, ("committed", "rolled_back"))
            yield row | {"lost": backlog.lost + stream.take_lost(ANSWER_S)}
        stream.close()


def _inputs(client: Client, model: str) -> dict[str, Any]:
    return {one.name: np.zeros(one.shape, np.float32) for one in client.models()[model].inputs}


def measure(report: Report, options: argparse.Namespace) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Bench(
            Path(folder), "bench", AGENT_SETTINGS, patience_s=PATIENCE_S, STAGELOOM_PLANNER_SEARCH="local"
        ) as bench,
    ):
        progress("starting a planner and an agent, profiling")
        bench.prepare()
        try:
            for row in rounds(bench, 5 if options.quick else 30):
                report.add({}, [row])
        finally:
            report.add(figures_of(report.rows))
    if not report.figures["proven_rounds"]:
        raise SystemExit("no plan was proven on the device: every round needed a trial")


def figures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the rounds there are; times to a proven plan only where one was."""
    times = [row["trigger_to_active_ms"] for row in rows if row["how"] == "proven"]
    found = {f"proven_active_p{percent}_ms": percentile(times, percent) for percent in (50, 99) if times}
    return found | {
        "stall_longest_ms": max((max(row["stall_ms"], row["stall_back_ms"]) for row in rows), default=0.0),
        "lost_tasks": float(sum(row["lost"] for row in rows)),
        "rounds": float(len(rows)),
        "proven_rounds": float(len(times)),
    }


if __name__ == "__main__":
    sys.exit(run(measure, ["onnxruntime", "pyzmq", "msgspec", "sqlalchemy"]))

"""From a trigger on the device to a proven plan that is active there, on loopback.

    python -m benchmarks.replan [--quick] [--json]

A planner and an agent, as processes. Plan A of two models puts operators side by side and pays for barriers,
plan B does not; both were committed on the device before, so both are proven there. Again and again: A is
pushed by order, a burst of tasks makes the queues diverge, the agent's trigger fires, and the planner answers
with B, at launch intervals for the load, unless it finds a plan that is cheaper still: that one has to win a
trial first, and is tried again only after an hour if it does not.

`proven_active_*_ms` is from the trigger to the first launch under a proven plan, by the device's clock, as
the planner keeps it; rounds with a trial do not count in it. `stall_p99_ms`: a steady stream of tasks is
served all the time; of each swap, the longest gap between two completions within a second around it, less the
median gap. `lost_tasks`: tasks that ended in any other way than completed.

From the burst on nothing else is started here: the planner's store is read in this process now and then,
since a command that starts Python every few milliseconds would take the cores that are measured.
"""

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import zoo
from benchmarks.demo.processes import Lines, Processes
from benchmarks.report import Report, arguments, emit, progress
from stageloom import Client
from stageloom.edge_agent.config import SETTINGS_NAME
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.replans import replan_infos
from stageloom.planner.store.store import ReadStore
from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.admin import ReplanInfo

DEVICE = DeviceId("bench")
MODELS = ("heavy", "light")
BURST = 40
STREAM_PER_S = 50.0
PATIENCE_S = 60.0
LOOK_S = 0.1
AGENT_SETTINGS = {
    "probation_s": 0.3,
    "alarm_threshold": 1e-4,
    "alarm_cooldown_s": 0.1,
    "stats_interval_s": 0.2,
    "guard": {"length_s": 1.0},
}


class Stream:
    """One task after another at an even pace; when each ended, by the wall clock in microseconds."""

    def __init__(self, client: Client, inputs: dict[str, Any]) -> None:
        self.ended_us: list[int] = []
        self.lost = 0
        self._client, self._inputs = client, inputs
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Submit no more."""
        self._stop.set()
        self._thread.join()

    def take(self, future: "Future[Any]") -> None:
        """Count how a task ended."""
        if future.exception() is None:
            self.ended_us.append(time.time_ns() // 1000)
        else:
            self.lost += 1

    def _run(self) -> None:
        while not self._stop.wait(1.0 / STREAM_PER_S):
            self._submit()

    def _submit(self) -> None:
        try:
            self._client.submit("light", self._inputs).add_done_callback(self.take)
        except StageloomError:
            self.lost += 1

    def gap_ms(self, around_us: int) -> float:
        """The longest gap between completions within a second around a moment, less the median gap."""
        gaps = [
            (after - before) / 1e3
            for before, after in zip(self.ended_us, self.ended_us[1:], strict=False)
            if abs(after - around_us) < 1_000_000
        ]
        return max(gaps) - median(gaps) if gaps else 0.0


class Bench:
    """The processes, and the commands that a user would type."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self.processes = folder, processes
        self.socket = Path(processes.environment["STAGELOOM_AGENT_SOCKET"])

    def planner(self, *words: str) -> Any:
        """One `stageloom` command."""
        return self.processes.call("-".join(words[:2]), "stageloom.planner", *words, "--json")

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Poll until it is true."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            self.processes.require_alive(["planner", "agent"])
            if time.monotonic() > give_up_s:
                raise SystemExit(
                    f"waited {PATIENCE_S:g} s for {what}; see the logs in {self.folder / 'logs'}"
                )
            time.sleep(LOOK_S)
        return found

    def start(self) -> None:
        """Planner, agent, models, plan A, profile."""
        up = self.processes.start("planner", "stageloom.planner", "up", "--listen", "127.0.0.1:0", "--json")
        assert up.stdout is not None
        ready = Lines(up.stdout)
        while ready.latest is None:
            self.processes.require_alive(["planner"])
            time.sleep(0.05)
        token = self.planner("device", "token", DEVICE)["token"]
        self.processes.call("agent-join", "stageloom.edge_agent", "join", token)
        settings = Path(self.processes.environment["STAGELOOM_AGENT_HOME"]) / SETTINGS_NAME
        settings.write_text(json.dumps(AGENT_SETTINGS))
        agent = self.processes.start("agent", "stageloom.edge_agent", "run")
        assert agent.stdout is not None
        Lines(agent.stdout)
        self.store = ReadStore.open(self.folder / "planner")
        self.until("the agent", lambda: self.planner("device", "show", DEVICE)["online"])
        for name in MODELS:
            zoo.write("squeezenet", self.folder / f"{name}.onnx", width=0.5 if name == "heavy" else 0.25)
            self.planner("model", "add", f"{name}={self.folder / name}.onnx")
        chosen = [word for model in MODELS for word in ("--model", model)]
        self.planner("plan", "create", "--name", "A", "--scheduler", "greedy", *chosen)
        self.planner("plan", "create", "--name", "B", "--scheduler", "sequential", *chosen)
        self.run_plan("A")
        self.run_plan("B")
        self.planner("device", "profile", DEVICE, "--budget", "10", "--wait")

    def run_plan(self, name: str) -> None:
        """Push a plan without a trial and wait until it is committed."""
        pushed = self.planner("plan", "push", DEVICE, name, "--now")
        self.committed(pushed["generation"])

    def committed(self, generation: int, ends: tuple[str, ...] = ("committed",)) -> None:
        """Wait until the device has committed a generation, or another of its `ends` came."""

        def is_committed() -> bool:
            report = self.store.read(device_info, DEVICE).report
            state = report.state.value if report.state is not None else ""
            return report.generation >= generation and state in ends

        self.until(f"generation {generation} to be committed", is_committed)

    def newest(self) -> int:
        """The number of the newest re-plan, 0 where there is none."""
        found = self.store.read(replan_infos, DEVICE, limit=1)
        return found[0].replan if found else 0

    def active(self, after: int) -> ReplanInfo | None:
        """The first re-plan after `after` whose plan became active."""
        for one in reversed(self.store.read(replan_infos, DEVICE, limit=8)):
            if one.replan > after and one.trigger_to_active_ms is not None:
                return one
        return None

    def close(self) -> None:
        """Close the planner's store."""
        self.store.close()


def rounds(bench: Bench, count: int) -> tuple[list[dict[str, Any]], int]:
    """Per round the times of one re-plan, and the tasks lost in all of them."""
    rows: list[dict[str, Any]] = []
    with Client(bench.socket) as client:
        inputs = {name: _inputs(client, name) for name in MODELS}
        stream = Stream(client, inputs["light"])
        for number in range(count):
            bench.planner("device", "replan", DEVICE, "--off")
            bench.run_plan("A")
            after = bench.newest()
            bench.planner("device", "replan", DEVICE, "--on")
            burst = [client.submit("heavy", inputs["heavy"]) for _ in range(BURST)]
            for future in burst:
                future.add_done_callback(stream.take)
            found = bench.until("a better plan to be active", partial(bench.active, after))
            for future in burst:
                future.exception(PATIENCE_S)
            active_ms = found.trigger_to_active_ms
            rows.append(
                {
                    "round": number,
                    "plan": found.plan,
                    "how": found.how,
                    "trigger_to_active_ms": active_ms,
                    "stall_ms": stream.gap_ms(found.at_us + round(1e3 * active_ms)),
                }
            )
            progress(f"round {number}: {active_ms:.0f} ms, {found.how}")
            bench.committed(found.generation, ("committed", "rolled_back"))
        stream.close()
        lost = stream.lost
    return rows, lost


def _inputs(client: Client, model: str) -> dict[str, Any]:
    return {one.name: np.zeros(one.shape, np.float32) for one in client.models()[model].inputs}


def main() -> None:
    options = arguments("From a trigger to a proven plan that is active.").parse_args()
    report = Report("replan")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "agent").mkdir()
        environment = {
            "STAGELOOM_HOME": str(folder / "planner"),
            "STAGELOOM_AGENT_HOME": str(folder / "agent"),
            "STAGELOOM_AGENT_SOCKET": str(folder / "agent" / "run" / "agent.sock"),
            "STAGELOOM_PLANNER_SEARCH": "local",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        with Processes(folder / "logs", environment) as processes:
            bench = Bench(folder, processes)
            progress("starting a planner and an agent, profiling")
            bench.start()
            rows, lost = rounds(bench, 5 if options.quick else 30)
            bench.close()
    times = [row["trigger_to_active_ms"] for row in rows if row["how"] == "proven"]
    if not times:
        raise SystemExit("no plan was proven on the device: every round needed a trial")
    figures = {
        "proven_active_p50_ms": float(np.quantile(times, 0.5)),
        "proven_active_p99_ms": float(np.quantile(times, 0.99)),
        "stall_p99_ms": float(np.quantile([row["stall_ms"] for row in rows], 0.99)),
        "lost_tasks": float(lost),
        "rounds": float(len(rows)),
        "proven_rounds": float(len(times)),
    }
    report.add(figures, rows)
    emit(report, as_json=options.json, packages=["onnxruntime", "pyzmq", "msgspec", "sqlalchemy"])


if __name__ == "__main__":
    main()

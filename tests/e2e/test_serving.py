"""Planner, agent and applications together: what an application sees while plans and processes change."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stageloom import Client
from stageloom.edge_agent.reporting.status import AgentStatus
from stageloom.shared.errors import AgentRestarted, TaskCancelled, TaskExpired, TaskRefused
from tests.e2e.application import WINDOW
from tests.e2e.fleet import Device
from tests.e2e.networks import reference, rows, write_chain
from tests.planner.processes import ROOT, until


def _totals(device: Device) -> dict[str, int]:
    """The agent's books over all models."""
    names = ("submitted", "completed", "refused", "failed", "cancelled", "expired", "open")
    tasks = device.running.now().tasks
    return {name: sum(getattr(one, name) for one in tasks) for name in names}


@pytest.mark.promise("application-uses-client-readme")
def test_application_submits_cancels_and_sets_deadlines_as_the_readme_shows(
    device: Device, files: dict[str, Path]
) -> None:
    """An application on a device that a planner manages.

    1. The planner pushes a plan of two networks; the device fetches and commits it.
    2. Results are those of the ONNX files in onnxruntime, for one model and for an input shared by both.
    3. While the engine stands still, a task is cancelled, one passes its deadline, and one with priority is
       taken: each ends in its own way once the engine goes on.
    4. A wrong model name and a wrong shape are refused with what would be right.
    5. The agent's books hold every task exactly once.
    """
    device.start()
    device.run("whole")
    row = rows(1)[0]
    expected = {name: reference(file).run(None, {"input": row})[0] for name, file in files.items()}
    with Client(device.running.socket) as client:
        future = client.submit("alpha", {"input": row}, deadline_s=30.0)
        np.testing.assert_allclose(future.result()["output"], expected["alpha"], rtol=1e-3, atol=1e-4)
        shared = client.run(["alpha", "beta"], {"input": row}, timeout_s=60)
        for name in files:
            np.testing.assert_allclose(shared[name]["output"], expected[name], rtol=1e-3, atol=1e-4)

        engine = device.running.now().engine.pid
        assert engine is not None
        os.kill(engine, signal.SIGSTOP)
        try:
            late = client.submit("beta", {"input": row}, deadline_s=1e-6)
            dropped = client.submit("beta", {"input": row})
            assert dropped.cancel()
            urgent = client.submit("beta", {"input": row}, priority=5)
        finally:
            os.kill(engine, signal.SIGCONT)
        with pytest.raises(TaskExpired):
            late.result(60)
        np.testing.assert_allclose(urgent.result(60)["output"], expected["beta"], rtol=1e-3, atol=1e-4)
        try:
            dropped.result(60)
        except TaskCancelled:
            pass  # unless it was complete before the word to drop it came: then that is how it ended
        with pytest.raises(TaskRefused, match="alpha"):
            client.submit("gamma", {"input": row})
        with pytest.raises(TaskRefused, match="1x4x12x12, not 1x4x5x12"):
            client.run("alpha", {"input": row[:, :, :5]}, timeout_s=60)
    totals = _totals(device)
    assert totals["submitted"] == sum(n for name, n in totals.items() if name != "submitted")
    assert (totals["expired"], totals["failed"], totals["open"]) == (1, 0, 0)


@contextmanager
def _load(
    device: Device, names: list[str], given: Any, deadline_s: float | None = None
) -> Iterator[dict[int, tuple[str, Any]]]:
    """Threads that keep tasks in flight; on leaving, `ended` holds each task's model and result."""
    ended: dict[int, tuple[str, Any]] = {}
    numbers, stop = count(), threading.Event()

    def go(client: Client, name: str) -> None:
        while not stop.is_set():
            burst = [
                (
                    n := next(numbers),
                    client.submit(name, {"input": given[n % len(given)]}, deadline_s=deadline_s),
                )
                for _ in "1234"
            ]
            for number, future in burst:
                error = future.exception(60)
                ended[number] = (name, future.result()["output"] if error is None else error)

    with Client(device.running.socket) as client:
        threads = [threading.Thread(target=go, args=(client, name)) for name in names]
        for thread in threads:
            thread.start()
        try:
            yield ended
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
    assert sorted(ended) == list(range(len(ended))), "a task never ended"


def _grown(ended: dict[int, tuple[str, Any]]) -> Callable[[], bool]:
    enough = len(ended) + 50
    return lambda: len(ended) > enough


@pytest.mark.more
@pytest.mark.promise("swaps-between-plans-other")
def test_push_of_a_plan_with_other_blocks_under_load_loses_no_task(
    device: Device, files: dict[str, Path]
) -> None:
    """Three swaps while both networks are busy.

    1. The device runs `whole`: one block per model, one replica.
    2. Threads keep both models busy.
    3. `cut` (other blocks, two replicas, two lanes) is pushed and committed; then `whole`, then `cut` again.
    4. Every task completed, with the right output for its input, and each was counted once.
    5. Telemetry: produced = stored + dropped.
    """
    device.start()
    device.run("whole")
    given = rows(32)
    sessions = {name: reference(file) for name, file in files.items()}
    with _load(device, ["alpha", "beta"], given) as ended:
        for plan in ("cut", "whole", "cut"):
            device.run(plan)
            until(_grown(ended))
    wrong = [result for _, result in ended.values() if isinstance(result, Exception)]
    assert not wrong, wrong[:3]
    expected = {name: [s.run(None, {"input": row})[0] for row in given] for name, s in sessions.items()}
    for number, (name, output) in ended.items():
        np.testing.assert_allclose(output, expected[name][number % len(given)], rtol=1e-3, atol=1e-4)
    totals = _totals(device)
    assert totals["submitted"] == totals["completed"] == len(ended)
    device.drain_telemetry()


@pytest.mark.promise("version-of-a-model")
def test_push_of_another_version_under_load_loses_refuses_and_delays_no_task(
    device: Device, files: dict[str, Path], tmp_path: Path
) -> None:
    """A model's file changes while its tasks come.

    1. The device runs version 1 of a model in several blocks; a thread keeps it busy with tasks that have a
       deadline.
    2. Other weights are added under the same name, and a plan of them is pushed: version 2 serves.
    3. The plan of version 1 is pushed again.
    4. Every task completed in time, with the output of one of the versions; they are of 1, then of 2, then of
       1, and the agent says which version it serves.
    """
    fleet = device.fleet
    newer = write_chain(tmp_path / "newer.onnx", seed=77)
    fleet.do("model", "add", str(files["alpha"]), "--name", "gamma")
    fleet.make_plan("first", "--model", "gamma:partition=base")
    fleet.do("model", "add", str(newer), "--name", "gamma")
    fleet.make_plan("second", "--model", "gamma:partition=base")
    given = rows(8)
    device.start()
    device.run("first")
    served = []
    with _load(device, ["gamma"], given, deadline_s=30.0) as ended, Client(device.running.socket) as client:
        for plan in ("first", "second", "first"):
            device.run(plan)
            served.append(client.models()["gamma"].version)
            until(_grown(ended))
    assert served == [1, 2, 1]
    detail = fleet.ask("model", "show", "gamma@1")
    assert device.name in detail["running_on"]  # beside those that run the same file under another name
    expected = [[reference(f).run(None, {"input": row})[0] for row in given] for f in (files["alpha"], newer)]
    ran = []
    for number in range(len(ended)):
        result = ended[number][1]
        assert not isinstance(result, Exception), result
        close = [np.allclose(result, one[number % len(given)], rtol=1e-3, atol=1e-4) for one in expected]
        assert close.count(True) == 1, "the output of neither version, or of both"
        ran.append(close.index(True) + 1)
    assert ran[0] == 1
    changes = sum(a != b for a, b in pairwise(ran))
    assert changes == 2, "each swap was one moment in the order of the tasks"
    totals = _totals(device)
    assert totals["submitted"] == totals["completed"] == len(ended)


def _all_three_have_open_tasks(status: AgentStatus) -> bool:
    """Two of them use alpha, so more than one window's worth of its tasks is of both."""
    opened = {one.model: one.open for one in status.tasks}
    return opened["alpha"] > WINDOW and opened["beta"] > 0


@pytest.mark.promise("kill-9-engine-while")
def test_tasks_of_three_processes_end_once_while_the_engine_is_killed(device: Device) -> None:
    """The engine process dies under the tasks of three applications.

    1. Three application processes keep tasks in flight.
    2. The engine is frozen until all three have tasks open, then killed with SIGKILL.
    3. The agent's main process lives on, starts another engine, and the planner never saw it go.
    4. The applications go on without connecting again; each submitted task ended in exactly one way, those in
       flight with AgentRestarted, and the agent's own books agree with the applications'.
    """
    device.start()
    device.run("cut")
    with ExitStack() as stack:
        applications = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.e2e.application", str(device.running.socket), model],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                )
            )
            for model in ("alpha", "beta", "alpha")
        ]
        for one in applications:
            stack.callback(one.kill)
            assert one.stdout is not None
            assert one.stdout.readline() == "serving\n"
        before = device.running.now()
        assert before.engine.pid is not None
        os.kill(before.engine.pid, signal.SIGSTOP)
        device.running.until(_all_three_have_open_tasks, "all three have tasks in flight")
        os.kill(before.engine.pid, signal.SIGKILL)
        device.running.until(lambda s: s.engine.pid != before.engine.pid and s.ready, "another engine serves")
        served = _totals(device)["completed"]
        device.running.until(lambda s: sum(t.completed for t in s.tasks) > served + 100, "they go on")
        counts = []
        for one in applications:
            out, _ = one.communicate(timeout=60)
            counts.append(json.loads(out))
            assert one.returncode == 0
    after = device.running.now()
    assert after.pid == before.pid
    assert after.engine.restarts == before.engine.restarts + 1
    for one_count in counts:
        endings = {name: number for name, number in one_count.items() if name != "submitted"}
        assert one_count["submitted"] == sum(endings.values())
        assert set(endings) <= {"completed", AgentRestarted.__name__, TaskRefused.__name__}
    totals = _totals(device)
    assert sum(one["submitted"] for one in counts) == totals["submitted"]
    assert sum(one["completed"] for one in counts) == totals["completed"]
    assert sum(one.get("AgentRestarted", 0) for one in counts) == totals["failed"]
    assert totals["failed"] > WINDOW
    assert device.seen()["online"]
    device.drain_telemetry()


def _kill_engine(device: Device, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    device.running.until(lambda s: s.engine.pid != pid, "its end is noticed")


@pytest.mark.promise("kill-9-engine-while")
@pytest.mark.more
def test_engine_that_crashes_again_and_again_falls_back_and_the_planner_is_told(device: Device) -> None:
    """A plan that takes the engine down.

    1. `whole` is committed, then `cut`.
    2. Under `cut` the engine dies three times in a row.
    3. The agent condemns `cut`, runs `whole` again and serves.
    4. The planner sees what really runs: the other digest, of origin fallback.
    """
    device.start()
    whole = device.run("whole")
    cut = device.run("cut")
    assert cut != whole
    for _ in range(3):
        status = device.running.until(lambda s: s.ready, "the engine serves")
        assert status.plan is not None
        assert status.plan.digest == cut
        assert status.engine.pid is not None
        _kill_engine(device, status.engine.pid)
    status = device.running.until(lambda s: s.ready, "it serves again")
    assert status.plan is not None
    assert status.plan.digest == whole
    with Client(device.running.socket) as client:
        assert client.run("beta", {"input": rows(1)[0]}, timeout_s=60)
    seen = device.until_seen(lambda s: s["report"]["active"] == whole, "the planner to be told")
    assert seen["report"]["origin"] == "fallback"
    assert seen["desired_plan"] == cut

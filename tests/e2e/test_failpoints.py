"""Real processes are killed with SIGKILL at every failpoint, started again, and must agree as if nothing was.

`names` reads the source, so that no failpoint is forgotten: each is in exactly one of the lists below.
"""

import ast
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stageloom import Client
from stageloom.shared.errors import StageloomError
from stageloom.shared.failpoint import VARIABLE
from tests.e2e.fleet import PATIENCE_S, Device, Fleet
from tests.e2e.networks import rows
from tests.planner.processes import ROOT, stageloom

pytestmark = pytest.mark.more

AGENT_STARTS = ("agent.state.before", "agent.state.after", "agent.file.written", "agent.spool.append")
"""Reached already before the first plan comes; the others while the second plan is deployed."""

AGENT_DEPLOYS = {
    "agent.file.previous": "kill@3",
    "agent.commit.before": "kill@1",
    "agent.commit.after": "kill@1",
    "agent.staged": "kill@1",
    "agent.swap.before": "kill@1",
    "agent.swap.after": "kill@2",
    "agent.fallback": "kill@1",
    "agent.artifact.append": "kill@1",
    "agent.artifact.rename": "kill@1",
    "agent.artifact.renamed": "kill@1",
    "agent.spool.marked": "kill@3",
    "agent.spool.ack": "kill@3",
    "agent.spool.ledger": "kill@2",
    "agent.spool.remove": "kill@2",
}
TRIAL = "agent.trial.begin"
ENGINE = {"engine.load": 2, "engine.loaded": 2, "engine.activate": 2, "engine.activated": 2, "engine.step": 3}
PLANNER = {
    "planner.api.answer": "kill@1",
    "planner.commit.before": "kill@4",
    "planner.commit.after": "kill@4",
    "planner.desired.before": "kill@1",
    "planner.desired.after": "kill@1",
    "planner.report.ack": "kill@2",
    "planner.telemetry.ack": "kill@2",
}
NEEDS_AN_ALARM = ("planner.alarm.ack",)
"""Killed at in tests/planner/test_replanning.py, whose device raises an alarm without any load."""

MIGRATION = ("planner.migration.before", "planner.migration.within", "planner.migration.after")


def names() -> set[str]:
    """Every failpoint in the source."""
    found: set[str] = set()
    for package in ("shared", "edge_agent", "planner", "migrations"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "failpoint":
                    (argument,) = node.args
                    plain = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                    assert plain, f"{path}: a failpoint's name is a plain text"
                    name = str(ast.literal_eval(argument))
                    assert name not in found, f"{name} is there twice"
                    found.add(name)
    return found


@pytest.mark.promise("kill-9-failpoint-planner")
def test_every_failpoint_of_the_source_is_named_here_and_documented() -> None:
    here = [TRIAL, *AGENT_STARTS, *AGENT_DEPLOYS, *ENGINE, *PLANNER, *NEEDS_AN_ALARM, *MIGRATION]
    assert sorted(names()) == sorted(here)
    page = (ROOT / "docs" / "fault_simulation.md").read_text()
    assert not [name for name in here if f"`{name}`" not in page]


@contextmanager
def failing(setting: str) -> Iterator[None]:
    """Processes that are started within the block have this failpoint."""
    os.environ[VARIABLE] = setting
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def converged(device: Device, plan: str) -> None:
    """Planner and device agree on this plan; every row is stored, dropped, or on the device's disk."""
    digest = device.run(plan)
    status = device.running.until_ready()
    assert status.plan is not None
    assert status.plan.digest == digest
    seen = device.until_seen(lambda s: s["report"]["state"] == "committed", "the verdict")
    generations = [entry["generation"] for entry in seen["history"]]
    assert generations == sorted(generations, reverse=True)
    assert seen["report"]["generation"] == max(generations)
    device.drain_telemetry()


def agent_dies_deploying(device: Device, setting: str) -> None:
    """The main process dies while plans are deployed.

    1. A device runs `alpha`. Its agent starts with the failpoint; plans are pushed until it dies.
    2. It starts again: both sides agree on `cut`, on the generations, and on the telemetry's books.
    """
    device.start()
    device.run("alpha")
    device.running.kill()
    with failing(setting):
        agent = device.start()
    for plan in ("whole", "cut", "alpha"):
        if not reached(agent.process, within_s=8.0):
            device.push(plan)
    assert reached(agent.process, within_s=PATIENCE_S), "the failpoint was not reached"
    device.start()
    converged(device, "cut")


def reached(process: "subprocess.Popen[Any]", within_s: float) -> bool:
    """Whether SIGKILL ended it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(within_s) == -signal.SIGKILL
    return False


def engine_dies(device: Device, setting: str) -> None:
    """The engine process dies while a plan is loaded, activated, or serves.

    1. The agent runs `whole`, and `cut` is pushed; the engine process dies as often as it reaches the point.
    2. The main process lives on. Without the failpoint, `cut` is taken.
    """
    with failing(setting):
        agent = device.start()
    device.push("whole")
    agent.until(lambda s: s.plan is not None or s.engine.restarts > 0, "a plan, or a crash")
    device.push("cut")
    with contextlib.suppress(StageloomError, OSError, TimeoutError):
        with Client(agent.socket) as client:
            for _ in range(20):
                client.run("alpha", {"input": rows(1)[0]}, timeout_s=10)
    agent.until(lambda s: s.engine.restarts > 0, "the engine process to die")
    assert agent.process.poll() is None
    agent.kill()
    device.start()
    converged(device, "cut")


def planner_dies(fleet: Fleet, device: Device, setting: str) -> None:
    """The planner dies while rows come in and a plan is pushed.

    1. A device runs `whole`; the planner starts again with the failpoint, and `cut` is pushed.
    2. What it had acknowledged is there when it starts once more; the device never stopped.
    """
    agent = device.start()
    device.run("whole")
    stored = device.books()["stored"]
    fleet.end(signal.SIGTERM)
    with failing(setting):
        fleet.start()
    with contextlib.suppress(subprocess.TimeoutExpired):  # the command waits for a planner that is gone
        stageloom(fleet.home, "plan", "push", device.name, "cut", "--now", timeout_s=15.0)
    assert reached(fleet.planner.process, within_s=PATIENCE_S), "the failpoint was not reached"
    fleet.end()
    fleet.start()
    assert device.books()["stored"] >= stored
    assert agent.process.poll() is None
    converged(device, "cut")


@pytest.mark.parametrize("name", ["agent.staged"])
def test_kill_9_of_the_agent_at_a_failpoint(device: Device, name: str) -> None:
    agent_dies_deploying(device, f"{name}={AGENT_DEPLOYS[name]}")


@pytest.mark.promise("kill-9-failpoint-planner")
@pytest.mark.full
@pytest.mark.parametrize("name", sorted({*AGENT_DEPLOYS, *AGENT_STARTS} - {"agent.staged"}))
def test_kill_9_of_the_agent_at_every_failpoint(device: Device, name: str) -> None:
    agent_dies_deploying(device, f"{name}={AGENT_DEPLOYS.get(name, 'kill@2')}")


@pytest.mark.parametrize("name", ["engine.activate"])
def test_kill_9_of_the_engine_at_a_failpoint(device: Device, name: str) -> None:
    engine_dies(device, f"{name}=kill@{ENGINE[name]}")


@pytest.mark.promise("kill-9-failpoint-planner")
@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(ENGINE) - {"engine.activate"}))
def test_kill_9_of_the_engine_at_every_failpoint(device: Device, name: str) -> None:
    engine_dies(device, f"{name}=kill@{ENGINE[name]}")


@pytest.mark.parametrize("name", ["planner.telemetry.ack"])
def test_kill_9_of_the_planner_at_a_failpoint(fleet: Fleet, device: Device, name: str) -> None:
    planner_dies(fleet, device, f"{name}={PLANNER[name]}")


@pytest.mark.promise("kill-9-failpoint-planner")
@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(PLANNER) - {"planner.telemetry.ack"}))
def test_kill_9_of_the_planner_at_every_failpoint(fleet: Fleet, device: Device, name: str) -> None:
    planner_dies(fleet, device, f"{name}={PLANNER[name]}")


@pytest.mark.promise("kill-9-failpoint-planner")
@pytest.mark.full
def test_agent_killed_when_a_trial_begins_rejects_the_plan_and_does_not_try_it_again(device: Device) -> None:
    """The record was on disk before the candidate ran, so the next life knows that it may be to blame.

    1. A device runs `whole` under load, and `cut` is pushed for a trial.
    2. The agent is killed when the trial begins. Its next life runs `whole` and reports `cut` as rejected.
    3. Pushed without a trial, `cut` is taken.
    """
    with failing(f"{TRIAL}=kill"):
        agent = device.start(trial={"timing_s": 2.0})
    whole = device.run("whole")
    generation = device.fleet.ask("plan", "push", device.name, "cut")["generation"]
    with contextlib.suppress(StageloomError, OSError, TimeoutError), Client(agent.socket) as client:
        for _ in range(100_000):
            client.run("alpha", {"input": rows(1)[0]}, timeout_s=10)
    assert reached(agent.process, within_s=PATIENCE_S)
    device.start()
    seen = device.until_seen(lambda s: s["online"] and s["report"]["state"] == "rejected", "the verdict")
    assert seen["report"]["generation"] == generation
    assert seen["report"]["active"] == whole
    assert "stopped during the trial" in seen["report"]["reason"]
    converged(device, "cut")


@pytest.mark.full
@pytest.mark.parametrize("name", MIGRATION)
def test_kill_9_of_the_planner_in_its_first_migration(tmp_path: Path, name: str) -> None:
    """The database is then empty or whole: the next start ends with a planner that works."""
    folder = tmp_path / "own"
    folder.mkdir()
    with failing(f"{name}=kill"):
        ended = stageloom(folder / "planner", "up", "--listen", "127.0.0.1:0")
    assert ended.returncode == -signal.SIGKILL
    fleet = Fleet(folder)
    try:
        assert fleet.ask("status")["epoch"] == 1
    finally:
        fleet.close()

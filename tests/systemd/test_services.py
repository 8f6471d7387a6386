"""Both services as real processes, started by a manager that listens."""

import signal
from pathlib import Path

import pytest

from tests.agent.models import import_tiny, plan_for, write_state
from tests.agent.process import AgentProcess
from tests.e2e.fleet import Device, Fleet
from tests.planner.processes import PlannerProcess
from tests.systemd.manager import Manager


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manager:
    found = Manager(tmp_path)
    monkeypatch.setenv("NOTIFY_SOCKET", found.address)
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    return found


def test_agent_tells_that_it_is_up_lives_what_it_does_and_that_it_stops(
    tmp_path: Path, manager: Manager
) -> None:
    home = tmp_path / "home"
    write_state(home, good=plan_for({"tiny": import_tiny(home / "artifacts", 0)}))
    with manager, AgentProcess(home) as agent:
        assert manager.until("READY") == {"READY": "1"}
        ready = agent.until_ready()
        assert ready.plan is not None
        digest = ready.plan.digest[:12]
        while not (status := manager.until("STATUS")["STATUS"]).startswith("ready"):
            assert status.startswith("not ready: ")
        assert status == f"ready, plan {digest} for tiny; link not_joined"
        for _ in range(3):
            manager.until("WATCHDOG", "1")
        agent.process.send_signal(signal.SIGTERM)
        manager.until("STOPPING", "1")
        assert agent.process.wait(30) == 0


@pytest.mark.promise("watchdog-fed-real-progress")
def test_agent_that_waits_for_its_first_plan_is_up_and_feeds_the_watchdog(
    tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET")
    fleet = Fleet(tmp_path / "fleet")
    try:
        device = Device(fleet, "nano", tmp_path)
        device.join()
        monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
        with manager, AgentProcess(device.home):
            manager.until("READY", "1")
            manager.until("STATUS", "not ready: no plan is active; link connected")
            manager.until("WATCHDOG", "1")
    finally:
        fleet.close()


def test_planner_tells_that_devices_can_connect_that_it_lives_and_that_it_stops(
    tmp_path: Path, manager: Manager
) -> None:
    with manager:
        planner = PlannerProcess(tmp_path / "planner")
        try:
            assert manager.until("READY") == {"READY": "1"}
            beat = manager.until("WATCHDOG", "1")
            assert beat["STATUS"] == "0 devices online, 0 telemetry rows waiting"
        finally:
            code = planner.stop()
        manager.until("STOPPING", "1")
        assert code == 0

"""Both services as real processes, started by a manager that listens."""

import re
import signal
from pathlib import Path

import pytest

from stageloom.edge_agent.config import ModelFile
from stageloom.edge_agent.run import BESIDE_IMPORT_S
from tests.agent.models import import_tiny, plan_for, write_state, write_tiny
from tests.agent.process import AgentProcess
from tests.architecture.sources import ROOT
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


def test_agent_that_imports_its_models_asks_for_the_time_of_each_before_it(
    tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGELOOM_IMPORT_LIMITS", "wall_s=900")
    files = [str(write_tiny(tmp_path / f"net{seed}.onnx", seed)) for seed in range(2)]
    models = tuple(ModelFile(path=file, name=Path(file).stem) for file in files)
    with manager, AgentProcess(tmp_path / "home", models=models, executor="null"):
        manager.until("READY", "1")
    asked = {
        one["STATUS"]: one["EXTEND_TIMEOUT_USEC"] for one in manager.said if "EXTEND_TIMEOUT_USEC" in one
    }
    allowed = str(round((900 + BESIDE_IMPORT_S) * 1e6))
    assert [asked.get(f"importing {file}") for file in files] == [allowed] * 2


@pytest.mark.parametrize("there", [False, True], ids=["not there yet", "no model"])
def test_a_service_is_started_again_unless_its_model_can_never_be_imported(
    there: bool, tmp_path: Path
) -> None:
    file = tmp_path / "net.onnx"
    if there:
        file.write_text("no model")
    models = (ModelFile(path=str(file), name="net"),)
    with AgentProcess(tmp_path / "home", models=models, executor="null") as agent:
        code = agent.process.wait(60)
    unit = (ROOT / "deploy" / "stageloom-agent.service").read_text(encoding="utf-8")
    (last,) = re.findall("^RestartPreventExitStatus=(.*)", unit, re.MULTILINE)
    assert code != 0 and (str(code) in last.split()) is there, agent.log


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

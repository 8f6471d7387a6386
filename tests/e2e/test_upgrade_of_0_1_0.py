"""An installation of version 0.1.0 goes on under this one: a planner, an enrolled device, what it serves.

`tests/data/version_0_1_0_homes.tar.gz` holds the data folders of both as that version left them: a device
that joined, one model, one plan that it had committed. They were made by version 0.1.0's own commands: `up`,
`device token`, `join`, `model add`, `plan create --push`, and SIGTERM to both once the plan was committed.
"""

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from stageloom import Client
from stageloom.edge_agent.link.connection import load_membership, save_membership
from stageloom.edge_agent.link.factory import MEMBERSHIP_NAME
from stageloom.shared.messages.control import DeviceState
from stageloom.shared.token import Endpoints
from tests.agent.process import AgentProcess
from tests.e2e.fleet import Device, Fleet

_HOMES = Path(__file__).parents[1] / "data" / "version_0_1_0_homes.tar.gz"
_DEVICE, _PLAN = "camera-7", "first"
_DIGEST = "07c4a3bb0e15"
_X = np.linspace(-1.0, 1.0, 8, dtype=np.float32).reshape(1, 8)
_W = np.arange(64, dtype=np.float32).reshape(8, 8) / 64 - 0.5


def _moved(home: Path, port: int) -> None:
    """The device looks for its planner at another port: that of the installation may be taken here."""
    membership = load_membership(home / MEMBERSHIP_NAME)
    assert membership is not None
    at = Endpoints(*(f"tcp://127.0.0.1:{port + lane}" for lane in range(3)))
    save_membership(home / MEMBERSHIP_NAME, replace(membership, endpoints=at))


def _serves(device: Device) -> bool:
    with Client(device.running.socket) as client:
        result = client.run("tiny", {"x": _X}, timeout_s=30)["y"]
    return bool(np.allclose(result, np.maximum(_X @ _W, 0.0), atol=1e-5))


@pytest.mark.promise("upgrade-of-0-1-0")
@pytest.mark.more
def test_planner_and_device_of_0_1_0_go_on_with_what_they_had(tmp_path: Path) -> None:
    """Upgrade both, the agent first, as on a device whose planner is upgraded later.

    1. The agent starts on its own folder, with its settings in agent.json, and serves its plan alone.
    2. The planner starts on its own folder, and migrates it: model, plan and history are there.
    3. The device, which kept its key, is let in, and reports the generation that it had committed.
    4. A new plan for it is made, pushed and committed.
    """
    with tarfile.open(_HOMES) as archive:
        archive.extractall(tmp_path, filter="data")
    fleet = Fleet(tmp_path, start=False)
    home = tmp_path / "agent"
    _moved(home, fleet.port)
    with Device(fleet, _DEVICE, tmp_path) as device:
        device.home = home
        device.agent = AgentProcess(home, **_settings_of(home))
        device.running.until(lambda status: status.ready, "it serves by its last-known-good plan")
        assert device.running.now().plan.digest.startswith(_DIGEST)  # type: ignore[union-attr]
        assert _serves(device)

        fleet.start()
        try:
            seen = device.until_seen(lambda seen: seen["online"], "the device to be let in")
            assert [plan["plan"] for plan in fleet.ask("plan", "list")] == [_PLAN]
            assert [model["model"] for model in fleet.ask("model", "list")] == ["tiny"]
            history = fleet.ask("plan", "history", _DEVICE)
            assert [(entry["plan"], entry["state"]) for entry in history] == [(_PLAN, "committed")]
            assert seen["report"]["state"] == DeviceState.COMMITTED.value
            assert seen["report"]["active"].startswith(_DIGEST)
            fleet.make_plan("second", "--model", "tiny:replicas=2", "--device", _DEVICE)
            device.run("second")
            assert _serves(device)
        finally:
            fleet.close()


def _settings_of(home: Path) -> dict[str, Any]:
    """What `stageloom-agent config show` says that the folder's own file set."""
    done = subprocess.run(
        [sys.executable, "-m", "stageloom.edge_agent", "config", "show", "--json", "--home", str(home)],
        capture_output=True,
        text=True,
        check=True,
    )
    shown = json.loads(done.stdout)
    chosen = {name: entry["value"] for name, entry in shown.items() if entry["from"]}
    assert chosen == {"probation_s": 0.5, "stats_interval_s": 0.2}
    return {"probation_s": chosen["probation_s"]}

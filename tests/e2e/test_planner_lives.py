"""What a fleet does while its planner is killed, restored, or replaced by another."""

import os
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest

from stageloom import Client
from stageloom.edge_agent.reporting.status import AgentStatus
from stageloom.planner.store.used_database import DATABASE_FILE
from tests.e2e.fleet import Device, Fleet
from tests.e2e.networks import rows
from tests.planner.processes import until

pytestmark = pytest.mark.more

NAMED_WITHIN_S = 5.0


def _serves(device: Device, model: str = "alpha") -> bool:
    with Client(device.running.socket) as client:
        return "output" in client.run(model, {"input": rows(1)[0]}, timeout_s=60)


def _rows(device: Device) -> int:
    """Telemetry rows in the planner's database; it need not run."""
    return len(device.fleet.ask("device", "telemetry", device.name, "--limit", "1000000"))


@pytest.mark.promise("kill-9-planner-devices")
def test_killed_planner_comes_back_to_devices_that_never_stopped_serving(
    device: Device, fleet: Fleet
) -> None:
    """kill -9 of the planner, twice.

    1. A device runs `whole`; its telemetry is stored.
    2. The planner is killed; the device says that it is not connected, and serves.
    3. The planner starts again on the same data; the device comes back by itself, the same agent process,
       and what was acknowledged is still there.
    4. `cut` is pushed and the planner is killed at once: the push was answered, so it is not lost.
    5. The planner starts a third time, and the device commits `cut`.
    6. Telemetry: produced = stored + dropped, over all three lives.
    """
    agent = device.start()
    whole = device.run("whole")
    assert _serves(device)
    device.until_seen(lambda _: device.books()["stored"] > 0, "telemetry to be stored")
    stored = device.books()["stored"]
    fleet.end(signal.SIGKILL)
    agent.until(lambda s: s.link.state != "connected", "the loss is noticed")
    assert _serves(device)

    fleet.start()
    seen = device.until_seen(lambda s: s["online"], "the device to come back")
    assert seen["report"]["active"] == whole
    assert device.books()["stored"] >= stored
    generation = device.push("cut")
    fleet.end(signal.SIGKILL)
    assert _serves(device)

    fleet.start()
    seen = device.until_seen(
        lambda s: s["report"]["generation"] == generation and s["report"]["state"] == "committed", "cut"
    )
    assert seen["report"]["active"] == seen["desired_plan"] != whole
    assert device.drain_telemetry().engine.restarts == 0
    assert agent.process.poll() is None


@pytest.mark.promise("disk-artifact-fit-fills")
def test_change_made_while_the_device_was_away_arrives(device: Device) -> None:
    """Desired state is a level, not a message.

    1. The device commits `whole` and its agent is killed.
    2. The planner notices; meanwhile `alpha` and then `cut` are pushed.
    3. The agent starts again: it serves `whole` at first, fetches nothing twice, and commits `cut`.
    4. `alpha` was superseded: the history says so, and the device never ran it.
    """
    device.start()
    device.run("whole")
    device.running.kill()
    until(lambda: not device.seen()["online"])
    skipped = device.push("alpha")
    wanted = device.push("cut")
    device.start()
    seen = device.until_seen(
        lambda s: s["report"]["generation"] == wanted and s["report"]["state"] == "committed", "cut"
    )
    assert seen["report"]["active"] == seen["desired_plan"]
    states = {entry["generation"]: entry["state"] for entry in seen["history"]}
    assert states[wanted] == "committed"
    assert states[skipped] != "committed"


@pytest.mark.promise("disk-artifact-fit-fills")
def test_planner_restored_from_an_older_copy_starts_an_epoch_and_converges(
    own_fleet: Fleet, tmp_path: Path
) -> None:
    """A backup from before the last change.

    1. A device commits `whole` as generation 1; the database is copied.
    2. It commits `cut` as generation 2.
    3. The planner stops, the copy takes the database's place, and the planner starts: it knows of
       generation 1 only, and wants `whole`.
    4. The device reports (1, 2). The planner starts epoch 2 above it and offers `whole` anew.
    5. The device commits `whole` in epoch 2, and a push after that gets through as well.
    6. Telemetry: what is neither stored nor dropped is what the database had and its copy had not.
    """
    with Device(own_fleet, "restored", tmp_path).join() as device:
        device.start()
        whole = device.run("whole")
        backup = tmp_path / "backup"
        with sqlite3.connect(own_fleet.home / DATABASE_FILE) as live, sqlite3.connect(backup) as copy:
            live.backup(copy)
        live.close()
        copy.close()
        copied = _rows(device)
        cut = device.run("cut")
        device.until_seen(lambda _: _rows(device) > copied, "telemetry that the copy has not")
        assert own_fleet.end() == 0
        lost = _rows(device)
        for leftover in own_fleet.home.glob(f"{DATABASE_FILE}*"):
            leftover.unlink()
        shutil.copyfile(backup, own_fleet.home / DATABASE_FILE)
        lost -= _rows(device)
        assert lost > 0

        own_fleet.start()
        seen = device.until_seen(
            lambda s: s["report"]["epoch"] == 2 and s["report"]["state"] == "committed", "epoch 2"
        )
        assert seen["report"]["active"] == whole
        assert seen["report"]["generation"] == seen["desired_generation"] > 2
        assert own_fleet.ask("status")["epoch"] == 2
        assert device.run("cut") == cut
        assert _serves(device)
        device.drain_telemetry(lost=lost)


@pytest.mark.promise("revocation-next-message-wrong")
def test_revoked_device_is_refused_at_its_next_message_and_serves_on(device: Device, fleet: Fleet) -> None:
    """Taking a key away, and giving the device a place again.

    1. The device runs `whole`.
    2. It is revoked: over the connection that it has, its next message is refused, and its status says why.
    3. A push to it is refused, nothing of it is stored any more, and it serves on.
    4. With a new token it joins again, under a new key since the old one stays out, and takes a new plan.
    """
    agent = device.start()
    device.run("whole")
    fleet.do("device", "revoke", device.name)
    status = agent.until(lambda s: s.link.state != "connected" and s.link.detail, "it is refused")
    assert "revoked" in status.link.detail
    assert device.seen()["revoked"]
    assert not device.seen()["online"]
    stored = device.books()["stored"]
    assert _serves(device)
    agent.until(lambda s: s.link.telemetry_spooled > 2, "telemetry waits on the device")
    assert device.books()["stored"] == stored
    with pytest.raises(AssertionError, match="revoked"):
        device.push("cut")
    agent.kill()
    revoked_key = (device.home / "device.key").read_bytes()
    device.join().start()
    assert (device.home / "device.key").read_bytes() != revoked_key
    device.run("cut")
    device.drain_telemetry()


def _named(device: Device, text: str) -> AgentStatus:
    """The status that names the problem; it must come within NAMED_WITHIN_S of the first that is answered."""
    agent = device.running
    agent.until(lambda s: True, "it answers")
    until(lambda: text in agent.now().link.detail, timeout_s=NAMED_WITHIN_S)
    return agent.now()


@pytest.mark.promise("revocation-next-message-wrong")
def test_wrong_key_is_named_within_five_seconds_on_either_side(own_fleet: Fleet, tmp_path: Path) -> None:
    """A wrong key must not look like a broken network.

    1. A device runs `whole` and its agent is stopped.
    2. The planner's key pair is lost: it starts with another one at the same address.
    3. The agent starts, serves, and within 5 s its status names the planner's key, and its log does too.
    4. The planner gets its old keys back, but the device another one: within 5 s the status names that.
    5. With its own key again, it connects.
    """
    with Device(own_fleet, "keys", tmp_path).join() as device:
        device.start()
        device.run("whole")
        assert device.running.stop() == 0
        assert own_fleet.end() == 0
        planner_keys = own_fleet.home / "planner.keys"
        planner_keys.rename(tmp_path / "planner.keys")
        own_fleet.start()

        device.start()
        status = _named(device, "does not hold the planner's key")
        assert status.link.state == "connecting"
        device.running.until_ready()
        assert _serves(device)
        assert "does not hold the planner's key" in device.running.log
        device.running.kill()

        assert own_fleet.end() == 0
        planner_keys.unlink()
        (tmp_path / "planner.keys").rename(planner_keys)
        own_fleet.start()
        device_key = device.home / "device.key"
        device_key.rename(tmp_path / "device.key")
        stranger = Device(own_fleet, "stranger", tmp_path).join()
        shutil.copy(stranger.home / "device.key", device_key)
        own_fleet.do("device", "revoke", "stranger")
        device.start()
        _named(device, "does not accept this device's key")
        device.running.until_ready()
        device.running.kill()

        os.replace(tmp_path / "device.key", device_key)
        device.start()
        device.until_seen(lambda s: s["online"], "it to connect")


@pytest.mark.promise("ctrl-c-leaves-nothing")
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM])
def test_planner_told_to_stop_leaves_nothing_running_and_devices_go_on(
    device: Device, fleet: Fleet, number: signal.Signals
) -> None:
    """Ctrl-C, or a service manager's signal, with a device connected.

    1. A device is online.
    2. The planner gets the signal and exits with 0, without a traceback; no process of it is left.
    3. The device serves on, and connects to the next planner.
    """
    device.start()
    device.run("whole")
    pid = fleet.planner.process.pid
    logged = len(fleet.planner.log())
    assert fleet.end(number) == 0
    assert "Traceback" not in fleet.planner.log()[logged:]
    assert not _processes_of(pid)
    assert _serves(device)
    fleet.start()
    device.until_seen(lambda s: s["online"], "it to connect")


def _processes_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found

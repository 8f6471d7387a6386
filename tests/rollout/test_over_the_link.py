"""A rollout by a real planner to simulated devices on real sockets; the planner is killed in the middle."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control_plane.planner import MODEL, PLAN, Enrolled, enrol, free_ports
from stageloom.planner.labels import LabelChanges
from stageloom.planner.store.desired import Push, push_wanted
from stageloom.planner.store.labels import change_labels
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.telemetry_history import telemetry_history
from stageloom.shared.ids import Digest
from stageloom.shared.messages.telemetry import RowKind
from stageloom.shared.token import Endpoints
from tests.planner.processes import PlannerProcess, ok, until
from tests.rollout.fleet import add_version
from tests.rollout.linked import LinkedFleet
from tests.store.migrated import new_store


def prepare(home: Path, devices: int) -> tuple[list[Enrolled], Digest, Digest]:
    """A planner's data: labelled devices that should run version 1 of a model; versions 2 and 3."""
    home.mkdir()
    fleet = enrol(home, devices)
    store = new_store(home)
    pushes = [Push(device=one.device, plan=PLAN, decided_by="operator") for one in fleet]
    store.write(push_wanted, pushes)
    for one in fleet:
        store.write(change_labels, one.device, LabelChanges({"site": "a"}, ()))
    second, third = (add_version(store, home, MODEL, weights, 24) for weights in ("two", "three"))
    store.close()
    return fleet, second, third


def shown(home: Path, name: str) -> dict[str, Any]:
    """A rollout with its devices."""
    document: dict[str, Any] = json.loads(ok(home, "rollout", "show", name, "--json"))
    return document


def state(home: Path, name: str, wanted: str, **numbers: int) -> Callable[[], bool]:
    """The condition that a rollout is in a state, with so many devices in theirs."""

    def holds() -> bool:
        info = shown(home, name)["rollout"]
        return info["state"] == wanted and all(info[key] == number for key, number in numbers.items())

    return holds


@pytest.mark.more
@pytest.mark.promise("rollout-goes-on-after-kill")
@pytest.mark.parametrize("devices", [8, pytest.param(50, marks=pytest.mark.full)])
def test_a_good_version_reaches_all_and_a_bad_one_stops_by_itself(tmp_path: Path, devices: int) -> None:
    home = tmp_path / "home"
    fleet, second, third = prepare(home, devices)
    listen = f"127.0.0.1:{free_ports()}"
    planner = PlannerProcess(home, "--listen", listen)
    linked = LinkedFleet(fleet, planner.ready["public_key"], Endpoints(**planner.ready["endpoints"]))
    try:
        until(lambda: len(linked.seen()) == 1 and "none" not in linked.seen())
        (first_plan,) = linked.seen()

        # A good version, whose second wave waits while the planner is killed.
        names = [one.device for one in fleet]
        linked.hold(names[1:], [second])
        waves = ["--label", "site=a", "--waves", "1,50%,100%"]
        ok(home, "rollout", "create", "--model", f"{MODEL}@2", *waves, "--name", "good")
        until(state(home, "good", "running", done=1, asked=devices // 2 - 1))
        asked = [one["generation"] for one in shown(home, "good")["devices"]]
        planner.stop(signal.SIGKILL)
        planner = PlannerProcess(home, "--listen", listen)
        assert [one["generation"] for one in shown(home, "good")["devices"]] == asked
        linked.hold(names, [])
        until(state(home, "good", "completed", done=devices), timeout_s=60.0)
        assert first_plan not in linked.seen() and sum(linked.seen().values()) == devices
        (good_plan,) = linked.seen()

        # A bad one: its second wave refuses it, and the third never hears of it.
        linked.refuse(names[1:], third)
        ok(home, "rollout", "create", "--model", f"{MODEL}@3", *waves, "--max-failed", "2", "--name", "bad")
        until(state(home, "bad", "stopped"), timeout_s=60.0)
        document = shown(home, "bad")
        assert document["rollout"]["waiting"] == devices - devices // 2
        assert document["rollout"]["failed"] > 2
        until(lambda: linked.seen().get(good_plan) == devices - 1)  # all but the first, which keeps it

        ok(home, "rollout", "abort", "bad", "--rollback")
        until(lambda: linked.seen() == {good_plan: devices})
    finally:
        linked.close()
        code = planner.stop()
    assert code == 0, planner.log()
    acknowledged = {name: device.rows_acknowledged for name, device in linked.devices.items()}
    store = ReadStore.open(home)
    for name in names:
        stored, _ = store.read(telemetry_history, name, list(RowKind), limit=1_000_000)
        assert len(stored) >= acknowledged[name] > 0  # nothing that was acknowledged is lost
    store.close()

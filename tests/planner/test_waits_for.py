"""What stands between a device and the plan that it should run, as `stageloom device show` tells it."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from stageloom.planner.cli.output import waits_for
from stageloom.planner.dispatch.ports import ReportRecord
from stageloom.planner.schema.device import DeviceInfo
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.link import LinkStore
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import DeviceState, Report
from tests.planner.processes import ok
from tests.planner.world import World
from tests.store.helpers import NANO

_INFO = DeviceInfo(
    device=DeviceId("nano"),
    online=True,
    revoked=False,
    device_class="cpu",
    agent_version="1",
    enrolled_at_us=1,
    last_seen_us=1,
    desired_epoch=1,
    desired_generation=2,
    desired_plan=None,
    report=Report(epoch=1, generation=2, state=DeviceState.COMMITTED),
)


def test_a_device_that_runs_what_it_should_or_may_not_run_anything_waits_for_nothing() -> None:
    assert waits_for(_INFO) == ""
    assert waits_for(replace(_INFO, revoked=True, desired_generation=3)) == ""
    assert waits_for(replace(_INFO, quarantine="it counts too far", desired_generation=3)) == ""
    assert waits_for(replace(_INFO, desired_generation=0)) == ""
    assert waits_for(replace(_INFO, report=replace(_INFO.report, state=DeviceState.REJECTED))) == ""


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (DeviceState.WAITING, "artifacts that it fetches"),
        (DeviceState.STAGED, "its trial to begin"),
        (DeviceState.TRIAL, "the trial's verdict"),
        (DeviceState.PROBATION, "the end of the plan's probation"),
    ],
)
def test_a_device_on_its_way_waits_for_the_next_step(state: DeviceState, what: str) -> None:
    assert waits_for(replace(_INFO, report=replace(_INFO.report, state=state))) == what


def test_how_long_a_trial_takes_is_told_as_the_device_announced_it() -> None:
    report = replace(_INFO.report, state=DeviceState.TRIAL, reason="the trial takes up to 40 s")
    assert waits_for(replace(_INFO, report=report)) == "the trial's verdict, the trial takes up to 40 s"


def test_a_device_that_was_not_told_yet_waits_to_come_online_or_to_be_told() -> None:
    behind = replace(_INFO, desired_generation=3)
    assert waits_for(replace(behind, online=False)) == "the device to come online"
    assert waits_for(behind) == "the device to be told"
    assert waits_for(replace(behind, online=False), live=False) == "the device to be told"


def test_the_list_has_no_state_of_an_older_generation_beside_the_desired_one(tmp_path: Path) -> None:
    world = World(tmp_path / "home")
    world.kept("greedy")
    pushed = world.store.write(push, Push(device=NANO, plan="greedy", decided_by="operator"))
    report = replace(_INFO.report, revision=1, epoch=pushed.epoch, generation=pushed.generation)
    LinkStore(world.store).record_reports([ReportRecord(NANO, 7, report)])
    assert "\tcommitted\t" in ok(world.home, "device", "list")
    world.store.write(push, Push(device=NANO, plan="greedy", decided_by="operator"))
    listed = ok(world.home, "device", "list")
    (known,) = json.loads(ok(world.home, "device", "list", "--json"))
    world.store.close()
    assert "\tnot told yet\t" in listed and "committed" not in listed
    assert known["report"]["state"] == "committed"

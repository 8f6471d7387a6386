"""A device that counts further than it can have come is refused, and nobody else notices."""

import pytest

from stageloom.planner.api import routes
from stageloom.planner.counters import CEILING, EPOCHS_AHEAD, SEQUENCES
from stageloom.planner.schema.device import DeviceReleaseRequest
from stageloom.planner.schema.service import StatusRequest
from stageloom.shared.messages import control, telemetry
from stageloom.shared.messages.base import MOST, Message, RefusalCode, Refused
from stageloom.shared.messages.telemetry import Ledger
from tests.adversary.rig import BOOT, Device, Rig
from tests.planner.processes import until

pytestmark = pytest.mark.more

FAR = {
    "epoch": control.Report(epoch=MOST, generation=1),
    "generation": control.Report(epoch=1, generation=MOST),
    "revision": control.Report(revision=MOST),
    "local counter": control.Report(local_counter=MOST),
    "epoch within the wire's lower half": control.Report(epoch=2 + EPOCHS_AHEAD, generation=1),
}


def code(reply: Message) -> RefusalCode:
    assert isinstance(reply, Refused), reply
    return reply.code


def release(rig: Rig, device: Device) -> None:
    rig.ask(routes.DEVICE_RELEASE, DeviceReleaseRequest(device=device.name))


@pytest.mark.promise("device-counts-too-far")
def test_a_device_that_says_it_is_far_ahead_is_quarantined_and_a_good_one_is_served(rig: Rig) -> None:
    """1. A hello says an epoch at the end of the wire's range; 2. its device is refused on every lane, and
    shown with the reason; 3. another one's welcome decodes; 4. released, the first is let in."""
    good, bad = rig.device("good"), rig.device("bad")
    assert good.is_served()
    for name, report in FAR.items():
        bad.hang_up()
        assert code(bad.hello(report)) is RefusalCode.QUARANTINED, name
        assert code(bad.heartbeat()) is RefusalCode.QUARANTINED
        assert code(bad.rows(telemetry.Event("x", ""))) is RefusalCode.QUARANTINED
        assert good.is_served()
        assert name.split(" within")[0] in until(lambda: rig.info("bad").quarantine)
        release(rig, bad)
        assert bad.is_served()
    assert rig.ask(routes.STATUS, StatusRequest()).epoch == 1


@pytest.mark.promise("device-counts-too-far")
def test_a_quarantine_outlives_the_planner_and_ends_by_an_operators_command(rig: Rig) -> None:
    bad = rig.device("bad")
    assert code(bad.hello(FAR["epoch"])) is RefusalCode.QUARANTINED
    rig.restart()
    assert code(bad.hello()) is RefusalCode.QUARANTINED
    info = rig.info("bad")
    assert info.quarantined_at_us and info.desired_epoch == 0
    assert rig.ask(routes.STATUS, StatusRequest()).quarantined == 1
    assert "quarantined" in rig.command("device", "list")
    rig.command("device", "release", "bad")
    assert bad.is_served()
    assert rig.ask(routes.STATUS, StatusRequest()).quarantined == 0


def test_a_restored_database_is_still_overtaken_within_reach(rig: Rig) -> None:
    ahead = rig.device("ahead")
    assert isinstance(
        ahead.hello(control.Report(epoch=1 + EPOCHS_AHEAD, generation=900_000)), control.Welcome
    )
    desired = ahead.expect("control", control.Desired)
    assert (desired.epoch, desired.generation) == (2 + EPOCHS_AHEAD, 900_001)


@pytest.mark.parametrize("ledger", [Ledger(BOOT, SEQUENCES, 0), Ledger(BOOT, MOST, MOST)])
def test_a_ledger_of_more_rows_than_a_boot_can_have_is_refused(rig: Rig, ledger: Ledger) -> None:
    bad = rig.device("bad")
    batch = telemetry.TelemetryBatch(rows=(), ranges=(), ledgers=(ledger,))
    assert code(bad.answer("telemetry", batch)) is RefusalCode.QUARANTINED
    assert rig.ask(routes.STATUS, StatusRequest()).telemetry.produced == 0


def test_the_limits_leave_the_planner_room_to_count_on() -> None:
    assert CEILING + EPOCHS_AHEAD < MOST and CEILING > 10**15

"""Which costs hold for a device: its class's in its power mode, or its own since it drifted from those."""

from pathlib import Path

import pytest
from msgspec import structs
from sqlalchemy import select

from stageloom.planner.costs.drift import Renewal
from stageloom.planner.dispatch.ports import ReportRecord, TelemetryWrite
from stageloom.planner.store.costs import (
    MOST_ENVIRONMENTS,
    calibration_of,
    keep_schedules,
    operator_costs,
    renew_costs,
    stage_costs,
)
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.events import newest_events
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.profiles import request_profile
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import CalibrationRow
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import DeviceId, Digest, OpId
from stageloom.shared.messages.control import Alarm, Report
from stageloom.shared.messages.telemetry import OperatorTiming, ProfileResult, RowKind
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.costs import MeasuredStage
from tests.store.helpers import NANO, T0_US, add_model, enrol, kept_schedule, row

CLASS = "cpu-2-core"
SLOW = "cpu-2-core, 15 W"
OTHER = DeviceId("other")


def alarm(number: int, environment: str) -> Alarm:
    return Alarm(
        boot=7, number=number, at_us=T0_US, cause="power_mode", value=1.0, threshold=0.0, plan=None,
        loads=(), samples=(), environment=environment,
    )  # fmt: skip


class Rig:
    """Two devices of a class, and a model of four operators."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.rows = store, 0
        enrol(store)
        enrol(store, OTHER, number=2)
        self.artifact = add_model(store, folder)

    def profiled(self, device: DeviceId, us: float, environment: str, request: int | None = None) -> None:
        times = tuple(OperatorTiming(op, us, 1.0, 9) for op in range(4))
        number = self.asked(device) if request is None else request
        data = ProfileResult(number, self.artifact, 1, environment, times, True)
        LinkStore(self.store).append_telemetry(
            [TelemetryWrite(device, (row(self.rows, data, kind=RowKind.PROFILE_RESULT),), ())]
        )
        self.rows += 1

    def asked(self, device: DeviceId) -> int:
        (request,), _ = self.store.write(request_profile, device, ["relu"])
        return request

    def costs(self, device: DeviceId) -> list[float]:
        found = self.store.read(
            operator_costs, self.store.read(calibration_of, device).costs_key, self.artifact
        )
        return [found[op].median_us for op in sorted(found)]

    def drifted(self, ratio: float, *stages: MeasuredStage) -> None:
        factors = {(self.artifact, OpId(0)): 3.0}
        found = Renewal(factors=factors, others=ratio, stages=stages, unseen=())
        self.store.write(renew_costs, NANO, found, ExecutorOptions(), ratio=ratio, steps_since_us=T0_US + 5)


@pytest.fixture
def rig(store: Store, tmp_path: Path) -> Rig:
    made = Rig(store, tmp_path)
    made.profiled(NANO, 10.0, CLASS)
    return made


def test_an_alarm_in_another_power_mode_makes_the_device_one_of_that_class(rig: Rig) -> None:
    """1. Its costs are those of the mode, of which nothing is known. 2. What it measures there is kept for
    it, and what still comes of the old mode for that. 3. Back in the old mode the old costs hold."""
    before = rig.asked(NANO)
    LinkStore(rig.store).record_alarm(NANO, alarm(1, SLOW))
    assert (
        rig.store.read(device_info, NANO).device_class == SLOW
        and rig.store.read(device_info, OTHER).device_class == CLASS
    )
    assert rig.costs(NANO) == []
    assert rig.store.read(calibration_of, NANO).steps_since_us == T0_US
    rig.profiled(NANO, 25.0, SLOW)
    rig.profiled(NANO, 11.0, CLASS, before)
    assert rig.costs(NANO) == [25.0] * 4
    LinkStore(rig.store).record_alarm(NANO, alarm(1, CLASS))
    assert rig.costs(NANO) == [25.0] * 4, "a repeat of the first alarm says nothing"
    LinkStore(rig.store).record_alarm(NANO, alarm(2, CLASS))
    assert rig.costs(NANO) == [11.0] * 4 == rig.costs(OTHER)


def test_steps_of_before_another_power_mode_say_nothing_of_its_costs_whatever_told_of_it_first(
    rig: Rig,
) -> None:
    """A hello says so before the alarm comes; one for other queues brings no other device."""
    link = LinkStore(rig.store)
    link.record_reports([ReportRecord(NANO, 7, Report(), "0.1.0", SLOW)])
    link.record_alarm(NANO, structs.replace(alarm(1, SLOW), cause="variance"))
    assert rig.store.read(calibration_of, NANO).steps_since_us == 0
    link.record_alarm(NANO, alarm(2, SLOW))
    assert rig.store.read(calibration_of, NANO).steps_since_us == T0_US


def test_a_device_that_names_ever_more_environments_keeps_those_that_it_came_to_last(rig: Rig) -> None:
    rig.drifted(2.0)
    own = rig.store.read(calibration_of, NANO).costs_key
    for at in range(MOST_ENVIRONMENTS + 2):
        raised = structs.replace(alarm(at, f"mode {at}"), at_us=T0_US + 10 + at)
        LinkStore(rig.store).record_alarm(NANO, raised)
    with rig.store.database.read() as session:
        kept = set(session.scalars(select(CalibrationRow.environment)))
    assert kept == {f"mode {at}" for at in range(2, MOST_ENVIRONMENTS + 2)}
    assert rig.store.read(operator_costs, own, rig.artifact) == {}


@pytest.mark.promise("drifted-device-costs-own")
def test_a_device_that_drifted_has_costs_of_its_own_and_its_class_keeps_its(rig: Rig) -> None:
    """1. Its operators' times are those of the class by their factors, and what its steps showed of stages is
    kept. 2. What it measures next is its own. 3. It drifts on, from its own."""
    members = ((rig.artifact, 0, 4),)
    rig.drifted(2.0, MeasuredStage(members, 1, ((0, 1, 2, 3),), 9e-5, False, 40, T0_US))
    held = rig.store.read(calibration_of, NANO)
    assert held.own and (held.ratio, held.steps_since_us) == (2.0, T0_US + 5)
    assert rig.costs(NANO) == [30.0, 20.0, 20.0, 20.0] and rig.costs(OTHER) == [10.0] * 4
    (stage,) = rig.store.read(stage_costs, held.costs_key, ExecutorOptions())
    assert (stage.members, stage.samples) == (members, 40) and stage.seconds == pytest.approx(9e-5)
    assert rig.store.read(stage_costs, CLASS, ExecutorOptions()) == []
    rig.profiled(NANO, 40.0, CLASS)
    assert rig.costs(NANO) == [40.0] * 4 and rig.costs(OTHER) == [10.0] * 4
    rig.drifted(0.5)
    assert rig.costs(NANO) == [120.0, 20.0, 20.0, 20.0]
    assert rig.store.read(stage_costs, held.costs_key, ExecutorOptions()) == [], (
        "they were of a device that is not"
    )
    assert "it has costs of its own" in rig.store.read(newest_events, limit=1)[0][3]


def test_a_device_that_is_back_shares_its_class_again_and_leaves_nothing_behind(rig: Rig) -> None:
    rig.drifted(2.0)
    own = rig.store.read(calibration_of, NANO).costs_key
    block: Digest = digest_bytes([b"block"])
    rig.store.write(keep_schedules, own, "ios", {(block, 1): "0"})
    rig.store.write(renew_costs, NANO, None, ExecutorOptions(), ratio=0.5, steps_since_us=T0_US + 9)
    assert rig.store.read(calibration_of, NANO).costs_key == CLASS and rig.costs(NANO) == [10.0] * 4
    assert rig.store.read(operator_costs, own, rig.artifact) == {}
    assert kept_schedule(rig.store, own, 1, block, "ios") is None


def test_costs_of_its_own_hold_in_the_power_mode_that_they_were_found_in(rig: Rig) -> None:
    rig.drifted(2.0)
    LinkStore(rig.store).record_alarm(NANO, alarm(1, SLOW))
    assert not rig.store.read(calibration_of, NANO).own
    LinkStore(rig.store).record_alarm(NANO, alarm(2, CLASS))
    assert rig.costs(NANO) == [30.0, 20.0, 20.0, 20.0]

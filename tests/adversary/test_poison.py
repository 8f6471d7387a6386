"""A record that no database takes, and a database that an older version poisoned, are one device's own."""

import json

import msgspec
import pytest
from sqlalchemy import update

from stageloom.planner.api import routes
from stageloom.planner.counters import CEILING
from stageloom.planner.schema.device import DeviceListRequest
from stageloom.planner.schema.plan import PlanHistoryRequest
from stageloom.planner.schema.service import StatusRequest, WatchRequest
from stageloom.planner.store.database import Database, sqlite_url
from stageloom.planner.store.tables import (
    DesiredRow,
    DeviceRow,
    GenerationRow,
    PlannerRow,
    ReportedRow,
    TelemetryRow,
)
from stageloom.planner.store.used_database import DATABASE_FILE
from stageloom.shared.codec import PLAIN
from stageloom.shared.messages import control, telemetry
from stageloom.shared.messages.base import MOST, RefusalCode, Refused
from stageloom.shared.messages.telemetry import Ledger, RowRange, TelemetryBatch
from tests.adversary.rig import BOOT, Rig

pytestmark = pytest.mark.more


@pytest.mark.promise("record-database-refuses-costs")
def test_a_nul_in_any_text_is_refused_and_nobody_waits_for_it(rig: Rig) -> None:
    """Each is what Postgres refuses to store: a row is kept as its bytes, a message is answered."""
    good, bad = rig.device("good"), rig.device("bad")
    assert good.is_served() and bad.is_served()
    row = telemetry.encode_row(telemetry.Row(1, telemetry.Event("x", "NUL"))).replace(b"NUL", b"a\x00c")
    batch = TelemetryBatch(rows=(row,), ranges=(RowRange(BOOT, 1, 1),), ledgers=(Ledger(BOOT, 2, 0),))
    assert isinstance(bad.answer("telemetry", batch), telemetry.TelemetryAck)
    report = control.Report(revision=1, reason="NUL")
    body = control.TO_PLANNER.encode_body(control.Reported(boot=BOOT, report=report))
    bad.send_frame("control", PLAIN + body.replace(b"NUL", b"a\x00c"))
    assert bad.expect("control", Refused).code is RefusalCode.MALFORMED
    assert good.is_served()
    info = rig.info("bad")
    assert info.unreadable == 1 and "telemetry row" in info.unreadable_reason
    assert rig.ask(routes.STATUS, StatusRequest()).unreadable == 1
    (shown,) = json.loads(rig.command("device", "telemetry", "bad", "--kind", "unreadable", "--json"))
    assert shown["values"]["size_bytes"] == len(row) and shown["values"]["reason"]


@pytest.fixture
def poisoned(rig: Rig, database_url: str) -> Rig:
    """A planner over what version 0.1.0 kept after one device's hello said epoch 2**53."""
    good, bad = rig.device("good"), rig.device("bad")
    assert good.is_served() and bad.is_served()
    for device in (good, bad):
        device.hang_up()
        reported = control.Report(epoch=3, generation=4, revision=9)
        assert isinstance(device.hello(reported), control.Welcome)
        device.expect("control", control.Desired)
    rig.stop()
    database = Database(database_url or sqlite_url(rig.home / DATABASE_FILE))
    with database.write() as session:
        session.execute(update(PlannerRow).values(epoch=MOST + 1))
        session.execute(update(DesiredRow).values(epoch=MOST + 1))
        session.execute(update(GenerationRow).values(epoch=MOST + 1))
        session.execute(update(ReportedRow).where(ReportedRow.device == "bad").values(epoch=MOST))
    database.close()
    rig.start()
    return rig


@pytest.mark.promise("device-counts-too-far")
def test_a_poisoned_database_serves_all_but_the_device_that_did_it(poisoned: Rig) -> None:
    good, bad = poisoned.enrolled("good"), poisoned.enrolled("bad")
    welcome = good.hello(control.Report(epoch=3, generation=4, revision=9))
    assert isinstance(welcome, control.Welcome) and 3 < welcome.epoch < 10
    desired = good.expect("control", control.Desired)
    assert desired.epoch == welcome.epoch and desired.generation == 5
    refused = bad.hello()
    assert isinstance(refused, Refused) and refused.code is RefusalCode.QUARANTINED
    assert "`stageloom device release bad`" in refused.reason
    assert str(CEILING) in poisoned.info("bad").quarantine
    for command in ("status", "watch", "device list", "device show bad", "device show good"):
        poisoned.command(*command.split())
    assert poisoned.ask(routes.PLAN_HISTORY, PlanHistoryRequest()).items
    poisoned.command("device", "release", "bad")
    assert bad.is_served()
    poisoned.restart()
    assert bad.is_served() and good.is_served()


@pytest.mark.promise("record-database-refuses-costs")
def test_a_record_that_cannot_be_shown_stands_on_its_page_with_the_reason(
    rig: Rig, database_url: str
) -> None:
    good, bad = rig.device("good"), rig.device("bad")
    assert good.is_served() and bad.is_served()
    database = Database(database_url or sqlite_url(rig.home / DATABASE_FILE))
    with database.write() as session:
        session.execute(update(DeviceRow).where(DeviceRow.name == "bad").values(device_class="x" * 999))
    database.close()
    infos = {info.device: info for info in rig.ask(routes.DEVICE_LIST, DeviceListRequest()).items}
    assert not infos[good.name].unshown and infos[good.name].device_class
    assert "cannot be shown" in infos[bad.name].unshown
    watched = rig.ask(routes.WATCH, WatchRequest())
    assert [bool(info.unshown) for info in watched.devices] == [True, False]


def test_rows_that_only_an_older_version_took_leave_every_page_whole(rig: Rig, database_url: str) -> None:
    """Version 0.1.0 stored histograms with buckets above the last one, and `watch` failed for all devices."""
    good, bad = rig.device("good"), rig.device("bad")
    assert good.is_served() and bad.is_served()
    good.rows(telemetry.LatencyHistogram("m", 1, 1, 1, ((96, 1),)))
    at_us = 1_700_000_000_000_000
    row = TelemetryRow(
        device="bad",
        boot=BOOT,
        sequence=100,
        kind=telemetry.RowKind.LATENCY_HISTOGRAM.value,
        at_us=at_us,
        body=msgspec.msgpack.encode((at_us, (2, "m", 1, 1, 1, ((97, 1),)))),
    )
    database = Database(database_url or sqlite_url(rig.home / DATABASE_FILE))
    with database.write() as session:
        session.add(row)
    database.close()
    watched = rig.ask(routes.WATCH, WatchRequest())
    assert [rate.device for rate in watched.rates] == ["good"]
    unshown = {info.device: info.unshown for info in watched.devices}
    assert unshown[good.name] == "" and unshown[bad.name].startswith("1 telemetry row")
    shown = json.loads(rig.command("device", "telemetry", "bad", "--json"))
    assert {entry["kind"] for entry in shown} == {"event", "unreadable"}

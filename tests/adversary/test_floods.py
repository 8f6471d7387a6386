"""A device that floods beside one that does not, over real sockets, on both databases.

Counts are the oracle. The quotas of these tests hardly refill, so that what a flood of any length leaves in
the database is what a quota lets through at once; every message of the good device is answered.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from sqlalchemy import func, select

from benchmarks.adversary.floods import FLOODS, Attacker, Flood, Target
from stageloom.planner.dispatch.core import DispatchConfig, DispatchCore
from stageloom.planner.dispatch.ports import EnrolAttempt
from stageloom.planner.dispatch.quotas import ROW_BYTES, Quota, Rate
from stageloom.planner.dispatch.server import DispatchServer, ServerConfig, new_keys
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.devices import add_token, enrol_device
from stageloom.planner.store.events import newest_events
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import AlarmRow, GenerationRow, LedgerRow, Table, TelemetryRow
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.keyfile import KeyPair
from stageloom.shared.messages import bulk, control, telemetry
from stageloom.shared.messages.base import Message
from tests.link.rig import LANES, wait_until
from tests.store import conftest as databases
from tests.store.helpers import add_model, small_plan

pytestmark = pytest.mark.more

# Fixtures: a store on SQLite, then on Postgres.
clock, database_url, migrated_file = databases.clock, databases.database_url, databases.migrated_file
migration, postgres, store = databases.migration, databases.postgres, databases.store

GOOD, BAD = DeviceId("good"), DeviceId("bad")
MESSAGES = 3_000  # of a flood
ROWS = 6_000.0
LIMITS = {
    Quota.CONNECTIONS: 200.0,
    Quota.CONTROL: 2_000.0,
    Quota.BATCHES: 300.0,
    Quota.CHUNKS: 400.0,
    Quota.HELLOS: 20.0,
    Quota.REPORTS: 40.0,
    Quota.ALARMS: 30.0,
    Quota.LOCAL_PLANS: 10.0,
    Quota.GENERATIONS: 10.0,
    Quota.TELEMETRY_BYTES: ROWS * ROW_BYTES,
    Quota.SINGLE_ROWS: 600.0,
    Quota.LEDGERS: 128.0,
}
QUEUE_BYTES = 1 << 20


class Side:
    """A planner's dispatch over a real store, two devices enrolled, a plan desired of both."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.keys = {name: new_keys() for name in (GOOD, BAD)}
        for name, keys in self.keys.items():
            _enrol(store, name, keys)
        self.artifact = add_model(store, folder)
        self.plan = small_plan(store)
        store.write(add_plan, "first", self.plan, "sequential")
        for name in self.keys:
            store.write(push, Push(device=name, plan="first", decided_by="operator"))
        self.planner_keys = new_keys()
        quotas = {quota: Rate(1e-6, most) for quota, most in LIMITS.items()}
        dispatch = DispatchConfig(quotas=quotas, device_queue_bytes=QUEUE_BYTES, dead_after_s=60.0)
        self.server = DispatchServer(
            LinkStore(store), ServerConfig(keys=self.planner_keys, dispatch=dispatch, max_devices=20)
        )
        self.endpoints = self.server.start()

    def target(self, name: DeviceId) -> Target:
        return Target(
            endpoints=self.endpoints,
            planner_key=self.planner_keys.public,
            keys=self.keys[name],
            artifact=self.artifact,
            plan=self.plan.wire,
        )

    def waiting(self) -> tuple[int, int]:
        """(bytes of the bad device that wait for the store, telemetry rows of anyone that do)."""

        def look(core: DispatchCore) -> tuple[int, int]:
            device = core.fleet.get(BAD)
            assert device is not None
            return device.waiting_bytes, core.backlog_rows

        return self.server.ask(look)

    def count(self, table: type[Table], device: DeviceId) -> int:
        with self.store.database.read() as session:
            wanted = select(func.count()).select_from(table).where(table.__table__.c.device == device)
            return session.scalar(wanted) or 0


def _enrol(store: Store, name: DeviceId, keys: KeyPair) -> None:
    secret = digest_bytes([name.encode()])
    store.write(add_token, secret, None, 3600.0)
    store.write(enrol_device, EnrolAttempt(secret, keys.public, name, "0.1.0", "cpu"))


@pytest.fixture
def side(store: Store, tmp_path: Path) -> Iterator[Side]:
    made = Side(store, tmp_path)
    yield made
    made.server.stop()


class Good:
    """A device that does what an agent does, and insists on an answer to each message."""

    def __init__(self, target: Target) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = {lane: self._dealer(target, lane) for lane in ("control", "telemetry", "bulk")}
        self._artifact = target.artifact
        self._number = 0

    def _dealer(self, target: Target, lane: str) -> "zmq.Socket[bytes]":
        dealer = self._context.socket(zmq.DEALER)
        dealer.curve_serverkey = target.planner_key.encode()
        dealer.curve_publickey = target.keys.public.encode()
        dealer.curve_secretkey = target.keys.secret.encode()
        dealer.connect(getattr(target.endpoints, lane))
        return dealer

    def close(self) -> None:
        self._context.destroy(linger=0)

    def asks(self, lane: str, message: Message, answer: type[Any]) -> Any:
        """Send, and wait for the answer of this kind."""
        outgoing, incoming = LANES[lane]
        self._sockets[lane].send(outgoing.encode(message))
        while True:
            assert self._sockets[lane].poll(30_000), f"no {answer.__name__}"
            found = incoming.decode(self._sockets[lane].recv())
            if isinstance(found, answer):
                return found

    def hello(self) -> None:
        report = control.Report(revision=1)
        message = control.Hello(boot=9, connection=1, agent_version="", device_class="cpu", report=report)
        self.asks("control", message, control.Welcome)

    def does_everything(self) -> None:
        """A heartbeat, a report, an alarm, ten rows and a chunk."""
        self._number += 1
        number = self._number
        beat = control.Heartbeat(boot=9, epoch=0, generation=0, state=None, revision=0)
        self.asks("control", beat, control.HeartbeatAck)
        report = control.Report(revision=number + 1)
        self.asks("control", control.Reported(boot=9, report=report), control.ReportedAck)
        alarm = control.Alarm(
            boot=9,
            number=number,
            at_us=5,
            cause="age",
            value=1.0,
            threshold=0.1,
            plan=None,
            loads=(),
            samples=(),
        )
        ack = self.asks("control", alarm, control.AlarmAck)
        assert ack.number == number
        first = 10 * (number - 1)
        body = telemetry.encode_row(telemetry.Row(1_700_000_000_000_000, telemetry.Event("e")))
        batch = telemetry.TelemetryBatch(
            rows=(body,) * 10,
            ranges=(telemetry.RowRange(9, first, first + 9),),
            ledgers=(telemetry.Ledger(9, first + 10, 0),),
        )
        assert self.asks("telemetry", batch, telemetry.TelemetryAck).ranges == batch.ranges
        wanted = bulk.ChunkRequest(digest=Digest(self._artifact), offset_bytes=0)
        assert self.asks("bulk", wanted, bulk.Chunk).data


@pytest.mark.promise("device-floods-way-protocol")
@pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgres", marks=pytest.mark.full)], indirect=True
)
@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.name)
def test_beside_a_flood_every_message_of_a_good_device_is_answered_and_what_stays_is_bounded(
    side: Side, flood: Flood
) -> None:
    """1. Both open a session. 2. After every 500 messages of the flood the good device does everything.
    3. When all is stored, the bad one has left no more than its quotas let through."""
    bad, good = Attacker(side.target(BAD)), Good(side.target(GOOD))
    most_bytes = 0
    try:
        good.hello()
        bad.hello()
        messages = MESSAGES // 20 if flood.reconnects else MESSAGES
        for sent, (lane, frame) in zip(range(messages), flood.frames(side.target(BAD)), strict=False):
            if flood.reconnects:
                bad.reconnect()
            if not bad.send(lane, frame, reads=flood.reads, give_up_s=0.0 if not flood.reads else 1e18):
                continue
            if sent % (messages // 6) == 0:
                most_bytes = max(most_bytes, side.waiting()[0])
                good.does_everything()
        good.does_everything()
        wait_until(lambda: side.waiting() == (0, 0))
    finally:
        bad.close()
        good.close()
    assert most_bytes <= QUEUE_BYTES
    assert side.count(AlarmRow, BAD) <= LIMITS[Quota.ALARMS]
    assert side.count(LedgerRow, BAD) <= LIMITS[Quota.LEDGERS]
    assert side.count(TelemetryRow, BAD) <= ROWS
    assert side.count(GenerationRow, BAD) <= 1 + LIMITS[Quota.GENERATIONS]


@pytest.mark.promise("device-floods-way-protocol")
def test_an_operator_sees_which_device_floods_in_one_event(side: Side) -> None:
    bad = Attacker(side.target(BAD))
    flood = next(one for one in FLOODS if one.name == "alarms")
    try:
        bad.hello()
        for _, (lane, frame) in zip(range(500), flood.frames(side.target(BAD)), strict=False):
            bad.send(lane, frame, reads=True)
        wait_until(lambda: any(code == "quota" for _, _, code, _ in side.store.read(newest_events)))
    finally:
        bad.close()
    (told,) = [(device, text) for _, device, code, text in side.store.read(newest_events) if code == "quota"]
    assert told[0] == BAD and told[1].startswith("alarms ")

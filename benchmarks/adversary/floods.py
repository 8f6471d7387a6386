"""Floods that one enrolled device can send: everything the protocol lets it say, as fast as it can.

`FLOODS` names them. `flood(target, seconds)` opens a session as the device of `target`, floods the planner
for that long and returns how many messages it sent; nothing is written but to sockets of its own. A harness
runs it beside a good device and looks at what that one notices.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import zmq
from msgspec import structs

from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import Digest
from stageloom.shared.keyfile import KeyPair
from stageloom.shared.messages import bulk, control, telemetry
from stageloom.shared.messages.base import MAX_PLAN_BYTES
from stageloom.shared.token import Endpoints

BOOT: Final = 1 << 40
_QUEUED: Final = 64
_WAIT_MS: Final = 1
_CONNECTED_MS: Final = 20
_NOBODYS: Final = digest_bytes([b"an artifact that nobody has"])
Frames = Iterator[tuple[str, bytes]]
"""(socket, frame): `control`, `telemetry` or `bulk`, and one encoded message."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A planner and the keys of a device that it has enrolled.

    `artifact`: one that the device's desired value names, for floods that ask for it; `plan`: a plan's
    wire form of granted artifacts, for floods that have one adopted. Without them those floods are refused.
    """

    endpoints: Endpoints
    planner_key: str  # Z85
    keys: KeyPair
    artifact: Digest = _NOBODYS
    plan: bytes = b"no plan"


class Attacker:
    """The device's connections, a session opened on them."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._connections = 0

    def close(self) -> None:
        """Drop every connection and whatever was not sent yet."""
        self._context.destroy(linger=0)

    def hello(self) -> None:
        """Open a session."""
        self._connections += 1
        message = control.Hello(
            boot=BOOT,
            connection=self._connections,
            agent_version="adversary",
            device_class="adversary",
            report=control.Report(),
        )
        self.send("control", control.TO_PLANNER.encode(message), reads=True)

    def reconnect(self) -> None:
        """A new connection in place of the one on the control socket, which had a moment to come about."""
        old = self._sockets.pop("control", None)
        if old is not None:
            old.poll(_CONNECTED_MS)
            old.close(linger=0)
        self.hello()

    def send(self, lane: str, frame: bytes, *, reads: bool, give_up_s: float = float("inf")) -> bool:
        """Send one frame; answers are read and thrown away, unless `reads` is false. Whether it went
        before `give_up_s` on the monotonic clock."""
        dealer = self._dealer(lane)
        while True:
            if reads:
                self._drain(dealer)
            try:
                dealer.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                if time.monotonic() >= give_up_s:
                    return False
                dealer.poll(_WAIT_MS, zmq.POLLOUT)
            else:
                return True

    def _drain(self, dealer: "zmq.Socket[bytes]") -> None:
        try:
            while True:
                dealer.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            pass

    def _dealer(self, lane: str) -> "zmq.Socket[bytes]":
        if lane not in self._sockets:
            dealer = self._context.socket(zmq.DEALER)
            dealer.curve_serverkey = self._target.planner_key.encode()
            dealer.curve_publickey = self._target.keys.public.encode()
            dealer.curve_secretkey = self._target.keys.secret.encode()
            dealer.setsockopt(zmq.SNDHWM, _QUEUED)
            dealer.setsockopt(zmq.RCVHWM, 1)  # what is not read waits at the planner
            dealer.connect(getattr(self._target.endpoints, lane))
            self._sockets[lane] = dealer
        return self._sockets[lane]


@dataclass(frozen=True)
class Flood:
    """One kind of flood. `frames` goes on for ever."""

    name: str
    frames: Callable[[Target], Frames]
    reads: bool = True
    reconnects: bool = False  # before each message

    def __call__(self, target: Target, seconds: float) -> int:
        """Flood for `seconds`; returns the number of messages sent."""
        until_s, sent = time.monotonic() + seconds, 0
        attacker = Attacker(target)
        try:
            attacker.hello()
            for lane, frame in self.frames(target):
                if time.monotonic() >= until_s:
                    break
                if self.reconnects:
                    attacker.reconnect()
                sent += attacker.send(lane, frame, reads=self.reads, give_up_s=until_s)
        finally:
            attacker.close()
        return sent


def _control(message: control.ControlToPlanner) -> tuple[str, bytes]:
    return "control", control.TO_PLANNER.encode(message)


def _heartbeats(_: Target) -> Frames:
    beat = control.Heartbeat(boot=BOOT, epoch=0, generation=0, state=None, revision=0)
    return itertools.repeat(_control(beat))


def _alarms(_: Target) -> Frames:
    loads = tuple(control.ModelLoad(f"model{at}", 1.0, 1.0, 1, 1) for at in range(16))
    alarm = control.Alarm(
        boot=BOOT,
        number=1,
        at_us=1,
        cause="variance",
        value=1.0,
        threshold=0.1,
        plan=None,
        loads=loads,
        samples=(),
    )
    return (_control(structs.replace(alarm, number=number)) for number in range(1, 1_000_001))


def _reports(_: Target) -> Frames:
    return (
        _control(control.Reported(boot=BOOT, report=control.Report(revision=revision, reason="x" * 512)))
        for revision in itertools.count(1)
    )


def _generations(_: Target) -> Frames:
    """Reports that know more than the planner gave out: each makes it begin a generation above."""
    return (
        _control(
            control.Reported(boot=BOOT, report=control.Report(revision=count, epoch=1, generation=count))
        )
        for count in itertools.count(1)
    )


def _local_plans(target: Target) -> Frames:
    digest = digest_bytes([target.plan])
    return (
        _control(
            control.LocalPlan(
                boot=BOOT,
                epoch=1,
                generation=count // 8,
                local_counter=count,
                plan_digest=digest,
                plan=target.plan,
                artifacts=(),
                cause="variance",
            )
        )
        for count in itertools.count(1)
    )


def _hellos(_: Target) -> Frames:
    report = control.Report()
    return (
        _control(
            control.Hello(
                boot=boot, connection=1, agent_version="adversary", device_class="adversary", report=report
            )
        )
        for boot in itertools.count(BOOT)
    )


def _big_frames(_: Target) -> Frames:
    """As large as the control socket takes: plans that are none, and bytes that are no message."""
    incompressible = b"".join(digest_bytes([b"%d" % at]).encode() for at in range(MAX_PLAN_BYTES // 64))
    plan = control.LocalPlan(
        boot=BOOT,
        epoch=1,
        generation=1,
        local_counter=1,
        plan_digest=_NOBODYS,
        plan=incompressible,
        artifacts=(),
        cause="variance",
    )
    return itertools.cycle((_control(plan), ("control", b"\x00" + b"\xff" * 160_000)))


def _batch(rows: tuple[bytes, ...], boot: int, first: int = 0) -> tuple[str, bytes]:
    end = first + len(rows)
    batch = telemetry.TelemetryBatch(
        rows=rows,
        ranges=(telemetry.RowRange(boot, first, end - 1),) if rows else (),
        ledgers=(telemetry.Ledger(boot, end, 0),),
    )
    return "telemetry", telemetry.TO_PLANNER.encode(batch)


def _empty_batches(_: Target) -> Frames:
    batch = telemetry.TelemetryBatch(rows=(), ranges=(), ledgers=())
    return itertools.repeat(("telemetry", telemetry.TO_PLANNER.encode(batch)))


def _ledgers(_: Target) -> Frames:
    """Batches without rows, each with the books of 64 lives that never were."""
    for first in itertools.count(1, 64):
        ledgers = tuple(telemetry.Ledger(first + at, 1, 1) for at in range(64))
        batch = telemetry.TelemetryBatch(rows=(), ranges=(), ledgers=ledgers)
        yield "telemetry", telemetry.TO_PLANNER.encode(batch)


def _rows(data: telemetry.RowData) -> Frames:
    body = telemetry.encode_row(telemetry.Row(time.time_ns() // 1_000, data))
    count = min(telemetry.MAX_BATCH_ROWS, (telemetry.MAX_BATCH_BYTES - 4_096) // (len(body) + 3))
    return (_batch((body,) * count, BOOT, first) for first in itertools.count(0, count))


def _telemetry_rows(_: Target) -> Frames:
    return _rows(telemetry.QueueSample("model", 1, 2, 3))


def _profile_rows(target: Target) -> Frames:
    timings = tuple(telemetry.OperatorTiming(at, 1.0, 0.1, 9) for at in range(64))
    return _rows(telemetry.ProfileResult(1, target.artifact, 1, "", timings, False))


def _chunk_requests(target: Target) -> Frames:
    asked = bulk.TO_PLANNER.encode(bulk.ChunkRequest(digest=target.artifact, offset_bytes=0))
    return itertools.repeat(("bulk", asked))


FLOODS: Final[tuple[Flood, ...]] = (
    Flood("heartbeats", _heartbeats),
    Flood("alarms", _alarms),
    Flood("reports", _reports),
    Flood("generations", _generations),
    Flood("local_plans", _local_plans),
    Flood("hellos", _hellos),
    Flood("reconnects", _heartbeats, reconnects=True),
    Flood("big_frames", _big_frames),
    Flood("empty_batches", _empty_batches),
    Flood("ledgers", _ledgers),
    Flood("telemetry_rows", _telemetry_rows),
    Flood("profile_rows", _profile_rows),
    Flood("artifact_requests", _chunk_requests),
    Flood("slow_reader", _chunk_requests, reads=False),
)

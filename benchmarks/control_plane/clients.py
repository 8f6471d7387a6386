"""The devices' process: one thread, one epoll, a steady pace; it is told what to do over a pipe.

A simulated device has real CURVE sockets and real messages, and as little work as possible behind them.
What an agent does on the wire is done here too: hello, heartbeats, reports until they are stored,
telemetry in numbered batches with one on its way, all sockets made anew after a silence. What is sent
over and over is encoded once.
"""

import multiprocessing
import resource
import select
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import cycle, islice
from multiprocessing.connection import Connection
from random import Random
from typing import Any, Final

import msgspec
import zmq

from benchmarks.control_plane.planner import Enrolled
from stageloom.edge_agent.link.connection import make_dealer
from stageloom.shared.backoff import backoff_s
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import KeyPair
from stageloom.shared.messages import bulk, control, telemetry
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.token import Endpoints

ROWS_PER_BATCH: Final = 5
"""What an agent with a model or two measures in a second."""

# Plain numbers: combining flags of an enum takes as long as a send.
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_NOBLOCK: Final = int(zmq.NOBLOCK)
_SILENT_S: Final = 4.0
_HELLO_AGAIN_S: Final = 2.0
_TELEMETRY_AGAIN_S: Final = 10.0
_decoded = lru_cache(maxsize=4096)(control.TO_DEVICE.decode)
_ROW = msgspec.msgpack.Encoder()

Socket = "zmq.Socket[bytes]"


@dataclass
class Tally:
    """What all devices together have sent and got."""

    heartbeats: int = 0
    acknowledged: int = 0
    rows: int = 0  # acknowledged after commit
    refused: int = 0
    reconnects: int = 0
    latency_s: list[float] = field(default_factory=list)  # heartbeats' round trips since the look before


@dataclass(eq=False)
class Books:
    """One device's side of what was acknowledged."""

    device: DeviceId
    boot: int  # its one life
    rows_acknowledged: int = 0  # sequences 0..n-1 of its one boot
    revision_acknowledged: int = 0
    generation_acknowledged: int = 0
    acknowledged_at_s: float = 0.0
    last_heartbeat_s: float = 0.0


class SimulatedDevice(Books):
    """One enrolled device. `connect`, then give it turns; `drain` when its sockets may have input."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        device: DeviceId,
        keys: KeyPair,
        planner_key: str,
        endpoints: Endpoints,
        tally: Tally,
        rng: Random,
    ) -> None:
        super().__init__(device, rng.getrandbits(60) | 1)
        self._context, self._keys, self._planner_key, self._endpoints = context, keys, planner_key, endpoints
        self._tally, self._rng = tally, rng
        self._connection = 0
        self._sockets: list[zmq.Socket[bytes]] = []
        self._delays = backoff_s(rng)
        self._connect_at_s = 0.0
        self._hello_at_s = float("-inf")
        self._greeted_at_s: float | None = None  # the first hello of this connection
        self._report = control.Report()
        self._heartbeat = b""
        # Of this connection's that are not acknowledged: answers come in order.
        self._beats_at_s: deque[float] = deque()
        self._batch: telemetry.TelemetryBatch | None = None
        self._batch_at_s = 0.0
        self.connected = self.welcomed = self.frozen = False
        self.heard_s = 0.0
        self._renew()

    # -- connections ----------------------------------------------------------------------------------------

    def connect(self) -> "list[zmq.Socket[bytes]]":
        """Make an agent's three connections; returns the sockets to watch (bulk's stays idle)."""
        lanes = (
            (control.TO_DEVICE, 32, self._endpoints.control),
            (telemetry.TO_DEVICE, 2, self._endpoints.telemetry),
            (bulk.TO_DEVICE, 64, self._endpoints.bulk),
        )
        for codec, send_messages, endpoint in lanes:
            dealer = make_dealer(
                self._context,
                keys=self._keys,
                planner_key=self._planner_key,
                frame_bytes=codec.limits.frame_bytes,
                send_messages=send_messages,
                rng=self._rng,
            )
            dealer.connect(endpoint)
            self._sockets.append(dealer)
        self.connected, self.welcomed = True, False
        self._connection += 1
        self._greeted_at_s, self._hello_at_s = None, float("-inf")
        return self._sockets[:2]

    def disconnect(self, now_s: float) -> "list[zmq.Socket[bytes]]":
        """Close everything and come back later, as an agent does after a silence; returns what was closed."""
        gone, self._sockets = self._sockets, []
        self.connected = self.welcomed = False
        self._beats_at_s.clear()
        self._greeted_at_s = None
        self._tally.reconnects += 1
        self._connect_at_s = now_s + next(self._delays)
        return gone

    def wants_connection(self, now_s: float) -> bool:
        """Whether it is time to connect."""
        return not self.connected and now_s >= self._connect_at_s

    def silent(self, now_s: float) -> bool:
        """Whether the planner has not been heard for as long as an agent waits after its hello."""
        greeted = self._greeted_at_s is not None and not self.frozen
        return greeted and now_s - max(self.heard_s, self._greeted_at_s or 0.0) > _SILENT_S

    # -- turns ----------------------------------------------------------------------------------------------

    def beat(self, now_s: float) -> None:
        """Send a heartbeat, or the hello that must come first."""
        if self.frozen or not self.connected:
            return
        if not self.welcomed:
            self._hello(now_s)
        elif self._send(0, self._heartbeat):
            self._beats_at_s.append(now_s)
            self.last_heartbeat_s = now_s
            self._tally.heartbeats += 1
        self.drain(0, now_s)  # sending may have taken in the signal that something came

    def measure(self, now_s: float, *, new_rows: bool) -> None:
        """Send the next rows, unless a batch is on its way; that one again, if it has been for long."""
        if self.frozen or not self.welcomed or (self._batch is None and not new_rows):
            return
        if self._batch is not None and now_s - self._batch_at_s < _TELEMETRY_AGAIN_S:
            return
        if self._batch is None:
            self._batch, self._batch_at_s = self.next_batch(now_s), float("-inf")
        if self._send(1, telemetry.TO_PLANNER.encode(self._batch)):
            self._batch_at_s = now_s
        self.drain(1, now_s)

    def idle(self) -> bool:
        """Whether no telemetry is on its way."""
        return self._batch is None

    def drain(self, lane: int, now_s: float) -> None:
        """Take in whatever has come on one of the sockets that `connect` returned."""
        # Asked first: an empty socket answers `recv` with an exception, which costs more than a message.
        while self.connected and self._sockets[lane].get(_EVENTS) & _POLLIN:  # type: ignore[operator]
            frame = self._sockets[lane].recv(_NOBLOCK)
            self.heard_s = now_s
            (self._control, self._telemetry)[lane](frame, now_s)

    def _send(self, lane: int, frame: bytes) -> bool:
        try:
            self._sockets[lane].send(frame, _NOBLOCK)
        except zmq.Again:
            return False  # down, or full
        return True

    def _hello(self, now_s: float) -> None:
        if now_s - self._hello_at_s < _HELLO_AGAIN_S:
            return
        hello = control.Hello(
            boot=self.boot,
            connection=self._connection,
            agent_version="0.1.0",
            device_class="bench",
            report=self._report,
        )
        if self._send(0, control.TO_PLANNER.encode(hello)):
            self._hello_at_s = now_s
            if self._greeted_at_s is None:
                self._greeted_at_s = now_s

    # -- what comes -----------------------------------------------------------------------------------------

    def _control(self, frame: bytes, now_s: float) -> None:
        message = _decoded(frame)
        if isinstance(message, control.HeartbeatAck):
            self._tally.acknowledged += 1
            if self._beats_at_s:
                self._tally.latency_s.append(now_s - self._beats_at_s.popleft())
            if message.revision < self._report.revision and self.revision_acknowledged < message.revision:
                self._send_report()
        elif isinstance(message, control.Welcome):
            self.welcomed, self._delays = True, backoff_s(self._rng)
            if self._batch is not None:  # its acknowledgement may be lost
                self._batch_at_s = float("-inf")
        elif isinstance(message, control.Desired):
            self._desired(message)
        elif isinstance(message, control.ReportedAck):
            self._stored(message.revision, now_s)
        elif isinstance(message, Refused):
            self._tally.refused += 1
            if message.code is RefusalCode.HELLO_FIRST:
                self.welcomed = False
                self._hello(now_s)

    def _desired(self, desired: control.Desired) -> None:
        if (desired.epoch, desired.generation) > (self._report.epoch, self._report.generation):
            self._report = self.report_on(desired, self._report.revision + 1)
            self._renew()
        self._send_report()

    def report_on(self, desired: control.Desired, revision: int) -> control.Report:
        """What it says of a plan: that it runs."""
        return control.Report(
            revision=revision,
            epoch=desired.epoch,
            generation=desired.generation,
            seen=desired.plan_digest,
            active=desired.plan_digest,
            origin=control.Origin.PLANNER,
            state=control.DeviceState.COMMITTED,
        )

    def _send_report(self) -> None:
        self._send(0, control.TO_PLANNER.encode(control.Reported(boot=self.boot, report=self._report)))

    def _stored(self, revision: int, now_s: float) -> None:
        self.revision_acknowledged = max(self.revision_acknowledged, revision)
        newest = self._report
        if revision == newest.revision and self.generation_acknowledged < newest.generation:
            self.generation_acknowledged, self.acknowledged_at_s = newest.generation, now_s

    def _telemetry(self, frame: bytes, _now_s: float) -> None:
        message = telemetry.TO_DEVICE.decode(frame)
        batch = self._batch
        if isinstance(message, telemetry.TelemetryAck):
            if batch is not None and message.ranges == batch.ranges:
                self.rows_acknowledged += len(batch.rows)
                self._tally.rows += len(batch.rows)
                self._batch = None
        else:
            self._tally.refused += 1

    def _renew(self) -> None:
        heartbeat = control.Heartbeat(
            boot=self.boot,
            epoch=self._report.epoch,
            generation=self._report.generation,
            state=self._report.state,
            revision=self._report.revision,
        )
        self._heartbeat = control.TO_PLANNER.encode(heartbeat)

    def next_batch(self, now_s: float) -> telemetry.TelemetryBatch:
        """What an agent measures of one model in one second."""
        first, at_us = self.rows_acknowledged, round(now_s * 1e6)
        draw = self._rng.randrange
        data: tuple[Any, ...] = (
            telemetry.TaskCounters("relu", 1_000_000, draw(99), draw(99), 0, 0, draw(3), 0),
            telemetry.LatencyHistogram(
                "relu", 40, draw(10**6), draw(10**5), ((30, draw(40)), (31, draw(40)))
            ),
            telemetry.QueueSample("relu", draw(9), draw(10**6), draw(10**6)),
            telemetry.StepTimings("0123456789abcdef", 0, 1, draw(99), draw(10**6), draw(10**5)),
            telemetry.Utilisation("cpu", draw(1000) / 10, "%"),
        )
        last = first + ROWS_PER_BATCH - 1
        return telemetry.TelemetryBatch(
            rows=tuple(_ROW.encode(telemetry.Row(at_us, one)) for one in data),
            ranges=(telemetry.RowRange(self.boot, first, last),),
            ledgers=(telemetry.Ledger(self.boot, last + 1, 0),),
        )


_SLICE_S = 0.005
_CONNECT_PER_SLICE = 10


@dataclass(frozen=True)
class Pace:
    """What the devices do together from now on."""

    heartbeats_per_s: float
    rows_per_s: float
    new_rows: bool = True  # else only what is on its way is sent again


@dataclass(frozen=True)
class Freeze:
    """The first `devices` of the fleet hang: they say nothing, their connections stand. 0: none any more."""

    devices: int


@dataclass(frozen=True)
class Look:
    """Asks for a `Seen`, with or without every device's books."""

    books: bool


@dataclass(frozen=True)
class Seen:
    """The devices' process at one instant of the monotonic clock."""

    at_s: float
    cpu_s: float
    welcomed: int
    measuring: int  # devices with a row acknowledged
    idle: int  # devices without a batch on its way
    told: int  # the lowest generation of which a device's report is acknowledged
    tally: Tally
    books: list[Books] = field(repr=False)


class Clients:
    def __init__(self, fleet: Sequence[Enrolled], planner_key: str, endpoints: Endpoints) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(theirs, fleet, planner_key, endpoints), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, order: Pace | Freeze) -> None:
        self._pipe.send(order)

    def look(self, *, books: bool = False) -> Seen:
        """What they have seen so far."""
        self._pipe.send(Look(books))
        if not self._pipe.poll(60.0):
            raise RuntimeError("the devices' process does not answer")
        seen = self._pipe.recv()
        assert isinstance(seen, Seen)
        return seen

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def file_of(dealer: "zmq.Socket[bytes]") -> int:
    """The file that becomes readable when the socket has something to say."""
    return int(dealer.getsockopt(zmq.FD))


def _run(pipe: Connection, fleet: Sequence[Enrolled], planner_key: str, endpoints: Endpoints) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two a connection, and those that are closing
    _Loop(pipe, fleet, planner_key, endpoints).run()


class _Rota:
    """Devices in turn, as many as are due; never more than all of them at once."""

    def __init__(self, devices: Sequence[SimulatedDevice]) -> None:
        self._devices, self._most = cycle(devices), float(len(devices))
        self.due = 0.0

    def take(self, more: float) -> Iterator[SimulatedDevice]:
        """Those whose turn it is now that so many more are due."""
        self.due = min(self.due + more, self._most)
        while self.due >= 1.0:
            self.due -= 1.0
            yield next(self._devices)


class _Loop:
    def __init__(
        self, pipe: Connection, fleet: Sequence[Enrolled], planner_key: str, endpoints: Endpoints
    ) -> None:
        self._pipe = pipe
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * len(fleet) + 64)
        self._tally = Tally()
        rng = Random(1)
        rngs = [Random(rng.random()) for _ in fleet]
        self._devices = [
            SimulatedDevice(self._context, one.device, one.keys, planner_key, endpoints, self._tally, own)
            for one, own in zip(fleet, rngs, strict=True)
        ]
        self._epoll = select.epoll()
        self._epoll.register(pipe.fileno(), select.EPOLLIN)
        self._watched: dict[int, tuple[SimulatedDevice, int]] = {}  # by file: whose, and which lane
        self._pace = Pace(1.0 * len(self._devices), 0.0)
        self._beats, self._batches = _Rota(self._devices), _Rota(self._devices)
        self._checked = cycle(self._devices)

    def run(self) -> None:
        """Until the pipe is closed."""
        last_s = time.monotonic()
        while True:
            wait_s = max(last_s + _SLICE_S - time.monotonic(), 0.0)
            for file, _ in self._epoll.poll(wait_s):
                watched = self._watched.get(file)
                if watched is not None:
                    device, lane = watched
                    device.drain(lane, time.monotonic())
                elif file == self._pipe.fileno() and not self._obey():
                    self._context.destroy(linger=0)
                    return
            now_s = time.monotonic()
            if now_s - last_s >= _SLICE_S:
                self._turns(now_s, now_s - last_s)
                last_s = now_s

    def _turns(self, now_s: float, passed_s: float) -> None:
        for device in self._beats.take(self._pace.heartbeats_per_s * passed_s):
            device.beat(now_s)
        for device in self._batches.take(self._pace.rows_per_s * passed_s / ROWS_PER_BATCH):
            device.measure(now_s, new_rows=self._pace.new_rows)
        self._check(now_s)

    def _check(self, now_s: float) -> None:
        """A part of the fleet at a time: who has to connect, who has waited long enough."""
        connected = 0
        for device in islice(self._checked, min(len(self._devices), 100)):
            if device.silent(now_s):
                self._disconnect(device, now_s)
            elif connected < _CONNECT_PER_SLICE and device.wants_connection(now_s):
                connected += 1
                for lane, made in enumerate(device.connect()):
                    self._watched[file_of(made)] = device, lane
                    self._epoll.register(file_of(made), select.EPOLLIN)

    def _disconnect(self, device: SimulatedDevice, now_s: float) -> None:
        for gone in device.disconnect(now_s):
            if self._watched.pop(file_of(gone), None) is not None:
                self._epoll.unregister(file_of(gone))
            gone.close(linger=0)

    def _obey(self) -> bool:
        try:
            order: Any = self._pipe.recv()
        except EOFError:
            return False
        if isinstance(order, Pace):
            self._pace = order
            self._beats.due = self._batches.due = 0.0
        elif isinstance(order, Freeze):
            for at, device in enumerate(self._devices):
                if device.frozen and at >= order.devices:
                    device.heard_s = time.monotonic()
                device.frozen = at < order.devices
        else:
            self._pipe.send(self._seen(order.books))
        return True

    def _seen(self, books: bool) -> Seen:
        devices = self._devices
        tally = replace(self._tally)
        self._tally.latency_s = []
        names = [name.name for name in fields(Books)]
        return Seen(
            at_s=time.monotonic(),
            cpu_s=time.process_time(),
            welcomed=sum(device.welcomed for device in devices),
            measuring=sum(device.rows_acknowledged > 0 for device in devices),
            idle=sum(device.idle() for device in devices),
            told=min(device.generation_acknowledged for device in devices),
            tally=tally,
            books=[Books(*(getattr(device, name) for name in names)) for device in devices if books],
        )

"""The devices' process: one thread, one epoll, a steady pace; it is told what to do over a pipe."""

import multiprocessing
import resource
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import zmq

from benchmarks.control_plane.device import ROWS_PER_BATCH, SimulatedDevice, Tally
from benchmarks.control_plane.enrolled import Enrolled
from stageloom.shared.ids import DeviceId
from stageloom.shared.token import Endpoints

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
class DeviceSeen:
    """One device's side of the books."""

    device: DeviceId
    boot: int
    rows_acknowledged: int
    revision_acknowledged: int
    generation_acknowledged: int
    acknowledged_at_s: float
    last_heartbeat_s: float


@dataclass(frozen=True)
class Seen:
    """The devices' process at one instant of the monotonic clock.

    `latency_s` holds heartbeats' round trips since the look before, `told` the lowest generation of which a
    device's report is acknowledged.
    """

    at_s: float
    cpu_s: float
    welcomed: int
    measuring: int  # devices with a row acknowledged
    idle: int  # devices without a batch on its way
    told: int
    heartbeats: int
    acknowledged: int
    rows: int
    refused: int
    reconnects: int
    latency_s: list[float]
    books: list[DeviceSeen] = field(repr=False)


@dataclass(frozen=True)
class Setting:
    """Whom to play, and where the planner is."""

    fleet: Sequence[Enrolled]
    planner_key: str
    endpoints: Endpoints


class Clients:
    """The process, from here."""

    def __init__(self, setting: Setting) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(theirs, setting), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, order: Pace | Freeze) -> None:
        """Change what they do."""
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
        """End the process."""
        self._pipe.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def file_of(dealer: "zmq.Socket[bytes]") -> int:
    """The file that becomes readable when the socket has something to say."""
    return int(dealer.getsockopt(zmq.FD))


def _run(pipe: Connection, setting: Setting) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two a connection, and those that are closing
    _Loop(pipe, setting).run()


class _Loop:
    def __init__(self, pipe: Connection, setting: Setting) -> None:
        self._pipe = pipe
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * len(setting.fleet) + 64)
        self._tally = Tally()
        rng = Random(1)
        self._devices = [
            SimulatedDevice(
                self._context,
                one.device,
                one.keys,
                setting.planner_key,
                setting.endpoints,
                self._tally,
                Random(rng.random()),
            )
            for one in setting.fleet
        ]
        self._epoll = select.epoll()
        self._epoll.register(pipe.fileno(), select.EPOLLIN)
        self._watched: dict[int, tuple[SimulatedDevice, int]] = {}  # by file: whose, and which lane
        self._pace = Pace(1.0 * len(self._devices), 0.0)
        self._beats_due = self._batches_due = 0.0
        self._beat_next = self._batch_next = self._check_next = 0

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
        count = len(self._devices)
        self._beats_due = min(self._beats_due + self._pace.heartbeats_per_s * passed_s, 1.0 * count)
        self._batches_due += self._pace.rows_per_s * passed_s / ROWS_PER_BATCH
        self._batches_due = min(self._batches_due, 1.0 * count)
        while self._beats_due >= 1.0:
            self._beats_due -= 1.0
            device = self._devices[self._beat_next]
            self._beat_next = (self._beat_next + 1) % count
            device.beat(now_s)
        while self._batches_due >= 1.0:
            self._batches_due -= 1.0
            device = self._devices[self._batch_next]
            self._batch_next = (self._batch_next + 1) % count
            device.measure(now_s, new_rows=self._pace.new_rows)
        self._check(now_s)

    def _check(self, now_s: float) -> None:
        """A part of the fleet at a time: who has to connect, who has waited long enough."""
        connected = 0
        for _ in range(min(len(self._devices), 100)):
            device = self._devices[self._check_next]
            self._check_next = (self._check_next + 1) % len(self._devices)
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
            self._beats_due = self._batches_due = 0.0
        elif isinstance(order, Freeze):
            for at, device in enumerate(self._devices):
                if device.frozen and at >= order.devices:
                    device.heard_s = time.monotonic()
                device.frozen = at < order.devices
        else:
            self._pipe.send(self._seen(order.books))
        return True

    def _seen(self, books: bool) -> Seen:
        tally, devices = self._tally, self._devices
        latency_s, tally.latency_s = tally.latency_s, []
        return Seen(
            time.monotonic(),
            time.process_time(),
            sum(one.welcomed for one in devices),
            sum(one.rows_acknowledged > 0 for one in devices),
            sum(one.idle() for one in devices),
            min(one.generation_acknowledged for one in devices),
            tally.heartbeats,
            tally.acknowledged,
            tally.rows,
            tally.refused,
            tally.reconnects,
            latency_s,
            [
                DeviceSeen(
                    one.device,
                    one.boot,
                    one.rows_acknowledged,
                    one.revision_acknowledged,
                    one.generation_acknowledged,
                    one.acknowledged_at_s,
                    one.last_heartbeat_s,
                )
                for one in devices
                if books
            ],
        )

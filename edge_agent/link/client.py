"""The thread that moves messages between this device and its planner.

It owns the sockets, the spool and the artifacts that are being fetched, and decides nothing about plans: what
the planner says becomes events for the main loop, whose actions come back through a queue.
"""

import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import zmq

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.link import fetch as fetching
from stageloom.edge_agent.link.connection import Membership, PlannerConnection
from stageloom.edge_agent.link.spool import Spool
from stageloom.edge_agent.reporting.status import LinkStatus
from stageloom.edge_agent.store import ArtifactStore
from stageloom.shared.backoff import backoff_s
from stageloom.shared.clock import Clock, SystemClock
from stageloom.shared.errors import DecodeError
from stageloom.shared.ids import Digest
from stageloom.shared.keyfile import KeyPair
from stageloom.shared.messages import control, telemetry
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.bulk import ChunkRequest
from stageloom.shared.messages.telemetry import MAX_BATCH_ROWS, TelemetryBatch
from stageloom.shared.text import bounded

log = logging.getLogger(__name__)

_TICK_S: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Where this agent keeps the link's state, and who it is."""

    folder: Path
    keys: KeyPair
    membership: Membership
    boot: int
    spool_bytes: int = 16 << 20
    spool_age_s: float = 7 * 86_400.0
    telemetry_every_s: float = 1.0
    telemetry_again_s: float = 10.0


ToPlanner = ev.SendMessage | ev.FetchArtifact | ev.Reconnect


class LinkClient:
    """The device's link from `start` to `stop`."""

    def __init__(
        self, config: ClientConfig, *, clock: Clock | None = None, rng: Random | None = None
    ) -> None:
        """Raises:
        OSError: the folder can be neither made nor read.
        """
        self._config = config
        self._clock = clock or SystemClock()
        self._rng = rng or Random()
        config.folder.mkdir(parents=True, exist_ok=True)
        self.artifacts = ArtifactStore(config.folder / "artifacts")
        self._welcomed = False  # on the connection that stands
        self._fetcher = fetching.FetchCore()
        self._spool = Spool(
            config.folder / "spool",
            boot=config.boot,
            limit_bytes=config.spool_bytes,
            limit_age_s=config.spool_age_s,
            clock=self._clock,
        )
        self._uplink = Uplink(self._spool, every_s=config.telemetry_every_s, again_s=config.telemetry_again_s)
        self._inbox: queue.SimpleQueue[ToPlanner | list[bytes]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._connection = PlannerConnection(
            self._context, self._poller, keys=config.keys, member=config.membership, rng=self._rng
        )
        self._connect_at_s: float | None = 0.0
        self._delays: Iterator[float] = backoff_s(self._rng)
        self._told_problem = ""  # of the handshakes
        self._stopping = False
        self._counts = self._spool.counts()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        # Whole artifacts are hashed aside: gigabytes take longer than the planner may seem silent.
        self._checks = ThreadPoolExecutor(max_workers=1, thread_name_prefix="link-check")
        self._checking: set[Digest] = set()  # whole, and their digests are not known yet

    # -- from other threads ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; everything that must survive is on disk already."""
        self._stopping = True
        self._wake()
        self._thread.join()
        self._checks.shutdown(cancel_futures=True)
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        self._wake_in.close()
        self._wake_out.close()

    def fileno(self) -> int:
        """Readable while events wait."""
        return self._read

    def take(self) -> Sequence[ev.Event]:
        """The events that wait, in order."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        events: list[ev.Event] = []
        while not self._events.empty():  # nobody else takes from it
            events.append(self._events.get_nowait())
        return events

    def act(self, action: ToPlanner) -> None:
        """Have the thread carry it out."""
        self._inbox.put(action)
        self._wake()

    def record(self, rows: Sequence[telemetry.RowData]) -> None:
        """Take telemetry in, stamped now. A row with a value outside its bounds is left out, and logged."""
        at_us = self._clock.wall_us()
        bodies = (_encoded(telemetry.Row(at_us, data)) for data in rows)
        self._inbox.put([body for body in bodies if body is not None])
        self._wake()

    def status(self) -> LinkStatus:
        """As of the last tick."""
        alive, counts = self._thread.is_alive(), self._counts
        return LinkStatus(
            state="connecting" if alive else "failed",
            detail=self._connection.problem if alive else "the link's thread has ended; restart the agent",
            device=self._config.membership.device,
            telemetry_produced=counts.produced,
            telemetry_acknowledged=counts.acknowledged,
            telemetry_dropped=counts.dropped,
            telemetry_spooled=counts.spooled,
        )

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"\x00")
        except OSError:
            pass  # full: it is awake; closed: it is gone

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._poller.register(self._wake_out, zmq.POLLIN)
        try:
            next_tick_s = 0.0
            while not self._stopping:
                ready = dict(self._poller.poll(int(_TICK_S * 1000)))
                now_s = self._clock.monotonic_s()
                due = now_s >= next_tick_s
                if due:
                    next_tick_s = now_s + _TICK_S
                self._round(ready, now_s, tick=due)
            self._drain_inbox(self._clock.monotonic_s())  # telemetry of the last moments
        finally:
            self._connection.close()
            self._spool.close()
            self._context.destroy(linger=0)

    def _round(self, ready: dict[Any, int], now_s: float, *, tick: bool) -> None:
        try:
            self._drain_inbox(now_s)
            self._follow(ready, now_s)
            for lane, message in self._connection.received(ready):
                self._received(lane, message, now_s)
            if tick:
                self._tick(now_s)
        except Exception:
            log.exception("the link failed; it reconnects")
            self._later(next(self._delays), now_s)

    def _tick(self, now_s: float) -> None:
        if self._connect_at_s is not None and now_s >= self._connect_at_s:
            self._connect_at_s = None
            self._connection.open()
        self._fetch(self._fetcher.tick(now_s))
        self._send_telemetry(now_s)
        self._counts = self._spool.counts()

    def _drain_inbox(self, now_s: float) -> None:
        try:
            while self._wake_out.recv(4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, list):
                self._spool.append(item)
            else:
                self._act(item, now_s)

    def _received(self, lane: str, message: Any, now_s: float) -> None:
        if lane == "control":
            if isinstance(message, control.Welcome):
                self._welcomed, self._fetcher.credits = True, message.bulk_credits
            if self._welcomed:
                self._delays = backoff_s(self._rng)
            self._tell(ev.Received(message))
        elif lane == "bulk":
            self._fetch(self._fetcher.received(message, now_s))
        elif isinstance(message, telemetry.TelemetryAck):
            self._spool.acknowledge(message)
            self._landed(message.correlation, now_s)
        elif isinstance(message, Refused):
            ours = message.code is RefusalCode.MALFORMED and self._uplink.unreadable(message.correlation)
            if ours:
                log.error("the planner cannot read a telemetry batch: %s", message.reason)
                self._landed(message.correlation, now_s)

    # -- actions --------------------------------------------------------------------------------------------

    def _tell(self, event: ev.Event) -> None:
        self._events.put(event)
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the main loop is about to read it
            os.write(self._write, b"\0")

    def _act(self, action: ToPlanner, now_s: float) -> None:
        match action:
            case ev.SendMessage(message):
                self._connection.send("control", message)
            case ev.FetchArtifact(need):
                self._want(need, now_s)
            case ev.Reconnect(reason, delay_s):
                log.warning("reconnecting: %s", reason)
                self._later(delay_s if delay_s is not None else next(self._delays), now_s)

    def _want(self, need: control.ArtifactNeed, now_s: float) -> None:
        if need.digest in self._checking:
            return  # it is here; what comes of it is told soon
        have_bytes = self.artifacts.partial_bytes(need.digest)
        try:
            self.artifacts.require_room(need.size_bytes, have_bytes)
        except OSError as error:
            self._tell(ev.FetchFailed(need.digest, f"cannot be stored: {error}"))
            return
        self._fetch(self._fetcher.want(need, have_bytes, now_s))

    def _fetch(self, actions: Sequence[fetching.FetchAction]) -> None:
        for action in actions:
            match action:
                case ChunkRequest():
                    self._connection.send("bulk", action)
                case ev.FetchFailed():
                    self._tell(action)
                case fetching.Write() | fetching.Finish():
                    if not self._keep(action):
                        return

    def _keep(self, action: fetching.Write | fetching.Finish) -> bool:
        digest = action.digest
        try:
            if isinstance(action, fetching.Write):
                self.artifacts.append(digest, action.offset_bytes, action.data)
            else:
                self._checking.add(digest)
                self._checks.submit(self._finish, digest)
        except OSError as error:
            self._fetcher.stop(digest)
            self._tell(ev.FetchFailed(digest, f"cannot be stored: {error}"))
            return False
        return True

    def _finish(self, digest: Digest) -> None:
        """Check a complete file, on a thread of its own; the fetch has forgotten it."""
        try:
            whole = self.artifacts.finish(digest)
            self._tell(ev.ArtifactPresent(digest) if whole else ev.FetchFailed(digest, "damaged"))
        except OSError as error:
            self._tell(ev.FetchFailed(digest, f"cannot be stored: {error}"))
        finally:
            self._checking.discard(digest)

    def _send_telemetry(self, now_s: float) -> None:
        if not self._welcomed:
            return
        try:
            batch = self._uplink.due(now_s)
        except OSError as error:  # telemetry must not cost the control lane
            log.warning("telemetry waits, since the spool cannot be used: %s", error)
            return
        if batch is not None and self._connection.send("telemetry", batch):
            self._uplink.sent(batch, now_s)  # else the next turn tries again

    def _landed(self, correlation: int, now_s: float) -> None:
        if self._uplink.landed(correlation, now_s):
            self._send_telemetry(now_s)

    def _record_event(self, code: str, text: str) -> None:
        self._record(telemetry.Event(bounded(code, 128), bounded(text)))

    def _record(self, data: telemetry.RowData) -> None:
        body = _encoded(telemetry.Row(self._clock.wall_us(), data))
        self._spool.append([body] if body is not None else [])

    # -- connection -----------------------------------------------------------------------------------------

    def _later(self, delay_s: float, now_s: float) -> None:
        self._connection.close()
        self._interrupted()
        self._connect_at_s = now_s + delay_s

    def _interrupted(self) -> None:
        """What the other lanes sent while the planner was away is lost: they reconnect by themselves."""
        self._welcomed = False
        self._uplink.interrupted()
        self._fetcher.lost()

    def _follow(self, ready: dict[Any, int], now_s: float) -> None:
        """What became of the control connection."""
        for change in self._connection.changes(ready):
            if change is None:
                self._later(next(self._delays), now_s)  # what was refused may be put right
            else:
                self._interrupted()
                self._tell(change)
        problem = self._connection.problem
        if problem and problem != self._told_problem:
            log.error("%s", problem)
            self._record_event("handshake", problem)
        self._told_problem = problem


def _encoded(row: telemetry.Row) -> bytes | None:
    try:
        return telemetry.encode_row(row)
    except DecodeError as error:
        log.error("a %s row is left out: %s", type(row.data).__name__, error)
        return None


class Uplink:
    """Decides when a batch is due. Only what was acknowledged leaves the spool."""

    def __init__(self, spool: Spool, *, every_s: float, again_s: float) -> None:
        """`every_s`: between two batches that are not full; `again_s`: how long to wait for an answer."""
        self._spool = spool
        self._every_s = every_s
        self._again_s = again_s
        self._flight: TelemetryBatch | None = None  # the batch that is out
        self._sent_s = 0.0
        self._next_s = 0.0
        self._correlation = 0

    def due(self, now_s: float) -> TelemetryBatch | None:
        """The batch to send now, on a session that stands; say `sent` if it went."""
        if self._flight is not None and now_s - self._sent_s < self._again_s:
            return None
        if now_s < self._next_s:
            return None
        self._correlation += 1
        self._next_s = now_s + self._every_s
        return self._spool.next_batch(self._correlation)

    def sent(self, batch: TelemetryBatch, now_s: float) -> None:
        self._flight, self._sent_s = batch, now_s

    def landed(self, correlation: int, now_s: float) -> bool:
        """The planner has answered; whether a backlog is to be sent at once."""
        flight = self._flight
        if flight is None or flight.correlation != correlation:
            return False
        self._flight = None
        full = len(flight.rows) == MAX_BATCH_ROWS
        if full:
            self._next_s = now_s
        return full

    def unreadable(self, correlation: int) -> bool:
        """The planner cannot read this batch: its rows are given up, and counted. Whether it was ours."""
        flight = self._flight
        if flight is None or flight.correlation != correlation:
            return False
        self._spool.reject(flight.ranges)
        return True

    def interrupted(self) -> None:
        """What was out may be lost."""
        self._flight = None

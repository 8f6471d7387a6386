"""The shell around the link core: one thread owns the DEALERs, the spool and the artifact folder.

It carries out what the cores decide, watches the control socket's monitor (a wrong key must not look like a
broken network), and hands what concerns plans to the plan manager, on this thread: `on_action` neither blocks
nor raises.
"""

import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import zmq

from edge_agent.link import events as ev
from edge_agent.link import fetch as fetching
from edge_agent.link.artifacts import ArtifactFolder
from edge_agent.link.config import LinkConfig
from edge_agent.link.core import LinkCore
from edge_agent.link.membership import Membership
from edge_agent.link.sockets import make_dealer, monitor_event
from edge_agent.link.spool import Spool, SpoolCounts
from edge_agent.link.statefile import load_state, save_state
from shared.backoff import backoff_s
from shared.clock import Clock, SystemClock
from shared.codec import Codec
from shared.errors import DecodeError
from shared.failpoint import failpoint
from shared.keyfile import KeyPair
from shared.messages import bulk, control, telemetry
from shared.messages.base import RefusalCode, Refused

log = logging.getLogger(__name__)

_TICK_S: Final = 0.1
_QUOTA: Final = 64
_CODECS: Final[dict[str, tuple[Codec[Any], Codec[Any], int]]] = {
    # lane: what goes out, what comes in, messages queued to send
    "control": (control.TO_PLANNER, control.TO_DEVICE, 32),
    "telemetry": (telemetry.TO_PLANNER, telemetry.TO_DEVICE, 2),
    "bulk": (bulk.TO_PLANNER, bulk.TO_DEVICE, 64),
}
_MONITORED: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
)
OUR_KEY_REFUSED: Final = "the planner does not accept this device's key; join again with a new token"
PLANNER_KEY_DIFFERS: Final = (
    "the handshake fails: what answers there does not hold the planner's key; join again with a new token"
)

PlanAction = (
    ev.VerifyPlan
    | ev.StagePlan
    | ev.RunTrial
    | ev.TrialRecorded
    | ev.ActivatePlan
    | ev.RestorePlan
    | ev.AbandonPlan
    | ev.UsePolicy
    | ev.RunProfile
    | ev.RunStageProfile
)


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Where this agent keeps the link's state, and who it is."""

    folder: Path
    keys: KeyPair
    membership: Membership
    link: LinkConfig
    environment: str
    spool_bytes: int = 16 << 20
    spool_age_s: float = 7 * 86_400.0
    telemetry_every_s: float = 1.0
    telemetry_again_s: float = 10.0


@dataclass(frozen=True)
class LinkStatus:
    """What `stageloom-agent status` shows of the link; `problem` is one line, empty when all is well."""

    connected: bool
    device: str
    problem: str
    report: control.Report
    telemetry: SpoolCounts


@dataclass
class _Flight:
    """The telemetry batch that is out."""

    correlation: int
    sent_s: float
    batch: telemetry.TelemetryBatch


@dataclass
class _Connection:
    dealers: "dict[str, zmq.Socket[bytes]]" = field(default_factory=dict)
    monitor: "zmq.Socket[bytes] | None" = None


class LinkClient:
    """The device's link from `start` to `stop`."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        on_action: Callable[[PlanAction], None],
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        """Raises:
        OSError: the folder can be neither made nor read.
        """
        self._config = config
        self._on_action = on_action
        self._clock = clock or SystemClock()
        self._rng = rng or Random()
        config.folder.mkdir(parents=True, exist_ok=True)
        self.artifacts = ArtifactFolder(config.folder / "artifacts")
        self._state_path = config.folder / "link.state"
        state, self._state_problem = load_state(self._state_path)
        self._core = LinkCore(state, config=config.link)
        self._fetcher = fetching.FetchCore()
        self._spool = Spool(
            config.folder / "spool",
            boot=config.link.boot,
            limit_bytes=config.spool_bytes,
            limit_age_s=config.spool_age_s,
            clock=self._clock,
        )
        self._inbox: queue.SimpleQueue[ev.Event | list[bytes]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connection = _Connection()
        self._poller = zmq.Poller()
        self._connect_at_s: float | None = 0.0
        self._delays: Iterator[float] = backoff_s(self._rng)
        self._handshake_problem = ""
        self._handshake_open = False
        self._handshakes_failed = 0
        self._flight: _Flight | None = None
        self._next_batch_s = 0.0
        self._correlation = 0
        self._recorded_state: tuple[int, int, control.DeviceState] | None = None
        self._stopping = False
        self._status = self._current_status()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    # -- from other threads ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Restore last-known-good (as an action, before any network) and serve on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; everything that must survive is on disk already."""
        self._stopping = True
        self._wake()
        self._thread.join()
        self._wake_in.close()
        self._wake_out.close()

    @property
    def alive(self) -> bool:
        """Whether the link's thread runs."""
        return self._thread.is_alive()

    def post(self, event: ev.Event) -> None:
        """Tell the core what the plan manager or the machine did."""
        self._inbox.put(event)
        self._wake()

    def record(self, rows: Sequence[telemetry.RowData]) -> None:
        """Take telemetry in, stamped now. A row with a value outside its bounds is left out, and logged."""
        at_us = self._clock.wall_us()
        bodies = (_encoded(telemetry.Row(at_us, data)) for data in rows)
        self._inbox.put([body for body in bodies if body is not None])
        self._wake()

    def status(self) -> LinkStatus:
        """As of the last tick."""
        return self._status

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"\x00")
        except OSError:
            pass  # full: it is awake; closed: it is gone

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._poller.register(self._wake_out, zmq.POLLIN)
        try:
            if self._state_problem:
                self._record_event("state_set_aside", self._state_problem)
            present = self.artifacts.present()
            self._carry(self._core.boot(self._config.environment, present, self._clock.monotonic_s()))
            next_tick_s = 0.0
            while not self._stopping:
                ready = dict(self._poller.poll(int(_TICK_S * 1000)))
                now_s = self._clock.monotonic_s()
                due = now_s >= next_tick_s
                if due:
                    next_tick_s = now_s + _TICK_S
                self._round(ready, now_s, tick=due)
            self._drain_inbox(self._clock.monotonic_s())  # how a trial ended must be on disk
        finally:
            self._disconnect()
            self._spool.close()
            self._context.destroy(linger=0)

    def _round(self, ready: dict[Any, int], now_s: float, *, tick: bool) -> None:
        try:
            self._drain_inbox(now_s)
            monitor = self._connection.monitor
            if monitor is not None and monitor in ready:
                self._drain_monitor(monitor, now_s)
            for lane in list(self._connection.dealers):
                dealer = self._connection.dealers.get(lane)
                if dealer is not None and dealer in ready:
                    self._drain(lane, dealer, now_s)
            if tick:
                self._tick(now_s)
        except Exception:
            log.exception("the link failed; it reconnects")
            self._later(next(self._delays), now_s)

    def _tick(self, now_s: float) -> None:
        if self._connect_at_s is not None and now_s >= self._connect_at_s:
            self._connect()
        self._do(ev.Tick())
        self._fetch(self._fetcher.tick(now_s))
        self._send_telemetry(now_s)
        self._status = self._current_status()

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
                self._do(item)

    def _drain(self, lane: str, dealer: "zmq.Socket[bytes]", now_s: float) -> None:
        for _ in range(_QUOTA):
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except (zmq.Again, zmq.ZMQError):
                return  # empty, or closed by what the last message made us do
            if len(frames) != 1:
                continue
            try:
                message = _CODECS[lane][1].decode(frames[0])
            except DecodeError as error:
                log.warning("a %s message from the planner is unreadable: %s", lane, error)
                continue
            self._received(lane, message, now_s)

    def _received(self, lane: str, message: Any, now_s: float) -> None:
        if lane == "control":
            self._do(ev.Received(message))
            if self._core.session.welcomed:
                self._delays = backoff_s(self._rng)
        elif lane == "bulk":
            self._fetch(self._fetcher.received(message, now_s))
        elif isinstance(message, telemetry.TelemetryAck):
            self._spool.acknowledge(message)
            self._landed(message.correlation, now_s)
        elif isinstance(message, Refused):
            flight = self._flight
            if message.code is RefusalCode.MALFORMED and flight and message.correlation == flight.correlation:
                log.error("the planner cannot read a telemetry batch: %s", message.reason)
                self._spool.reject(flight.batch.ranges)
                self._landed(message.correlation, now_s)

    # -- actions --------------------------------------------------------------------------------------------

    def _do(self, event: ev.Event) -> None:
        self._carry(self._core.handle(event, self._clock.monotonic_s()))

    def _carry(self, actions: Sequence[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, ev.Persist):
                commits = action.state.state is control.DeviceState.COMMITTED
                try:
                    if commits:
                        failpoint("agent.commit.before")
                    save_state(self._state_path, action.state)
                    if commits:
                        failpoint("agent.commit.after")
                except OSError as error:
                    log.error("the link's state cannot be stored: %s", error)
                    self._record_event("storage", f"the link's state cannot be stored: {error}")
                    self._do(ev.PersistFailed(str(error)))
                    return
                self._core.persisted(action.state)
                self._record_state(action.state)
            elif isinstance(action, ev.Hold):
                self._core.held(action.state)
                self._record_state(action.state)
            else:
                self._act(action)

    def _act(self, action: ev.Action) -> None:
        now_s = self._clock.monotonic_s()
        match action:
            case ev.Send(message):
                self._send("control", message)
            case ev.FetchArtifact(need):
                self._fetcher.credits = self._core.session.bulk_credits
                self._fetch(self._fetcher.want(need, self.artifacts.partial_bytes(need.digest), now_s))
            case ev.Reconnect(reason, delay_s):
                log.warning("reconnecting: %s", reason)
                self._later(delay_s if delay_s is not None else next(self._delays), now_s)
            case ev.Record(row):
                self._record(row)
            case ev.Persist() | ev.Hold():
                raise AssertionError("done by _carry")
            case _:
                self._on_action(action)

    def _fetch(self, actions: Sequence[fetching.FetchAction]) -> None:
        for action in actions:
            match action:
                case fetching.Ask(request):
                    self._send("bulk", request)
                case fetching.GiveUp(digest, reason):
                    self._do(ev.FetchFailed(digest, reason))
                case fetching.Write() | fetching.Finish():
                    if not self._keep(action):
                        return

    def _keep(self, action: fetching.Write | fetching.Finish) -> bool:
        digest = action.digest
        try:
            if isinstance(action, fetching.Write):
                self.artifacts.append(digest, action.offset_bytes, action.data)
            else:
                whole = self.artifacts.finish(digest)
                self._do(ev.ArtifactPresent(digest) if whole else ev.FetchFailed(digest, "damaged"))
        except OSError as error:
            self._fetcher.stop(digest)
            self._do(ev.FetchFailed(digest, f"cannot be stored: {error}"))
            return False
        return True

    def _send(self, lane: str, message: Any) -> bool:
        """Whether ZeroMQ took it."""
        dealer = self._connection.dealers.get(lane)
        if dealer is None:
            return False
        try:
            dealer.send(_CODECS[lane][0].encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("the %s lane is full or down; what was to be sent is sent again later", lane)
            return False
        return True

    def _send_telemetry(self, now_s: float) -> None:
        flight = self._flight
        if flight is not None and now_s - flight.sent_s < self._config.telemetry_again_s:
            return
        if not self._core.session.welcomed or now_s < self._next_batch_s:
            return
        self._correlation += 1
        batch = self._spool.next_batch(self._correlation)
        self._next_batch_s = now_s + self._config.telemetry_every_s
        if batch is not None and self._send("telemetry", batch):
            self._flight = _Flight(self._correlation, now_s, batch)  # else the next turn tries again

    def _landed(self, correlation: int, now_s: float) -> None:
        if self._flight is not None and self._flight.correlation == correlation:
            full = len(self._flight.batch.rows) == telemetry.MAX_BATCH_ROWS
            self._flight = None
            if full:  # a backlog: go on at once
                self._next_batch_s = now_s
                self._send_telemetry(now_s)

    def _record_event(self, code: str, text: str) -> None:
        self._record(telemetry.Event(code[:128], text[:512]))

    def _record(self, data: telemetry.RowData) -> None:
        body = _encoded(telemetry.Row(self._clock.wall_us(), data))
        self._spool.append([body] if body is not None else [])

    def _record_state(self, state: ev.LinkState) -> None:
        if state.desired is None or state.state is None:
            return
        told = (state.desired.epoch, state.desired.generation, state.state)
        if told == self._recorded_state:
            return
        self._recorded_state = told
        origin = state.active.origin if state.active else control.Origin.FALLBACK
        change = telemetry.StateChange(
            state.desired.epoch,
            state.desired.generation,
            state.state,
            state.desired.plan_digest,
            origin,
            state.reason,
        )
        self._record(change)

    # -- connection -----------------------------------------------------------------------------------------

    def _later(self, delay_s: float, now_s: float) -> None:
        self._disconnect()
        self._connect_at_s = now_s + delay_s

    def _connect(self) -> None:
        self._connect_at_s = None
        member = self._config.membership
        for lane, (_, incoming, send_messages) in _CODECS.items():
            dealer = make_dealer(
                self._context,
                keys=self._config.keys,
                planner_key=member.planner_key,
                frame_bytes=incoming.limits.frame_bytes,
                send_messages=send_messages,
                rng=self._rng,
            )
            if lane == "control":
                self._connection.monitor = dealer.get_monitor_socket(_MONITORED)
                self._poller.register(self._connection.monitor, zmq.POLLIN)
            self._connection.dealers[lane] = dealer
            self._poller.register(dealer, zmq.POLLIN)
            dealer.connect(getattr(member.endpoints, lane))

    def _disconnect(self) -> None:
        if self._connection.monitor is not None:
            self._poller.unregister(self._connection.monitor)
            self._connection.dealers["control"].disable_monitor()
            self._connection.monitor.close(linger=0)
        for dealer in self._connection.dealers.values():
            self._poller.unregister(dealer)
            dealer.close(linger=0)
        self._connection = _Connection()
        self._flight = None
        self._fetcher.lost()

    def _drain_monitor(self, monitor: "zmq.Socket[bytes]", now_s: float) -> None:
        while monitor is self._connection.monitor:
            try:
                event = monitor_event(monitor)
            except zmq.Again:
                return
            if event == zmq.EVENT_CONNECTED:
                self._handshake_open = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshake_open, self._handshake_problem, self._handshakes_failed = False, "", 0
                # What the other lanes sent while the planner was away is lost: they reconnect by themselves.
                self._flight = None
                self._fetcher.lost()
                self._do(ev.Connected())
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._handshake_failed(OUR_KEY_REFUSED, now_s)
            elif event == zmq.EVENT_DISCONNECTED and not self._handshake_open:
                self._flight = None
                self._fetcher.lost()
                self._do(ev.Lost())
            else:
                self._handshake_failed(PLANNER_KEY_DIFFERS, now_s)

    def _handshake_failed(self, problem: str, now_s: float) -> None:
        # libzmq does not come back by itself after a refusal, and what was refused may be put right.
        self._later(next(self._delays), now_s)
        self._handshake_open = False
        self._handshakes_failed += 1
        if problem == PLANNER_KEY_DIFFERS and self._handshakes_failed < 2:
            return  # once may be a planner that stopped half-way
        if self._handshake_problem != problem:
            log.error("%s", problem)
            self._record_event("handshake", problem)
        self._handshake_problem = problem

    def _current_status(self) -> LinkStatus:
        core = self._core
        problem = self._handshake_problem
        if not problem and core.session.denied is not None:
            problem = f"{core.session.denied.code.value}: {core.session.denied.reason}"
        if not problem and core.disk.error:
            problem = f"the link's state cannot be stored: {core.disk.error}"
        device = core.session.device or self._config.membership.device
        return LinkStatus(core.session.welcomed, device, problem, core.report(), self._spool.counts())


def _encoded(row: telemetry.Row) -> bytes | None:
    try:
        return telemetry.encode_row(row)
    except DecodeError as error:
        log.error("a %s row is left out: %s", type(row.data).__name__, error)
        return None

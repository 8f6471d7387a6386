"""The shell around the dispatch core: one plain thread owns the three ROUTERs and answers for admission.

Other threads reach it through `post` and `ask`. Lanes are drained in order of urgency with a quota each, so
that heartbeats and plans keep their latency whatever telemetry arrives.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeVar

import zmq

from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.core import DispatchConfig, DispatchCore, Presence
from stageloom.planner.dispatch.ports import DispatchStore
from stageloom.planner.dispatch.sockets import (
    ZAP_DOMAIN,
    ZAP_ENDPOINT,
    Waker,
    bind_router,
    receive,
    require_files,
    send,
    zap_reply,
)
from stageloom.planner.dispatch.workers import StoreWorkers
from stageloom.shared.clock import Clock, SystemClock
from stageloom.shared.codec import Codec
from stageloom.shared.errors import DecodeError, UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import KeyPair
from stageloom.shared.messages import bulk, control, telemetry
from stageloom.shared.messages.base import Message
from stageloom.shared.token import Endpoints

log = logging.getLogger(__name__)

T = TypeVar("T")
_TICK_S: Final = 0.25
_ROUND_S: Final = 0.001  # rounds begin this far apart: what comes meanwhile shares the cost of waking up
_SMALL_BYTES: Final = 128
_SMALL_FRAMES: Final = 16_384
_SHARED_FRAMES: Final = 256  # a plan may take a megabyte


@dataclass(frozen=True)
class _LaneSpec:
    incoming: Codec[Any]
    outgoing: Codec[Any]
    quota: int  # messages per round
    receive_messages: int  # queued per connection
    send_messages: int  # queued per connection; 0: twice the chunks that a device may ask for at once


# In order of urgency.
_LANES: Final[dict[ev.Lane, _LaneSpec]] = {
    ev.Lane.CONTROL: _LaneSpec(control.TO_PLANNER, control.TO_DEVICE, 512, 32, 32),
    ev.Lane.BULK: _LaneSpec(bulk.TO_PLANNER, bulk.TO_DEVICE, 16, 32, 0),
    ev.Lane.TELEMETRY: _LaneSpec(telemetry.TO_PLANNER, telemetry.TO_DEVICE, 32, 4, 32),
}


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where to listen (port 0: any free one) and as whom."""

    keys: KeyPair
    control: str = "tcp://127.0.0.1:0"
    telemetry: str = "tcp://127.0.0.1:0"
    bulk: str = "tcp://127.0.0.1:0"
    max_devices: int = 0  # as many as this process may open files for
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)


def new_keys() -> KeyPair:
    """A fresh CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


class DispatchServer:
    """Serves devices from `start` to `stop`."""

    def __init__(
        self,
        store: DispatchStore,
        config: ServerConfig,
        *,
        clock: Clock | None = None,
        on_presence: Callable[[DeviceId, bool], None] = lambda device, online: None,
        on_replan: Callable[[DeviceId, int], None] = lambda device, replan: None,
    ) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._on_presence = on_presence
        self._on_replan = on_replan
        self._store = store
        self._core = DispatchCore(list(store.fleet()), epoch=store.epoch(), config=config.dispatch)
        self._inbox: queue.SimpleQueue[ev.Event | Callable[[], None]] = queue.SimpleQueue()
        self._waker = Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._routers: dict[ev.Lane, zmq.Socket[bytes]] = {}
        # A device's heartbeat stays the same, byte for byte, until its report changes.
        self._small_message = lru_cache(_SMALL_FRAMES)(control.TO_PLANNER.decode)
        self._shared_frame = lru_cache(_SHARED_FRAMES)(control.TO_DEVICE.encode)
        self._stopping = False
        self._workers: StoreWorkers | None = None
        self._thread = threading.Thread(target=self._run, name="dispatch", daemon=True)

    # -- from other threads ---------------------------------------------------------------------------------

    def start(self) -> Endpoints:
        """Bind, then serve on a thread of its own; returns where.

        Raises:
            SettingError: too few open files for `max_devices`.
            UnavailableError: an address is taken.
        """
        require_files(self._config.max_devices)
        self._zap = self._context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP_ENDPOINT)
        addresses = {
            ev.Lane.CONTROL: self._config.control,
            ev.Lane.TELEMETRY: self._config.telemetry,
            ev.Lane.BULK: self._config.bulk,
        }
        try:
            for lane, spec in _LANES.items():
                self._routers[lane] = bind_router(
                    self._context,
                    addresses[lane],
                    keys=self._config.keys,
                    domain=ZAP_DOMAIN,
                    frame_bytes=spec.incoming.limits.frame_bytes,
                    receive_messages=spec.receive_messages,
                    send_messages=spec.send_messages or 2 * self._config.dispatch.bulk_credits,
                )
        except UnavailableError:
            self._context.destroy(linger=0)
            self._waker.close()
            raise
        self._workers = StoreWorkers(self._store, self._post_all, self._clock.monotonic_s)
        self._thread.start()
        return Endpoints(
            control=self._endpoint(ev.Lane.CONTROL),
            telemetry=self._endpoint(ev.Lane.TELEMETRY),
            bulk=self._endpoint(ev.Lane.BULK),
        )

    def stop(self) -> None:
        """Stop serving; work taken by the store is finished first."""
        self._stopping = True
        self._waker.wake()
        self._thread.join()
        if self._workers is not None:
            self._workers.close()
        self._waker.close()

    @property
    def alive(self) -> bool:
        """Whether the thread that owns the sockets runs; the planner's health check."""
        return self._thread.is_alive()

    def post(self, event: ev.Event) -> None:
        """Hand an event to the core: `DesiredChanged` after a push, `Revoked` after a revocation."""
        self._post_all([event])

    def _post_all(self, events: Sequence[ev.Event]) -> None:
        for event in events:
            self._inbox.put(event)
        self._waker.wake()

    def ask(self, question: Callable[[DispatchCore], T], *, timeout_s: float = 5.0) -> T:
        """The answer to a question about the core, from its own thread.

        Raises:
            TimeoutError: the thread does not answer.
        """
        answer: Future[T] = Future()

        def put() -> None:
            try:
                answer.set_result(question(self._core))
            except Exception as error:
                answer.set_exception(error)

        self._inbox.put(put)
        self._waker.wake()
        return answer.result(timeout_s)

    def admit(self, device: DeviceId, public_key: str) -> None:
        """Let a key in that the store has enrolled; returns when the next connection with it is admitted.

        Raises:
            TimeoutError: the thread does not answer.
        """
        self.ask(lambda core: core.handle(ev.Joined(device, public_key), self._clock.monotonic_s()))

    def presence(self) -> list[Presence]:
        """Every device, as dispatch sees it now."""
        return self.ask(lambda core: core.presence())

    def _endpoint(self, lane: ev.Lane) -> str:
        return self._routers[lane].getsockopt_string(zmq.LAST_ENDPOINT)

    # -- the thread that owns the sockets -------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker, zmq.POLLIN)
        poller.register(self._zap, zmq.POLLIN)
        for router in self._routers.values():
            poller.register(router, zmq.POLLIN)
        next_tick_s = self._clock.monotonic_s()
        try:
            while not self._stopping:
                ready = dict(poller.poll(int(_TICK_S * 1000)))
                now_s = self._clock.monotonic_s()
                self._round(ready, now_s)
                if now_s >= next_tick_s:
                    next_tick_s = now_s + _TICK_S
                    self._handle(ev.Tick(), now_s)
                time.sleep(max(now_s + _ROUND_S - self._clock.monotonic_s(), 0.0))
        finally:
            self._context.destroy(linger=0)

    def _round(self, ready: dict[Any, int], now_s: float) -> None:
        if self._waker.fileno() in ready:
            self._drain_inbox(now_s)
        if self._zap in ready:
            self._admit()
        for lane, router in self._routers.items():
            if router in ready:
                self._drain(lane, router, now_s)

    def _drain_inbox(self, now_s: float) -> None:
        self._waker.clear()
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if callable(item):
                item()
            else:
                self._handle(item, now_s)

    def _admit(self) -> None:
        now_s = self._clock.monotonic_s()
        answer = zap_reply(
            self._zap.recv_multipart(),
            self._core.may_connect,
            lambda key: self._core.may_connect_now(key, now_s),
        )
        self._zap.send_multipart(answer or [b"1.0", b"", b"500", b"No request", b"", b""])

    def _drain(self, lane: ev.Lane, router: "zmq.Socket[bytes]", now_s: float) -> None:
        for _ in range(_LANES[lane].quota):
            try:
                route, frame = receive(router)
            except zmq.Again:
                return
            if frame is None:
                self._core.counts["frames"] += 1
                continue
            key = str(frame.get("User-Id"))
            if self._core.may_read(lane, key, now_s):
                self._handle(self._event(lane, route, key, frame), now_s)

    def _event(self, lane: ev.Lane, route: bytes, key: str, frame: zmq.Frame) -> ev.Event:
        try:
            if lane is ev.Lane.CONTROL:
                return ev.ControlReceived(route, key, self._control_message(frame))
            message = _LANES[lane].incoming.decode(frame.buffer)
        except DecodeError as error:
            return ev.Malformed(lane, route, str(error)[:200])
        if lane is ev.Lane.TELEMETRY:
            return ev.TelemetryReceived(route, key, message)
        return ev.BulkReceived(route, key, message)

    def _control_message(self, frame: zmq.Frame) -> control.ControlToPlanner:
        if len(frame) <= _SMALL_BYTES:
            return self._small_message(frame.bytes)
        return control.TO_PLANNER.decode(frame.buffer)

    def _handle(self, event: ev.Event, now_s: float) -> None:
        try:
            pending = self._core.handle(event, now_s)
            for action in pending:
                self._act(action, now_s)
        except Exception:
            # One device's message must not end the service of all others.
            log.exception("dispatch failed on %s", type(event).__name__)

    def _act(self, action: ev.Action, now_s: float) -> None:
        if isinstance(action, ev.Send):
            self._send(action, now_s)
        elif isinstance(action, ev.PresenceChanged):
            log.info("device_id=%s %s", action.device, "came" if action.online else "went")
            self._on_presence(action.device, action.online)
        elif isinstance(action, ev.ReplanDue):
            self._on_replan(action.device, action.replan)
        else:
            assert self._workers is not None
            self._workers.submit(action)

    def _frame(self, lane: ev.Lane, message: Message) -> bytes:
        # Both are the same for a whole fleet that runs one plan.
        if isinstance(message, control.HeartbeatAck | control.Desired):
            return self._shared_frame(message)
        return _LANES[lane].outgoing.encode(message)

    def _send(self, action: ev.Send, now_s: float) -> None:
        frame = self._frame(action.lane, action.message)
        try:
            send(self._routers[action.lane], action.route, frame)
        except zmq.Again:
            # Its queue is full: it does not read. Whatever this was, the next comparison repairs it.
            self._core.counts["send_full"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._handle(ev.Unreachable(action.lane, action.route), now_s)

"""The running planner: lock, store, the devices' side and the operator's side, in that order."""

import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import SystemRandom
from types import FrameType
from typing import Any, Final

from zmq.utils import z85

from stageloom.planner.api.access import Tokens
from stageloom.planner.api.apart import StoreReaders
from stageloom.planner.api.application import Api
from stageloom.planner.api.client import socket_path
from stageloom.planner.api.context import ApiContext, RunningPlanner
from stageloom.planner.api.handlers.service import hold_tokens
from stageloom.planner.api.jobs import Jobs
from stageloom.planner.api.routes import ROUTES
from stageloom.planner.api.server import ApiServer
from stageloom.planner.cluster.search_pool import AnytimePool
from stageloom.planner.config import PlannerConfig
from stageloom.planner.dispatch.core.fleet import DispatchConfig
from stageloom.planner.dispatch.events import DesiredChanged, DesiredInDoubt, Released, Revoked
from stageloom.planner.dispatch.server import DispatchServer, ServerConfig, new_keys
from stageloom.planner.dispatch.sockets import listen
from stageloom.planner.enrolment.service import (
    CERTIFICATE_FILE,
    EnrolmentDesk,
    EnrolmentService,
    certificate_digest,
)
from stageloom.planner.housekeeping import Housekeeper, KernelCompiler
from stageloom.planner.lock import lock_data_dir, lock_sqlite
from stageloom.planner.metrics.counting import CountedPool, PlannerCounters
from stageloom.planner.replan.regime_finder import RegimeFinder
from stageloom.planner.replan.service import Replanner
from stageloom.planner.rollout.service import RolloutService
from stageloom.planner.store.devices import enrol_device, note_heard, note_presence
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.retention import Retention
from stageloom.planner.store.store import Store
from stageloom.planner.store.used_database import keep_url, require_chosen, sqlite_file
from stageloom.planner.webhooks.service import WebhookService
from stageloom.shared.clock import Clock, SystemClock
from stageloom.shared.errors import StageloomError, UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import KeyPair, read_keys, write_keys
from stageloom.shared.messages.control import Desired
from stageloom.shared.systemd.notify import Notifier, manager_of
from stageloom.shared.token import Endpoints, JoinToken

logger = logging.getLogger(__name__)

KEY_FILE: Final = "planner.keys"
_SWITCH_S: Final = 0.0005  # the thread that serves devices gives way at every send, and wants back
_BEAT_S: Final = 5.0  # the unit's watchdog waits for a minute
_ENROL_BACKLOG: Final = 128
_API_BACKLOG: Final = 128
API_CERTIFICATE_FILE: Final = "api.pem"
API_NAME: Final = "stageloom-planner"
"""What the certificate always holds for, beside the host that it was made on."""

_ANY_ADDRESS: Final = ("0.0.0.0", "[::]", "*")


class DispatchFleet:
    """The devices' side as the API's handlers see it."""

    def __init__(
        self,
        server: DispatchServer,
        keys: KeyPair,
        presence: "Online",
        *,
        endpoints: Endpoints,
        enrol: str,
        certificate: bytes,
    ) -> None:
        self._server = server
        self._keys = keys
        self._presence = presence
        self._endpoints = endpoints
        self._enrol = enrol
        self._certificate = certificate

    def online(self) -> frozenset[DeviceId]:
        """Devices with a live session."""
        return self._presence.now()

    def desired_changed(self, device: DeviceId, desired: Desired) -> None:
        """Tell dispatch what a device should do now."""
        self._server.post(DesiredChanged(device, desired))

    def desired_in_doubt(self, devices: Sequence[DeviceId]) -> None:
        """Have dispatch read again what these devices should do; without devices, what any should."""
        self._server.post(DesiredInDoubt(tuple(devices)))

    def revoked(self, device: DeviceId) -> None:
        """Tell dispatch that a device is out."""
        self._server.post(Revoked(device))
        self._heard()

    def released(self, device: DeviceId) -> None:
        """Tell dispatch that a device's quarantine has ended."""
        self._server.post(Released(device))
        self._heard()

    def _heard(self) -> None:
        """Wait until dispatch has what was posted: the device's next message may be on its way."""
        try:
            self._server.ask(lambda core: None)
        except TimeoutError as error:
            raise UnavailableError(
                "the thread that serves devices does not answer", remedy="see the planner's log"
            ) from error

    def backlog_rows(self) -> int:
        """Telemetry rows taken in and not yet committed."""
        return self._server.ask(lambda core: core.backlog_rows)

    def telemetry_failures(self) -> tuple[int, int]:
        """Batches of telemetry that the store did not take: in all, and since the last that it took."""
        return self._server.ask(lambda core: core.telemetry_failures)

    def token(self, secret: bytes) -> JoinToken:
        """A token that leads here."""
        return JoinToken(
            planner_key=bytes(z85.decode(self._keys.public.encode("ascii"))),
            secret=secret,
            control=self._endpoints.control,
            telemetry=self._endpoints.telemetry,
            bulk=self._endpoints.bulk,
            enrol=self._enrol,
            certificate=self._certificate,
        )


class Online:
    """Who is online, kept from dispatch's announcements; each is noted in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._devices: frozenset[DeviceId] = frozenset()

    def changed(self, device: DeviceId, online: bool) -> None:
        """A device came or went; called on dispatch's thread."""
        with self._lock:
            self._devices = self._devices | {device} if online else self._devices - {device}
        self._store.submit_together(note_presence, (device, online))

    def now(self) -> frozenset[DeviceId]:
        """The devices online."""
        return self._devices

    def close(self) -> None:
        """Note when the devices online were heard of last; once nobody serves them any more."""
        try:
            self._store.write(note_heard, self._devices)
        except StageloomError as error:
            logger.warning("when devices were seen last is not noted: %s", error)


class Planner:
    """A planner on one data directory, from `__init__` (serving) to `close`."""

    def __init__(self, config: PlannerConfig) -> None:
        """Lock, migrate, bind, serve.

        Raises:
            InputError: another planner runs on the data directory, or `require_chosen`.
            StorageError: the data directory or the database cannot be used.
            UnavailableError: an address is taken, or another planner runs on the database.
            SettingError: the system allows too few open files.
        """
        clock = SystemClock()
        self.config = config
        self.counters = PlannerCounters()
        self._undo: list[Callable[[], None]] = []
        try:
            api_path = socket_path(config.data_dir)
            self._undo.append(lock_data_dir(config.data_dir).release)
            require_chosen(config.data_dir, config.database_url)
            file = sqlite_file(config.data_dir, config.database_url)
            if file is not None:
                self._undo.append(lock_sqlite(file, config.data_dir).release)
            self.keys = _keys(config.data_dir / KEY_FILE)
            claim = ExitStack()  # given up last: closing the store commits what still waits
            self._undo.append(claim.close)
            self.store = Store(config.data_dir, config.database_url, clock, claim=claim)
            self._undo.append(self.store.close)
            keep_url(config.data_dir, config.database_url)
            self._online = Online(self.store)
            alarms: queue.SimpleQueue[tuple[DeviceId, int] | None] = queue.SimpleQueue()

            def replan_begun(device: DeviceId, replan: int) -> None:
                self.counters.replan_began()
                alarms.put((device, replan))

            self.server = DispatchServer(
                LinkStore(self.store, self.counters.rows_stored),
                _server_config(config, self.keys),
                clock=clock,
                on_presence=self._online.changed,
                on_replan=replan_begun,
            )
            bound = self.server.start()
            self._undo += [self._online.close, self.server.stop]
            certificate = config.data_dir / CERTIFICATE_FILE
            digest = certificate_digest(certificate)
            self.enrolment = self._start_enrolment(certificate, clock)
            name = _advertised_host(config, config.listen_address[0])
            self.endpoints = _advertised(bound, name)
            self.enrol_address = f"tls://{name}:{self.enrolment.port}"
            fleet = DispatchFleet(
                self.server,
                self.keys,
                self._online,
                endpoints=self.endpoints,
                enrol=self.enrol_address,
                certificate=digest,
            )
            pool = AnytimePool(
                config.search_workers or _search_workers(),
                use_ray=config.search == "ray",
                ray_address=config.ray_address,
            )
            self.pool = CountedPool(pool, self.counters)
            self._undo.append(self.pool.close)
            self.replanner = Replanner(self.store, fleet, self.pool, clock, alarms)
            self._undo.append(self.replanner.close)
            self.replanner.start()
            readers = StoreReaders(config.data_dir, config.database_url)
            finder = RegimeFinder(self.store, readers, clock, lambda: self.replanner.idle)
            self._undo.append(finder.close)
            finder.start()
            self.rollouts = RolloutService(self.store, fleet, self.replanner.pool, clock)
            self._undo.append(self.rollouts.close)
            self.rollouts.start()
            self._serve_api(api_path, fleet, clock)
            webhooks = WebhookService(self.store, clock)
            self._undo.append(webhooks.close)
            webhooks.start()
            self._undo.append(Housekeeper(self.store, _retention(config), fleet).close)
            self._undo.append(KernelCompiler().close)
        except BaseException:
            self.close()
            raise

    def _serve_api(self, path: Path, fleet: DispatchFleet, clock: Clock) -> None:
        config, address = self.config, self.config.api_address
        listening, files = None, None
        self.api_url = ""
        certificate, pinned = _api_certificate(config)  # tokens made now hold when `api` is set later, too
        if address is not None:
            files = certificate
            listening = listen(*address, backlog=_API_BACKLOG, guarded=False)
            self._undo.append(listening.close)
            name = _advertised_host(config, address[0])
            self.api_url = f"https://{name}:{listening.getsockname()[1]}"
        readers = StoreReaders(config.data_dir, config.database_url)
        running = RunningPlanner(
            store=self.store,
            fleet=fleet,
            pool=self.replanner.pool,
            tokens=Tokens(config.api_requests),
            readers=readers,
            started_s=clock.monotonic_s(),
            certificate=pinned,
            counters=self.counters,
            wake_rollouts=self.rollouts.wake,
        )
        hold_tokens(running)
        jobs = Jobs(clock)
        api = Api(
            ApiContext(reader=self.store, clock=clock, jobs=jobs, config=config, running=running), ROUTES
        )
        self._undo += [api.close, readers.close]  # in this order a page would wait for readers, a minute long
        self.api = ApiServer(path, api.local, remote=api.remote, listening=listening, certificate=files)
        self.api.start()
        self._undo += [self.api.stop, api.end_streams, jobs.close]

    def _start_enrolment(self, certificate: Path, clock: Clock) -> EnrolmentService:
        host, first = self.config.listen_address
        service = EnrolmentService(
            listen(host, first + 3 if first else 0, backlog=_ENROL_BACKLOG, guarded=False),
            certificate,
            EnrolmentDesk(
                lambda attempt: self.store.write(enrol_device, attempt), self.server.admit, clock
            ).answer,
            clock=clock,
            rng=SystemRandom(),
        )
        service.start()
        self._undo.append(service.close)
        return service

    def check(self) -> None:
        """Make sure that it may go on.

        Raises:
            UnavailableError: the thread that serves the devices died, or another planner has the database.
        """
        self.store.database.check_claim()
        if not self.server.alive:
            raise UnavailableError(
                "a part of the planner died", remedy="see the log above, and start it again"
            )

    def summary(self) -> str:
        """One line for `systemctl status`, from the thread that serves the devices: proof that it turns.

        Raises:
            TimeoutError: that thread does not answer.
        """
        backlog = self.server.ask(lambda core: core.backlog_rows)
        return f"{len(self._online.now())} devices online, {backlog} telemetry rows waiting"

    def close(self) -> None:
        """Stop in reverse order; what was acknowledged is on disk already."""
        while self._undo:
            self._undo.pop()()


def run_planner(
    config: PlannerConfig, *, ready: Callable[[Any], None] | None, progress: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM. `ready` is told once where the planner listens.

    Raises:
        UnavailableError: as `Planner.check`.
    """
    began_s = time.monotonic()
    sys.setswitchinterval(_SWITCH_S)
    stop = threading.Event()
    previous = {number: signal.signal(number, _stopper(stop)) for number in (signal.SIGINT, signal.SIGTERM)}
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    faulthandler.enable(2)  # systemd ends a process that hangs by SIGABRT: the log shows where
    manager = manager_of(os.environ)
    try:
        planner = Planner(config)
        try:
            startup_s = time.monotonic() - began_s
            if ready is not None:
                ready(_ready_line(planner, startup_s))
            manager.send(READY="1")
            progress(
                f"planner ready in {startup_s:.2f} s on {planner.endpoints.control}, "
                + (f"API on {planner.api_url}, its page at {planner.api_url}/ui, " if planner.api_url else "")
                + f"data in {config.data_dir}; Ctrl-C stops it"
            )
            _serve(planner, stop, manager)
            manager.send(STOPPING="1", STATUS="stopping")
            progress("stopping")
        finally:
            planner.close()
    finally:
        manager.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _serve(planner: Planner, stop: threading.Event, manager: Notifier) -> None:
    beat_s = time.monotonic()
    while not stop.wait(0.5):
        planner.check()
        if manager.listens and time.monotonic() >= beat_s:
            beat_s = time.monotonic() + _BEAT_S
            _beat(planner, manager)


def _beat(planner: Planner, manager: Notifier) -> None:
    """Feed the watchdog, if the thread that serves the devices answers."""
    try:
        summary = planner.summary()
    except TimeoutError:
        logger.warning("the thread that serves the devices does not answer")
        return
    manager.send(STATUS=summary, WATCHDOG="1")


def _stopper(stop: threading.Event) -> Callable[[int, FrameType | None], None]:
    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    return handle


def _ready_line(planner: Planner, startup_s: float) -> dict[str, Any]:
    ends = planner.endpoints
    return {
        "ready": True,
        "pid": os.getpid(),
        "data_dir": str(planner.config.data_dir.absolute()),
        "endpoints": {
            "control": ends.control,
            "telemetry": ends.telemetry,
            "bulk": ends.bulk,
        },
        "enrol": planner.enrol_address,
        "api": planner.api_url,
        "public_key": planner.keys.public,
        "startup_s": round(startup_s, 4),
    }


def _search_workers() -> int:
    """One less than the cores: serving keeps one."""
    return max((os.cpu_count() or 2) - 1, 1)


def _keys(path: Path) -> KeyPair:
    if not path.exists():
        write_keys(path, new_keys())
    return read_keys(path)


def _retention(config: PlannerConfig) -> Retention:
    return Retention(
        config.telemetry_rows_keep_s,
        config.telemetry_minutes_keep_s,
        config.telemetry_hours_keep_s,
        config.history_rows_keep,
    )


def _api_certificate(config: PlannerConfig) -> tuple[tuple[Path, Path], bytes]:
    """(files of certificate and key, SHA-256 that tokens pin or empty); our own is made at first use."""
    if config.api_certificate:
        certificate = Path(config.api_certificate)
        return (certificate, Path(config.api_key) if config.api_key else certificate), b""
    own = config.data_dir / API_CERTIFICATE_FILE
    host, _ = config.api_address or config.listen_address
    hosts = (API_NAME, _advertised_host(config, host))
    pinned = certificate_digest(own, subject=API_NAME, hosts=hosts)
    return (own, own), pinned


def _server_config(config: PlannerConfig, keys: KeyPair) -> ServerConfig:
    host, first = config.listen_address
    control, telemetry, bulk = (f"tcp://{host}:{first + at if first else 0}" for at in range(3))
    return ServerConfig(
        keys=keys,
        control=control,
        telemetry=telemetry,
        bulk=bulk,
        max_devices=config.max_devices,
        dispatch=DispatchConfig(
            heartbeat_interval_s=config.heartbeat_interval_s,
            dead_after_s=config.dead_after_s,
            bulk_credits=config.bulk_credits,
            backlog_rows=config.backlog_rows,
            quotas=config.quotas,
            device_queue_bytes=config.device_queue_bytes,
        ),
    )


def _advertised_host(config: PlannerConfig, host: str) -> str:
    """What others call the machine that listens on `host`."""
    return config.advertised or (socket.gethostname() if host in _ANY_ADDRESS else host)


def _advertised(bound: Endpoints, name: str) -> Endpoints:
    """What devices are told: the bound ports under the advertised host."""

    def at(endpoint: str) -> str:
        return f"tcp://{name}:{endpoint.rpartition(':')[2]}"

    return Endpoints(at(bound.control), at(bound.telemetry), at(bound.bulk))

"""A planner's dispatch and devices on loopback sockets, for tests of the shells."""

import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import zmq

from stageloom.edge_agent.lifecycle import events as dev
from stageloom.edge_agent.lifecycle.core import Lifecycle
from stageloom.edge_agent.lifecycle.session import LinkConfig
from stageloom.edge_agent.lifecycle.shell import LifecycleShell
from stageloom.edge_agent.lifecycle.statefile import load_state
from stageloom.edge_agent.link.client import ClientConfig, LinkClient
from stageloom.edge_agent.link.connection import Membership, make_dealer, new_keys
from stageloom.edge_agent.link.factory import STATE_NAME
from stageloom.edge_agent.reporting.status import LinkStatus
from stageloom.planner.dispatch import events as pev
from stageloom.planner.dispatch.core import DispatchConfig
from stageloom.planner.dispatch.ports import FleetMember
from stageloom.planner.dispatch.server import DispatchServer, ServerConfig
from stageloom.planner.dispatch.server import new_keys as planner_keys
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import KeyPair
from stageloom.shared.messages import bulk, control, telemetry
from stageloom.shared.messages.control import ArtifactNeed, Desired
from stageloom.shared.token import Endpoints
from tests.lifecycle import orders
from tests.link.memory_store import MemoryStore

LANES: dict[str, tuple[Any, Any]] = {
    "control": (control.TO_PLANNER, control.TO_DEVICE),
    "telemetry": (telemetry.TO_PLANNER, telemetry.TO_DEVICE),
    "bulk": (bulk.TO_PLANNER, bulk.TO_DEVICE),
}


def wait_until(condition: Callable[[], Any], *, timeout_s: float = 15.0) -> Any:
    """The first true value of `condition`; fails the test if none comes."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError("it did not happen in time")


class Rig:
    """One server over a memory store."""

    def __init__(self, **dispatch: Any) -> None:
        self.store = MemoryStore()
        self.keys = planner_keys()
        self.dispatch = DispatchConfig(heartbeat_interval_s=0.2, **dispatch)
        self.came: list[tuple[DeviceId, bool]] = []
        self.server: DispatchServer
        self.endpoints: Endpoints

    def start(self, at: Endpoints | None = None) -> None:
        where = {} if at is None else {name: getattr(at, name) for name in LANES}
        config = ServerConfig(keys=self.keys, dispatch=self.dispatch, max_devices=20, **where)
        self.server = DispatchServer(
            self.store, config, on_presence=lambda device, online: self.came.append((device, online))
        )
        self.endpoints = self.server.start()

    def enrolled(self, name: str) -> KeyPair:
        """Keys of a device that is enrolled before the server starts, or known to it by an event."""
        keys = new_keys()
        self.store.members[DeviceId(name)] = FleetMember(DeviceId(name), keys.public)
        return keys

    def push(self, device: str, plan: bytes, blobs: tuple[bytes, ...] = ()) -> Desired:
        needs = []
        for at, blob in enumerate(blobs):
            digest = digest_bytes([blob])
            self.store.artifacts[digest] = blob
            needs.append(ArtifactNeed(f"m{at}", digest, len(blob)))
        desired = self.store.push(
            DeviceId(device),
            Desired(
                epoch=0, generation=0, plan_digest=digest_bytes([plan]), plan=plan, artifacts=tuple(needs)
            ),
        )
        self.server.post(pev.DesiredChanged(DeviceId(device), desired))
        return desired

    def revoke(self, device: str) -> None:
        self.store.revoke(DeviceId(device))
        self.server.post(pev.Revoked(DeviceId(device)))

    def count(self, name: str) -> int:
        return self.server.ask(lambda core: core.counts[name])


@contextmanager
def running(*devices: str, **dispatch: Any) -> Iterator[tuple[Rig, list[KeyPair]]]:
    """A server with these devices enrolled, and their keys."""
    rig = Rig(**dispatch)
    keys = [rig.enrolled(name) for name in devices]
    rig.start()
    try:
        yield rig, keys
    finally:
        rig.server.stop()


class Wire:
    """A bare DEALER that speaks the protocol by hand, as a careless or hostile device would."""

    def __init__(self, rig: Rig, lane: str, keys: KeyPair, *, routing_id: bytes = b"") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.outgoing, self.incoming = LANES[lane]
        self.dealer = make_dealer(
            self.context,
            keys=keys,
            planner_key=rig.keys.public,
            frame_bytes=1 << 20,
            send_messages=100,
            rng=Random(1),
        )
        if routing_id:
            self.dealer.setsockopt(zmq.ROUTING_ID, routing_id)
        self.endpoint = getattr(rig.endpoints, lane)

    def connect(self) -> "Wire":
        self.dealer.connect(self.endpoint)
        return self

    def send(self, message: Any) -> None:
        self.send_frames([self.outgoing.encode(message)])

    def send_frames(self, frames: list[bytes]) -> None:
        assert self.dealer.poll(10_000, zmq.POLLOUT), "no connection"
        self.dealer.send_multipart(frames)

    def reply(self, *, timeout_s: float = 10.0) -> Any:
        assert self.dealer.poll(int(timeout_s * 1000)), "no answer"
        return self.incoming.decode(self.dealer.recv())

    def answers(self, *, timeout_s: float) -> bool:
        return bool(self.dealer.poll(int(timeout_s * 1000)))

    def hello(self, boot: int = 1, connection: int = 1) -> Any:
        report = control.Report()
        self.send(
            control.Hello(
                boot=boot, connection=connection, agent_version="t", device_class="t", report=report
            )
        )
        answer = self.reply()
        if isinstance(answer, control.Welcome):
            assert isinstance(self.reply(), control.ReportedAck)
        return answer

    def __enter__(self) -> "Wire":
        return self.connect()

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)


def heartbeat(boot: int = 1, generation: int = 0) -> control.Heartbeat:
    return control.Heartbeat(boot=boot, epoch=0, generation=generation, state=None, revision=0)


class _Shell(LifecycleShell):
    """One whose engine, policy and journal are a function."""

    def __init__(self, manage: Callable[[Any], None], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._manage = manage

    def carry_on(self, action: Any) -> None:
        self._manage(action)


class Agent:
    """A device whose plan manager agrees to everything at once, on a main loop of its own."""

    def __init__(self, rig: Rig, name: str, keys: KeyPair, folder: Path, **changes: Any) -> None:
        self.actions: list[Any] = []  # what was asked of the plan manager
        member = Membership(
            device=DeviceId(name),
            planner_key=changes.pop("planner_key", rig.keys.public),
            endpoints=changes.pop("endpoints", rig.endpoints),
        )
        boot = Random().getrandbits(60) | 1
        config = ClientConfig(
            folder=folder, keys=keys, membership=member, boot=boot, telemetry_every_s=0.05, **changes
        )
        self.client = LinkClient(config)
        plans: Any = orders.RecordingPlans()
        state, _ = load_state(folder / STATE_NAME)
        core = Lifecycle(state, config=LinkConfig(boot=boot, silent_after_s=3.0), plans=plans)
        self.host = _Shell(
            self._manage,
            core,
            self.client,
            folder / STATE_NAME,
            environment="test",
            present=self.client.artifacts.present(),
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def status(self) -> LinkStatus:
        return self.host.status()

    @property
    def connected(self) -> bool:
        return self.status.state == "connected"

    def _run(self) -> None:
        parts: Any = None
        self.host.start(parts)
        while not self._stopping.is_set():
            select.select([self.client.fileno()], [], [], 0.05)
            self.host.take()
            self.host.handle(dev.TimePassed())

    def _manage(self, action: Any) -> None:
        core = self.host.core
        match action:
            case orders.VerifyPlan(attempt):
                core.add(core.verified(attempt))
            case orders.StagePlan(attempt):
                core.add(core.staged(dev.PlanStaged(attempt)))
            case orders.ActivatePlan(attempt):
                core.add(core.passed(attempt))
            case dev.CollectArtifacts():
                return
        self.actions.append(action)

    def __enter__(self) -> "Agent":
        self.client.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self.host.stop()

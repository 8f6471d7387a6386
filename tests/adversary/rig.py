"""A planner process over several lives, on either database, and devices that say whatever a test wants.

A `Device` is enrolled as agents are, by a token, and then speaks the protocol by hand: message by message, or
frame by frame. `Device.is_served` is the oracle of a good one: whatever others do, it gets its answers.
"""

import signal
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import msgspec
import zmq

from stageloom.edge_agent.link.connection import make_dealer, new_keys
from stageloom.edge_agent.link.join import join
from stageloom.planner.api import routes
from stageloom.planner.api.route import Route
from stageloom.planner.dispatch.quotas import Quota
from stageloom.planner.schema.base import Request
from stageloom.planner.schema.device import DeviceInfo, DeviceShowRequest, DeviceTokenRequest
from stageloom.shared.clock import SystemClock
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import bulk, control, telemetry
from stageloom.shared.messages.base import Message
from stageloom.shared.messages.telemetry import Ledger, RowData, RowRange
from stageloom.shared.token import parse_token
from tests.e2e.fleet import four_free_ports
from tests.planner.processes import PlannerProcess, ask, ok

PATIENCE_S: Final = 45.0
BOOT: Final = 77
CODECS: Final[dict[str, tuple[Any, Any]]] = {
    "control": (control.TO_PLANNER, control.TO_DEVICE),
    "telemetry": (telemetry.TO_PLANNER, telemetry.TO_DEVICE),
    "bulk": (bulk.TO_PLANNER, bulk.TO_DEVICE),
}

Q = TypeVar("Q", bound=Request)
R = TypeVar("R")


class Rig:
    """One planner over all its lives: the same address, data directory and database."""

    def __init__(self, folder: Path, database_url: str = "") -> None:
        self.home = folder / "planner"
        self._listen = f"127.0.0.1:{four_free_ports()}"
        self._database = ("--database-url", database_url) if database_url else ()
        self._devices: list[Device] = []

    def start(self) -> None:
        """Begin a life of the planner; it serves when this returns.

        Its devices may say as much as they like: what quotas do is tested elsewhere.
        """
        settings = self.home.with_name("planner.toml")
        if not settings.exists():
            wide = "".join(f'quota_{quota.value} = "1000000000/1000000000"\n' for quota in Quota)
            settings.write_text(f"[planner]\n{wide}")
        where = ("--listen", self._listen, "--config", str(settings))
        self.planner = PlannerProcess(self.home, *where, *self._database)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End a life of the planner."""
        self.planner.stop(number)

    def restart(self) -> None:
        """One life after another."""
        self.stop()
        self.start()

    def close(self) -> None:
        """End it all."""
        for device in self._devices:
            device.close()
        if self.planner.process.poll() is None:
            self.stop()

    def device(self, name: str, *, agent_version: str = "", device_class: str = "") -> "Device":
        """An enrolled device, and what it says of itself when it joins."""
        token = self.ask(routes.DEVICE_TOKEN, DeviceTokenRequest()).token
        made = Device(name, token, agent_version=agent_version, device_class=device_class)
        self._devices.append(made)
        return made

    def enrolled(self, name: str) -> "Device":
        """The device that was enrolled under this name before."""
        return next(device for device in self._devices if device.name == name)

    def ask(self, route: Route[Q, R], request: Q) -> R:
        """What the planner answers an operator."""
        return ask(self.home, route, request, timeout_s=PATIENCE_S)

    def info(self, device: str) -> DeviceInfo:
        """How the planner shows a device."""
        return self.ask(routes.DEVICE_SHOW, DeviceShowRequest(device=DeviceId(device))).device

    def command(self, *arguments: str) -> str:
        """What a command prints."""
        return ok(self.home, *arguments)


class Device:
    """An enrolled key and three connections."""

    def __init__(self, name: str, token: str, *, agent_version: str = "", device_class: str = "") -> None:
        self.name = DeviceId(name)
        self.keys = new_keys()
        self.member = join(
            parse_token(token),
            self.name,
            self.keys,
            clock=SystemClock(),
            rng=Random(1),
            timeout_s=PATIENCE_S,
            agent_version=agent_version,
            device_class=device_class,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._connection = 0
        self._said = 0
        self._rows = 0

    def close(self) -> None:
        """Hang up for good."""
        self._context.destroy(linger=0)

    def hang_up(self) -> None:
        """End the connections; the next message makes new ones."""
        for made in self._sockets.values():
            made.close(linger=0)
        self._sockets.clear()

    def socket(self, lane: str) -> "zmq.Socket[bytes]":
        """The connection of a lane, made at first use."""
        if lane not in self._sockets:
            made = make_dealer(
                self._context,
                keys=self.keys,
                planner_key=self.member.planner_key,
                frame_bytes=1 << 20,
                send_messages=1000,
                rng=Random(1),
            )
            made.connect(getattr(self.member.endpoints, lane))
            self._sockets[lane] = made
        return self._sockets[lane]

    def send_frame(self, lane: str, frame: bytes) -> None:
        """Send bytes as they are."""
        assert self.socket(lane).poll(round(PATIENCE_S * 1e3), zmq.POLLOUT), f"no connection to {lane}"
        self.socket(lane).send(frame)

    def send(self, lane: str, message: Message) -> None:
        """Send a message."""
        self.send_frame(lane, CODECS[lane][0].encode(message))

    def receive(self, lane: str) -> Any:
        """The next message."""
        assert self.socket(lane).poll(round(PATIENCE_S * 1e3)), f"nothing came on {lane}"
        return CODECS[lane][1].decode(self.socket(lane).recv())

    def expect(self, lane: str, *kinds: type) -> Any:
        """The next message of some kinds; others are passed over."""
        while not isinstance(message := self.receive(lane), kinds):
            pass
        return message

    def answer(self, lane: str, message: Any) -> Any:
        """What a message with a correlation of its own is answered with."""
        self._said += 1
        self.send(lane, msgspec.structs.replace(message, correlation=self._said))
        while (reply := self.receive(lane)).correlation != self._said:
            pass
        return reply

    def hello(self, report: control.Report | None = None, *, boot: int = BOOT) -> Any:
        """Open a session: a `Welcome`, or why not."""
        self._connection += 1
        message = control.Hello(
            boot=boot,
            connection=self._connection,
            agent_version="0.1.0",
            device_class="cpu-test",
            report=report or control.Report(),
        )
        return self.answer("control", message)

    def heartbeat(self) -> Any:
        """An acknowledgement, or why not."""
        beat = control.Heartbeat(boot=BOOT, epoch=0, generation=0, state=None, revision=0)
        return self.answer("control", beat)

    def rows(self, *data: RowData, boot: int = BOOT) -> Any:
        """Store telemetry rows, numbered on from the last ones: the acknowledgement, or why not."""
        first, self._rows = self._rows, self._rows + len(data)
        return self.answer(
            "telemetry",
            telemetry.TelemetryBatch(
                rows=tuple(telemetry.encode_row(telemetry.Row(1_700_000_000_000_000, one)) for one in data),
                ranges=(RowRange(boot, first, self._rows - 1),),
                ledgers=(Ledger(boot, self._rows, 0),),
            ),
        )

    def is_served(self) -> bool:
        """Whether it gets the answers that a good device may expect, on a new connection."""
        self.hang_up()
        return (
            isinstance(self.hello(), control.Welcome)
            and isinstance(self.heartbeat(), control.HeartbeatAck)
            and isinstance(self.rows(telemetry.Event("served", "")), telemetry.TelemetryAck)
        )

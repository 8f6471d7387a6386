"""The least that speaks to a planner: three DEALERs and no opinion."""

from types import TracebackType
from typing import Any

import zmq
from zmq.utils import z85

from stageloom.edge_agent.link.join import ask
from stageloom.shared.codec import Codec
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import bulk, control, enrol, telemetry
from stageloom.shared.messages.base import Message
from stageloom.shared.messages.telemetry import Ledger, RowRange
from stageloom.shared.token import parse_token

BOOT = 77


class FakeDevice:
    """Enrols with a token, then sends what a test wants and reads the answers."""

    def __init__(self, token: str, name: str = "nano", device_class: str = "cpu-test") -> None:
        self.token = parse_token(token)
        self.name = DeviceId(name)
        self.device_class = device_class
        self._public, self._secret = zmq.curve_keypair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def __enter__(self) -> "FakeDevice":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def socket(self, lane: str) -> "zmq.Socket[bytes]":
        """The connection of a lane, made at first use."""
        if lane not in self._sockets:
            made = self._context.socket(zmq.DEALER)
            made.curve_serverkey = z85.encode(self.token.planner_key)
            made.curve_publickey, made.curve_secretkey = self._public, self._secret
            made.connect(getattr(self.token, lane))
            self._sockets[lane] = made
        return self._sockets[lane]

    def send(self, lane: str, codec: Codec[Any], message: Message) -> None:
        """Send one message."""
        self.socket(lane).send(codec.encode(message))

    def receive(self, lane: str, codec: Codec[Any], *, timeout_s: float = 15.0) -> Any:
        """The next message."""
        assert self.socket(lane).poll(round(timeout_s * 1000)), f"nothing came on {lane}"
        return codec.decode(self.socket(lane).recv())

    @property
    def public_key(self) -> str:
        """Who it is, in Z85."""
        return self._public.decode()

    def enrol(self) -> Any:
        """Use the token; returns the answer."""
        request = enrol.EnrolRequest(
            secret=self.token.secret,
            public_key=self.public_key,
            device=self.name,
            agent_version="0.1.0",
            device_class=self.device_class,
        )
        return ask(self.token, request, 15.0)

    def hello(self, report: control.Report | None = None) -> control.Welcome:
        """Open a session."""
        message = control.Hello(
            boot=BOOT,
            connection=1,
            agent_version="0.1.0",
            device_class=self.device_class,
            report=report or control.Report(),
        )
        self.send("control", control.TO_PLANNER, message)
        welcome: control.Welcome = self.expect("control", control.TO_DEVICE, control.Welcome)
        return welcome

    def expect(self, lane: str, codec: Codec[Any], kind: type) -> Any:
        """The next message of a kind; others are passed over."""
        while not isinstance(message := self.receive(lane, codec), kind):
            pass
        return message

    def heartbeat(self) -> None:
        """Say that it lives, with nothing seen."""
        beat = control.Heartbeat(boot=BOOT, epoch=0, generation=0, state=None, revision=0)
        self.send("control", control.TO_PLANNER, beat)

    def report(self, report: control.Report) -> None:
        """Report, and wait until it is stored."""
        self.send("control", control.TO_PLANNER, control.Reported(boot=BOOT, report=report))
        while self.expect("control", control.TO_DEVICE, control.ReportedAck).revision < report.revision:
            pass

    def rows(self, first: int, data: list[Any], *, at_us: int = 1_700_000_000_000_000) -> Any:
        """Send telemetry rows numbered from `first` on, and wait for the acknowledgement."""
        batch = telemetry.TelemetryBatch(
            rows=tuple(telemetry.encode_row(telemetry.Row(at_us, one)) for one in data),
            ranges=(RowRange(BOOT, first, first + len(data) - 1),),
            ledgers=(Ledger(BOOT, first + len(data), 0),),
        )
        self.send("telemetry", telemetry.TO_PLANNER, batch)
        return self.receive("telemetry", telemetry.TO_DEVICE)

    def fetch(self, need: control.ArtifactNeed) -> bytes:
        """An artifact's bytes, chunk by chunk."""
        parts: list[bytes] = []
        while (offset := sum(map(len, parts))) < need.size_bytes:
            request = bulk.ChunkRequest(digest=need.digest, offset_bytes=offset)
            self.send("bulk", bulk.TO_PLANNER, request)
            parts.append(self.receive("bulk", bulk.TO_DEVICE).data)
        return b"".join(parts)

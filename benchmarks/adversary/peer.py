"""An enrolled device that says what it likes: raw frames, no bounds, no opinion.

It shares no message type with what it attacks, so that it speaks to any version and outside of any bound.
"""

import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import msgpack
import zmq

PLAIN: Final = b"\x00"
LANES: Final = ("control", "telemetry", "bulk")
REPORT: Final[dict[str, Any]] = {"revision": 0, "epoch": 0, "generation": 0}


@dataclass(frozen=True)
class Credentials:
    """What joining left behind. Keys in Z85, endpoints by lane."""

    device: str
    public_key: str
    secret_key: str = field(repr=False)
    planner_key: str
    endpoints: dict[str, str]


class Peer:
    """Connections of one device, one per lane, made at first use; a context manager."""

    def __init__(self, who: Credentials, *, boot: int = 77) -> None:
        self.who = who
        self.boot = boot
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._hellos = 0

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def socket(self, lane: str) -> "zmq.Socket[bytes]":
        """The connection of a lane."""
        if lane not in self._sockets:
            made = self._context.socket(zmq.DEALER)
            made.curve_serverkey = self.who.planner_key.encode()
            made.curve_publickey = self.who.public_key.encode()
            made.curve_secretkey = self.who.secret_key.encode()
            made.connect(self.who.endpoints[lane])
            self._sockets[lane] = made
        return self._sockets[lane]

    def send(self, lane: str, kind: str, *, wait: bool = True, **fields: Any) -> bool:
        """Send one message; without `wait` False where the queue is full."""
        body = msgpack.packb({"type": kind, "version": 1, "correlation": 0, **fields})
        try:
            self.socket(lane).send(PLAIN + body, 0 if wait else zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, lane: str, *, timeout_s: float = 10.0) -> dict[str, Any] | None:
        """The next message; None if none comes in time."""
        if not self.socket(lane).poll(round(timeout_s * 1e3)):
            return None
        return unpacked(self.socket(lane).recv())

    def expect(self, lane: str, *kinds: str, timeout_s: float = 10.0) -> dict[str, Any] | None:
        """The next message of these kinds; others are passed over."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            found = self.receive(lane, timeout_s=left_s)
            if found is None or found["type"] in kinds:
                return found
        return None

    def hello(self, *, device_class: str = "cpu-test", timeout_s: float = 10.0, **report: Any) -> Any:
        """Say hello with a report; the welcome or refusal, or None."""
        self._hellos += 1
        self.send(
            "control",
            "hello",
            boot=self.boot,
            connection=self._hellos,
            agent_version="0.1.0",
            device_class=device_class,
            report={**REPORT, **report},
        )
        return self.expect("control", "welcome", "refused", timeout_s=timeout_s)

    def heartbeat(self, *, timeout_s: float = 10.0) -> Any:
        """One heartbeat; its acknowledgement, or None."""
        fields: dict[str, Any] = {
            "boot": self.boot,
            "epoch": 0,
            "generation": 0,
            "state": None,
            "revision": 0,
        }
        self.send("control", "heartbeat", **fields)
        return self.expect("control", "heartbeat_ack", "refused", timeout_s=timeout_s)

    def report(self, *, timeout_s: float = 10.0, **report: Any) -> Any:
        """Send a report; its acknowledgement, or None."""
        self.send("control", "reported", boot=self.boot, report={**REPORT, **report})
        return self.expect("control", "reported_ack", "refused", timeout_s=timeout_s)

    def alarm(self, number: int, *, timeout_s: float = 10.0) -> Any:
        """Raise one alarm; its acknowledgement, or None."""
        self.send("control", "alarm", **alarm_fields(self.boot, number))
        return self.expect("control", "alarm_ack", "refused", timeout_s=timeout_s)

    def rows(self, first: int, rows: list[Any], *, timeout_s: float = 10.0, ledgers: Any = ()) -> Any:
        """Send telemetry rows, each an array as on the wire; the acknowledgement, or None."""
        self.send(
            "telemetry",
            "telemetry_batch",
            rows=[msgpack.packb(row) for row in rows],
            ranges=[[self.boot, first, first + len(rows) - 1]] if rows else [],
            ledgers=list(ledgers),
        )
        return self.expect("telemetry", "telemetry_ack", "refused", timeout_s=timeout_s)


def alarm_fields(boot: int, number: int) -> dict[str, Any]:
    """An alarm without a plan."""
    return {
        "boot": boot,
        "number": number,
        "at_us": round(time.time() * 1e6),
        "cause": "threshold",
        "value": 2.0,
        "threshold": 1.0,
        "plan": None,
        "loads": [],
        "samples": [],
    }


def unpacked(frame: bytes) -> dict[str, Any]:
    """The message in a frame."""
    import zlib

    body = zlib.decompress(frame[1:]) if frame[:1] == b"\x01" else frame[1:]
    message: dict[str, Any] = msgpack.unpackb(body)
    return message


class Beside:
    """A function over and over on a thread of its own, while the block runs; what it returned is kept."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.returned: list[Any] = []
        self.error: Exception | None = None

    def __enter__(self) -> "Beside":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.returned.append(self._body())
        except Exception as error:  # shown by whoever asks
            self.error = error

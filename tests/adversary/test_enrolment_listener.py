"""A stranger at the enrolment port stops enrolment at most: devices are served meanwhile."""

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

import pytest

from stageloom.edge_agent.link.connection import new_keys
from stageloom.edge_agent.link.join import join
from stageloom.shared.clock import SystemClock
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import control, enrol
from stageloom.shared.messages.base import RefusalCode, Refused
from tests.enrolment.rig import EnrolmentRig, enrolling
from tests.link.rig import Wire, heartbeat, wait_until

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnrolmentRig]:
    with enrolling(tmp_path_factory.mktemp("planner")) as made:
        wait_until(lambda: made.enrolment.pid)
        yield made


def _plain(rig: EnrolmentRig) -> socket.socket:
    return socket.create_connection(("127.0.0.1", rig.enrolment.port), 20.0)


def _secured(rig: EnrolmentRig, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = version
    return context.wrap_socket(_plain(rig))


def _drain(connection: socket.socket) -> None:
    """Read until the other side ends the connection.

    Raises:
        TimeoutError: it does not, within the connection's own timeout.
    """
    with suppress(ConnectionError, ssl.SSLError):
        while connection.recv(4096):
            pass


def _announce_much(rig: EnrolmentRig) -> socket.socket:
    connection = _secured(rig)
    connection.sendall(enrol.LENGTH.pack(1 << 31))
    return connection


def _garbage(rig: EnrolmentRig) -> socket.socket:
    connection = _plain(rig)
    with suppress(OSError):
        connection.sendall(Random(1).randbytes(100_000))
    return connection


def _curve_greeting(rig: EnrolmentRig) -> socket.socket:
    connection = _plain(rig)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(52, b"\0"))
    return connection


def _half_a_handshake(rig: EnrolmentRig) -> socket.socket:
    connection = _plain(rig)
    connection.sendall(b"\x16\x03\x01\x02\x00\x01")
    return connection


def _half_a_request(rig: EnrolmentRig) -> socket.socket:
    connection = _secured(rig)
    connection.sendall(enrol.LENGTH.pack(500) + bytes(20))
    return connection


VISITS: list[Callable[[EnrolmentRig], socket.socket]] = [
    *(_garbage, _curve_greeting, _announce_much, _plain, _half_a_handshake, _secured, _half_a_request)
]


@pytest.mark.promise("stranger-gets-zeromq-socket")
def test_connections_that_ask_nothing_end_within_their_limits(rig: EnrolmentRig) -> None:
    with ExitStack() as opened:
        connections = [opened.enter_context(visit(rig)) for visit in VISITS]
        for connection in connections:
            _drain(connection)


def test_an_older_tls_is_refused(rig: EnrolmentRig) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        _secured(rig, ssl.TLSVersion.TLSv1_2)


@pytest.mark.promise("stranger-gets-zeromq-socket")
@pytest.mark.parametrize(
    "frame",
    [b"", b"\x00\xc1", b"\x02abc", control.TO_PLANNER.encode(heartbeat())],
    ids=["nothing", "no_msgpack", "no_flag", "another_conversation"],
)
def test_what_is_no_request_is_answered_as_malformed(rig: EnrolmentRig, frame: bytes) -> None:
    with _secured(rig) as connection:
        connection.sendall(enrol.LENGTH.pack(len(frame)) + frame)
        answer = b""
        while part := connection.recv(4096):
            answer += part
    reply = enrol.TO_DEVICE.decode(answer[enrol.LENGTH.size :])
    assert isinstance(reply, Refused) and reply.code is RefusalCode.MALFORMED


@pytest.mark.promise("stranger-gets-zeromq-socket")
def test_five_hundred_idle_connections_stop_no_device_and_enrolment_comes_back(tmp_path: Path) -> None:
    with enrolling(tmp_path) as rig:
        keys = new_keys()
        clock = SystemClock()
        join(rig.token(), DeviceId("good"), keys, clock=clock, rng=Random(1), timeout_s=20.0)
        with Wire(rig, "control", keys) as device, ExitStack() as flood:
            assert isinstance(device.hello(), control.Welcome)
            for _ in range(500):
                flood.enter_context(_plain(rig))
            for _ in range(20):
                device.send(heartbeat())
                assert isinstance(device.reply(), control.HeartbeatAck)
            files = len(list(Path(f"/proc/{rig.enrolment.pid}/fd").iterdir()))
            assert files < 40, "eight connections of one address, and what the process itself has open"
        token = rig.token(b"t" * 16)
        join(token, DeviceId("late"), new_keys(), clock=clock, rng=Random(2), timeout_s=20.0)

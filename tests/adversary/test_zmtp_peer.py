"""A raw ZMTP peer against the planner's ZeroMQ sockets: what ends libzmq, and what keeps it from it."""

import json
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.adversary.pings import End, finish
from benchmarks.adversary.zmtp import HandshakeRefused, RawPeer
from stageloom.edge_agent.link.connection import new_keys
from stageloom.planner.dispatch.quotas import DEFAULT_QUOTAS, Quota
from stageloom.planner.dispatch.sockets import listen
from stageloom.shared.keyfile import KeyPair
from stageloom.shared.messages import control
from tests.link.rig import LANES, Rig, Wire, heartbeat, running

pytestmark = pytest.mark.more

BURSTS = 25
PER_BURST = 40  # more than any receive queue holds, and few enough for a PING in each 8 KiB that libzmq reads


class Victim:
    """`tests.adversary.victim`, seen from outside."""

    def __init__(self, mode: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.adversary.victim", mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = json.loads(self._line())
        self.endpoints: dict[str, str] = said["endpoints"]
        self.server_key: str = said["server_key"]
        self.keys = KeyPair(*said["keys"])

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def tell(self, order: str) -> bool:
        """Whether it carries the order out; not if it dies."""
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self._line() == "done\n"

    def peer(self, lane: str) -> RawPeer:
        return _peer(self.endpoints[lane], self.keys, self.server_key)


@contextmanager
def victim(mode: str) -> Iterator[Victim]:
    made = Victim(mode)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def _peer(endpoint: str, keys: KeyPair, server_key: str) -> RawPeer:
    port = int(endpoint.rpartition(":")[2])
    # One that comes too often is told nothing until libzmq ends the handshake, after 10 s.
    return RawPeer.connect("127.0.0.1", port, keys, server_key, timeout_s=30.0)


def _fill_and_break(planner: Victim, lane: str, end: End) -> None:
    """1. The planner's thread reads nothing. 2. A peer fills the queue, with PINGs behind, and breaks the
    connection. 3. The planner reads on."""
    with planner.peer(lane) as peer:
        assert planner.tell("hold")
        peer.send(
            b"".join(
                b"".join(peer.message(b"\x00\xc1") for _ in range(PER_BURST)) + peer.ping()
                for _ in range(BURSTS)
            )
        )
        finish(peer, end)
        planner.tell("release")


@pytest.mark.promise("end-connection-ends-planner")
def test_a_reset_ends_a_planner_that_sees_it() -> None:
    """The trap itself, libzmq 4.3.5."""
    with victim("unfiltered") as planner:
        _fill_and_break(planner, "control", End.RESET)
        assert planner.process.wait(60) == -signal.SIGABRT
        assert planner.process.stderr is not None and "!_io_error" in planner.process.stderr.read()


@pytest.mark.promise("end-connection-ends-planner")
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("end", End)
def test_a_planner_outlives_every_end_of_a_connection_and_reads_what_came_before(lane: str, end: End) -> None:
    with victim("filtered") as planner:
        _fill_and_break(planner, lane, end)
        assert planner.tell(f"malformed {BURSTS * PER_BURST}")
        assert planner.process.poll() is None


@pytest.mark.promise("end-connection-ends-planner")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "*"])
@pytest.mark.parametrize("guarded", [True, False])
def test_a_guarded_connection_sees_no_reset(host: str, guarded: bool) -> None:
    listening = listen(host, 0, backlog=1, guarded=guarded)
    with listening, socket.create_connection((host.replace("*", "::1"), listening.getsockname()[1])) as peer:
        select.select([listening], [], [])
        connection, _ = listening.accept()
        with connection:
            peer.sendall(b"before")
            RawPeer(peer, b"").reset()
            poller = select.poll()
            poller.register(connection)
            broken = any(events & (select.POLLERR | select.POLLHUP) for _, events in poller.poll(0))
            assert broken is not guarded
            if guarded:
                assert connection.recv(100) == b"before"


@pytest.mark.promise("stranger-gets-zeromq-socket")
@pytest.mark.parametrize("lane", LANES)
def test_a_stranger_gets_into_no_socket(lane: str) -> None:
    with running("a") as (rig, _), pytest.raises(HandshakeRefused):
        _peer(getattr(rig.endpoints, lane), new_keys(), rig.keys.public)


def _greeting_only(rig: Rig, lane: str) -> socket.socket:
    port = int(getattr(rig.endpoints, lane).rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(52, b"\0"))
    return connection


def _nothing(rig: Rig, lane: str) -> socket.socket:
    port = int(getattr(rig.endpoints, lane).rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port))


@pytest.mark.promise("stranger-gets-zeromq-socket")
@pytest.mark.parametrize("visit", [_greeting_only, _nothing])
def test_a_flood_of_handshakes_stops_no_device(visit: Callable[[Rig, str], socket.socket]) -> None:
    with running("a") as (rig, (keys,)), Wire(rig, "control", keys) as wire, ExitStack() as flood:
        assert isinstance(wire.hello(), control.Welcome)
        for lane in LANES:
            for _ in range(60):
                flood.enter_context(visit(rig, lane))
        for _ in range(20):
            wire.send(heartbeat())
            assert isinstance(wire.reply(), control.HeartbeatAck)


@pytest.mark.promise("key-connects-too-often")
def test_a_key_that_connects_too_often_is_left_waiting_and_others_are_not() -> None:
    with running("bad", "good") as (rig, (bad, good)), ExitStack() as opened:
        for _ in range(round(DEFAULT_QUOTAS[Quota.CONNECTIONS].burst)):
            opened.enter_context(_peer(rig.endpoints.control, bad, rig.keys.public))
        with pytest.raises(HandshakeRefused):
            _peer(rig.endpoints.control, bad, rig.keys.public)
        with Wire(rig, "control", good) as wire:
            assert isinstance(wire.hello(), control.Welcome)

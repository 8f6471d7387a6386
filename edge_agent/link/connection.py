"""The device's sockets to the planner: a DEALER per lane, and what the control socket's monitor tells.

A wrong key must not look like a broken network, so handshakes are watched: ZeroMQ itself says nothing of them
to whoever sends and receives.
"""

import logging
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

import zmq
from msgspec import Struct
from zmq.utils import z85

from stageloom.edge_agent.lifecycle.events import Connected, Lost
from stageloom.shared.codec import Codec, CodecLimits
from stageloom.shared.durable_file import replace_synced
from stageloom.shared.errors import DecodeError, StateError, StorageError
from stageloom.shared.keyfile import KeyPair
from stageloom.shared.messages import bulk, control, telemetry
from stageloom.shared.messages.base import DeviceName, Message, PublicKey
from stageloom.shared.token import Endpoints

log = logging.getLogger(__name__)

_QUOTA: Final = 64  # messages of a lane before the others have their turn
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
    "the handshake fails: the planner is too busy, this device connects too often, or what answers there "
    "does not hold the planner's key; join again with a new token only if the planner has another key now"
)


def new_keys() -> KeyPair:
    """A fresh CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def z85_key(raw: bytes) -> str:
    """32 raw bytes of a key, as the messages spell it."""
    return z85.encode(raw).decode("ascii")


class Membership(Struct, frozen=True, kw_only=True, tag="membership", tag_field="type"):
    """One planner, as this device knows it."""

    device: DeviceName
    planner_key: PublicKey
    endpoints: Endpoints


_CODEC: Final[Codec[Membership]] = Codec(Membership, CodecLimits(frame_bytes=4 << 10, body_bytes=4 << 10))


def save_membership(path: Path, membership: Membership) -> None:
    """Replace the file durably.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        replace_synced(path, _CODEC.encode(membership))
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", remedy="check the folder"
        ) from error


def load_membership(path: Path) -> Membership | None:
    """The planner we joined, or None if we never did.

    Raises:
        StateError: the file is damaged; the agent can still run alone.
    """
    try:
        return _CODEC.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, DecodeError) as error:
        raise StateError(f"{path} is unreadable: {error}", remedy="join the planner again") from error


class PlannerConnection:
    """The sockets between `open` and `close`, which may follow each other any number of times."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        *,
        keys: KeyPair,
        member: Membership,
        rng: Random,
    ) -> None:
        """`poller` watches the sockets while they are open."""
        self.problem = ""  # why handshakes fail; one line
        self._context = context
        self._poller = poller
        self._keys = keys
        self._member = member
        self._rng = rng
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._monitor: zmq.Socket[bytes] | None = None
        self._handshake_open = False
        self._handshakes_failed = 0

    def open(self) -> None:
        """Make the sockets and let them connect."""
        for lane, (_, incoming, send_messages) in _CODECS.items():
            dealer = make_dealer(
                self._context,
                keys=self._keys,
                planner_key=self._member.planner_key,
                frame_bytes=incoming.limits.frame_bytes,
                send_messages=send_messages,
                rng=self._rng,
            )
            if lane == "control":
                self._monitor = dealer.get_monitor_socket(_MONITORED)
                self._poller.register(self._monitor, zmq.POLLIN)
            self._dealers[lane] = dealer
            self._poller.register(dealer, zmq.POLLIN)
            dealer.connect(getattr(self._member.endpoints, lane))

    def close(self) -> None:
        """Close them; what was to be sent is dropped."""
        if self._monitor is not None:
            self._poller.unregister(self._monitor)
            self._dealers["control"].disable_monitor()
            self._monitor.close(linger=0)
        for dealer in self._dealers.values():
            self._poller.unregister(dealer)
            dealer.close(linger=0)
        self._dealers, self._monitor, self._handshake_open = {}, None, False

    def send(self, lane: str, message: Message) -> bool:
        """Send without waiting; False if the lane is full or down."""
        dealer = self._dealers.get(lane)
        if dealer is None:
            return False
        try:
            dealer.send(_CODECS[lane][0].encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("the %s lane is full or down; what was to be sent is sent again later", lane)
            return False
        return True

    def received(self, ready: Mapping[Any, int]) -> Iterator[tuple[str, Any]]:
        """The messages that wait on sockets that are ready, with their lanes; some of each."""
        for lane in list(self._dealers):
            dealer = self._dealers.get(lane)  # closed, perhaps, by what the last message made us do
            if dealer is not None and dealer in ready:
                yield from ((lane, message) for message in _waiting(lane, dealer))

    def changes(self, ready: Mapping[Any, int]) -> Iterator[Connected | Lost | None]:
        """What the monitor tells, up to a `close` in between.

        None: a handshake failed; libzmq does not come back by itself after a refusal.
        """
        monitor = self._monitor
        if monitor is None or monitor not in ready:
            return
        while monitor is self._monitor:
            try:
                event = monitor_event(monitor)
            except zmq.Again:
                return
            if event == zmq.EVENT_CONNECTED:
                self._handshake_open = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshake_open, self.problem, self._handshakes_failed = False, "", 0
                yield Connected()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._handshake_failed(OUR_KEY_REFUSED)
                yield None
            elif event == zmq.EVENT_DISCONNECTED and not self._handshake_open:
                yield Lost()
            else:
                self._handshake_failed(PLANNER_KEY_DIFFERS)
                yield None

    def _handshake_failed(self, problem: str) -> None:
        self._handshake_open = False
        self._handshakes_failed += 1
        if problem == PLANNER_KEY_DIFFERS and self._handshakes_failed < 2:
            return  # once may be a planner that stopped half-way; one that throttles us looks like this, too
        self.problem = problem


def _waiting(lane: str, dealer: "zmq.Socket[bytes]") -> Iterator[Any]:
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
        yield message


# Only to notice that the other end is gone; whether the planner lives is told by its acknowledgements.
# ZeroMQ's own heartbeats stay off at both ends: see `planner/dispatch/sockets.py`.
_KEEPALIVE_IDLE_S: Final = 10
_KEEPALIVE_IVL_S: Final = 5
_KEEPALIVE_PROBES: Final = 3
_UNANSWERED_MS: Final = 15_000


def make_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]",
    *,
    keys: KeyPair,
    planner_key: str,
    frame_bytes: int,
    send_messages: int,
    rng: Random,
) -> "zmq.Socket[bytes]":
    """A DEALER that has yet to connect. It never sets a routing id: identity is the key."""
    dealer = context.socket(zmq.DEALER)
    dealer.curve_publickey, dealer.curve_secretkey = keys.public.encode(), keys.secret.encode()
    dealer.curve_serverkey = planner_key.encode()
    dealer.setsockopt(zmq.MAXMSGSIZE, frame_bytes)
    dealer.setsockopt(zmq.SNDHWM, send_messages)
    dealer.setsockopt(zmq.RCVHWM, 64)
    dealer.setsockopt(zmq.IMMEDIATE, 1)  # queue for a connection that stands, not for one that may
    dealer.setsockopt(zmq.TCP_KEEPALIVE, 1)
    dealer.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
    dealer.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_IVL_S)
    dealer.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES)
    dealer.setsockopt(zmq.TCP_MAXRT, _UNANSWERED_MS)
    dealer.setsockopt(zmq.HANDSHAKE_IVL, 10_000)  # a busy planner has a fleet's to do
    dealer.setsockopt(zmq.RECONNECT_IVL, rng.randint(200, 600))
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, rng.randint(8_000, 15_000))
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IPV6, 1)
    return dealer


def monitor_event(monitor: "zmq.Socket[bytes]") -> int:
    """The next event of a socket's monitor.

    pyzmq's own reader comes with asyncio, several MiB that the agent has no other use for.

    Raises:
        zmq.Again: there is none.
    """
    event, _ = monitor.recv_multipart(zmq.NOBLOCK)
    (number,) = struct.unpack_from("=H", event)
    return int(number)

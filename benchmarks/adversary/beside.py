"""An attack beside a good device: attacker and good device on one core, the planner on another.

The good device is a process of its own that says a heartbeat every 50 ms; its latency is from sending to the
acknowledgement. Where there is one core only, all share it.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import quantiles
from typing import Any, Final

from benchmarks.adversary import api_clients
from benchmarks.adversary.floods import FLOODS, Target
from benchmarks.adversary.ground import Ground
from benchmarks.adversary.peer import Credentials, Peer
from benchmarks.adversary.plans import add_plan
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.api.routes import ACCESS_CREATE
from stageloom.planner.schema.access import AccessCreateRequest, Role
from stageloom.shared.ids import Digest
from stageloom.shared.keyfile import KeyPair
from stageloom.shared.token import Endpoints

MOST_GROWN_MIB: Final = 256.0
_LEAST_P99_MS: Final = 250.0
_INTERVAL_S: Final = 0.05
_UNANSWERED_S: Final = 5.0
_CORES: Final = sorted(os.sched_getaffinity(0))
_SPAWN: Final = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Noticed:
    """What a good device noticed, and what the planner took."""

    sent: int  # messages, by the attacker
    alone_p99_ms: float  # of heartbeats before the flood
    p99_ms: float  # beside it
    unanswered: int
    died: int  # times that the planner took the good device for dead
    grown_mib: float  # of the planner's memory, at most
    alive: bool  # the planner, at the end

    @property
    def broken(self) -> str:
        """Which bound did not hold; empty text for none."""
        if not self.alive:
            return "the planner died"
        if self.unanswered or self.died:
            return f"{self.unanswered} of a good device's heartbeats unanswered, {self.died} times dead"
        if self.p99_ms > max(3 * self.alone_p99_ms, _LEAST_P99_MS):
            return f"a good device's p99 is {self.p99_ms:.0f} ms, alone {self.alone_p99_ms:.0f} ms"
        return f"the planner grew by {self.grown_mib:.0f} MiB" if self.grown_mib > MOST_GROWN_MIB else ""


def flooded(ground: Ground, flood: str, seconds: float) -> Noticed:
    """Flood a started planner for `seconds` as one device, and ask another what it noticed.

    Raises:
        RuntimeError: the attacker died, or sent nothing.
    """
    target = _target(ground, ground.enrol("bad"))
    return _beside(ground, partial(next(kind for kind in FLOODS if kind.name == flood), target), seconds)


def asked(ground: Ground, seconds: float) -> Noticed:
    """Let the clients of `benchmarks.adversary.api_clients` at a started planner's API for `seconds`.

    Raises:
        RuntimeError: the attacker died, or was answered nothing.
    """
    port = int(ground.api.rpartition(":")[2])
    with PlannerClient(data_dir=ground.home) as client:
        tokens = [
            client.call(ACCESS_CREATE, AccessCreateRequest(name=f"bad-{number}", role=Role.VIEWER)).token
            for number in range(api_clients.CLIENTS)
        ]
    targets = [api_clients.ApiTarget(port, token.partition(".")[0]) for token in tokens]
    return _beside(ground, partial(api_clients.attack, targets), seconds)


def _beside(ground: Ground, attack: Callable[[float], int], seconds: float) -> Noticed:
    good = ground.enrol("good")
    ground.pin(_CORES[-1])
    ours, theirs = _SPAWN.Pipe()
    results, attackers = _SPAWN.Pipe(duplex=False)
    device = _SPAWN.Process(target=_good_device, args=(good, theirs), daemon=True)
    attacker = _SPAWN.Process(target=_attack, args=(attack, seconds, attackers), daemon=True)
    device.start()
    try:
        ours.send(max(seconds / 2, 3.0))
        alone_ms = ours.recv()
        before_mib = most_mib = ground.memory_mib()
        attacker.start()
        attackers.close()  # the attacker alone holds its end: if it dies, that is seen
        ours.send(seconds)
        while not ours.poll(0.1):
            most_mib = max(most_mib, ground.memory_mib())
        beside_ms = ours.recv()
        sent = outcome_of(results, 30.0)
    finally:
        for process in (device, attacker):
            if process.pid is not None:
                process.kill()
                process.join()
    if not sent and ground.alive:
        raise RuntimeError("nothing was sent to the planner, or answered by it: is it reachable?")
    died = ground.query("select count(*) from events where device = 'good' and code = 'offline'")[0][0]
    return Noticed(
        sent,
        _p99(alone_ms),
        _p99(beside_ms),
        beside_ms.count(None),
        died,
        most_mib - before_mib,
        ground.alive,
    )


def _target(ground: Ground, bad: Credentials) -> Target:
    """All that a flood may need: a device with a plan of its own, and what is in it."""
    artifact = add_plan(ground, "small")
    ground.ok("plan", "push", bad.device, "small", "--autonomy", "full")
    ((wire,),) = ground.query("select wire from plans where name = 'small'")
    endpoints = Endpoints(bad.endpoints["control"], bad.endpoints["telemetry"], bad.endpoints["bulk"])
    keys = KeyPair(bad.public_key, bad.secret_key)
    return Target(
        endpoints=endpoints,
        planner_key=bad.planner_key,
        keys=keys,
        artifact=Digest(artifact),
        plan=bytes(wire),
    )


def _attack(attack: Callable[[float], int], seconds: float, results: Connection) -> None:
    os.sched_setaffinity(0, {_CORES[0]})
    results.send(attack(seconds))


def _good_device(who: Credentials, orders: Connection) -> None:
    """Say heartbeats for as long as each order says; answer with their latencies in ms, None: no answer."""
    os.sched_setaffinity(0, {_CORES[0]})
    with Peer(who) as peer:
        peer.hello()
        while True:
            until_s = time.monotonic() + orders.recv()
            latencies_ms: list[float | None] = []
            while (began_s := time.monotonic()) < until_s:
                answer = peer.heartbeat(timeout_s=_UNANSWERED_S)
                ok = answer is not None and answer["type"] == "heartbeat_ack"
                latencies_ms.append((time.monotonic() - began_s) * 1e3 if ok else None)
                if not ok:
                    peer.hello(timeout_s=_UNANSWERED_S)
                time.sleep(max(0.0, began_s + _INTERVAL_S - time.monotonic()))
            orders.send(latencies_ms)


def outcome_of(attacker: Connection, patience_s: float) -> Any:
    """What the process of an attacker says once it is done.

    Raises:
        RuntimeError: it died, or says nothing in time. What it was to attack has not been tried.
    """
    with suppress(EOFError):
        if attacker.poll(patience_s):
            return attacker.recv()
    raise RuntimeError(f"an attacker died or is not done after {patience_s:g} s: see what it wrote above")


def _p99(latencies_ms: Sequence[float | None]) -> float:
    answered = [one for one in latencies_ms if one is not None]
    return quantiles(answered, n=100, method="inclusive")[98] if len(answered) > 1 else float("inf")

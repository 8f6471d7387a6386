"""The planner as users start it, in a process of its own; its data directory with devices and a plan to push.

Devices are enrolled through the store with a token each: the enrolment socket lets a few strangers a
second in, on purpose, which would take minutes here.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from sqlalchemy.orm import Session

from benchmarks.lanes.chains import chain_graph
from benchmarks.processes import PLANNER, Processes
from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.dispatch.ports import EnrolAttempt
from stageloom.planner.schema.plan import MAX_PUSHED, PlanPushRequest
from stageloom.planner.store.desired import Push, push_wanted
from stageloom.planner.store.devices import add_token, enrol_device
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.store import Store
from stageloom.shared.artifact import pack_artifact
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.keyfile import KeyPair
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.token import Endpoints

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class PlannerProcess:
    """`stageloom up --json`, ready when made."""

    def __init__(self, data_dir: Path, port: int, *, heartbeat_interval_s: float) -> None:
        self.data_dir = data_dir
        interval = {"STAGELOOM_PLANNER_HEARTBEAT_INTERVAL_S": str(heartbeat_interval_s)}
        self._processes = Processes(data_dir.parent, interval)
        listen = ("--listen", f"127.0.0.1:{port}", "--data-dir", str(data_dir))
        self._process = self._processes.start("planner", PLANNER, "up", "--json", *listen)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the planner did not start: {self._processes.tail('planner')}")
        ready: dict[str, Any] = json.loads(line)
        self.startup_s = float(ready["startup_s"])
        self.public_key = str(ready["public_key"])
        self.endpoints = Endpoints(**ready["endpoints"])

    def last_words(self) -> str:
        """How the process fares, and what its log says besides the ordinary."""
        lines = (self.data_dir.parent / "planner.log").read_text(encoding="utf-8").splitlines()
        unusual = [line for line in lines if " INFO " not in line]
        return "\n".join([f"planner's exit code: {self._process.poll()}; its log:", *unusual[:200]])

    def kill(self) -> float:
        """SIGKILL, and wait until it is gone; returns when it was sent, on the monotonic clock."""
        at_s = time.monotonic()
        self._processes.kill("planner")
        return at_s

    def stop(self) -> None:
        self._processes.stop("planner")

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds so far: of ZeroMQ's own threads (CURVE, TCP), and of all others."""
        library_s = other_s = 0.0
        for stat in Path(f"/proc/{self._process.pid}/task").glob("*/stat"):
            text = stat.read_text(encoding="utf-8", errors="replace")
            name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
            spent_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
            if name.startswith("ZMQbg"):
                library_s += spent_s
            else:
                other_s += spent_s
        return library_s, other_s


def free_ports() -> int:
    """The first of four ports in a row that are free now."""
    for first in range(20_000, 60_000, 16):
        try:
            for port in range(first, first + 4):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no four ports in a row are free")


def push_to_all(data_dir: Path, plan: str, fleet: Sequence[DeviceId]) -> tuple[dict[DeviceId, float], int]:
    """Push to every device through the API, with as many requests as it takes.

    Returns when each was asked for (all at once, when the first request begins), on the monotonic clock, and
    the highest generation given.
    """
    asked_s = dict.fromkeys(fleet, time.monotonic())
    newest = 0
    with PlannerClient(data_dir=data_dir) as client:
        for at in range(0, len(fleet), MAX_PUSHED):
            request = PlanPushRequest(plan=plan, devices=tuple(fleet[at : at + MAX_PUSHED]))
            for pushed in client.call(routes.PLAN_PUSH, request).pushed:
                if pushed.cause:
                    raise RuntimeError(f"a push was refused: {pushed.cause}")
                newest = max(newest, pushed.generation)
    return asked_s, newest


PLAN = "bench"
MODEL = "relu"
_OPERATORS = 24


@dataclass(frozen=True)
class Enrolled:
    """A device that the planner knows."""

    device: DeviceId
    keys: KeyPair


def enrol(data_dir: Path, count: int) -> list[Enrolled]:
    """Make the data directory, with `count` devices, one model and one plan."""
    store = Store(data_dir)
    try:
        fleet = [Enrolled(DeviceId(f"bench-{at:04}"), _new_keys()) for at in range(count)]
        answers = [
            store.writer.submit(lambda session, one=one: _enrol(session, one))  # type: ignore[misc]
            for one in fleet
        ]
        for answer in answers:
            answer.result(60.0)
        _add_plan(store, data_dir)
        return fleet
    finally:
        store.close()


def push_behind_the_planners_back(data_dir: Path, fleet: Sequence[Enrolled]) -> int:
    """Desire the plan once more of every device, as a planner does that dies before it has told them.

    Returns the generation.
    """
    store = Store(data_dir)
    try:
        answers = [
            store.submit_together(push_wanted, Push(device=one.device, plan=PLAN, decided_by="operator"))
            for one in fleet
        ]
        return max(answer.result(60.0).generation for answer in answers)
    finally:
        store.close()


def _new_keys() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def _enrol(session: Session, one: Enrolled) -> None:
    secret = digest_bytes([one.device.encode()])
    add_token(session, secret, one.device, 3600.0)
    session.flush()
    enrol_device(session, EnrolAttempt(secret, one.keys.public, one.device, "0.1.0", "bench"))


def _add_plan(store: Store, folder: Path) -> None:
    graph = chain_graph(_OPERATORS)
    digest, blob = pack_artifact(graph, b"no file: nothing here runs it")
    file = folder / "relu.artifact"
    file.write_bytes(blob)
    store.add_model(MODEL, file, digest)
    choice = ModelChoice(name=MODEL, artifact=Digest(digest), graph=graph, partition=())
    store.write(add_plan, PLAN, compose([choice]), "bench")

"""A planner, an agent and a database as real processes over many lives, to be killed and started again."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import tomli_w

from benchmarks.adversary.postgres import PostgresServer
from benchmarks.processes import Lines, Processes
from stageloom.edge_agent.config import SETTINGS_NAME, TABLE, load_config
from stageloom.edge_agent.ingest.channel import socket_of
from stageloom.edge_agent.link.factory import join_planner
from stageloom.edge_agent.reporting.status import AgentStatus, ask_status
from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.api.route import Route
from stageloom.planner.schema.base import Request
from stageloom.planner.schema.device import DeviceInfo, DeviceShowRequest, DeviceTokenRequest
from stageloom.planner.schema.model import ModelAddRequest
from stageloom.planner.schema.plan import PlanPushRequest
from stageloom.shared.errors import UnavailableError
from stageloom.shared.failpoint import VARIABLE as FAILPOINT
from stageloom.shared.ids import DeviceId
from stageloom.shared.importer.api import artifact_path, import_model
from stageloom.shared.messages.control import Activation, Autonomy

DEVICE: Final = "killed"
"""The device whose agent runs here."""

ANSWER_S: Final = 60.0
"""A process that has not started, ended or agreed after so long, or a request without an answer, hangs."""

_SETTINGS: Final = {
    "HEARTBEAT_INTERVAL_S": "0.2",
    "DEAD_AFTER_S": "1",
    "BULK_CREDITS": "1",
    "SEARCH": "local",
}
_AGENT: Final = {
    "probation_s": 0.5,
    "stats_interval_s": 0.1,
    "trial": {"timing_s": 0.5, "shortest_window_s": 0.1, "limit_s": 4.0},
}

Q = TypeVar("Q", bound=Request)
R = TypeVar("R")


class Hung(Exception):
    """Something has not ended, answered or agreed within `ANSWER_S`."""


def until(condition: Callable[[], Any], what: str, within_s: float = ANSWER_S) -> Any:
    """Poll until `condition` is true; its value.

    Raises:
        Hung: it stays false.
    """
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > deadline_s:
            raise Hung(f"not within {within_s:g} s: {what}")
        time.sleep(0.03)
    return found


class World:
    """One planner on one database, and one agent that has joined it."""

    def __init__(
        self, processes: Processes, folder: Path, port: int, server: PostgresServer | None = None
    ) -> None:
        """`server` None: SQLite."""
        self.server = server
        self.planner_home = folder / "planner"
        self.agent_home = folder / "agent"
        self.socket = socket_of(self.agent_home)
        self._processes, self._port = processes, port
        self._lives = 0
        self._planner = self._agent = ""

    # -- planner --------------------------------------------------------------------------------------------

    def start_planner(self, failpoint: str = "") -> None:
        """Ready when this returns, or dead by its failpoint.

        Raises:
            Hung: neither in time, or it ended in another way.
        """
        url = {"DATABASE_URL": self.server.url} if self.server else {}
        settings = {f"STAGELOOM_PLANNER_{name}": value for name, value in {**_SETTINGS, **url}.items()}
        self._planner = self._next_life("planner")
        where = ("--listen", f"127.0.0.1:{self._port}", "--data-dir", str(self.planner_home))
        arguments = ("up", "--json", *where)
        process = self._processes.start(
            self._planner, "stageloom.planner", *arguments, **settings, **{FAILPOINT: failpoint}
        )
        assert process.stdout is not None
        ready = Lines(process.stdout)
        until(lambda: ready.latest or process.poll() is not None, "the planner starts")
        if self.died("planner") and not failpoint:
            raise Hung("the planner was killed while it started: see that no other program does that")

    def died(self, victim: str) -> bool:
        """Whether the `planner` or `agent` that was started last ended by SIGKILL, as by a failpoint.

        Raises:
            Hung: it ended in another way, which no kill did.
        """
        name = self._planner if victim == "planner" else self._agent
        code = self._processes.running[name].poll()
        if code not in (None, -signal.SIGKILL):
            raise Hung(f"the {victim} ended with {code}: {self._processes.tail(name)}")
        return code is not None

    def planner_runs(self) -> bool:
        """Whether its process lives."""
        return self._runs(self._planner)

    def end_planner(self, *, kill: bool) -> None:
        """SIGKILL, or as a service manager does."""
        self._end(self._planner, kill=kill)

    def call(self, route: Route[Q, R], request: Q, *, timeout_s: float = 10.0) -> R:
        """What the planner answers.

        Raises:
            UnavailableError: nothing in time.
            ApiRefused: no.
        """
        with PlannerClient(data_dir=self.planner_home) as client:
            return client.call(route, request, timeout_s=timeout_s)

    def add_model(self, name: str, file: Path) -> None:
        """Import a file and give it to the planner."""
        report = import_model(file, shapes={}, out_dir=file.parent)
        with PlannerClient(data_dir=self.planner_home) as client:
            client.upload(
                routes.MODEL_ADD,
                ModelAddRequest(model=name, digest=report.digest),
                artifact_path(file.parent, report.digest),
            )

    def push(self, plan: str, device: str = DEVICE, *, trial: bool = False) -> tuple[int, int]:
        """Desire a plan; the (epoch, generation) that was answered."""
        request = PlanPushRequest(
            plan=plan,
            devices=(DeviceId(device),),
            activation=Activation.TRIAL if trial else Activation.NOW,
            autonomy=Autonomy.OFF,
        )
        (pushed,) = self.call(routes.PLAN_PUSH, request).pushed
        return pushed.epoch, pushed.generation

    def device(self, name: str = DEVICE) -> DeviceInfo:
        """A device as the planner sees it."""
        return self.call(routes.DEVICE_SHOW, DeviceShowRequest(device=DeviceId(name))).device

    # -- agent ----------------------------------------------------------------------------------------------

    def token(self, name: str) -> str:
        """A join token for a device of this name."""
        return self.call(routes.DEVICE_TOKEN, DeviceTokenRequest(device=DeviceId(name))).token

    def join(self, token: str, name: str, home: Path) -> None:
        """As `stageloom-agent join` does; safe to repeat."""
        join_planner(load_config(home), token, name)

    def start_agent(self, failpoint: str = "") -> None:
        """Returns at once; `status` tells how it is."""
        self.agent_home.mkdir(parents=True, exist_ok=True)
        (self.agent_home / SETTINGS_NAME).write_text(tomli_w.dumps({TABLE: _AGENT}))
        self._agent = self._next_life("agent")
        process = self._processes.start(
            self._agent,
            "stageloom.edge_agent",
            "run",
            "--home",
            str(self.agent_home),
            **{FAILPOINT: failpoint},
        )
        assert process.stdout is not None
        Lines(process.stdout)

    def agent_runs(self) -> bool:
        """Whether its main process lives."""
        return self._runs(self._agent)

    def end_agent(self, *, kill: bool) -> None:
        """SIGKILL to the main process alone, or as a service manager does."""
        self._end(self._agent, kill=kill)

    def status(self) -> AgentStatus | None:
        """What the agent says of itself; None while it does not answer."""
        try:
            return ask_status(self.socket)
        except UnavailableError:
            return None

    def _runs(self, name: str) -> bool:
        process = self._processes.running.get(name)
        return process is not None and process.poll() is None

    def _end(self, name: str, *, kill: bool) -> None:
        if name not in self._processes.running:
            return  # it was ended before
        if kill:
            self._processes.kill(name)
        else:
            self._processes.stop(name)

    def _next_life(self, kind: str) -> str:
        """A log of its own for each life."""
        self._lives += 1
        return f"{kind}-{self._lives}"

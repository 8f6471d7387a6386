"""A planner and its devices as real processes on this machine, driven by the commands that a user types."""

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from random import SystemRandom
from typing import Any

from stageloom.edge_agent.cli.app import execute as agent_command
from stageloom.edge_agent.reporting.status import AgentStatus
from tests.agent.process import AgentProcess
from tests.planner.processes import PlannerProcess, ok, until

_SETTINGS = """[planner]
heartbeat_interval_s = 0.2
dead_after_s = 1.0
bulk_credits = 1  # transfers take their time, so that one can be cut off in the middle
"""
PATIENCE_S = 60.0


def four_free_ports() -> int:
    """The first of four consecutive ports that nobody listens on, below those that outgoing connections take.

    A planner that is started again must be found where it was, so it cannot take ports as they come.
    """
    rng = SystemRandom()
    while True:
        first = rng.randrange(10_000, 32_000, 4)
        taken = 0
        for port in range(first, first + 4):
            with socket.socket() as probe:
                taken += probe.connect_ex(("127.0.0.1", port)) == 0
        if not taken:
            return first


class Fleet:
    """One planner over all its lives: the same address, and unless the test says otherwise the same data."""

    def __init__(self, folder: Path, *, start: bool = True) -> None:
        """Without `start` the planner is started by the test."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.home = folder / "planner"
        self.config = folder / "planner.toml"
        self.config.write_text(_SETTINGS)
        self.port = four_free_ports()
        if start:
            self.start()

    def start(self) -> None:
        """Ready when this returns."""
        listen = f"127.0.0.1:{self.port}"
        self.planner = PlannerProcess(self.home, "--listen", listen, "--config", str(self.config))

    @property
    def runs(self) -> bool:
        """Whether the planner's process lives."""
        return self.planner.process.poll() is None

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit code."""
        return self.planner.stop(number)

    def ask(self, *arguments: str) -> Any:
        """What `stageloom ARGUMENTS --json` prints."""
        return json.loads(ok(self.home, *arguments, "--json"))

    def do(self, *arguments: str) -> None:
        """A command that prints nothing of interest."""
        ok(self.home, *arguments)

    def make_plan(self, name: str, *how: str) -> str:
        """`plan create`; the plan's digest."""
        return str(self.ask("plan", "create", "--name", name, *how)["digest"])

    def close(self) -> None:
        """Nothing is left running."""
        if self.runs:
            self.end(signal.SIGKILL)


class Device:
    """One device over all lives of its agent."""

    def __init__(self, fleet: Fleet, name: str, folder: Path) -> None:
        self.fleet = fleet
        self.name = name
        self.home = folder / name
        self.agent: AgentProcess | None = None

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self.agent is None:
            return
        self.agent.kill()
        if error is not None:
            error.add_note(f"the agent's log:\n{self.agent.log[-8000:]}")
            error.add_note(f"the planner's log:\n{self.fleet.planner.log()[-4000:]}")

    def join(self) -> "Device":
        """With a token of its own."""
        token = self.fleet.ask("device", "token", self.name)["token"]
        assert agent_command(["join", token, "--home", str(self.home)]) == 0
        return self

    def start(self, **settings: Any) -> AgentProcess:
        """Run the agent; plans are under probation for a moment only."""
        self.agent = AgentProcess(self.home, **{"probation_s": 0.3, **settings})
        return self.agent

    @property
    def running(self) -> AgentProcess:
        """The agent that was started last."""
        assert self.agent is not None
        return self.agent

    def push(self, plan: str) -> int:
        """The plan becomes what is desired, without a trial; its generation."""
        return int(self.fleet.ask("plan", "push", self.name, plan, "--now")["generation"])

    def seen(self) -> dict[str, Any]:
        """The device as the planner sees it."""
        found: dict[str, Any] = self.fleet.ask("device", "show", self.name)
        return found

    def until_seen(self, condition: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """Poll the planner's view while the agent lives."""
        last: dict[str, Any] = {}

        def reached() -> bool:
            assert self.running.process.poll() is None, f"the agent ended\n{self.running.log}"
            last.update(self.seen())
            return bool(condition(last))

        try:
            until(reached, timeout_s=PATIENCE_S, pause_s=0.1)  # each look takes a command and a request
        except AssertionError as error:
            error.add_note(f"waited for {what}; the planner sees {last}")
            raise
        return last

    def run(self, plan: str) -> str:
        """Push a plan and wait until it is committed; its digest."""
        generation = self.push(plan)

        def committed(seen: dict[str, Any]) -> bool:
            report = seen["report"]
            if report["generation"] != generation:
                return False  # still about an earlier push, which may have been rejected
            assert report["state"] not in ("rejected", "rolled_back"), report
            return bool(report["state"] == "committed")

        digest = self.until_seen(committed, f"plan {plan} to be committed")["report"]["active"]
        return str(digest)

    def books(self) -> dict[str, int]:
        """Telemetry rows that the planner counts for this device: produced, stored, dropped."""
        found: dict[str, int] = self.fleet.ask("watch", self.name, "--count", "1")["telemetry"]
        return found

    def drain_telemetry(self, lost: int = 0) -> AgentStatus:
        """Wait until all that was produced is stored or dropped, but for `lost` rows at most.

        Of rows that an older copy of the database lacks the device sends again those whose storing it was not
        told of.
        """
        self.until_seen(lambda _: 0 <= _missing(self.books()) <= lost, "the books to balance")
        return self.running.now()


def _missing(books: dict[str, int]) -> int:
    assert books["produced"] > 0
    return books["produced"] - books["stored"] - books["dropped"]

"""A real agent in processes of its own."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from stageloom.edge_agent.config import AgentConfig, encode_config
from stageloom.edge_agent.ingest.channel import socket_of
from stageloom.edge_agent.reporting.status import AgentStatus, ask_status
from stageloom.shared.errors import UnavailableError
from tests.agent.conftest import eventually


class AgentProcess:
    """`python -m stageloom.edge_agent.run`; killed at the end of the `with` block if it still runs."""

    def __init__(self, home: Path, *, leads: bool = False, **settings: Any) -> None:
        """`leads`: a session of its own, as a service does."""
        home.mkdir(parents=True, exist_ok=True)
        config = AgentConfig(home=str(home), stats_interval_s=0.1, **settings)
        self.home = home
        self.socket = socket_of(home)
        self.log_path = home / "log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stageloom.edge_agent.run", encode_config(config)],
                stderr=log,
                stdout=log,
                start_new_session=leads,
            )

    def __enter__(self) -> "AgentProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if error is not None:
            error.add_note(f"the agent's log:\n{self.log}")

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def status(self) -> AgentStatus | None:
        """None while it does not answer."""
        try:
            return ask_status(self.socket)
        except UnavailableError:
            return None

    def now(self) -> AgentStatus:
        """The status of one that answers."""
        found = self.status()
        assert found is not None, self.log
        return found

    def until(self, condition: Callable[[AgentStatus], object], what: str) -> AgentStatus:
        """Poll the status until it is as wanted; an agent that has ended is not waited for."""

        def reached() -> bool:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}\n{self.log}"
            found = self.status()
            return found is not None and bool(condition(found))

        eventually(reached, what, within_s=60.0, pause_s=0.03)
        return self.now()

    def until_ready(self) -> AgentStatus:
        return self.until(lambda status: status.ready, "the agent is ready")

    def socket_when_ready(self) -> Path:
        """For applications that are to find it serving."""
        self.until_ready()
        return self.socket

    def stop(self) -> int:
        """Politely; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

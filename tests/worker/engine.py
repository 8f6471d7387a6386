"""A real engine process behind the agent's client, on a loop that turns while a test waits."""

import time
from collections.abc import Sequence
from typing import TypeVar

from stageloom.edge_agent.loop import Loop
from stageloom.edge_agent.worker import messages
from stageloom.edge_agent.worker.client import EngineClient, memory_file
from stageloom.edge_agent.worker.messages import WorkerConfig
from stageloom.shared.artifact import Artifact
from stageloom.shared.plan import Plan

TIMEOUT_S = 60.0

R = TypeVar("R", bound=messages.Report)


class RealEngine:
    """One process. `reports` holds those that no test has taken yet."""

    def __init__(self, config: WorkerConfig | None = None) -> None:
        self.loop = Loop()
        self.reports: list[messages.Report] = []
        self.client = EngineClient(self.loop, config or WorkerConfig(), self.reports.append)
        self.client.start()

    def send(self, command: messages.Command, fds: Sequence[int] = ()) -> None:
        assert self.client.send(command, fds)

    def send_file(self, command: messages.Command, content: bytes) -> None:
        with memory_file(content) as fd:
            self.send(command, [fd])

    def load(self, key: int, plan: Plan, model: Artifact) -> None:
        self.send_file(messages.LoadPlan(key, {model.digest: str(model.path)}), plan.wire)

    def wait_for(self, kind: type[R]) -> R:
        """The oldest report of a kind that was not taken yet; others stay."""
        ends_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < ends_s:
            for report in self.reports:
                if isinstance(report, kind):
                    self.reports.remove(report)
                    return report
            self.loop.turn(1.0)
        raise AssertionError(f"no {kind.__name__} came, but {self.reports}")

    def stop(self) -> int | None:
        """The exit code; None if the process had ended."""
        code = self.client.shut_down(5.0)
        self.loop.close()
        return code

"""What the agent needs from a link to the planner, and the link of an agent that has no planner."""

import os
from collections.abc import Sequence
from typing import Protocol

from stageloom.edge_agent.lifecycle import events
from stageloom.edge_agent.lifecycle.states import RunnablePlan
from stageloom.edge_agent.reporting.status import LinkStatus
from stageloom.shared.messages.telemetry import RowData


class Link(Protocol):
    """Called from the main loop's thread only; never waits."""

    def fileno(self) -> int:
        """Readable when orders wait."""

    def take(self) -> Sequence[events.Order]:
        """The orders that wait, in order."""

    def tell(self, event: events.Event) -> None:
        """What happened to an order."""

    def tick(self) -> None:
        """Time passed: try again what failed."""

    def record(self, rows: Sequence[RowData]) -> None:
        """Keep telemetry for the planner."""

    def status(self) -> LinkStatus:
        """How the link is."""

    def stop(self) -> None:
        """Leave."""


class NoPlanner:
    """The agent runs one plan that was made here; telemetry has nowhere to go."""

    def __init__(self, plan: RunnablePlan) -> None:
        self._orders: list[events.Order] = [events.RestorePlan(plan)]
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(self._write, b"\0")  # the one order there is waits from the start

    def fileno(self) -> int:
        return self._read

    def take(self) -> Sequence[events.Order]:
        os.read(self._read, 1)
        orders, self._orders = self._orders, []
        return orders

    def tell(self, event: events.Event) -> None:
        """No one wants to know."""

    def tick(self) -> None:
        """Nothing was tried."""

    def record(self, rows: Sequence[RowData]) -> None:
        """No one wants to know."""

    def status(self) -> LinkStatus:
        return LinkStatus(state="alone", detail="this agent runs without a planner")

    def stop(self) -> None:
        os.close(self._read)
        os.close(self._write)

"""The link of an agent that cannot reach for a planner: it has not joined one, or its key is unusable.

The same core decides as for a joined device, so last-known-good is served and a deployment that was under way
is finished; there is only no one to talk to.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from stageloom.edge_agent.lifecycle import events
from stageloom.edge_agent.lifecycle.core import LinkCore
from stageloom.edge_agent.lifecycle.statefile import save_state
from stageloom.edge_agent.reporting.status import LinkStatus
from stageloom.shared.ids import Digest
from stageloom.shared.messages.telemetry import RowData

_log = logging.getLogger(__name__)


class OfflineLink:
    """The link core without a network; called on the main loop's thread only."""

    def __init__(
        self, core: LinkCore, path: Path, *, environment: str, present: frozenset[Digest], why: str
    ) -> None:
        self._core = core
        self._path = path
        self._why = why
        self._orders: deque[events.Order] = deque()
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._carry_out(core.boot(environment, present, time.monotonic()))

    def fileno(self) -> int:
        return self._read

    def take(self) -> Sequence[events.Order]:
        os.read(self._read, 4096)
        orders = list(self._orders)
        self._orders.clear()
        return orders

    def tell(self, event: events.Event) -> None:
        self._carry_out(self._core.handle(event, time.monotonic()))

    def tick(self) -> None:
        self._carry_out(self._core.handle(events.Tick(), time.monotonic()))

    def record(self, rows: Sequence[RowData]) -> None:
        """Nowhere to send it: an agent that has joined no planner owes none."""

    def status(self) -> LinkStatus:
        report = self._core.report()
        return LinkStatus(
            state="not_joined",
            detail=self._core.disk.error or self._why,
            desired=f"{report.epoch}.{report.generation}" if report.state else "",
            desired_state=report.state.value if report.state else "",
            reason=report.reason,
        )

    def stop(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def _carry_out(self, actions: Sequence[events.Action]) -> None:
        for action in actions:
            match action:
                case events.Persist(state):
                    try:
                        save_state(self._path, state)
                    except OSError as error:
                        _log.error("%s", error)
                        self._carry_out(self._core.handle(events.PersistFailed(str(error)), time.monotonic()))
                        return
                    self._core.persisted(state)
                case events.Hold(state):
                    self._core.held(state)
                case events.FetchArtifact() | events.Send() | events.Reconnect() | events.Record():
                    pass  # there is no one to ask or to tell
                case _:
                    self._orders.append(action)
                    os.write(self._write, b"\0")

"""Telemetry on its way to the planner: one batch at a time, sent again until it is acknowledged."""

from dataclasses import dataclass

from stageloom.edge_agent.link.spool import Spool
from stageloom.shared.messages.telemetry import MAX_BATCH_ROWS, TelemetryBatch


@dataclass(frozen=True, slots=True)
class _Flight:
    """The batch that is out."""

    sent_s: float
    batch: TelemetryBatch


class Uplink:
    """Decides when a batch is due. Only what was acknowledged leaves the spool."""

    def __init__(self, spool: Spool, *, every_s: float, again_s: float) -> None:
        """`every_s`: between two batches that are not full; `again_s`: how long to wait for an answer."""
        self._spool = spool
        self._every_s = every_s
        self._again_s = again_s
        self._flight: _Flight | None = None
        self._next_s = 0.0
        self._correlation = 0

    def due(self, now_s: float) -> TelemetryBatch | None:
        """The batch to send now, on a session that stands; say `sent` if it went."""
        if self._flight is not None and now_s - self._flight.sent_s < self._again_s:
            return None
        if now_s < self._next_s:
            return None
        self._correlation += 1
        self._next_s = now_s + self._every_s
        return self._spool.next_batch(self._correlation)

    def sent(self, batch: TelemetryBatch, now_s: float) -> None:
        """It is out."""
        self._flight = _Flight(now_s, batch)

    def landed(self, correlation: int, now_s: float) -> bool:
        """The planner has answered; whether a backlog is to be sent at once."""
        flight = self._flight
        if flight is None or flight.batch.correlation != correlation:
            return False
        self._flight = None
        full = len(flight.batch.rows) == MAX_BATCH_ROWS
        if full:
            self._next_s = now_s
        return full

    def unreadable(self, correlation: int) -> bool:
        """The planner cannot read this batch: its rows are given up, and counted. Whether it was ours."""
        flight = self._flight
        if flight is None or flight.batch.correlation != correlation:
            return False
        self._spool.reject(flight.batch.ranges)
        return True

    def interrupted(self) -> None:
        """What was out may be lost."""
        self._flight = None

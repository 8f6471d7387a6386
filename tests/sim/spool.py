"""The device's spool, which says when its books may have changed."""

from collections.abc import Sequence

from stageloom.edge_agent.link.spool import Spool
from stageloom.shared.messages.telemetry import RowRange, TelemetryAck, TelemetryBatch


class WatchedSpool(Spool):
    """Counts the calls that may change its books: they need not be read again while it stands still."""

    changes = 0

    def append(self, rows: Sequence[bytes]) -> int:
        self.changes += 1
        return super().append(rows)

    def next_batch(self, correlation: int) -> TelemetryBatch | None:
        self.changes += 1
        return super().next_batch(correlation)

    def acknowledge(self, ack: TelemetryAck) -> None:
        self.changes += 1
        super().acknowledge(ack)

    def reject(self, ranges: Sequence[RowRange]) -> None:
        self.changes += 1
        super().reject(ranges)

"""The telemetry lane: batches in, an acknowledgement once they are committed."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from stageloom.planner.counters import rows_beyond_reach
from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.core.fleet import Device, DispatchConfig, Fleet
from stageloom.planner.dispatch.quotas import ROW_BYTES, Quota
from stageloom.planner.dispatch.rows import single_rows
from stageloom.shared.messages.base import RefusalCode
from stageloom.shared.messages.telemetry import RowRange, TelemetryAck, TelemetryBatch


@dataclass(frozen=True)
class _Open:
    who: Device
    route: bytes
    batch: TelemetryBatch
    size_bytes: int


class TelemetryCore:
    """Decisions of the telemetry lane."""

    def __init__(self, fleet: Fleet, config: DispatchConfig) -> None:
        self.backlog_rows = 0
        self._fleet = fleet
        self._config = config
        self._open: dict[int, _Open] = {}  # by ticket
        self._ranges: defaultdict[str, set[tuple[RowRange, ...]]] = defaultdict(set)  # open ones, by key

    def received(self, event: ev.TelemetryReceived, now_s: float) -> list[ev.Action]:
        """A batch came."""
        batch, lane = event.message, ev.Lane.TELEMETRY
        who = self._fleet.authorise(lane, event.route, event.key, batch.correlation)
        if isinstance(who, ev.Send):
            return [who]
        if reason := rows_beyond_reach(batch):
            return self._fleet.quarantine(who, reason, lane, event.route, batch.correlation)
        if not _numbered(batch):
            return [self._refuse(event, RefusalCode.MALFORMED, "ranges do not number the rows")]
        if not _balanced(batch):
            return [self._refuse(event, RefusalCode.MALFORMED, "a ledger does not balance")]
        ranges = self._ranges[event.key]
        if batch.ranges and batch.ranges in ranges:
            return []  # sent again before the commit of the first; that one answers
        # Alone it is taken in whatever its size: a limit below one batch would hold telemetry up for ever.
        if self.backlog_rows and self.backlog_rows + len(batch.rows) > self._config.backlog_rows:
            return [self._refuse(event, RefusalCode.BUSY, "the store is behind")]
        size_bytes = ROW_BYTES * (len(batch.rows) + len(batch.ranges) + len(batch.ledgers) + 1)
        size_bytes += sum(map(len, batch.rows))
        if not self._fleet.may_wait(who, size_bytes) or not self._within(who, batch, size_bytes, now_s):
            return []  # the device sends it again
        who.waiting_bytes += size_bytes
        self.backlog_rows += len(batch.rows)
        ranges.add(batch.ranges)
        ticket = self._fleet.ticket()
        self._open[ticket] = _Open(who, event.route, batch, size_bytes)
        return [ev.AppendTelemetry(ticket, who.member.device, batch)]

    def _within(self, who: Device, batch: TelemetryBatch, size_bytes: int, now_s: float) -> bool:
        """Whether the device's quotas allow this batch."""
        within = self._fleet.within
        told = {one.boot for one in batch.ledgers} | {one.boot for one in batch.ranges}
        new_boots = told.difference(who.boots)
        singles = single_rows(batch.rows)
        if (
            (new_boots and not within(who, Quota.LEDGERS, now_s, len(new_boots)))
            or (singles and not within(who, Quota.SINGLE_ROWS, now_s, singles))
            or not within(who, Quota.TELEMETRY_BYTES, now_s, size_bytes)
        ):
            return False
        who.know(new_boots)
        return True

    def committed(self, event: ev.TelemetryCommitted) -> list[ev.Action]:
        """The store answered."""
        done = self._open.pop(event.ticket, None)
        if done is None:
            return []
        batch, counts = done.batch, self._fleet.counts
        self.backlog_rows -= len(batch.rows)
        done.who.waiting_bytes -= done.size_bytes
        self._ranges[done.who.member.public_key].discard(batch.ranges)
        if not event.ok:
            counts["telemetry_not_stored"] += 1
            lane, reason = ev.Lane.TELEMETRY, "the store failed"
            return [self._fleet.refuse(lane, done.route, batch.correlation, RefusalCode.BUSY, reason)]
        counts["telemetry_rows"] += len(batch.rows)
        if done.who.member.revoked:
            return []
        ack = TelemetryAck(correlation=batch.correlation, ranges=batch.ranges, ledgers=batch.ledgers)
        return [ev.Send(ev.Lane.TELEMETRY, done.route, ack)]

    def _refuse(self, event: ev.TelemetryReceived, code: RefusalCode, reason: str) -> ev.Action:
        return self._fleet.refuse(ev.Lane.TELEMETRY, event.route, event.message.correlation, code, reason)


def _numbered(batch: TelemetryBatch) -> bool:
    """Whether the ranges number the rows."""
    counted = 0
    for rows in batch.ranges:
        if rows.last < rows.first:
            return False
        counted += rows.last - rows.first + 1
    return counted == len(batch.rows)


def _balanced(batch: TelemetryBatch) -> bool:
    """Whether the ledgers can be: each boot told once, and its rows here are produced and not dropped."""
    rows: Counter[int] = Counter()
    ends: Counter[int] = Counter()
    for part in batch.ranges:
        rows[part.boot] += part.last - part.first + 1
        ends[part.boot] = max(ends[part.boot], part.last + 1)
    return len({ledger.boot for ledger in batch.ledgers}) == len(batch.ledgers) and all(
        ledger.dropped + rows[ledger.boot] <= ledger.produced and ends[ledger.boot] <= ledger.produced
        for ledger in batch.ledgers
    )

"""The telemetry lane, whose batches are acknowledged once they are committed, and the bulk lane."""

from collections import Counter, defaultdict

from stageloom.planner.counters import rows_beyond_reach
from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.core.fleet import DispatchConfig, EnrolledFleet, FleetDevice
from stageloom.planner.dispatch.ports import single_rows
from stageloom.planner.dispatch.quotas import ROW_BYTES, Quota
from stageloom.shared.ids import Digest
from stageloom.shared.messages import bulk, control
from stageloom.shared.messages.base import RefusalCode
from stageloom.shared.messages.telemetry import RowRange, TelemetryAck, TelemetryBatch


class TelemetryCore:
    """Decisions of the telemetry lane."""

    def __init__(self, fleet: EnrolledFleet, config: DispatchConfig) -> None:
        self.backlog_rows = 0
        self.not_stored = self.not_stored_in_a_row = 0  # batches: in all, and since the last that was
        self._fleet = fleet
        self._config = config
        self._open: dict[
            int, tuple[FleetDevice, bytes, TelemetryBatch, int]
        ] = {}  # (who, route, batch, bytes) by ticket
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
        self._open[ticket] = who, event.route, batch, size_bytes
        return [ev.AppendTelemetry(ticket, who.member.device, batch)]

    def _within(self, who: FleetDevice, batch: TelemetryBatch, size_bytes: int, now_s: float) -> bool:
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
        who, route, batch, size_bytes = done
        self.backlog_rows -= len(batch.rows)
        who.waiting_bytes -= size_bytes
        self._ranges[who.member.public_key].discard(batch.ranges)
        if not event.ok:
            self.not_stored += 1
            self.not_stored_in_a_row += 1
            lane, reason = ev.Lane.TELEMETRY, "the store failed"
            return [self._fleet.refuse(lane, route, batch.correlation, RefusalCode.BUSY, reason)]
        self.not_stored_in_a_row = 0
        self._fleet.counts["telemetry_rows"] += len(batch.rows)
        if who.member.revoked:
            return []
        ack = TelemetryAck(correlation=batch.correlation, ranges=batch.ranges, ledgers=batch.ledgers)
        return [ev.Send(ev.Lane.TELEMETRY, route, ack)]

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


class BulkCore:
    """Decisions of the bulk lane."""

    def __init__(self, fleet: EnrolledFleet, config: DispatchConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._open: dict[
            int, tuple[FleetDevice, bytes, bulk.ChunkRequest]
        ] = {}  # (who, route, request) by ticket
        self._on_their_way: Counter[str] = Counter()  # chunks, by key

    def received(self, event: ev.BulkReceived) -> list[ev.Action]:
        """A device asks for a chunk."""
        request = event.message
        who = self._fleet.authorise(ev.Lane.BULK, event.route, event.key, request.correlation)
        if isinstance(who, ev.Send):
            return [who]
        if request.digest not in _artifacts_of(who.member.desired):
            return [self._refuse(event.route, request, RefusalCode.NOT_FOUND, "not part of what is desired")]
        if self._on_their_way[event.key] >= self._config.bulk_credits:
            return [self._refuse(event.route, request, RefusalCode.BUSY, "credits used up")]
        self._on_their_way[event.key] += 1
        ticket = self._fleet.ticket()
        self._open[ticket] = who, event.route, request
        return [
            ev.ReadChunk(
                ticket, who.member.device, request.digest, request.offset_bytes, request.length_bytes
            )
        ]

    def read(self, event: ev.ChunkRead) -> list[ev.Action]:
        """The store answered."""
        done = self._open.pop(event.ticket, None)
        if done is None:
            return []
        who, route, request = done
        self._on_their_way[who.member.public_key] -= 1
        if who.member.revoked:
            return []
        if event.data is None:
            return [self._refuse(route, request, RefusalCode.NOT_FOUND, event.reason)]
        chunk = bulk.Chunk(
            correlation=request.correlation,
            digest=request.digest,
            offset_bytes=request.offset_bytes,
            size_bytes=event.size_bytes,
            data=event.data,
        )
        return [ev.Send(ev.Lane.BULK, route, chunk)]

    def _refuse(self, route: bytes, request: bulk.ChunkRequest, code: RefusalCode, reason: str) -> ev.Action:
        return self._fleet.refuse(ev.Lane.BULK, route, request.correlation, code, reason)


def _artifacts_of(desired: control.Desired | None) -> set[Digest]:
    if desired is None:
        return set()
    policies = {desired.policy.digest} if desired.policy is not None else set()
    profiled = {one.artifact.digest for one in desired.profiles}
    staged = desired.stage_profile.artifacts if desired.stage_profile is not None else ()
    return {need.digest for need in (*desired.artifacts, *staged)} | profiled | policies

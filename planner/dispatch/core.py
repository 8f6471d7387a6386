"""The planner's side of the link as a pure core: (event, now) -> actions.

A device is the key of its connection (`User-Id`), never a routing id. Every message is authorised anew, so a
revocation holds from the next message on. Desired and reported are compared by level at every hello,
heartbeat and report; whatever got lost is repaired by the next one.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from planner.dispatch import events as ev
from planner.dispatch.alarms import AlarmDesk
from planner.dispatch.ports import EnrolAttempt, FleetMember, ReportRecord
from planner.dispatch.rate import TokenBuckets
from shared.digest import digest_bytes
from shared.ids import DeviceId, Digest
from shared.messages import bulk, control, enrol, telemetry
from shared.messages.base import RefusalCode, Refused


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """Pace and bounds of the planner's side."""

    heartbeat_interval_s: float = 1.0
    dead_after_s: float = 4.0  # design: a dead device is noticed within 5 s
    resend_desired_s: float = 2.0
    bulk_credits: int = 4
    backlog_rows: int = 100_000  # telemetry taken in and not yet committed, over all devices
    enrol_per_s: float = 5.0
    enrol_burst: int = 10


@dataclass
class Session:
    """The one control connection of a device that counts."""

    route: bytes
    boot: int
    connection: int
    last_seen_s: float
    desired_sent_s: float = float("-inf")


@dataclass
class _Device:
    member: FleetMember
    session: Session | None = None
    agent_version: str = ""
    device_class: str = ""
    stored_revision: int = 0
    storing_revision: int | None = None
    reissuing: bool = False
    open_chunks: int = 0
    batches: set[tuple[telemetry.RowRange, ...]] = field(default_factory=set)


@dataclass(frozen=True)
class _OpenBatch:
    device: DeviceId
    route: bytes
    batch: telemetry.TelemetryBatch


@dataclass(frozen=True)
class _OpenChunk:
    device: DeviceId
    route: bytes
    request: bulk.ChunkRequest


@dataclass(frozen=True)
class _OpenEnrolment:
    route: bytes
    correlation: int
    attempt: EnrolAttempt


@dataclass(frozen=True)
class Presence:
    """What the operator is shown of one device."""

    member: FleetMember
    online: bool
    agent_version: str
    device_class: str


_NOBODY: Final = (0, 0)


def _pair(value: control.Desired | control.Report | control.Heartbeat | None) -> tuple[int, int]:
    return (value.epoch, value.generation) if value is not None else _NOBODY


class DispatchCore:
    """All decisions of dispatch. Not thread-safe: the thread that owns the sockets owns this."""

    def __init__(self, fleet: list[FleetMember], *, epoch: int, config: DispatchConfig) -> None:
        self.config = config
        self.epoch = epoch
        self.counts: Counter[str] = Counter()
        self.backlog_rows = 0
        self._by_key: dict[str, DeviceId] = {}
        self._devices: dict[DeviceId, _Device] = {}
        self._next_ticket = 1
        self._batches: dict[int, _OpenBatch] = {}
        self._chunks: dict[int, _OpenChunk] = {}
        self._enrolments: dict[int, _OpenEnrolment] = {}
        self._alarms = AlarmDesk(self.counts)
        self._enrol_rate = TokenBuckets(per_s=config.enrol_per_s, burst=config.enrol_burst)
        for member in fleet:
            self._add(member)

    def may_connect(self, key: str) -> bool:
        """Whether a connection with this key gets into the devices' domain at all."""
        device = self._by_key.get(key)
        return device is not None and not self._devices[device].member.revoked

    def presence(self) -> list[Presence]:
        """Every device, in order of enrolment."""
        return [
            Presence(one.member, one.session is not None, one.agent_version, one.device_class)
            for one in self._devices.values()
        ]

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Action]:
        """Decide. `now_s` is monotonic."""
        match event:
            case ev.ControlReceived():
                return self._control(event, now_s)
            case ev.TelemetryReceived():
                return self._telemetry(event)
            case ev.BulkReceived():
                return self._bulk(event)
            case ev.EnrolReceived():
                return self._enrol(event, now_s)
            case ev.Malformed(lane, route, _):
                self.counts["malformed"] += 1
                return [ev.Send(lane, route, Refused(code=RefusalCode.MALFORMED, reason=event.reason))]
            case ev.TelemetryCommitted():
                return self._telemetry_done(event)
            case ev.ChunkRead():
                return self._chunk_read(event)
            case ev.Enrolled() | ev.EnrolDenied():
                return self._enrol_done(event)
            case ev.ReportStored(device, revision, ok):
                return self._report_stored(device, revision, ok)
            case ev.DesiredChanged(device, desired):
                return self._desired_changed(device, desired, now_s)
            case ev.ReissueFailed(device):
                if device in self._devices:
                    self._devices[device].reissuing = False
                return []
            case ev.AlarmStored():
                return self._alarms.stored(event)
            case ev.LocalSettled(device, _, adopted):
                self._alarms.settled(event)
                return [] if adopted is None else self._desired_changed(device, adopted, now_s)
            case ev.Revoked(device):
                return self._revoked(device)
            case ev.Unreachable(lane, route):
                return self._unreachable(lane, route)
            case ev.Tick():
                return self._tick(now_s)

    # -- who is it ------------------------------------------------------------------------------------------

    def _add(self, member: FleetMember) -> None:
        device = _Device(member, stored_revision=member.report.revision if member.report else 0)
        self._devices[member.device] = device
        self._by_key[member.public_key] = member.device

    def _authorise(self, lane: ev.Lane, route: bytes, key: str, correlation: int) -> _Device | ev.Send:
        """The device behind a key, or the refusal to send instead."""
        name = self._by_key.get(key)
        if name is None:
            code, reason = RefusalCode.UNKNOWN_KEY, "this key is not enrolled; join with a new token"
        elif self._devices[name].member.revoked:
            code, reason = RefusalCode.REVOKED, f"device {name} was revoked; join with a new token"
        else:
            return self._devices[name]
        self.counts[code.value] += 1
        return ev.Send(lane, route, Refused(correlation=correlation, code=code, reason=reason))

    # -- control --------------------------------------------------------------------------------------------

    def _control(self, event: ev.ControlReceived, now_s: float) -> list[ev.Action]:
        message = event.message
        who = self._authorise(ev.Lane.CONTROL, event.route, event.key, message.correlation)
        if isinstance(who, ev.Send):
            return [who]
        if isinstance(message, control.Hello):
            return self._hello(who, event.route, message, now_s)
        session = who.session
        if session is None or session.route != event.route:
            return [self._no_session(session, event.route, message)]
        session.last_seen_s = now_s
        if isinstance(message, control.Heartbeat):
            desired = who.member.desired
            epoch, generation = _pair(desired)
            ack = control.HeartbeatAck(
                correlation=message.correlation,
                epoch=epoch,
                generation=generation,
                revision=who.stored_revision,
            )
            actions: list[ev.Action] = [ev.Send(ev.Lane.CONTROL, event.route, ack)]
            return actions + self._send_desired(who, _pair(message), now_s)
        if isinstance(message, control.Reported):
            return self._absorb(who, message.boot, message.report) + self._compare(who, message.report, now_s)
        return self._alarms.received(who.member.device, event.route, message)

    def _no_session(
        self, session: Session | None, route: bytes, message: control.ControlToPlanner
    ) -> ev.Action:
        if session is not None and session.boot != message.boot:
            self.counts["superseded"] += 1
            refusal = Refused(
                correlation=message.correlation,
                code=RefusalCode.SUPERSEDED,
                reason="another agent said hello with this key later",
                boot=session.boot,
            )
        else:
            refusal = Refused(correlation=message.correlation, code=RefusalCode.HELLO_FIRST)
        return ev.Send(ev.Lane.CONTROL, route, refusal)

    def _hello(self, who: _Device, route: bytes, hello: control.Hello, now_s: float) -> list[ev.Action]:
        old = who.session
        if old is not None and old.boot == hello.boot and old.connection > hello.connection:
            self.counts["stale_hello"] += 1
            return []
        actions: list[ev.Action] = []
        if old is not None and old.route != route:
            refusal = Refused(
                code=RefusalCode.SUPERSEDED, reason="a later hello with this key", boot=hello.boot
            )
            actions.append(ev.Send(ev.Lane.CONTROL, old.route, refusal))
        who.session = Session(route, hello.boot, hello.connection, now_s)
        who.agent_version, who.device_class = hello.agent_version, hello.device_class
        welcome = control.Welcome(
            correlation=hello.correlation,
            device=who.member.device,
            epoch=self.epoch,
            heartbeat_interval_s=self.config.heartbeat_interval_s,
            bulk_credits=self.config.bulk_credits,
        )
        actions.append(ev.Send(ev.Lane.CONTROL, route, welcome))
        if old is None:
            actions.append(ev.PresenceChanged(who.member.device, True))
        actions += self._absorb(who, hello.boot, hello.report)
        return actions + self._compare(who, hello.report, now_s)

    def _absorb(self, who: _Device, boot: int, report: control.Report) -> list[ev.Action]:
        """Take in a report that is newer than the one on record; acknowledge one that is stored already."""
        known = who.member.report
        if known is not None and boot == who.member.boot and report.revision < known.revision:
            return []  # overtaken on the way
        if known == report and boot == who.member.boot and who.stored_revision == report.revision:
            return self._ack_report(who)
        if who.storing_revision == report.revision and boot == who.member.boot:
            return []
        who.member = replace(who.member, boot=boot, report=report)
        who.storing_revision = report.revision
        record = ReportRecord(who.member.device, boot, report, who.agent_version, who.device_class)
        return [ev.StoreReport(record)]

    def _report_stored(self, device: DeviceId, revision: int, ok: bool) -> list[ev.Action]:
        who = self._devices.get(device)
        if who is None:
            return []
        if who.storing_revision == revision:
            who.storing_revision = None
        if not ok:
            self.counts["report_not_stored"] += 1
            return []  # no acknowledgement: the next heartbeat makes the device report again
        who.stored_revision = revision
        return self._ack_report(who)

    def _ack_report(self, who: _Device) -> list[ev.Action]:
        if who.session is None or who.member.revoked:
            return []
        ack = control.ReportedAck(revision=who.stored_revision)
        return [ev.Send(ev.Lane.CONTROL, who.session.route, ack)]

    def _compare(self, who: _Device, report: control.Report, now_s: float) -> list[ev.Action]:
        """Desired against reported, by level: send it, or find out that this database is behind."""
        desired = who.member.desired
        wanted = _pair(desired)
        differs = desired is not None and _pair(report) == wanted and report.seen != desired.plan_digest
        if _pair(report) > wanted or differs:
            if who.reissuing:
                return []
            who.reissuing = True
            self.counts["reissued"] += 1
            return [ev.Reissue(who.member.device, report.epoch, report.generation)]
        return self._send_desired(who, _pair(report), now_s)

    def _send_desired(self, who: _Device, seen: tuple[int, int], now_s: float) -> list[ev.Action]:
        desired, session = who.member.desired, who.session
        if desired is None or session is None or seen >= _pair(desired):
            return []
        if now_s - session.desired_sent_s < self.config.resend_desired_s:
            return []
        session.desired_sent_s = now_s
        return [ev.Send(ev.Lane.CONTROL, session.route, desired)]

    def _desired_changed(self, device: DeviceId, desired: control.Desired, now_s: float) -> list[ev.Action]:
        who = self._devices.get(device)
        if who is None:
            return []
        who.reissuing = False
        if _pair(desired) <= _pair(who.member.desired):
            return []  # two changes passed each other on the way here; generations never fall
        self.epoch = max(self.epoch, desired.epoch)
        who.member = replace(who.member, desired=desired)
        if who.session is None or who.member.revoked:
            return []
        who.session.desired_sent_s = float("-inf")
        return self._send_desired(who, _NOBODY, now_s)

    def _revoked(self, device: DeviceId) -> list[ev.Action]:
        who = self._devices.get(device)
        if who is None:
            return []
        who.member = replace(who.member, revoked=True)
        session, who.session = who.session, None
        if session is None:
            return []
        refusal = Refused(code=RefusalCode.REVOKED, reason=f"device {device} was revoked")
        return [ev.Send(ev.Lane.CONTROL, session.route, refusal), ev.PresenceChanged(device, False)]

    def _unreachable(self, lane: ev.Lane, route: bytes) -> list[ev.Action]:
        self.counts["unreachable"] += 1
        if lane is not ev.Lane.CONTROL:
            return []
        return self._end_sessions(
            [one for one in self._devices.values() if one.session and one.session.route == route]
        )

    def _tick(self, now_s: float) -> list[ev.Action]:
        limit_s = now_s - self.config.dead_after_s
        return self._end_sessions(
            [one for one in self._devices.values() if one.session and one.session.last_seen_s < limit_s]
        )

    def _end_sessions(self, lost: list[_Device]) -> list[ev.Action]:
        for who in lost:
            who.session = None
        return [ev.PresenceChanged(who.member.device, False) for who in lost]

    # -- telemetry ------------------------------------------------------------------------------------------

    def _telemetry(self, event: ev.TelemetryReceived) -> list[ev.Action]:
        batch, lane = event.message, ev.Lane.TELEMETRY
        who = self._authorise(lane, event.route, event.key, batch.correlation)
        if isinstance(who, ev.Send):
            return [who]
        if any(rows.last < rows.first for rows in batch.ranges) or sum(
            rows.last - rows.first + 1 for rows in batch.ranges
        ) != len(batch.rows):
            return [
                self._refuse(
                    lane,
                    event.route,
                    batch.correlation,
                    RefusalCode.MALFORMED,
                    "ranges do not number the rows",
                )
            ]
        if batch.ranges and batch.ranges in who.batches:
            return []  # sent again before the commit of the first; that one answers
        if self.backlog_rows + len(batch.rows) > self.config.backlog_rows:
            return [
                self._refuse(lane, event.route, batch.correlation, RefusalCode.BUSY, "the store is behind")
            ]
        self.backlog_rows += len(batch.rows)
        who.batches.add(batch.ranges)
        ticket = self._ticket()
        self._batches[ticket] = _OpenBatch(who.member.device, event.route, batch)
        return [ev.AppendTelemetry(ticket, who.member.device, batch)]

    def _telemetry_done(self, event: ev.TelemetryCommitted) -> list[ev.Action]:
        done = self._batches.pop(event.ticket, None)
        if done is None:
            return []
        self.backlog_rows -= len(done.batch.rows)
        who = self._devices[done.device]
        who.batches.discard(done.batch.ranges)
        if not event.ok:
            self.counts["telemetry_not_stored"] += 1
            return [
                self._refuse(
                    ev.Lane.TELEMETRY,
                    done.route,
                    done.batch.correlation,
                    RefusalCode.BUSY,
                    "the store failed",
                )
            ]
        self.counts["telemetry_rows"] += len(done.batch.rows)
        if who.member.revoked:
            return []
        ack = telemetry.TelemetryAck(
            correlation=done.batch.correlation, ranges=done.batch.ranges, ledgers=done.batch.ledgers
        )
        return [ev.Send(ev.Lane.TELEMETRY, done.route, ack)]

    # -- bulk -----------------------------------------------------------------------------------------------

    def _bulk(self, event: ev.BulkReceived) -> list[ev.Action]:
        request, lane = event.message, ev.Lane.BULK
        who = self._authorise(lane, event.route, event.key, request.correlation)
        if isinstance(who, ev.Send):
            return [who]
        if request.digest not in _artifacts_of(who.member.desired):
            return [
                self._refuse(
                    lane,
                    event.route,
                    request.correlation,
                    RefusalCode.NOT_FOUND,
                    "not part of what is desired",
                )
            ]
        if who.open_chunks >= self.config.bulk_credits:
            return [self._refuse(lane, event.route, request.correlation, RefusalCode.BUSY, "credits used up")]
        who.open_chunks += 1
        ticket = self._ticket()
        self._chunks[ticket] = _OpenChunk(who.member.device, event.route, request)
        return [ev.ReadChunk(ticket, request.digest, request.offset_bytes, request.length_bytes)]

    def _chunk_read(self, event: ev.ChunkRead) -> list[ev.Action]:
        done = self._chunks.pop(event.ticket, None)
        if done is None:
            return []
        who = self._devices[done.device]
        who.open_chunks -= 1
        if who.member.revoked:
            return []
        request = done.request
        if event.data is None:
            return [
                self._refuse(
                    ev.Lane.BULK, done.route, request.correlation, RefusalCode.NOT_FOUND, event.reason
                )
            ]
        chunk = bulk.Chunk(
            correlation=request.correlation,
            digest=request.digest,
            offset_bytes=request.offset_bytes,
            size_bytes=event.size_bytes,
            data=event.data,
        )
        return [ev.Send(ev.Lane.BULK, done.route, chunk)]

    # -- enrolment ------------------------------------------------------------------------------------------

    def _enrol(self, event: ev.EnrolReceived, now_s: float) -> list[ev.Action]:
        request, lane = event.message, ev.Lane.ENROL
        if not self._enrol_rate.take(event.address, now_s):
            self.counts["enrol_rate"] += 1
            return [
                self._refuse(
                    lane,
                    event.route,
                    request.correlation,
                    RefusalCode.RATE,
                    "too many attempts; wait a minute",
                )
            ]
        if request.public_key != event.key:
            return [
                self._refuse(
                    lane,
                    event.route,
                    request.correlation,
                    RefusalCode.MALFORMED,
                    "the key in the message is not the connection's",
                )
            ]
        attempt = EnrolAttempt(
            digest_bytes([request.secret]),
            event.key,
            request.device,
            request.agent_version,
            request.device_class,
        )
        ticket = self._ticket()
        self._enrolments[ticket] = _OpenEnrolment(event.route, request.correlation, attempt)
        return [ev.Enrol(ticket, attempt)]

    def _enrol_done(self, event: ev.Enrolled | ev.EnrolDenied) -> list[ev.Action]:
        done = self._enrolments.pop(event.ticket, None)
        if done is None:
            return []
        if isinstance(event, ev.EnrolDenied):
            self.counts["enrol_refused"] += 1
            return [self._refuse(ev.Lane.ENROL, done.route, done.correlation, event.code, event.reason)]
        known = self._devices.get(event.device)
        if known is None or known.member.public_key != done.attempt.public_key:
            if known is not None:  # a revoked device joined again with a new key
                self._by_key.pop(known.member.public_key, None)
            # The name keeps what it was to run: the store does, too.
            desired = known.member.desired if known is not None else None
            self._add(FleetMember(event.device, done.attempt.public_key, desired=desired))
        reply = enrol.EnrolReply(correlation=done.correlation, device=event.device)
        return [ev.Send(ev.Lane.ENROL, done.route, reply)]

    # -- small things ---------------------------------------------------------------------------------------

    def _refuse(
        self, lane: ev.Lane, route: bytes, correlation: int, code: RefusalCode, reason: str
    ) -> ev.Action:
        self.counts[code.value] += 1
        return ev.Send(lane, route, Refused(correlation=correlation, code=code, reason=reason[:512]))

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket


def _artifacts_of(desired: control.Desired | None) -> set[Digest]:
    if desired is None:
        return set()
    return {need.digest for need in desired.artifacts} | {one.artifact.digest for one in desired.profiles}

"""The control lane: sessions, heartbeats, and desired against reported.

Desired and reported are compared by level at every hello, heartbeat and report; whatever got lost is
repaired by the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from msgspec import structs

from stageloom.planner.counters import beyond_reach
from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.core.fleet import DeviceSession, DispatchConfig, EnrolledFleet, FleetDevice
from stageloom.planner.dispatch.ports import ReportRecord
from stageloom.planner.dispatch.quotas import Quota
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import control
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.control import Alarm, AlarmAck, LocalPlan

_LINE: Final = 512  # characters of a reason


Key = tuple[DeviceId, int, int]  # device, boot, number (of an alarm) or local counter (of a plan)


# What a decoded message takes here, about.
_MESSAGE_BYTES: Final = 1024

_LOAD_BYTES: Final = 256

_NUMBER_BYTES: Final = 40


@dataclass(slots=True)
class _Open:
    """Handed to the store and not answered; `route` waits for the acknowledgement or the refusal."""

    who: FleetDevice
    size_bytes: int
    route: bytes
    correlation: int


class AlarmDesk:
    """What was handed to the store and is not answered yet."""

    def __init__(self, fleet: EnrolledFleet) -> None:
        self._fleet = fleet
        self._alarms: dict[Key, _Open] = {}
        self._plans: dict[Key, _Open] = {}
        self._due: dict[DeviceId, int] = {}  # the newest re-plan that was told of

    def received(
        self, who: FleetDevice, route: bytes, message: Alarm | LocalPlan, now_s: float
    ) -> list[ev.Action]:
        """An authorised message of a device with a session."""
        if isinstance(message, Alarm):
            return self._alarm(who, route, message, now_s)
        return self._local_plan(who, route, message, now_s)

    def _alarm(self, who: FleetDevice, route: bytes, alarm: Alarm, now_s: float) -> list[ev.Action]:
        device = who.member.device
        key = (device, alarm.boot, alarm.number)
        if (waiting := self._alarms.get(key)) is not None:
            waiting.route = route
            return []
        numbers = sum(len(one.progress) + len(one.deviations) for one in alarm.samples)
        numbers += 2 * len(alarm.usual or ())
        size_bytes = _MESSAGE_BYTES + _LOAD_BYTES * len(alarm.loads) + _NUMBER_BYTES * numbers
        if not self._fleet.within(who, Quota.ALARMS, now_s) or not self._fleet.may_wait(who, size_bytes):
            return []
        self._alarms[key] = _opened(who, size_bytes, route, alarm.correlation)
        return [ev.StoreAlarm(device, alarm)]

    def _local_plan(self, who: FleetDevice, route: bytes, local: LocalPlan, now_s: float) -> list[ev.Action]:
        device = who.member.device
        key = (device, local.boot, local.local_counter)
        size_bytes = _MESSAGE_BYTES + len(local.plan) + _LOAD_BYTES * len(local.artifacts)
        if (
            key in self._plans
            or not self._fleet.within(who, Quota.LOCAL_PLANS, now_s)
            or not self._fleet.within(who, Quota.GENERATIONS, now_s)
            or not self._fleet.may_wait(who, size_bytes)
        ):
            return []
        self._plans[key] = _opened(who, size_bytes, route, local.correlation)
        return [ev.AdoptLocal(device, local)]

    def stored(self, event: ev.AlarmStored) -> list[ev.Action]:
        """Acknowledge, and have it acted on where it began a re-plan; nothing where the store failed."""
        alarm = event.alarm
        done = self._alarms.pop((event.device, alarm.boot, alarm.number), None)
        if done is not None:
            done.who.waiting_bytes -= done.size_bytes
        if not event.ok:
            self._fleet.counts["alarm_not_stored"] += 1
            return []
        actions: list[ev.Action] = []
        if event.replan is not None and event.replan != self._due.get(event.device):
            self._due[event.device] = event.replan
            actions.append(ev.ReplanDue(event.device, event.replan))
        if done is not None:
            ack = AlarmAck(boot=alarm.boot, number=alarm.number)
            actions.append(ev.Send(ev.Lane.CONTROL, done.route, ack))
        return actions

    def settled(self, event: ev.LocalSettled) -> list[ev.Action]:
        """The store has adopted the plan, or has not: a repeat may ask again. A refusal is answered."""
        done = self._plans.pop((event.device, event.plan.boot, event.plan.local_counter), None)
        if done is None:
            return []
        done.who.waiting_bytes -= done.size_bytes
        if not event.refused:
            return []
        self._fleet.counts["local_plan_refused"] += 1
        refusal = Refused(
            correlation=done.correlation, code=RefusalCode.NOT_PERMITTED, reason=event.refused[:_LINE]
        )
        return [ev.Send(ev.Lane.CONTROL, done.route, refusal)]


def _opened(who: FleetDevice, size_bytes: int, route: bytes, correlation: int) -> _Open:
    who.waiting_bytes += size_bytes
    return _Open(who, size_bytes, route, correlation)


_NOBODY: Final = (0, 0)


def _pair(value: control.Desired | control.Report | control.Heartbeat | None) -> tuple[int, int]:
    return (value.epoch, value.generation) if value is not None else _NOBODY


def _is_another(desired: control.Desired, report: control.Report) -> bool:
    """The device knows this generation, and knows something else by it."""
    if _pair(report) != _pair(desired):
        return False
    return (
        report.seen != desired.plan_digest
        or report.activation not in (None, desired.activation)
        or report.autonomy not in (None, desired.autonomy)
    )


class ControlCore:
    """Decisions of the control lane."""

    def __init__(
        self, fleet: EnrolledFleet, alarms: AlarmDesk, *, epoch: int, config: DispatchConfig
    ) -> None:
        self.epoch = epoch
        self._fleet = fleet
        self._alarms = alarms
        self._config = config

    def received(self, event: ev.ControlReceived, now_s: float) -> list[ev.Action]:
        """A device said something."""
        message = event.message
        who = self._fleet.authorise(ev.Lane.CONTROL, event.route, event.key, message.correlation)
        if isinstance(who, ev.Send):
            return [who]
        reason = beyond_reach(
            message, epoch=self.epoch, generation=_pair(who.member.desired)[1], known=who.member.report
        )
        if reason:
            return self._fleet.quarantine(who, reason, ev.Lane.CONTROL, event.route, message.correlation)
        if isinstance(message, control.Hello):
            if not self._fleet.within(who, Quota.HELLOS, now_s):
                return []
            return self._hello(who, event.route, message, now_s)
        session = who.session
        if session is None or session.route != event.route:
            return [self._no_session(session, event.route, message)]
        session.last_seen_s = now_s
        if isinstance(message, control.Heartbeat):
            epoch, generation = _pair(who.member.desired)
            ack = control.HeartbeatAck(
                correlation=message.correlation,
                epoch=epoch,
                generation=generation,
                revision=who.stored_revision,
            )
            actions: list[ev.Action] = [ev.Send(ev.Lane.CONTROL, event.route, ack)]
            actions += self._read_desired(who) + self._reissue(who, now_s)
            return actions + self._send_desired(who, _pair(message), now_s)
        if isinstance(message, control.Reported):
            if not self._fleet.within(who, Quota.REPORTS, now_s):
                return []  # sent again with the next heartbeat
            return self._absorb(who, message.boot, message.report) + self._compare(who, message.report, now_s)
        return self._alarms.received(who, event.route, message, now_s)

    def _no_session(
        self, session: DeviceSession | None, route: bytes, message: control.ControlToPlanner
    ) -> ev.Action:
        if session is not None and session.boot != message.boot:
            self._fleet.counts["superseded"] += 1
            refusal = Refused(
                correlation=message.correlation,
                code=RefusalCode.SUPERSEDED,
                reason="another agent said hello with this key later",
                boot=session.boot,
            )
        else:
            refusal = Refused(correlation=message.correlation, code=RefusalCode.HELLO_FIRST)
        return ev.Send(ev.Lane.CONTROL, route, refusal)

    def _hello(self, who: FleetDevice, route: bytes, hello: control.Hello, now_s: float) -> list[ev.Action]:
        old = who.session
        if old is not None and old.boot == hello.boot and old.connection > hello.connection:
            self._fleet.counts["stale_hello"] += 1
            return []
        actions: list[ev.Action] = []
        if old is not None and old.route != route:
            refusal = Refused(
                code=RefusalCode.SUPERSEDED, reason="a later hello with this key", boot=hello.boot
            )
            actions.append(ev.Send(ev.Lane.CONTROL, old.route, refusal))
        who.session = DeviceSession(route, hello.boot, hello.connection, now_s)
        changed = hello.device_class != who.device_class
        who.agent_version, who.device_class = hello.agent_version, hello.device_class
        welcome = control.Welcome(
            correlation=hello.correlation,
            device=who.member.device,
            epoch=self.epoch,
            heartbeat_interval_s=self._config.heartbeat_interval_s,
            bulk_credits=self._config.bulk_credits,
        )
        actions.append(ev.Send(ev.Lane.CONTROL, route, welcome))
        if old is None:
            actions.append(ev.PresenceChanged(who.member.device, True))
        actions += self._absorb(who, hello.boot, hello.report, changed=changed)
        return actions + self._compare(who, hello.report, now_s)

    # -- reported -------------------------------------------------------------------------------------------

    def _absorb(
        self, who: FleetDevice, boot: int, report: control.Report, *, changed: bool = False
    ) -> list[ev.Action]:
        """Take in a report that is newer than the one on record; acknowledge one that is stored already.

        `changed`: the device is of another class now, which is stored with it whatever the report says.
        """
        report = structs.replace(report, activation=None, autonomy=None)  # they say nothing of the device
        known = who.member.report
        if known is not None and boot == who.member.boot and report.revision < known.revision:
            return []  # overtaken on the way
        same = boot == who.member.boot and not changed
        if known == report and same and who.stored_revision == report.revision:
            return self._ack_report(who)
        if who.storing_revision == report.revision and same:
            return []
        if boot != who.member.boot:
            # A device whose newest state was lost with its disk may count to a revision that it had before:
            # what is stored under that number is not what it reports now.
            who.stored_revision = max(min(who.stored_revision, report.revision - 1), 0)
        who.member = replace(who.member, boot=boot, report=report)
        who.storing_revision = report.revision
        record = ReportRecord(who.member.device, boot, report, who.agent_version, who.device_class)
        return [ev.StoreReport(record)]

    def report_stored(self, device: DeviceId, revision: int, ok: bool) -> list[ev.Action]:
        """The store answered."""
        who = self._fleet.get(device)
        if who is None:
            return []
        if who.storing_revision == revision:
            who.storing_revision = None
        if not ok:
            self._fleet.counts["report_not_stored"] += 1
            return []  # no acknowledgement: the next heartbeat makes the device report again
        who.stored_revision = revision
        return self._ack_report(who)

    def _ack_report(self, who: FleetDevice) -> list[ev.Action]:
        if who.session is None or who.member.revoked:
            return []
        ack = control.ReportedAck(revision=who.stored_revision)
        return [ev.Send(ev.Lane.CONTROL, who.session.route, ack)]

    # -- desired --------------------------------------------------------------------------------------------

    def _compare(self, who: FleetDevice, report: control.Report, now_s: float) -> list[ev.Action]:
        """Desired against reported, by level: send it, or find out that this database is behind."""
        desired = who.member.desired
        wanted = _pair(desired)
        if _pair(report) > wanted or (desired is not None and _is_another(desired, report)):
            who.behind = _pair(report)
            return self._reissue(who, now_s)
        return self._send_desired(who, _pair(report), now_s)

    def _reissue(self, who: FleetDevice, now_s: float) -> list[ev.Action]:
        """Have this database overtake what the device knows. Asked for with every heartbeat until it has: the
        report that showed it may be on record by then, and is not sent again."""
        if who.behind is None or who.reissuing or who.in_doubt or who.reading:
            return []
        if not self._fleet.within(who, Quota.GENERATIONS, now_s):
            return []
        who.reissuing = True
        self._fleet.counts["reissued"] += 1
        return [ev.Reissue(who.member.device, *who.behind)]

    def _send_desired(self, who: FleetDevice, seen: tuple[int, int], now_s: float) -> list[ev.Action]:
        desired, session = who.member.desired, who.session
        if desired is None or session is None or seen >= _pair(desired):
            return []
        if now_s - session.desired_sent_s < self._config.resend_desired_s:
            return []
        session.desired_sent_s = now_s
        return [ev.Send(ev.Lane.CONTROL, session.route, desired)]

    def desired_changed(self, device: DeviceId, desired: control.Desired, now_s: float) -> list[ev.Action]:
        """The store holds a newer desired value."""
        who = self._fleet.get(device)
        if who is None:
            return []
        who.reissuing = False
        return self._newer(who, desired, now_s)

    def _newer(self, who: FleetDevice, desired: control.Desired, now_s: float) -> list[ev.Action]:
        if who.behind is not None and _pair(desired) > who.behind:
            who.behind = None
        if _pair(desired) <= _pair(who.member.desired):
            return []  # two changes passed each other on the way here; generations never fall
        self.epoch = max(self.epoch, desired.epoch)
        who.member = replace(who.member, desired=desired)
        if who.session is None or who.member.revoked:
            return []
        who.session.desired_sent_s = float("-inf")
        return self._send_desired(who, _NOBODY, now_s)

    def reissue_failed(self, device: DeviceId) -> list[ev.Action]:
        """The store did not, as far as is known; the device's next heartbeat has it looked up."""
        who = self._fleet.get(device)
        if who is not None:
            who.reissuing = False
            who.in_doubt = True
        return []

    def desired_in_doubt(self, devices: Sequence[DeviceId]) -> list[ev.Action]:
        """A write about these failed, about any of them if there are none: their next heartbeats have it
        looked up."""
        for who in [self._fleet.get(device) for device in devices] or self._fleet:
            if who is not None:
                who.in_doubt = True
        return []

    def _read_desired(self, who: FleetDevice) -> list[ev.Action]:
        if not who.in_doubt or who.reading:
            return []
        who.in_doubt, who.reading = False, True  # what fails from now on is not in what is read
        return [ev.ReadDesired(who.member.device)]

    def desired_read(self, event: ev.DesiredRead, now_s: float) -> list[ev.Action]:
        """The store answered; where it could not, the next heartbeat asks again."""
        who = self._fleet.get(event.device)
        if who is None:
            return []
        who.reading = False
        who.in_doubt |= not event.ok
        actions = [] if event.desired is None else self._newer(who, event.desired, now_s)
        return actions + self._reissue(who, now_s)

    # -- who leaves -----------------------------------------------------------------------------------------

    def revoked(self, device: DeviceId) -> list[ev.Action]:
        """An operator took the key away."""
        who = self._fleet.get(device)
        if who is None:
            return []
        who.member = replace(who.member, revoked=True)
        session, who.session = who.session, None
        if session is None:
            return []
        refusal = Refused(code=RefusalCode.REVOKED, reason=f"device {device} was revoked")
        return [ev.Send(ev.Lane.CONTROL, session.route, refusal), ev.PresenceChanged(device, False)]

    def unreachable(self, route: bytes) -> list[ev.Action]:
        """A send found no such connection."""
        return self._end_sessions([one for one in self._fleet if one.session and one.session.route == route])

    def tick(self, now_s: float) -> list[ev.Action]:
        """Who has been silent for too long is gone."""
        limit_s = now_s - self._config.dead_after_s
        return self._end_sessions(
            [one for one in self._fleet if one.session and one.session.last_seen_s < limit_s]
        )

    def _end_sessions(self, lost: list[FleetDevice]) -> list[ev.Action]:
        for who in lost:
            who.session = None
        return [ev.PresenceChanged(who.member.device, False) for who in lost]

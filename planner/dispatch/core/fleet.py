"""Who is enrolled, who is there, and what the cores of the lanes share."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.dispatch import events as ev
from planner.dispatch.ports import FleetMember
from shared.ids import DeviceId
from shared.messages.base import RefusalCode, Refused
from shared.text import bounded


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
class Device:
    """One enrolled device: as stored, and what its control connection said since."""

    member: FleetMember
    session: Session | None = None
    agent_version: str = ""
    device_class: str = ""
    stored_revision: int = 0
    storing_revision: int | None = None
    behind: tuple[int, int] | None = None  # what it knows, and this database never gave out
    reissuing: bool = False


@dataclass(frozen=True)
class Presence:
    """What the operator is shown of one device."""

    member: FleetMember
    online: bool
    agent_version: str
    device_class: str


class Fleet:
    """Devices by name and by key; every message is authorised here."""

    def __init__(self, members: Sequence[FleetMember]) -> None:
        self.counts: Counter[str] = Counter()
        self._by_key: dict[str, Device] = {}
        self._by_name: dict[DeviceId, Device] = {}
        self._last_ticket = 0
        for member in members:
            self.add(member)

    def __iter__(self) -> Iterator[Device]:
        return iter(self._by_name.values())

    def get(self, device: DeviceId) -> Device | None:
        """The device of that name."""
        return self._by_name.get(device)

    def add(self, member: FleetMember) -> None:
        """Take in a device; one that joined again under its name is known by its new key only."""
        before = self._by_name.get(member.device)
        if before is not None:
            self._by_key.pop(before.member.public_key, None)
        revision = member.report.revision if member.report else 0
        device = Device(member, device_class=member.device_class, stored_revision=revision)
        self._by_name[member.device] = self._by_key[member.public_key] = device

    def may_connect(self, key: str) -> bool:
        """Whether a connection with this key gets into the devices' domain at all."""
        device = self._by_key.get(key)
        return device is not None and not device.member.revoked

    def authorise(self, lane: ev.Lane, route: bytes, key: str, correlation: int) -> Device | ev.Send:
        """The device behind a key, or the refusal to send instead."""
        device = self._by_key.get(key)
        if device is None:
            reason = "this key is not enrolled; join with a new token"
            return self.refuse(lane, route, correlation, RefusalCode.UNKNOWN_KEY, reason)
        if device.member.revoked:
            reason = f"device {device.member.device} was revoked; join with a new token"
            return self.refuse(lane, route, correlation, RefusalCode.REVOKED, reason)
        if device.member.quarantine:
            return self._refuse_quarantined(device, lane, route, correlation)
        return device

    def quarantine(
        self, who: Device, reason: str, lane: ev.Lane, route: bytes, correlation: int
    ) -> list[ev.Action]:
        """Refuse a device from this message on, until an operator releases it; nothing of it is stored."""
        was_here, who.session = who.session is not None, None
        who.member = replace(who.member, quarantine=reason)
        who.behind = None
        self.counts["quarantines"] += 1
        gone = [ev.PresenceChanged(who.member.device, False)] if was_here else []
        return [
            ev.Quarantine(who.member.device, reason),
            self._refuse_quarantined(who, lane, route, correlation),
            *gone,
        ]

    def quarantine_stored(self, device: DeviceId, ok: bool) -> None:
        """The store answered; where it could not note it, the device's next message quarantines it again."""
        who = self.get(device)
        if who is not None and not ok:
            who.member = replace(who.member, quarantine="")

    def released(self, device: DeviceId) -> None:
        """An operator ended a quarantine: the device is let in at its next message."""
        who = self.get(device)
        if who is not None:
            who.member = replace(who.member, quarantine="")

    def refuse(
        self, lane: ev.Lane, route: bytes, correlation: int, code: RefusalCode, reason: str
    ) -> ev.Send:
        """Say no, and count it."""
        self.counts[code.value] += 1
        return ev.Send(lane, route, Refused(correlation=correlation, code=code, reason=bounded(reason)))

    def _refuse_quarantined(self, who: Device, lane: ev.Lane, route: bytes, correlation: int) -> ev.Send:
        device, why = who.member.device, who.member.quarantine
        reason = f"device {device} is quarantined: {why}; `stageloom device release {device}` lets it in"
        return self.refuse(lane, route, correlation, RefusalCode.QUARANTINED, reason)

    def ticket(self) -> int:
        """A number for a piece of work that is given away."""
        self._last_ticket += 1
        return self._last_ticket

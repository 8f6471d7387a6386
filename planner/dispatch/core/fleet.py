"""Who is enrolled, who is there, and what the cores of the lanes share."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.ports import FleetMember
from stageloom.planner.dispatch.quotas import DEFAULT_QUOTAS, DeviceQuotas, Quota, Rate, TokenBucket
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.text import bounded

_NOT_ENROLLED: Final = Rate(10.0, 100.0)  # messages of all connections whose key is out by now
_BOOTS: Final = 4_096  # as many as an agent's spool keeps books of
_BEFORE_DECODING: Final = {
    ev.Lane.CONTROL: Quota.CONTROL,
    ev.Lane.TELEMETRY: Quota.BATCHES,
    ev.Lane.BULK: Quota.CHUNKS,
}


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """Pace and bounds of the planner's side."""

    heartbeat_interval_s: float = 1.0
    dead_after_s: float = 4.0  # design: a dead device is noticed within 5 s
    resend_desired_s: float = 2.0
    bulk_credits: int = 4
    backlog_rows: int = 100_000  # telemetry taken in and not yet committed, over all devices
    quotas: Mapping[Quota, Rate] = field(default_factory=lambda: DEFAULT_QUOTAS)  # of each device
    device_queue_bytes: int = 1 << 20  # what of one device may wait for the store


@dataclass
class DeviceSession:
    """The one control connection of a device that counts."""

    route: bytes
    boot: int
    connection: int
    last_seen_s: float
    desired_sent_s: float = float("-inf")


@dataclass
class FleetDevice:
    """One enrolled device: as stored, and what its control connection said since."""

    member: FleetMember
    quotas: DeviceQuotas
    session: DeviceSession | None = None
    agent_version: str = ""
    device_class: str = ""
    stored_revision: int = 0
    storing_revision: int | None = None
    behind: tuple[int, int] | None = None  # what it knows, and this database never gave out
    reissuing: bool = False
    in_doubt: bool = False  # the store may desire something newer than `member.desired`
    reading: bool = False
    waiting_bytes: int = 0  # of its messages, handed to the store and not answered
    boots: dict[int, None] = field(default_factory=dict)  # lives it has told of, the newest last

    def know(self, boots: Iterable[int]) -> None:
        """The device told of these of its lives; the newest `_BOOTS` are remembered."""
        self.boots |= dict.fromkeys(boots)
        for boot in list(self.boots)[: max(len(self.boots) - _BOOTS, 0)]:
            del self.boots[boot]


@dataclass(frozen=True)
class Presence:
    """What the operator is shown of one device."""

    member: FleetMember
    online: bool
    agent_version: str
    device_class: str


class EnrolledFleet:
    """Devices by name and by key; every message is authorised here."""

    def __init__(self, members: Sequence[FleetMember], config: DispatchConfig) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        self._not_enrolled = TokenBucket(_NOT_ENROLLED, 0.0)
        self._beyond: set[DeviceId] = set()  # devices beyond a quota, of which an operator is to be told
        self._by_key: dict[str, FleetDevice] = {}
        self._by_name: dict[DeviceId, FleetDevice] = {}
        self._last_ticket = 0
        for member in members:
            self.add(member)

    def __iter__(self) -> Iterator[FleetDevice]:
        return iter(self._by_name.values())

    def get(self, device: DeviceId) -> FleetDevice | None:
        """The device of that name."""
        return self._by_name.get(device)

    def add(self, member: FleetMember) -> None:
        """Take in a device; one that joined again under its name is known by its new key only."""
        before = self._by_name.get(member.device)
        if before is not None:
            self._by_key.pop(before.member.public_key, None)
        revision = member.report.revision if member.report else 0
        quotas = DeviceQuotas(self._config.quotas)
        device = FleetDevice(member, quotas, device_class=member.device_class, stored_revision=revision)
        self._by_name[member.device] = self._by_key[member.public_key] = device

    def join(self, device: DeviceId, public_key: str) -> None:
        """Take in a key that was enrolled just now, or again because the first answer was lost."""
        known = self._by_name.get(device)
        if known is None or known.member.public_key != public_key:
            # A revoked device joined again with a new key. The name keeps what it was to run: the store does.
            desired = known.member.desired if known is not None else None
            self.add(FleetMember(device, public_key, desired=desired))

    def may_connect(self, key: str) -> bool:
        """Whether a connection with this key gets into the devices' domain at all."""
        device = self._by_key.get(key)
        return device is not None and not device.member.revoked

    def authorise(self, lane: ev.Lane, route: bytes, key: str, correlation: int) -> FleetDevice | ev.Send:
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
        self, who: FleetDevice, reason: str, lane: ev.Lane, route: bytes, correlation: int
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

    # -- quotas ---------------------------------------------------------------------------------------------

    def may_read(self, lane: ev.Lane, key: str, now_s: float) -> bool:
        """Whether a message of this key is worth decoding; one that is not is dropped unanswered."""
        quota = _BEFORE_DECODING.get(lane)
        if quota is None:
            return True
        device = self._by_key.get(key)
        if device is None:
            return self._not_enrolled.take(now_s)
        return self.within(device, quota, now_s)

    def connects(self, key: str, now_s: float) -> bool:
        """Whether an enrolled key may make another connection now."""
        device = self._by_key.get(key)
        return device is None or self.within(device, Quota.CONNECTIONS, now_s)

    def within(self, device: FleetDevice, quota: Quota, now_s: float, amount: float = 1.0) -> bool:
        """Whether a device may do this much more now; if not, it is counted and an operator will be told."""
        if device.quotas.take(quota, now_s, amount):
            return True
        self.counts["beyond_quota"] += 1
        self._beyond.add(device.member.device)
        return False

    def may_wait(self, device: FleetDevice, size_bytes: int) -> bool:
        """Whether a message may wait for the store too; alone it may, whatever its size."""
        waiting_bytes = device.waiting_bytes
        if not waiting_bytes or waiting_bytes + size_bytes <= self._config.device_queue_bytes:
            return True
        self.counts["beyond_queue"] += 1
        return False

    def excess(self, now_s: float) -> list[ev.Action]:
        """What operators are told of devices beyond their quotas: at most once a minute of each."""
        told: list[ev.Action] = []
        for name in sorted(self._beyond):
            text = self._by_name[name].quotas.excess(now_s)
            if text:
                told.append(ev.NoteExcess(name, text))
                self._beyond.discard(name)
        return told

    def refuse(
        self, lane: ev.Lane, route: bytes, correlation: int, code: RefusalCode, reason: str
    ) -> ev.Send:
        """Say no, and count it."""
        self.counts[code.value] += 1
        return ev.Send(lane, route, Refused(correlation=correlation, code=code, reason=bounded(reason)))

    def _refuse_quarantined(self, who: FleetDevice, lane: ev.Lane, route: bytes, correlation: int) -> ev.Send:
        device, why = who.member.device, who.member.quarantine
        reason = f"device {device} is quarantined: {why}; `stageloom device release {device}` lets it in"
        return self.refuse(lane, route, correlation, RefusalCode.QUARANTINED, reason)

    def ticket(self) -> int:
        """A number for a piece of work that is given away."""
        self._last_ticket += 1
        return self._last_ticket

"""Who is enrolled, who is there, and what the cores of the lanes share."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.dispatch import events as ev
from planner.dispatch.ports import FleetMember
from shared.ids import DeviceId
from shared.messages.base import RefusalCode, Refused


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """Pace and bounds of the planner's side."""

    heartbeat_interval_s: float = 1.0
    dead_after_s: float = 4.0  # design: a dead device is noticed within 5 s
    resend_desired_s: float = 2.0
    bulk_credits: int = 4
    backlog_rows: int = 100_000  # telemetry taken in and not yet committed, over all devices


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

    def authorise(self, lane: ev.Lane, route: bytes, key: str, correlation: int) -> Device | ev.Send:
        """The device behind a key, or the refusal to send instead."""
        device = self._by_key.get(key)
        if device is None:
            reason = "this key is not enrolled; join with a new token"
            return self.refuse(lane, route, correlation, RefusalCode.UNKNOWN_KEY, reason)
        if device.member.revoked:
            reason = f"device {device.member.device} was revoked; join with a new token"
            return self.refuse(lane, route, correlation, RefusalCode.REVOKED, reason)
        return device

    def refuse(
        self, lane: ev.Lane, route: bytes, correlation: int, code: RefusalCode, reason: str
    ) -> ev.Send:
        """Say no, and count it."""
        self.counts[code.value] += 1
        return ev.Send(lane, route, Refused(correlation=correlation, code=code, reason=reason[:512]))

    def ticket(self) -> int:
        """A number for a piece of work that is given away."""
        self._last_ticket += 1
        return self._last_ticket

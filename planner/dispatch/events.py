"""What happens to the dispatch core, and what it answers with, as frozen values.

`route` is a ROUTER's routing id of one connection, `key` the Z85 key that the connection proved to hold.
Structs, not dataclasses: several are made per message, and a frozen dataclass takes five times as long.
"""

from enum import Enum

from msgspec import Struct

from stageloom.planner.dispatch.ports import ReportRecord
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.base import Message
from stageloom.shared.messages.bulk import ChunkRequest
from stageloom.shared.messages.control import Alarm, ControlToPlanner, Desired, LocalPlan
from stageloom.shared.messages.telemetry import TelemetryBatch


class Lane(str, Enum):
    """The three device sockets."""

    CONTROL = "control"
    TELEMETRY = "telemetry"
    BULK = "bulk"


class ControlReceived(Struct, frozen=True):
    route: bytes
    key: str
    message: ControlToPlanner


class TelemetryReceived(Struct, frozen=True):
    route: bytes
    key: str
    message: TelemetryBatch


class BulkReceived(Struct, frozen=True):
    route: bytes
    key: str
    message: ChunkRequest


class Malformed(Struct, frozen=True):
    """A frame that did not decode."""

    lane: Lane
    route: bytes
    reason: str


class TelemetryCommitted(Struct, frozen=True):
    ticket: int
    ok: bool = True


class ChunkRead(Struct, frozen=True):
    """`data` None: there is no such artifact, or it cannot be read, for `reason`."""

    ticket: int
    size_bytes: int
    data: bytes | None
    reason: str = ""


class Joined(Struct, frozen=True):
    """The store has enrolled a key under this name."""

    device: DeviceId
    public_key: str


class ReportStored(Struct, frozen=True):
    device: DeviceId
    revision: int
    ok: bool = True


class DesiredChanged(Struct, frozen=True):
    """The store holds a newer desired value: an operator pushed, `Reissue` was carried out, or a device that
    has answered is asked for more."""

    device: DeviceId
    desired: Desired


class ReissueFailed(Struct, frozen=True):
    device: DeviceId


class DesiredInDoubt(Struct, frozen=True):
    """A write that desires something of these devices failed; it may be in the store all the same.

    Without devices: of any.
    """

    devices: tuple[DeviceId, ...]


class DesiredRead(Struct, frozen=True):
    """What the store desires of a device; not `ok`: it could not be read."""

    device: DeviceId
    desired: Desired | None
    ok: bool = True


class AlarmStored(Struct, frozen=True):
    """`replan` is the number of the re-plan that this alarm began; None where it began none."""

    device: DeviceId
    alarm: Alarm
    replan: int | None = None
    ok: bool = True


class LocalSettled(Struct, frozen=True):
    """The store has decided about a local plan: `desired` where it adopted it, `refused` why it may not be.

    Neither: a newer value stands, or the store `failed`.
    """

    device: DeviceId
    plan: LocalPlan
    desired: Desired | None = None
    refused: str = ""
    failed: bool = False


class Revoked(Struct, frozen=True):
    device: DeviceId


class QuarantineStored(Struct, frozen=True):
    """The store knows of a quarantine; not `ok`: it does not."""

    device: DeviceId
    ok: bool = True


class Released(Struct, frozen=True):
    """An operator ended a quarantine."""

    device: DeviceId


class Unreachable(Struct, frozen=True):
    """A send found no such connection."""

    lane: Lane
    route: bytes


class Tick(Struct, frozen=True):
    """Time passed."""


Event = (
    ControlReceived
    | TelemetryReceived
    | BulkReceived
    | Malformed
    | TelemetryCommitted
    | ChunkRead
    | Joined
    | ReportStored
    | DesiredChanged
    | ReissueFailed
    | DesiredInDoubt
    | DesiredRead
    | AlarmStored
    | LocalSettled
    | Revoked
    | QuarantineStored
    | Released
    | Unreachable
    | Tick
)


class Send(Struct, frozen=True):
    lane: Lane
    route: bytes
    message: Message


class AppendTelemetry(Struct, frozen=True):
    """Commit a batch; answer with `TelemetryCommitted`."""

    ticket: int
    device: DeviceId
    batch: TelemetryBatch


class StoreReport(Struct, frozen=True):
    """Commit a report; answer with `ReportStored`."""

    record: ReportRecord


class ReadChunk(Struct, frozen=True):
    """Read part of an artifact; answer with `ChunkRead`."""

    ticket: int
    device: DeviceId
    digest: Digest
    offset_bytes: int
    length_bytes: int


class Reissue(Struct, frozen=True):
    """Have the store desire the same above a generation it does not know; answer with `DesiredChanged`."""

    device: DeviceId
    above_epoch: int
    above_generation: int


class ReadDesired(Struct, frozen=True):
    """Read what a device should do; answer with `DesiredRead`."""

    device: DeviceId


class StoreAlarm(Struct, frozen=True):
    """Commit an alarm; answer with `AlarmStored`."""

    device: DeviceId
    alarm: Alarm


class AdoptLocal(Struct, frozen=True):
    """Adopt a local plan if it is still the answer to the newest desired value; `LocalSettled` answers."""

    device: DeviceId
    plan: LocalPlan


class Quarantine(Struct, frozen=True):
    """Note that a device is refused from now on; answer with `QuarantineStored`."""

    device: DeviceId
    reason: str


class ReplanDue(Struct, frozen=True):
    """An alarm began a re-plan."""

    device: DeviceId
    replan: int


class NoteExcess(Struct, frozen=True):
    """A device did more than its quotas allow; `text` says what was dropped and how often. No answer."""

    device: DeviceId
    text: str


class PresenceChanged(Struct, frozen=True):
    """A device came or went."""

    device: DeviceId
    online: bool


Action = (
    Send
    | AppendTelemetry
    | StoreReport
    | ReadChunk
    | Reissue
    | ReadDesired
    | StoreAlarm
    | AdoptLocal
    | Quarantine
    | ReplanDue
    | NoteExcess
    | PresenceChanged
)

"""What happens to the dispatch core, and what it answers with, as frozen values.

`route` is a ROUTER's routing id of one connection, `key` the Z85 key that the connection proved to hold.
"""

from dataclasses import dataclass
from enum import Enum

from planner.dispatch.ports import EnrolAttempt, ReportRecord
from shared.ids import DeviceId, Digest
from shared.messages.base import Message, RefusalCode
from shared.messages.bulk import ChunkRequest
from shared.messages.control import Alarm, ControlToPlanner, Desired, LocalPlan
from shared.messages.enrol import EnrolRequest
from shared.messages.telemetry import TelemetryBatch


class Lane(str, Enum):
    """The four device sockets."""

    CONTROL = "control"
    TELEMETRY = "telemetry"
    BULK = "bulk"
    ENROL = "enrol"


@dataclass(frozen=True)
class ControlReceived:
    route: bytes
    key: str
    message: ControlToPlanner


@dataclass(frozen=True)
class TelemetryReceived:
    route: bytes
    key: str
    message: TelemetryBatch


@dataclass(frozen=True)
class BulkReceived:
    route: bytes
    key: str
    message: ChunkRequest


@dataclass(frozen=True)
class EnrolReceived:
    """`address` is the peer's network address, the unit of the rate limit."""

    route: bytes
    key: str
    address: str
    message: EnrolRequest


@dataclass(frozen=True)
class Malformed:
    """A frame that did not decode."""

    lane: Lane
    route: bytes
    reason: str


@dataclass(frozen=True)
class TelemetryCommitted:
    ticket: int
    ok: bool = True


@dataclass(frozen=True)
class ChunkRead:
    """`data` None: there is no such artifact, or it cannot be read, for `reason`."""

    ticket: int
    size_bytes: int
    data: bytes | None
    reason: str = ""


@dataclass(frozen=True)
class Enrolled:
    ticket: int
    device: DeviceId


@dataclass(frozen=True)
class EnrolDenied:
    ticket: int
    code: RefusalCode
    reason: str


@dataclass(frozen=True)
class ReportStored:
    device: DeviceId
    revision: int
    ok: bool = True


@dataclass(frozen=True)
class DesiredChanged:
    """The store holds a newer desired value: an operator pushed, or `Reissue` was carried out."""

    device: DeviceId
    desired: Desired


@dataclass(frozen=True)
class ReissueFailed:
    device: DeviceId


@dataclass(frozen=True)
class AlarmStored:
    """`replan` is the number of the re-plan that this alarm began; None where it began none."""

    device: DeviceId
    alarm: Alarm
    replan: int | None = None
    ok: bool = True


@dataclass(frozen=True)
class LocalSettled:
    """The store has decided about a local plan; where it adopted it, `desired` says so."""

    device: DeviceId
    plan: LocalPlan
    desired: Desired | None = None


@dataclass(frozen=True)
class Revoked:
    device: DeviceId


@dataclass(frozen=True)
class Unreachable:
    """A send found no such connection."""

    lane: Lane
    route: bytes


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = (
    ControlReceived
    | TelemetryReceived
    | BulkReceived
    | EnrolReceived
    | Malformed
    | TelemetryCommitted
    | ChunkRead
    | Enrolled
    | EnrolDenied
    | ReportStored
    | DesiredChanged
    | ReissueFailed
    | AlarmStored
    | LocalSettled
    | Revoked
    | Unreachable
    | Tick
)


@dataclass(frozen=True)
class Send:
    lane: Lane
    route: bytes
    message: Message


@dataclass(frozen=True)
class AppendTelemetry:
    """Commit a batch; answer with `TelemetryCommitted`."""

    ticket: int
    device: DeviceId
    batch: TelemetryBatch


@dataclass(frozen=True)
class StoreReport:
    """Commit a report; answer with `ReportStored`."""

    record: ReportRecord


@dataclass(frozen=True)
class ReadChunk:
    """Read part of an artifact; answer with `ChunkRead`."""

    ticket: int
    digest: Digest
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class Enrol:
    """Ask the store; answer with `Enrolled` or `EnrolDenied`."""

    ticket: int
    attempt: EnrolAttempt


@dataclass(frozen=True)
class Reissue:
    """Have the store desire the same above a generation it does not know; answer with `DesiredChanged`."""

    device: DeviceId
    above_epoch: int
    above_generation: int


@dataclass(frozen=True)
class StoreAlarm:
    """Commit an alarm; answer with `AlarmStored`."""

    device: DeviceId
    alarm: Alarm


@dataclass(frozen=True)
class AdoptLocal:
    """Adopt a local plan if it is still the answer to the newest desired value; `LocalSettled` answers."""

    device: DeviceId
    plan: LocalPlan


@dataclass(frozen=True)
class ReplanDue:
    """An alarm began a re-plan."""

    device: DeviceId
    replan: int


@dataclass(frozen=True)
class PresenceChanged:
    """A device came or went."""

    device: DeviceId
    online: bool


Action = (
    Send
    | AppendTelemetry
    | StoreReport
    | ReadChunk
    | Enrol
    | Reissue
    | StoreAlarm
    | AdoptLocal
    | ReplanDue
    | PresenceChanged
)

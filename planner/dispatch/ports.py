"""What dispatch needs from the store. Calls block and come from dispatch's own store threads, never from the
thread that owns the sockets. A method that returns has committed; one that raises `StorageError` has not, and
its caller tries again or lets the device try again. What only the sender of a record can be blamed for is
kept as unreadable, which counts as stored: sent again it would fail again.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.base import RefusalCode
from stageloom.shared.messages.control import Alarm, Desired, LocalPlan, Report
from stageloom.shared.messages.telemetry import Ledger, RowData, RowKind


class EnrolRefused(StageloomError):
    """The store does not enrol this key with this secret; `code` says why (`TOKEN_*` or `NAME_TAKEN`)."""

    def __init__(self, code: RefusalCode, cause: str) -> None:
        self.code = code
        super().__init__(cause, remedy="make a new token with `stageloom device token`")


class LocalPlanRefused(StageloomError):
    """A device may not make this plan, or it is none; nothing of it was kept."""


@dataclass(frozen=True)
class FleetMember:
    """One enrolled device as stored; `public_key` is its CURVE key in Z85.

    `quarantine`: why it is refused until an operator releases it; empty where it is not.
    """

    device: DeviceId
    public_key: str
    revoked: bool = False
    desired: Desired | None = None
    boot: int = 0
    report: Report | None = None
    device_class: str = ""
    quarantine: str = ""


@dataclass(frozen=True)
class EnrolAttempt:
    """A key that wants in. Only the secret's digest ever reaches the store."""

    secret_digest: Digest
    public_key: str
    device: DeviceId
    agent_version: str
    device_class: str


@dataclass(frozen=True)
class ReportRecord:
    """The newest report of one device. `revision` inside it rises; equal or lower ones change nothing,
    unless `boot` is new."""

    device: DeviceId
    boot: int
    report: Report
    agent_version: str = ""
    device_class: str = ""


@dataclass(frozen=True)
class StoredRow:
    """One telemetry row; (device, boot, sequence) is its key. An UNREADABLE one has a `reason`, no data."""

    boot: int
    sequence: int
    at_us: int
    kind: RowKind
    body: bytes
    data: RowData | None
    reason: str = ""


@dataclass(frozen=True)
class TelemetryWrite:
    """Rows and ledgers of one device. Rows already stored are skipped; of a ledger the larger counts win."""

    device: DeviceId
    rows: tuple[StoredRow, ...]
    ledgers: tuple[Ledger, ...]


@dataclass(frozen=True)
class ArtifactFile:
    """Where an artifact's bytes lie."""

    path: Path
    size_bytes: int


class DispatchStore(Protocol):
    """The store, as dispatch sees it."""

    def epoch(self) -> int:
        """The planner's current epoch, 1 in a new database."""
        ...

    def fleet(self) -> Sequence[FleetMember]:
        """Every enrolled device, revoked ones included."""
        ...

    def reissue(self, device: DeviceId, *, above_epoch: int, above_generation: int) -> Desired:
        """Desire the same as before (or nothing) as a generation above the given one.

        A device knows a generation that this database does not: it was restored from a backup. If the
        current epoch is not above `above_epoch`, a new one begins above it; the generation is above
        `above_generation` as well. Recorded with `decided_by` "restored".
        """
        ...

    def record_reports(self, records: Sequence[ReportRecord]) -> None:
        """Store the newest reports, and the state of their generations, in one transaction."""
        ...

    def append_telemetry(self, writes: Sequence[TelemetryWrite]) -> None:
        """Store rows and ledgers in one transaction, durable when this returns."""
        ...

    def record_alarm(self, device: DeviceId, alarm: Alarm) -> int | None:
        """Keep an alarm; returns the number of the re-plan that it begins, or None.

        It begins none where it is stored already, where re-planning is off for the device, and during
        another re-plan of the device, which it is noted against.
        """
        ...

    def adopt_local(self, device: DeviceId, local: LocalPlan) -> Desired | None:
        """Desire a plan that the device made, if what it was made under is still the newest desired value.

        Returns what is desired then, or None where a newer value stands. Recorded with `decided_by` "local".

        Raises:
            LocalPlanRefused: the device's autonomy is off, or the plan is illegal, or names an artifact that
                is not here or was never assigned to this device. It is kept as an event.
        """
        ...

    def quarantine(self, device: DeviceId, reason: str) -> "Future[None]":
        """Refuse a device over restarts, too, until an operator releases it.

        Returns at once, so that a release that comes later is stored later; the future ends with the commit.
        """
        ...

    def note_excess(self, device: DeviceId, text: str) -> None:
        """Keep for operators that a device did more than its quotas allow."""
        ...

    def artifact(self, digest: Digest) -> ArtifactFile | None:
        """The artifact's file, or None if the store has none of this digest."""
        ...

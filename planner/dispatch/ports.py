"""What dispatch needs from the store. Calls block and come from dispatch's own store threads, never from the
thread that owns the sockets. A method that returns has committed; one that raises `StorageError` has not, or
the answer to its commit was lost: its caller tries again or lets the device try again, and reads what may
have changed all the same. What only the sender of a record can be blamed for is
kept as unreadable, which counts as stored: sent again it would fail again.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from stageloom.shared.errors import DecodeError, StageloomError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.base import RefusalCode
from stageloom.shared.messages.control import Alarm, Desired, LocalPlan, Report
from stageloom.shared.messages.telemetry import (
    KIND_OF,
    ExecutorTime,
    Ledger,
    MachineFacts,
    PartProfileResult,
    PlanActivated,
    ProfileResult,
    RowData,
    RowKind,
    StageProfileResult,
    StateChange,
    TelemetryBatch,
    TrialEnded,
    decode_row,
)


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


_SINGLE_TAGS: Final = frozenset(
    kind.__struct_config__.tag
    for kind in (
        *(ExecutorTime, MachineFacts, PartProfileResult, PlanActivated, ProfileResult),
        *(StageProfileResult, StateChange, TrialEnded),
    )
)

_INTEGER_BYTES: Final = dict.fromkeys(range(0x80), 1) | {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}


def single_rows(rows: Iterable[bytes]) -> int:
    """How many rows the store works on one by one, told by their first bytes; other rows share a statement.

    A row is written as agents write it or it counts: decoding takes other encodings of the same values too.
    """
    return sum(map(_is_single, rows))


def _is_single(body: bytes) -> bool:
    """See `single_rows`. A row is [at_us, [tag, ...]]: an array of two, an integer, an array, its tag."""
    if body[0] != 0x92 or len(body) < 4:
        return body[0] & 0xF0 == 0x90 or body[0] in (0xDC, 0xDD)  # an array in another encoding, or no row
    array = 1 + _INTEGER_BYTES.get(body[1], len(body))
    if array + 1 >= len(body) or body[array] & 0xF0 != 0x90 or body[array + 1] >= 0x80:
        return True
    return body[array + 1] in _SINGLE_TAGS


def telemetry_write(device: DeviceId, batch: TelemetryBatch) -> TelemetryWrite:
    """The batch's rows with their numbers; one that cannot be read is kept as its bytes, kind UNREADABLE.

    Raises:
        ValueError: the ranges do not number the rows (the core refuses such a batch before).
    """
    numbers = [(one.boot, at) for one in batch.ranges for at in range(one.first, one.last + 1)]
    rows = tuple(
        _stored(boot, sequence, body) for (boot, sequence), body in zip(numbers, batch.rows, strict=True)
    )
    return TelemetryWrite(device, rows, batch.ledgers)


def _stored(boot: int, sequence: int, body: bytes) -> StoredRow:
    try:
        row = decode_row(body)
    except DecodeError as error:
        return StoredRow(boot, sequence, 0, RowKind.UNREADABLE, body, None, error.cause)
    return StoredRow(boot, sequence, row.at_us, KIND_OF[type(row.data)], body, row.data)


class DispatchStore(Protocol):
    """The store, as dispatch sees it."""

    def epoch(self) -> int:
        """The planner's current epoch, 1 in a new database."""
        ...

    def fleet(self) -> Sequence[FleetMember]:
        """Every enrolled device, revoked ones included."""
        ...

    def desired(self, device: DeviceId) -> Desired | None:
        """What a device should do, after every write about it that is under way; None for nothing."""
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

    def append_telemetry(self, writes: Sequence[TelemetryWrite]) -> Sequence[tuple[DeviceId, Desired]]:
        """Store rows and ledgers in one transaction, durable when this returns.

        Returns what is desired of devices that are asked for more measurements as they have answered.
        Recorded with `decided_by` "profile".
        """
        ...

    def record_alarm(self, device: DeviceId, alarm: Alarm) -> int | None:
        """Keep an alarm; returns the number of the re-plan that it begins, or None.

        It begins none where it is stored already, where re-planning is off for the device, and during
        another re-plan of the device, which it is noted against. A repeat returns the number again while
        that re-plan has pushed nothing: the answer to the commit may have been lost.
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

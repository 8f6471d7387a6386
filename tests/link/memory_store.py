"""`DispatchStore` in memory: the reference that the database's implementation is compared with, and what the
simulator crashes and restores."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import msgspec

from stageloom.planner.dispatch.ports import (
    ArtifactFile,
    EnrolAttempt,
    EnrolRefused,
    FleetMember,
    ReportRecord,
    StoredRow,
    TelemetryWrite,
)
from stageloom.planner.telemetry import TelemetryAccount
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.base import RefusalCode
from stageloom.shared.messages.control import Alarm, Desired, LocalPlan
from tests.scratch import scratch


@dataclass
class MemoryStore:
    """Everything durable of a planner."""

    current_epoch: int = 1
    members: dict[DeviceId, FleetMember] = field(default_factory=dict)
    tokens: dict[Digest, str] = field(default_factory=dict)  # secret digest: key that used it, or ""
    rows: dict[tuple[DeviceId, int, int], StoredRow] = field(default_factory=dict)
    books: dict[tuple[DeviceId, int], TelemetryAccount] = field(default_factory=dict)
    artifacts: dict[Digest, bytes] = field(default_factory=dict)
    alarms: dict[tuple[DeviceId, int, int], Alarm] = field(default_factory=dict)
    excess: list[tuple[DeviceId, str]] = field(default_factory=list)
    folder: Path | None = None

    def snapshot(self) -> Self:
        """A backup."""
        return type(self)(
            self.current_epoch,
            dict(self.members),
            dict(self.tokens),
            dict(self.rows),
            dict(self.books),
            dict(self.artifacts),
            dict(self.alarms),
            list(self.excess),
            self.folder,
        )

    def epoch(self) -> int:
        return self.current_epoch

    def fleet(self) -> Sequence[FleetMember]:
        return list(self.members.values())

    def enrol(self, attempt: EnrolAttempt) -> DeviceId:
        used_by = self.tokens.get(attempt.secret_digest)
        if used_by is None:
            raise EnrolRefused(RefusalCode.TOKEN_WRONG, "no such token")
        if used_by not in ("", attempt.public_key):
            raise EnrolRefused(RefusalCode.TOKEN_USED, "the token was used")
        known = self.members.get(attempt.device)
        if known is not None and known.public_key != attempt.public_key and not known.revoked:
            raise EnrolRefused(RefusalCode.NAME_TAKEN, f"there is a device {attempt.device}")
        self.tokens[attempt.secret_digest] = attempt.public_key
        if known is None or known.revoked:
            self.members[attempt.device] = FleetMember(attempt.device, attempt.public_key)
        return attempt.device

    def revoke(self, device: DeviceId) -> None:
        self.members[device] = replace(self.members[device], revoked=True)

    def quarantine(self, device: DeviceId, reason: str) -> "Future[None]":
        self.members[device] = replace(self.members[device], quarantine=reason)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def push(self, device: DeviceId, desired: Desired) -> Desired:
        """Desire this as the device's next generation."""
        known = self.members[device].desired
        generation = known.generation + 1 if known else 1
        wanted = msgspec.structs.replace(desired, epoch=self.current_epoch, generation=generation)
        self.members[device] = replace(self.members[device], desired=wanted)
        return wanted

    def desired(self, device: DeviceId) -> Desired | None:
        return self.members[device].desired

    def reissue(self, device: DeviceId, *, above_epoch: int, above_generation: int) -> Desired:
        self.current_epoch = max(self.current_epoch, above_epoch + 1)
        known = self.members[device].desired or Desired(epoch=0, generation=0)
        generation = max(known.generation, above_generation) + 1
        wanted = msgspec.structs.replace(known, epoch=self.current_epoch, generation=generation)
        self.members[device] = replace(self.members[device], desired=wanted)
        return wanted

    def record_reports(self, records: Sequence[ReportRecord]) -> None:
        for one in records:
            known = self.members[one.device]
            known = replace(known, device_class=one.device_class or known.device_class)
            self.members[one.device] = known
            if known.report and known.boot == one.boot and known.report.revision >= one.report.revision:
                continue
            self.members[one.device] = replace(self.members[one.device], boot=one.boot, report=one.report)

    def append_telemetry(self, writes: Sequence[TelemetryWrite]) -> Sequence[tuple[DeviceId, Desired]]:
        for write in writes:
            for boot in {row.boot for row in write.rows} | {one.boot for one in write.ledgers}:
                rows = {row.sequence: row for row in write.rows if row.boot == boot}
                said = [one for one in write.ledgers if one.boot == boot]
                book, new = self.books.get((write.device, boot), TelemetryAccount()).take(rows, said)
                self.books[write.device, boot] = book
                for sequence in new:
                    self.rows[write.device, boot, sequence] = rows[sequence]
        return ()

    def record_alarm(self, device: DeviceId, alarm: Alarm) -> int | None:
        key = (device, alarm.boot, alarm.number)
        if key in self.alarms:
            return None
        self.alarms[key] = alarm
        return len(self.alarms)

    def adopt_local(self, device: DeviceId, local: LocalPlan) -> Desired | None:
        known = self.members[device].desired
        if ((known.epoch, known.generation) if known else (0, 0)) != (local.epoch, local.generation):
            return None
        plan = Desired(
            epoch=0, generation=0, plan_digest=local.plan_digest, plan=local.plan, artifacts=local.artifacts
        )
        return self.push(device, plan)

    def note_excess(self, device: DeviceId, text: str) -> None:
        self.excess.append((device, text))

    def artifact(self, digest: Digest) -> ArtifactFile | None:
        if digest not in self.artifacts:
            return None
        if self.folder is None:
            self.folder = scratch()
        path = self.folder / digest
        path.write_bytes(self.artifacts[digest])
        return ArtifactFile(path, len(self.artifacts[digest]))

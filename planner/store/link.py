"""The store as dispatch needs it: what devices send is kept whatever one of them sends.

Where one record of a batch cannot be stored, the others are, and that one is counted as unreadable.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from stageloom.planner.dispatch.ports import (
    ArtifactFile,
    FleetMember,
    LocalPlanRefused,
    ReportRecord,
    StoredRow,
    TelemetryWrite,
)
from stageloom.planner.store.database import is_of_the_record, why
from stageloom.planner.store.desired import Push, adopt_plan, desired_of, push, settled_desired
from stageloom.planner.store.devices import (
    planner_epoch,
    quarantine_device,
    raise_epoch,
    report_of,
    store_reports,
)
from stageloom.planner.store.events import LOCAL_PLAN_REFUSED, count_unreadable, note_refusal
from stageloom.planner.store.generations import require_permitted
from stageloom.planner.store.policies import policy_body
from stageloom.planner.store.replans import record_alarm
from stageloom.planner.store.rows import add_event
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import DeviceRow, QuarantineRow, ReportedRow
from stageloom.planner.store.telemetry import append_telemetry
from stageloom.planner.store.writer import isolated
from stageloom.shared.bound import bind
from stageloom.shared.errors import InputError, PlanError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Alarm, Desired, LocalPlan
from stageloom.shared.messages.telemetry import RowKind
from stageloom.shared.plan import decode_plan


class LinkStore:
    """Implements `stageloom.planner.dispatch.ports.DispatchStore`, which documents the methods."""

    def __init__(
        self, store: Store, on_rows: Callable[[Sequence[tuple[DeviceId, StoredRow]]], None] | None = None
    ) -> None:
        """`on_rows` is told of telemetry rows once they are stored, each once; on any thread."""
        self._store = store
        self._on_rows = on_rows or (lambda rows: None)

    def epoch(self) -> int:
        return self._store.read(planner_epoch)

    def fleet(self) -> list[FleetMember]:
        return self._store.read(fleet_members)

    def desired(self, device: DeviceId) -> Desired | None:
        return self._store.write(settled_desired, device)

    def reissue(self, device: DeviceId, *, above_epoch: int, above_generation: int) -> Desired:
        """Raises:
        InputError: there is no such device, or it is revoked.
        """
        return self._store.write(_reissue, device, above_epoch, above_generation)

    def record_reports(self, records: Sequence[ReportRecord]) -> None:
        isolated(
            lambda some: self._store.write(store_reports, some),
            records,
            lambda record, error: self._unreadable(record.device, "report", error),
        )

    def append_telemetry(self, writes: Sequence[TelemetryWrite]) -> list[tuple[DeviceId, Desired]]:
        told: list[tuple[DeviceId, Desired]] = []
        isolated(partial(self._append, told), writes, lambda write, _: self._append_by_row(told, write))
        return told

    def _append(self, told: list[tuple[DeviceId, Desired]], writes: Sequence[TelemetryWrite]) -> None:
        rows, desired = self._store.writer.run(partial(append_telemetry, writes=writes), bulk=True)
        told += desired
        self._on_rows(rows)

    def _append_by_row(self, told: list[tuple[DeviceId, Desired]], write: TelemetryWrite) -> None:
        """Store what can be stored of a write that cannot be as a whole; its rows in order."""
        append = partial(self._append, told)
        rows = [TelemetryWrite(write.device, (row,), ()) for row in write.rows]
        isolated(append, rows, self._append_unread)
        ledgers = TelemetryWrite(write.device, (), write.ledgers)
        blame = partial(self._unreadable, write.device, "telemetry ledger")
        isolated(append, [ledgers], lambda _, error: blame(error))

    def _append_unread(self, write: TelemetryWrite, error: Exception) -> None:
        """Store a row that cannot be stored for what it says as its bytes."""
        (row,) = write.rows
        unread = replace(row, kind=RowKind.UNREADABLE, data=None, reason=why(error))
        blame = partial(self._unreadable, write.device, "telemetry row")
        write = replace(write, rows=(unread,))
        isolated(partial(self._append, []), [write], lambda _, again: blame(again))

    def _unreadable(self, device: DeviceId, kind: str, error: Exception) -> None:
        """Count a record of which nothing is stored."""
        self._store.write(count_unreadable, [(device, kind, why(error))])

    def record_alarm(self, device: DeviceId, alarm: Alarm) -> int | None:
        try:
            return self._store.write(record_alarm, device, alarm)
        except Exception as error:
            if not is_of_the_record(error):
                raise
            self._unreadable(device, "alarm", error)
            return None

    def quarantine(self, device: DeviceId, reason: str) -> "Future[None]":
        """Raises (from the future):
        InputError: there is no such device.
        """
        return self._store.submit(quarantine_device, device, reason)

    def adopt_local(self, device: DeviceId, local: LocalPlan) -> Desired | None:
        store = self._store
        try:
            plan = decode_plan(local.plan, local.plan_digest)
            store.read(require_permitted, device, local, plan)
            # Beside the writer's thread: it takes a while, and whatever changes what is permitted takes a
            # generation, which `adopt_plan` compares again.
            bind(plan, {model.artifact: store.graph(model.artifact) for model in plan.models})
            return store.write(adopt_plan, device, local, plan)
        except (PlanError, InputError) as error:
            reason = str(error)[:512]
            store.write(note_refusal, device, LOCAL_PLAN_REFUSED, reason)
            raise LocalPlanRefused(reason) from error

    def note_excess(self, device: DeviceId, text: str) -> None:
        self._store.write(add_event, device, "quota", text)

    def artifact(self, digest: Digest) -> ArtifactFile | None:
        path = self._store.blobs.path(digest)
        try:
            return ArtifactFile(path, path.stat().st_size)
        except OSError:
            pass
        body = self._store.read(policy_body, digest)  # a policy's file is made when a device first asks
        return None if body is None else ArtifactFile(path, self._store.blobs.put_bytes(body, digest))


def fleet_members(session: Session) -> list[FleetMember]:
    """Every enrolled device, revoked ones included."""
    rows = session.execute(
        select(DeviceRow, ReportedRow, QuarantineRow.reason)
        .outerjoin(ReportedRow, ReportedRow.device == DeviceRow.name)
        .outerjoin(QuarantineRow, QuarantineRow.device == DeviceRow.name)
        .order_by(DeviceRow.enrolled_at_us, DeviceRow.name)
    ).all()
    wanted = desired_of(session, [DeviceId(row.name) for row, _, _ in rows])
    return [
        FleetMember(
            device=DeviceId(row.name),
            public_key=row.public_key,
            revoked=row.revoked,
            desired=wanted.get(DeviceId(row.name)),
            boot=reported.boot if reported else 0,
            report=report_of(reported) if reported else None,
            device_class=row.device_class,
            quarantine=quarantine or "",
        )
        for row, reported, quarantine in rows
    ]


def _reissue(session: Session, device: DeviceId, above_epoch: int, above_generation: int) -> Desired:
    raise_epoch(session, above_epoch)
    return push(
        session, Push(device=device, plan=None, decided_by="restored", above_generation=above_generation)
    )

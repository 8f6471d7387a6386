"""The store of one planner: what dispatch, the operator's commands and the search read and write.

Every write goes through the one writer thread and returns when it is committed. Reads open a snapshot of
their own and never wait. Methods may be called from any thread.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from planner.costs.schedules import FoundSchedule
from planner.dispatch.ports import (
    ArtifactFile,
    EnrolAttempt,
    FleetMember,
    ReportRecord,
    TelemetryWrite,
)
from planner.store import costs, devices, history, plans, retention, schema, telemetry
from planner.store.blobs import Blobs
from planner.store.database import Database, sqlite_url
from planner.store.history import Entry
from planner.store.retention import Retention
from planner.store.tables import DeviceRow, EventRow, ReportedRow
from planner.store.writer import Writer
from planner.telemetry.books import Balance
from planner.telemetry.rollup import Width
from shared.artifact import Artifact, open_artifact
from shared.clock import Clock, SystemClock
from shared.errors import InputError
from shared.failpoint import failpoint
from shared.graph import Graph
from shared.ids import DeviceId, Digest
from shared.messages.admin import DeviceInfo, HistoryEntry, ModelInfo, PlanInfo
from shared.messages.control import Activation, Autonomy, Desired
from shared.messages.telemetry import OperatorTiming, Row, RowKind
from shared.plan import Plan

DATABASE_FILE = "planner.sqlite"
ARTIFACT_FOLDER = "artifacts"


class ReadStore:
    """What may be read, with or without a running planner."""

    def __init__(self, data_dir: Path, database_url: str = "") -> None:
        self.data_dir = data_dir
        self.blobs = Blobs(data_dir / ARTIFACT_FOLDER)
        self.database = Database(database_url or sqlite_url(data_dir / DATABASE_FILE))
        self._graphs: dict[Digest, Graph] = {}

    @classmethod
    def open(cls, data_dir: Path, database_url: str = "") -> "ReadStore":
        """Open for reading only.

        Raises:
            InputError: there is no planner's data in `data_dir`.
            StorageError: the database cannot be read, or has another schema.
        """
        store = cls(data_dir, database_url)
        path = store.database.sqlite_path
        if path is not None and not path.is_file():
            raise InputError(
                f"there is no planner data in {data_dir}",
                remedy="start a planner there with `stageloom up`, or name its --data-dir",
            )
        try:
            schema.require_current(store.database)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close all connections."""
        self.database.close()

    def devices(
        self, *, device: DeviceId | None = None, after: str = "", limit: int = 256
    ) -> list[DeviceInfo]:
        """Devices by name; `online` is always False here."""
        with self.database.read() as session:
            return devices.device_infos(session, device=device, after=after, limit=limit)

    def device(self, device: DeviceId) -> DeviceInfo:
        """One device.

        Raises:
            InputError: there is none of that name.
        """
        with self.database.read() as session:
            devices.known_device(session, device)
            return devices.device_infos(session, device=device)[0]

    def models(self, *, after: str = "", limit: int = 256) -> list[ModelInfo]:
        """Models by name."""
        with self.database.read() as session:
            return plans.model_infos(session, after=after, limit=limit)

    def named_models(self, names: list[str]) -> list[ModelInfo]:
        """The named models, in the order asked.

        Raises:
            InputError: one of them does not exist.
        """
        with self.database.read() as session:
            return plans.models(session, names)

    def load_artifact(self, digest: Digest) -> Artifact:
        """An artifact with its graph.

        Raises:
            InputError: its file is not here.
            DecodeError: its file is damaged.
        """
        if not self.blobs.has(digest):
            raise InputError(f"the file of artifact {digest[:12]} is missing", remedy="add the model again")
        return open_artifact(self.blobs.path(digest), digest)

    def graph(self, digest: Digest) -> Graph:
        """An artifact's graph; the file is read and checked once, then the graph is kept.

        Raises:
            InputError, DecodeError: as `load_artifact`.
        """
        if digest not in self._graphs:
            self._graphs[digest] = self.load_artifact(digest).graph
        return self._graphs[digest]

    def plans(self, *, after: str = "", limit: int = 256) -> list[PlanInfo]:
        """Plans by name."""
        with self.database.read() as session:
            return plans.plan_infos(session, after=after, limit=limit)

    def plan(self, name: str) -> PlanInfo:
        """A plan by name, or by at least 8 characters of its digest.

        Raises:
            InputError: there is none.
        """
        with self.database.read() as session:
            return plans.plan_info(session, name)

    def history(
        self, device: DeviceId | None, *, before: int = 0, limit: int = 64
    ) -> tuple[list[HistoryEntry], int]:
        """Generations, newest first, and the position to continue before (0: no more).

        Raises:
            InputError: there is no such device.
        """
        with self.database.read() as session:
            if device is not None:
                devices.known_device(session, device)
            return plans.history(session, device, before=before, limit=limit)

    def operator_costs(
        self, device_class: str, artifact: Digest, batch: int = 1
    ) -> dict[int, OperatorTiming]:
        """Measured operators of an artifact on a device class."""
        with self.database.read() as session:
            return costs.operator_costs(session, device_class, artifact, batch)

    def kept_schedule(
        self, device_class: str, batch: int, combined_block: Digest, scheduler: str
    ) -> str | None:
        """The stage string that a scheduler once found for a combined block on a device class."""
        with self.database.read() as session:
            return costs.kept_schedule(session, device_class, batch, combined_block, scheduler)

    def open_profiles(self, requests: list[int]) -> list[int]:
        """Those of the requests that are not answered yet."""
        with self.database.read() as session:
            return costs.open_profiles(session, requests)

    def profile_reasons(self, requests: list[int]) -> dict[int, str]:
        """Per answered request why it is incomplete; an empty text where it is not."""
        with self.database.read() as session:
            return costs.profile_reasons(session, requests)

    def telemetry_balance(self, device: DeviceId | None = None) -> Balance:
        """The telemetry books of one device or of all."""
        with self.database.read() as session:
            return telemetry.balance(session, device)

    def telemetry(
        self, device: DeviceId, kinds: Sequence[RowKind], *, since_us: int = 0, limit: int = 10_000
    ) -> list[Row]:
        """Telemetry of some kinds from `since_us` on, oldest first, at most the newest `limit` rows."""
        with self.database.read() as session:
            return telemetry.rows_since(session, device, kinds, since_us=since_us, limit=limit)

    def telemetry_history(
        self,
        device: DeviceId,
        kinds: Sequence[RowKind],
        *,
        by: Width | None = None,
        since_us: int = 0,
        limit: int = 10_000,
    ) -> list[Entry]:
        """Telemetry over its whole age, oldest first: as fine as it is kept, or rolled up to `by`."""
        with self.database.read() as session:
            if by is None:
                return history.history(session, device, kinds, since_us=since_us, limit=limit)
            return history.history_by(session, device, kinds, by, since_us=since_us, limit=limit)

    def newest_telemetry(self, device: DeviceId, kinds: Sequence[RowKind], window_us: int) -> list[Row]:
        """The telemetry of the last `window_us` before the device's newest row, by the device's clock."""
        with self.database.read() as session:
            return telemetry.newest_rows(session, device, kinds, window_us)

    def events(self, *, limit: int = 100) -> list[tuple[int, str, str, str]]:
        """The newest events, newest first: (at_us, device or "", code, text)."""
        with self.database.read() as session:
            rows = session.scalars(select(EventRow).order_by(EventRow.id.desc()).limit(limit))
            return [(row.at_us, row.device or "", row.code, row.text) for row in rows]


class Store(ReadStore):
    """The planner's own store; implements `planner.dispatch.ports.DispatchStore`."""

    def __init__(self, data_dir: Path, database_url: str = "", clock: Clock | None = None) -> None:
        """Migrate, then open for writing.

        Raises:
            StorageError: the schema is newer than this version, or the database cannot be written.
        """
        super().__init__(data_dir, database_url)
        self._clock = clock or SystemClock()
        try:
            schema.migrate(self.database)
        except BaseException:
            self.database.close()
            raise
        self.blobs.sweep()
        self.writer = Writer(self.database)
        now_us = self._clock.wall_us()
        self.writer.run(lambda session: devices.planner_row(session, now_us).epoch)

    def close(self) -> None:
        """Commit what was submitted, then close."""
        self.writer.close()
        super().close()

    # -- what dispatch needs --------------------------------------------------------------------------------

    def epoch(self) -> int:
        """The planner's current epoch, 1 in a new database."""
        now_us = self._clock.wall_us()
        with self.database.read() as session:
            return devices.planner_row(session, now_us).epoch

    def fleet(self) -> list[FleetMember]:
        """Every enrolled device, revoked ones included."""
        with self.database.read() as session:
            rows = session.execute(
                select(DeviceRow, ReportedRow)
                .outerjoin(ReportedRow, ReportedRow.device == DeviceRow.name)
                .order_by(DeviceRow.enrolled_at_us, DeviceRow.name)
            ).all()
            return [
                FleetMember(
                    device=DeviceId(row.name),
                    public_key=row.public_key,
                    revoked=row.revoked,
                    desired=plans.desired(session, DeviceId(row.name)),
                    boot=reported.boot if reported else 0,
                    report=devices.report_of(reported) if reported else None,
                )
                for row, reported in rows
            ]

    def enrol(self, attempt: EnrolAttempt) -> DeviceId:
        """Use up a token and add the key; see `planner.store.devices.enrol`.

        Raises:
            EnrolRefused: the secret or the name is not acceptable.
        """
        now_us = self._clock.wall_us()
        return self.writer.run(lambda session: devices.enrol(session, attempt, now_us))

    def reissue(self, device: DeviceId, *, above_epoch: int, above_generation: int) -> Desired:
        """Desire the same above a generation that this database does not know.

        Raises:
            InputError: there is no such device, or it is revoked.
        """
        now_us = self._clock.wall_us()

        def work(session: Session) -> Desired:
            devices.raise_epoch(session, above_epoch, now_us)
            plans.push(
                session,
                device,
                None,
                decided_by="restored",
                now_us=now_us,
                above_generation=above_generation,
            )
            return _required(plans.desired(session, device))

        return self.writer.run(work)

    def record_reports(self, records: Sequence[ReportRecord]) -> None:
        """Store the newest reports, and the state of their generations, in one transaction."""
        now_us = self._clock.wall_us()

        self.writer.run(lambda session: devices.store_reports(session, records, now_us))

    def append_telemetry(self, writes: Sequence[TelemetryWrite]) -> None:
        """Store rows and ledgers in one transaction, durable when this returns."""
        now_us = self._clock.wall_us()

        self.writer.run(lambda session: telemetry.append(session, writes, now_us))

    def artifact(self, digest: Digest) -> ArtifactFile | None:
        """The artifact's file, or None if the store has none of this digest."""
        path = self.blobs.path(digest)
        try:
            return ArtifactFile(path, path.stat().st_size)
        except OSError:
            return None

    # -- what operators ask for -----------------------------------------------------------------------------

    def add_token(self, secret_digest: Digest, device: DeviceId | None, lifetime_s: float) -> int:
        """Remember a one-time secret; returns when it expires, in microseconds since 1970.

        Raises:
            InputError: the name is in use.
        """
        now_us = self._clock.wall_us()
        expires_at_us = now_us + round(lifetime_s * 1e6)
        self.writer.run(
            lambda session: devices.add_token(session, secret_digest, device, expires_at_us, now_us)
        )
        return expires_at_us

    def revoke(self, device: DeviceId) -> None:
        """Take a device's key away; a repeat changes nothing.

        Raises:
            InputError: there is no such device.
        """
        now_us = self._clock.wall_us()
        self.writer.run(lambda session: devices.revoke(session, device, now_us))

    def add_model(self, name: str, source: Path, digest: Digest) -> ModelInfo:
        """Copy an artifact file in and name it.

        Raises:
            InputError: the name belongs to another artifact.
            DecodeError: the file is no artifact, or not the one of this digest.
            StorageError: the disk is full.
        """
        artifact = open_artifact(source, digest)
        size_bytes = self.blobs.put_file(source, digest)
        now_us = self._clock.wall_us()
        info = self.writer.run(
            lambda session: plans.add_model(session, name, digest, artifact.graph, size_bytes, now_us)
        )
        self._graphs[digest] = artifact.graph
        return info

    def remove_model(self, name: str) -> None:
        """Forget a model, and its artifact's file where nothing needs it any more.

        Raises:
            InputError: there is no such model, or a device should run it.
        """
        orphan = self.writer.run(lambda session: plans.remove_model(session, name))
        if orphan is not None:
            self._graphs.pop(orphan, None)
            self.blobs.remove(orphan)

    def add_plan(self, name: str, plan: Plan, scheduler: str) -> PlanInfo:
        """Keep a plan under a name; a repeat with the same plan changes nothing.

        Raises:
            InputError: the name belongs to another plan.
        """
        now_us = self._clock.wall_us()
        return self.writer.run(lambda session: plans.add_plan(session, name, plan, scheduler, now_us))

    def keep_schedules(self, device_class: str, scheduler: str, found: Iterable[FoundSchedule]) -> None:
        """Share schedules that were found with all devices of a class."""
        now_us, rows = self._clock.wall_us(), tuple(found)
        self.writer.run(lambda session: costs.keep_schedules(session, device_class, scheduler, rows, now_us))

    def push(
        self,
        device: DeviceId,
        plan: str,
        *,
        decided_by: str,
        autonomy: Autonomy | None = None,
        activation: Activation = Activation.TRIAL,
    ) -> Desired:
        """Make a plan the device's next generation; returns what is desired now.

        Raises:
            InputError: there is no such device or plan, or the device is revoked.
        """
        now_us = self._clock.wall_us()

        def work(session: Session) -> Desired:
            plans.push(
                session,
                device,
                plan,
                decided_by=decided_by,
                now_us=now_us,
                autonomy=autonomy,
                activation=activation,
            )
            failpoint("planner.desired.before")
            return _required(plans.desired(session, device))

        wanted = self.writer.run(work)
        failpoint("planner.desired.after")
        return wanted

    def request_profile(
        self, device: DeviceId, names: list[str], *, batch: int = 1, budget_s: float = 20.0
    ) -> tuple[list[int], Desired]:
        """Ask a device to measure models; returns the requests' numbers and what is desired now.

        Raises:
            InputError: there is no such device or model, or the device is revoked.
        """
        now_us = self._clock.wall_us()

        def work(session: Session) -> tuple[list[int], Desired]:
            requests = costs.request_profile(
                session, device, names, batch=batch, budget_s=budget_s, now_us=now_us
            )
            return requests, _required(plans.desired(session, device))

        return self.writer.run(work)

    def tidy(self, keep: Retention) -> Iterator[int]:
        """Roll up and delete old telemetry in small steps; see `planner.store.retention.tidy`."""
        return retention.tidy(self.database, self.writer, keep, self._clock.wall_us())

    def presence(self, device: DeviceId, online: bool) -> None:
        """Note that a device came or went; returns at once."""
        now_us = self._clock.wall_us()
        self.writer.submit(lambda session: devices.presence(session, device, online, now_us))


def _required(value: Desired | None) -> Desired:
    assert value is not None, "`push` has just made it"
    return value

"""What may be read of a planner's data, with or without a running planner.

Reads open a snapshot of their own and never wait.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import select

from stageloom.planner.costs.records import Calibration, FoundBy, MeasurementOrigin, OperatorCost
from stageloom.planner.replan.policy import ReplanSettings
from stageloom.planner.store import (
    calibrations,
    checkpoints,
    considered,
    costs,
    devices,
    history,
    plans,
    predictions,
    provenance,
    replans,
    schema,
    stages,
    telemetry,
    unreadable,
)
from stageloom.planner.store.blobs import Blobs
from stageloom.planner.store.considered import KeptConsidered
from stageloom.planner.store.database import Database, sqlite_url
from stageloom.planner.store.history import Entry
from stageloom.planner.store.replan_view import ReplanView
from stageloom.planner.store.tables import EventRow
from stageloom.planner.store.used_database import kept_url, same_database
from stageloom.planner.telemetry.books import Balance
from stageloom.planner.telemetry.rollup import Width
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.admin import (
    DeviceInfo,
    HistoryEntry,
    ModelInfo,
    PlanInfo,
    ReplanInfo,
    TrialInfo,
)
from stageloom.shared.messages.telemetry import Row, RowKind, StepTimings
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.costs import MeasuredStage

DATABASE_FILE = "planner.sqlite"
ARTIFACT_FOLDER = "artifacts"


def require_own(data_dir: Path, database_url: str) -> None:
    """Make sure that a URL somebody gave names the database of the planner of `data_dir`; empty always does.

    Raises:
        InputError: it names another one, or does not parse.
    """
    default = data_dir / DATABASE_FILE
    own = kept_url(data_dir) or (sqlite_url(default) if default.is_file() else database_url)
    if database_url and not same_database(database_url, own):
        raise InputError(
            f"the database URL that was given names another database than the planner on {data_dir} uses",
            remedy="leave out --database-url and STAGELOOM_PLANNER_DATABASE_URL, or name its --data-dir",
        )


def sqlite_file(data_dir: Path, database_url: str) -> Path | None:
    """The file of a planner's database; None where that is on a server.

    Raises:
        SettingError: the URL does not parse.
    """
    return Database(database_url).sqlite_path if database_url else data_dir / DATABASE_FILE


class ReadStore:
    """What may be read, with or without a running planner."""

    def __init__(self, data_dir: Path, database_url: str = "") -> None:
        self.data_dir = data_dir
        self.blobs = Blobs(data_dir / ARTIFACT_FOLDER)
        self.database = Database(database_url or sqlite_url(data_dir / DATABASE_FILE))
        self._graphs: dict[Digest, Graph] = {}

    @classmethod
    def open(cls, data_dir: Path, database_url: str = "") -> "ReadStore":
        """Open for reading only; without a URL the database that the planner of `data_dir` uses.

        Raises:
            InputError: there is no planner's data in `data_dir`.
            StorageError: the database cannot be read, or has another schema.
        """
        store = cls(data_dir, database_url or kept_url(data_dir))
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

    def operator_costs(self, device_class: str, artifact: Digest, batch: int = 1) -> dict[int, OperatorCost]:
        """Measured operators of an artifact on a device class."""
        with self.database.read() as session:
            return costs.operator_costs(session, device_class, artifact, batch)

    def calibration(self, device: DeviceId) -> Calibration:
        """Which costs hold for a device.

        Raises:
            InputError: there is none of that name.
        """
        with self.database.read() as session:
            return calibrations.calibration(
                session, device, devices.known_device(session, device).device_class
            )

    def kept_schedule(
        self, device_class: str, batch: int, combined_block: Digest, scheduler: str
    ) -> str | None:
        """The stage string that a scheduler once found for a combined block on a device class."""
        with self.database.read() as session:
            return costs.kept_schedule(session, device_class, batch, combined_block, scheduler)

    def schedules(self, keys: Sequence[str]) -> dict[tuple[Digest, int], tuple[str, ...]]:
        """Stage strings that were found under some keys, by (combined block, batch)."""
        with self.database.read() as session:
            return costs.schedules(session, keys)

    def newest_checkpoint(self, policy: str, device_class: str) -> bytes | None:
        """The newest trained policy of a device class, else the newest for any device."""
        with self.database.read() as session:
            return checkpoints.newest(session, policy, device_class)

    def fitting_checkpoint(self, policy: str, device_class: str, artifacts: Sequence[Digest]) -> bytes:
        """A device class's newest trained policy over these models, else its newest; b"": none."""
        with self.database.read() as session:
            return checkpoints.fitting(session, policy, device_class, artifacts)

    def predictions(
        self, device: DeviceId | None = None, *, limit: int = 100
    ) -> list[predictions.Prediction]:
        """What the twin predicted for one device or for all, newest first."""
        with self.database.read() as session:
            return predictions.newest(session, device, limit=limit)

    def open_profiles(self, requests: list[int]) -> list[int]:
        """Those of the requests that are not answered yet."""
        with self.database.read() as session:
            return costs.open_profiles(session, requests)

    def profile_reasons(self, requests: list[int]) -> dict[int, str]:
        """Per answered request why it is incomplete; an empty text where it is not."""
        with self.database.read() as session:
            return costs.profile_reasons(session, requests)

    def stage_costs(self, device_class: str, executor: ExecutorOptions) -> list[MeasuredStage]:
        """Measured stages of a device class, the newest first."""
        with self.database.read() as session:
            return stages.stage_costs(session, device_class, executor)

    def open_stage_profiles(self, requests: list[int]) -> list[int]:
        """Those of the stage requests that are not answered yet."""
        with self.database.read() as session:
            return stages.open_requests(session, requests)

    def stage_profile_reasons(self, requests: list[int]) -> dict[int, str]:
        """Per answered stage request why it is incomplete; an empty text where it is not."""
        with self.database.read() as session:
            return stages.reasons(session, requests)

    def replan_settings(self, device: DeviceId) -> ReplanSettings:
        """How a device is re-planned.

        Raises:
            InputError: there is no such device.
        """
        with self.database.read() as session:
            devices.known_device(session, device)
            return replans.settings(session, device)

    def replans(self, device: DeviceId | None = None, *, limit: int = 1000) -> Sequence[ReplanInfo]:
        """Re-plans of one device or of all, newest first.

        Raises:
            InputError: there is no such device.
        """
        with self.database.read() as session:
            if device is not None:
                devices.known_device(session, device)
            return replans.replan_infos(session, device, limit=limit)

    def considered(self, serves: Digest, device_class: str, *, limit: int = 1000) -> Sequence[KeptConsidered]:
        """Plans over the same models that were looked at for a device class or for none, newest first."""
        with self.database.read() as session:
            return considered.of_models(session, serves, device_class, limit=limit)

    # -- where all of this comes from -------------------------------------------------------------------

    def operator_origins(
        self, device_class: str, artifact: Digest, batch: int
    ) -> dict[int, MeasurementOrigin]:
        """Per measured operator of an artifact where its time comes from."""
        with self.database.read() as session:
            return provenance.operator_origins(session, device_class, artifact, batch)

    def stage_origins(
        self, device_class: str, executor: ExecutorOptions, combined_block: Digest, batch: int
    ) -> dict[str, MeasurementOrigin]:
        """Per measured stage of a combined block, by its stage string, where its time comes from."""
        with self.database.read() as session:
            return provenance.stage_origins(session, device_class, executor, combined_block, batch)

    def schedules_of(self, device_class: str, combined_block: Digest, batch: int) -> list[FoundBy]:
        """Every schedule that was found for a combined block of a device class, by scheduler."""
        with self.database.read() as session:
            return provenance.schedules_of(session, device_class, combined_block, batch)

    def trials_of(self, plans: Iterable[Digest], environment: str) -> list[TrialInfo]:
        """Trials of these plans on any device of a class, newest first."""
        with self.database.read() as session:
            return provenance.trials_of(session, plans, environment)

    def device_of(self, plan: Digest) -> DeviceId | None:
        """The device that was asked last to run a plan, else the last one for which it was looked at."""
        with self.database.read() as session:
            return provenance.device_of(session, plan)

    def plan_names(self, plans: Iterable[Digest]) -> dict[Digest, str]:
        """The names of those plans that were kept, the oldest one of each."""
        with self.database.read() as session:
            return dict(provenance.plan_names(session, plans))

    @contextmanager
    def replan_view(self) -> Iterator[ReplanView]:
        """One snapshot of what re-plans are decided by."""
        with self.database.read() as session:
            yield ReplanView(session)

    def trials(self, device: DeviceId, *, limit: int = 1000) -> list[TrialInfo]:
        """The trials of a device, newest first.

        Raises:
            InputError: there is no such device.
        """
        with self.database.read() as session:
            devices.known_device(session, device)
            return replans.trials(session, device, limit=limit)

    def telemetry_balance(self, device: DeviceId | None = None) -> Balance:
        """The telemetry books of one device or of all."""
        with self.database.read() as session:
            return telemetry.balance(session, device)

    def telemetry(
        self, device: DeviceId, kinds: Sequence[RowKind], *, since_us: int = 0, limit: int = 10_000
    ) -> list[Row]:
        """Telemetry of some kinds from `since_us` on, oldest first, at most the newest `limit` rows.

        A row that this version cannot read is left out.
        """
        with self.database.read() as session:
            return telemetry.rows_since(session, device, kinds, since_us=since_us, limit=limit)[0]

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

    def first_steps(self, device: DeviceId, *, since_us: int, limit: int) -> list[StepTimings]:
        """What steps took from `since_us` on, the oldest `limit` rows of it, as fine as it is kept."""
        with self.database.read() as session:
            return history.first_steps(session, device, since_us=since_us, limit=limit)

    def newest_telemetry(self, device: DeviceId, kinds: Sequence[RowKind], window_us: int) -> list[Row]:
        """The telemetry of the last `window_us` before the device's newest row, by the device's clock.

        A row that this version cannot read is left out.
        """
        rows, _ = self.newest_readable(device, kinds, window_us)
        return rows

    def newest_readable(
        self, device: DeviceId, kinds: Sequence[RowKind], window_us: int
    ) -> tuple[list[Row], str]:
        """`newest_telemetry`, and what of it cannot be read; empty where it is whole."""
        with self.database.read() as session:
            return telemetry.newest_rows(session, device, kinds, window_us)

    def unreadable(self) -> int:
        """How many records of all devices the database would not take."""
        with self.database.read() as session:
            return unreadable.number(session)

    def events(self, *, limit: int = 100) -> list[tuple[int, str, str, str]]:
        """The newest events, newest first: (at_us, device or "", code, text)."""
        with self.database.read() as session:
            rows = session.scalars(select(EventRow).order_by(EventRow.id.desc()).limit(limit))
            return [(row.at_us, row.device or "", row.code, row.text) for row in rows]

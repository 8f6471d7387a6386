"""The store of one planner: a database, the artifact files beside it, and transactions over both.

What is read and written are functions of a session, in the modules of this package by subject: `devices`,
`models`, `plans`, `desired`, `generations`, `profiles`, `costs`, `replans`, `labels`, `rollouts`, `policies`,
`predictions`, `telemetry`, `events`, `trusted_time`. `read` and `write` run one of them as one transaction:

    store.read(plan_info, "urban")
    store.write(revoke_device, DeviceId("edge1"))

Reads open a snapshot of their own and never wait. Writes go through the one writer thread and return when
they are committed. All methods may be called from any thread.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from msgspec.structs import asdict
from sqlalchemy.orm import Session

from stageloom.planner.schema.model import ModelAdded
from stageloom.planner.store import schema
from stageloom.planner.store.database import Database, sqlite_url
from stageloom.planner.store.models import Blobs, forget_versions, name_artifact
from stageloom.planner.store.used_database import ARTIFACT_FOLDER, DATABASE_FILE, kept_url
from stageloom.planner.store.writer import Item, Together, Writer
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.clock import Clock
from stageloom.shared.errors import InputError, UnavailableError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest

P = ParamSpec("P")
T = TypeVar("T")


class Reader(Protocol):
    """What reads in a transaction: a store, which opens one for each call, or a snapshot, which is one."""

    def read(self, function: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function(session, ...)` returns.

        Raises:
            StorageError: the database cannot be read.
        """
        ...


class Snapshot:
    """One transaction that many functions read; implements `Reader`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def read(self, function: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return function(self._session, *args, **kwargs)


class ReadStore:
    """What may be read, with or without a running planner."""

    def __init__(self, data_dir: Path, database_url: str = "", clock: Clock | None = None) -> None:
        self.data_dir = data_dir
        self.blobs = Blobs(data_dir / ARTIFACT_FOLDER)
        self.database = Database(database_url or sqlite_url(data_dir / DATABASE_FILE), clock)
        self._graphs: dict[Digest, Graph] = {}

    @classmethod
    def open(cls, data_dir: Path, database_url: str = "", *, or_older: bool = False) -> "ReadStore":
        """Open for reading only; without a URL the database that the planner of `data_dir` uses.

        `or_older`: before its migration, too, when most functions of this version cannot read it.

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
            schema.require_current(store.database, or_older=or_older)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close all connections."""
        self.database.close()

    def read(self, function: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function(session, ...)` reads in one consistent snapshot.

        Raises:
            StorageError: the database cannot be read.
        """
        with self.database.read() as session:
            return function(session, *args, **kwargs)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """One consistent snapshot for several reads."""
        with self.database.read() as session:
            yield Snapshot(session)

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


class Store(ReadStore):
    """The planner's own store, which writes as well."""

    def __init__(
        self,
        data_dir: Path,
        database_url: str = "",
        clock: Clock | None = None,
        *,
        claim: ExitStack | None = None,
    ) -> None:
        """Migrate, then open for writing. `clock` tells the time of transactions.

        `claim`: the database is claimed first, before anything in it changes, until this is closed.

        Raises:
            StorageError: the schema is newer than this version, or the database cannot be written.
            UnavailableError: another planner has claimed it.
        """
        super().__init__(data_dir, database_url, clock)
        try:
            if claim is not None and not claim.enter_context(self.database.claim()):
                raise UnavailableError(  # a service manager tries that again: the other's host may be gone
                    "another planner runs on this database",
                    remedy="stop that one, or name another --database-url",
                )
            schema.migrate(self.database)
        except BaseException:
            self.database.close()
            raise
        self.blobs.sweep()
        self._naming = Lock()  # a model's file and the versions that name it change together
        self.writer = Writer(self.database)
        self.write(schema.mend)

    def close(self) -> None:
        """Commit what was submitted, then close."""
        self.writer.close()
        super().close()

    def write(self, function: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function(session, ...)` in a transaction and return what it does once that is committed.

        Raises:
            StorageError: the commit failed, nothing of it was kept.
            StageloomError: what the function raised; nothing of it was kept.
            UnavailableError: not committed in time; it may still be.
        """
        return self.writer.run(lambda session: function(session, *args, **kwargs))

    def submit(
        self, function: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> "Future[T]":
        """`write` without waiting; the future raises what `write` does, and its callbacks must be short."""
        return self.writer.submit(lambda session: function(session, *args, **kwargs))

    def submit_together(self, together: Together[Item, T], item: Item) -> "Future[T]":
        """`submit` of one item; items that wait for the same commit are worked on together (`Writer`)."""
        return self.writer.submit_one(together, item)

    def add_model(self, name: str, source: Path, digest: Digest) -> ModelAdded:
        """Copy an artifact file in and make it a version of a model.

        Raises:
            InputError: the model has had as many versions as may be.
            DecodeError: the file is no artifact, or not the one of this digest.
            StorageError: the disk is full.
        """
        artifact = open_artifact(source, digest)
        with self._naming:
            size_bytes = self.blobs.put_file(source, digest)
            info, added = self.write(name_artifact, name, digest, artifact.graph, size_bytes)
            self._graphs[digest] = artifact.graph  # else a removal in between leaves it there
        return ModelAdded(**asdict(info), added=added)

    def remove_model(self, name: str, *, force: bool = False) -> None:
        """Forget a version or all of a model's, and the files of artifacts that nothing needs any more.

        Raises:
            InputError: as `forget_versions`.
        """
        with self._naming:
            for orphan in self.write(forget_versions, name, force=force):
                self._graphs.pop(orphan, None)
                self.blobs.remove(orphan)

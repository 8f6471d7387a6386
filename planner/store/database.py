"""One database by URL, with the settings without which SQLite loses or refuses writes.

SQLAlchemy's default mode on SQLite starts transactions late, so read-modify-write loses updates; a plain
BEGIN fails with "locked" when two readers want to become writers. Here every writing transaction starts with
BEGIN IMMEDIATE and waits its turn. Commits are synchronous=FULL, since what is committed gets acknowledged
to a device, which then forgets it.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from shared.errors import SettingError, StorageError

BUSY_TIMEOUT_S = 30.0
_READ_ONLY = "stageloom_read_only"
_ATTEMPTS = 32  # a transaction that loses a race this often in a row is a defect, not bad luck
_LOST_RACE_STATES = ("40001", "40P01", "23505")  # Postgres: not serializable, deadlock, inserted by another

T = TypeVar("T")


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file."""
    return f"sqlite:///{path.absolute()}"


class Database:
    """Connections and transactions; knows nothing of the tables."""

    def __init__(self, url: str) -> None:
        """Connect lazily.

        Raises:
            SettingError: the URL does not parse or names a database without an installed driver.
        """
        try:
            self.url = make_url(url)
            self.engine = create_engine(self.url, connect_args=_connect_args(self.url.get_backend_name()))
        except (ArgumentError, SQLAlchemyError, ImportError) as error:
            raise SettingError(
                f"database_url cannot be used: {_first_line(error)}",
                remedy="use sqlite:///FILE, or postgresql+psycopg://... with the extra `postgres` installed",
            ) from error
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite:
            event.listen(self.engine, "connect", _on_sqlite_connect)
            event.listen(self.engine, "begin", _on_sqlite_begin)
            self._reader = self.engine.execution_options(**{_READ_ONLY: True})
        else:
            self._reader = self.engine.execution_options(isolation_level="REPEATABLE READ")

    @property
    def sqlite_path(self) -> Path | None:
        """The file, for SQLite."""
        return Path(self.url.database) if self.is_sqlite and self.url.database else None

    @contextmanager
    def read(self) -> Iterator[Session]:
        """One consistent snapshot; never waits for a writer.

        Raises:
            StorageError: the database cannot be read.
        """
        with self._translated(), Session(self._reader) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One transaction, committed at the end; on any exception rolled back.

        Raises:
            StorageError: the database cannot be written, nothing of the transaction was kept.
            StaleDataError: another writer changed a versioned row in between (not on SQLite).
        """
        with self._translated(), Session(self.engine, expire_on_commit=False) as session, session.begin():
            yield session

    def change(self, work: Callable[[Session], T]) -> T:
        """Run a read-modify-write until it did not lose a race; `work` may therefore run more than once.

        Raises:
            StorageError: as `write`.
        """
        for _ in range(_ATTEMPTS):
            try:
                with self.write() as session:
                    result = work(session)
            except (StaleDataError, LostRace):
                continue
            return result
        raise StorageError(
            f"a write lost the race against other writers {_ATTEMPTS} times", remedy="try again later"
        )

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) in _LOST_RACE_STATES:
                raise LostRace(str(error.orig)) from error
            raise StorageError(
                f"{self.url.render_as_string()}: {_first_line(error.orig or error)}",
                remedy=_remedy(str(error.orig)),
            ) from error


class LostRace(Exception):
    """Postgres chose another transaction; the same work may be tried again."""


def _connect_args(backend: str) -> dict[str, Any]:
    if backend != "sqlite":
        return {}
    return {"timeout": BUSY_TIMEOUT_S}


def _on_sqlite_connect(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # the driver must not begin transactions by itself
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",  # NORMAL may lose the last commits of a WAL on power loss
        "foreign_keys=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _on_sqlite_begin(connection: Connection) -> None:
    read_only = connection.get_execution_options().get(_READ_ONLY)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _first_line(error: object) -> str:
    return str(error).strip().split("\n")[0][:200]


def _remedy(message: str) -> str:
    if "full" in message:
        return "free space on the disk that holds the data directory"
    if "malformed" in message or "not a database" in message:
        return "restore the database from a backup, or move it away to start a new one"
    if "locked" in message:
        return "another process holds the database; stop it or try again"
    if "unable to open" in message or "readonly" in message:
        return "check that the data directory exists and is writable"
    return "check the database"

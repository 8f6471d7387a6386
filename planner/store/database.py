"""One database by URL, with the settings without which SQLite loses or refuses writes.

SQLAlchemy's default mode on SQLite starts transactions late, so read-modify-write loses updates; a plain
BEGIN fails with "locked" when two readers want to become writers. Here every writing transaction starts with
BEGIN IMMEDIATE and waits its turn. Commits are synchronous=FULL, since what is committed gets acknowledged
to a device, which then forgets it.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
)
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from stageloom.shared.clock import Clock, SystemClock
from stageloom.shared.errors import SettingError, StageloomError, StorageError, UnavailableError

BUSY_TIMEOUT_S = 30.0
_READ_ONLY = "stageloom_read_only"
_NOW_US = "now_us"
_ATTEMPTS = 32  # a transaction that loses a race this often in a row is a defect, not bad luck
_LOST_RACE_STATES = ("40001", "40P01", "23505")  # Postgres: not serializable, deadlock, inserted by another
CLAIM = 0x57A6E101  # any number that no other program on a database server uses
_THIS_SESSION = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
_END_SESSION = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s"

P = ParamSpec("P")
T = TypeVar("T")


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file."""
    return f"sqlite:///{path.absolute()}"


def now_us(session: Session) -> int:
    """When a session's transaction began, in microseconds since 1970: the time of all that it writes."""
    began_us: int = session.info[_NOW_US]
    return began_us


class Database:
    """Connections and transactions; knows nothing of the tables."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        """Connect lazily. `clock` tells the time of each transaction (`now_us`).

        Raises:
            SettingError: the URL does not parse or names a database without an installed driver.
        """
        self._clock = clock or SystemClock()
        try:
            self.url = make_url(url)
            if "@" in (self.url.host or ""):
                raise ValueError("a part of the password is taken for one of the host")
            backend = self.url.get_backend_name()
            # A server that was restarted has ended the connections that wait here: they are tried first.
            self.engine = create_engine(
                self.url, connect_args=_connect_args(backend), pool_pre_ping=backend != "sqlite"
            )
        except ValueError:  # SQLAlchemy's message quotes what may be a part of the password
            raise SettingError(
                "database_url cannot be used: its host and port cannot be read",
                remedy="write @, : and / of a password as %40, %3A and %2F",
            ) from None
        except (ArgumentError, SQLAlchemyError, ImportError) as error:
            raise SettingError(
                f"database_url cannot be used: {_first_line(error)}",
                remedy="use sqlite:///FILE, or postgresql+psycopg://... with the extra `postgres` installed",
            ) from error
        self.is_sqlite = backend == "sqlite"
        if self.is_sqlite:
            event.listen(self.engine, "connect", _on_sqlite_connect)
            event.listen(self.engine, "begin", _on_sqlite_begin)
            self._reader = self.engine.execution_options(**{_READ_ONLY: True})
        else:
            self._reader = self.engine.execution_options(isolation_level="REPEATABLE READ")
        self._writer = self.engine
        self._session: tuple[object, ...] | None = None  # of the server, that held the claim last
        self._superseded = False

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
        with self._translated(), Session(self._reader, info=self._time()) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One transaction, committed at the end; on any exception rolled back.

        Raises:
            StorageError: the database cannot be written, nothing of the transaction was kept.
            UnavailableError: it was claimed, and meanwhile by another process, too; nothing was written.
            StaleDataError: another writer changed a versioned row in between (not on SQLite).
        """
        with (
            self._translated(),
            Session(self._writer, expire_on_commit=False, info=self._time()) as session,
            session.begin(),
        ):
            yield session

    def _time(self) -> dict[str, int]:
        return {_NOW_US: self._clock.wall_us()}

    def change(self, function: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function(session, ...)` in a transaction of its own; it runs again where it lost a race.

        Raises:
            StorageError, UnavailableError: as `write`.
        """
        for _ in range(_ATTEMPTS):
            try:
                with self.write() as session:
                    result = function(session, *args, **kwargs)
            except (StaleDataError, LostRace):
                continue
            return result
        raise StorageError(
            f"a write lost the race against other writers {_ATTEMPTS} times", remedy="try again later"
        )

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Whether this process is the only one to claim a database on a server; free for SQLite.

        SQLite's file is locked by another beside it (`planner.lock`), which is no use for a server. There the
        lock belongs to a connection and ends with it. So while the database is claimed, everything is
        written through one connection, which takes the lock whenever it is made: nothing is written without.

        Raises:
            StorageError: the database cannot be reached.
        """
        if self.is_sqlite:
            yield True
            return
        self._superseded = False
        writer = create_engine(self.url, pool_size=1, max_overflow=0)
        event.listen(writer, "connect", self._on_claimed_connect)
        try:
            with self._translated(), suppress(UnavailableError):
                writer.connect().close()
            if not self._superseded:
                self._writer = writer
            yield not self._superseded
        finally:
            self._writer = self.engine
            writer.dispose()

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def check_claim(self) -> None:
        """Make sure that no other process has claimed the database in place of this one.

        Raises:
            UnavailableError: one has; found out by the first write after the connection was lost.
        """
        if self._superseded:
            raise UnavailableError(
                "another planner took this database while it could not be reached",
                remedy="stop that one, or start this one with another --database-url",
            )

    def _on_claimed_connect(self, connection: Any, _record: object) -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute(_FOUND_GONE)
                # Who was superseded once stays so: what it knows is no longer what the database says.
                ours = not self._superseded and (_locked(cursor) or _taken_back(cursor, self._session))
                cursor.execute(_THIS_SESSION)
                self._session = cursor.fetchone()
            connection.commit()  # the lock belongs to the connection, not to its transaction
            self._superseded = not ours
            self.check_claim()
        except BaseException:
            connection.close()
            raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as last:
            error = _first_failure(last)
            if getattr(error.orig, "sqlstate", None) in _LOST_RACE_STATES:
                raise LostRace(str(error.orig)) from error
            kind = Unstorable if isinstance(error, DataError | IntegrityError) else StorageError
            raise kind(
                f"{self.url.render_as_string()}: {_first_line(error.orig or error)}",
                remedy=_remedy(
                    str(error.orig), of_a_server=not self.is_sqlite and isinstance(error, OperationalError)
                ),
            ) from error


class Unstorable(StorageError):
    """The database is well and will not take what was to be written."""


def is_defect(error: BaseException) -> bool:
    """Whether a failed transaction was wrong itself, rather than its data, or its database away or full."""
    wrong = (IntegrityError, ProgrammingError)
    return not isinstance(error, StageloomError) or isinstance(error.__cause__, wrong)


def is_of_the_record(error: BaseException) -> bool:
    """Whether what was to be written is to blame: written again, it fails again.

    Not a database that is away, full, read-only or of another shape: the same may be written later.
    """
    elsewhere = (StorageError, UnavailableError, OSError, MemoryError, LostRace, StaleDataError)
    return isinstance(error, Unstorable) or not isinstance(error, elsewhere)


def why(error: BaseException) -> str:
    """What is wrong with a record, in a line."""
    cause = error.__cause__ if isinstance(error, Unstorable) and error.__cause__ else error
    orig = getattr(cause, "orig", None) or cause
    return f"{type(orig).__name__}: {_first_line(orig)}"


class LostRace(Exception):
    """Postgres chose another transaction; the same work may be tried again."""


def _locked(cursor: Any) -> bool:
    """Whether the server gave a connection the lock."""
    cursor.execute("SELECT pg_try_advisory_lock(%s)", (CLAIM,))
    return bool(cursor.fetchone()[0])


def _taken_back(cursor: Any, session: tuple[object, ...] | None) -> bool:
    """Whether the lock was our own, of a session that the server takes to be alive: the network lost it."""
    if session is None:
        return False
    cursor.execute(_END_SESSION, session)
    if cursor.fetchone() is None:
        return False
    cursor.execute("SET LOCAL lock_timeout = '10s'")
    cursor.execute("SELECT pg_advisory_lock(%s)", (CLAIM,))
    return True


_FOUND_GONE: Final = (
    "SET tcp_keepalives_idle = 20; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"
)
"""The server finds out within 35 s that a planner's host is gone, and not after hours: so long the lock is
taken. Meant for TCP; over a local socket it has no effect."""


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


def _first_failure(error: DBAPIError) -> DBAPIError:
    """The failure that began it.

    On a full disk SQLite rolls back by itself; SQLAlchemy's rollback to a savepoint then fails as well and
    would hide the cause.
    """
    first, step = error, error.__context__
    while step is not None:
        if isinstance(step, DBAPIError):
            first = step
        step = step.__context__
    return first


def _first_line(error: object) -> str:
    return str(error).strip().split("\n")[0][:200]


def _remedy(message: str, *, of_a_server: bool) -> str:
    if "No space left" in message:
        return "free space on the disk of the database server"
    if of_a_server:
        return "see that the database server runs and can be reached"
    if "full" in message:
        return "free space on the disk that holds the data directory"
    if "malformed" in message or "not a database" in message:
        return "restore the database from a backup, or move it away to start a new one"
    if "locked" in message:
        return "another process holds the database; stop it or try again"
    if "unable to open" in message or "readonly" in message:
        return "check that the data directory exists and is writable"
    return "check the database"

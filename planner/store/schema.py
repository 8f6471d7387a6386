"""Bring a database to this version's tables, once, whoever asks at the same time.

The usual start finds the newest revision and does not import Alembic at all.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from sqlalchemy import ColumnElement, delete, func, inspect, or_, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import InstrumentedAttribute, Session

from stageloom.planner.counters import CEILING
from stageloom.planner.store.database import Database
from stageloom.planner.store.devices import quarantine_device
from stageloom.planner.store.rows import add_event, planner_row
from stageloom.planner.store.tables import DesiredRow, GenerationRow, PlannerRow, ReplanRow, ReportedRow
from stageloom.shared.errors import StorageError
from stageloom.shared.failpoint import failpoint
from stageloom.shared.ids import DeviceId

REVISIONS: Final = tuple(f"{number:04}" for number in range(1, 28))
"""Every revision in `migrations/versions`, oldest first; a test keeps the two equal."""


HEAD: Final = REVISIONS[-1]

_ADVISORY_LOCK: Final = 0x57A6E100  # any number that no other program on the database server uses


def current_revision(database: Database) -> str | None:
    """The database's revision; None for an empty one.

    Raises:
        StorageError: the database cannot be read.
    """
    with database.read() as session:
        connection = session.connection()
        if not inspect(connection).has_table("alembic_version"):
            return None
        found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
        return None if found is None else str(found)


def require_known(revision: str | None) -> None:
    """Refuse a database that a newer version has written.

    Raises:
        StorageError: the revision is not one of ours.
    """
    if revision is not None and revision not in REVISIONS:
        raise StorageError(
            f"the database has schema {revision}, newer than {HEAD}, the newest this version knows",
            remedy="upgrade stageloom, or name another --data-dir",
        )


def require_current(database: Database, *, or_older: bool = False) -> None:
    """For readers, which never migrate; `or_older` is for those that read what every revision has.

    Raises:
        StorageError: the database is empty, older or newer.
    """
    revision = current_revision(database)
    require_known(revision)
    if revision != HEAD and not (or_older and revision):
        raise StorageError(
            f"the database has schema {revision or 'none'}, this version needs {HEAD}",
            remedy="start the planner with `stageloom up`, which migrates it",
        )


def migrate(database: Database) -> tuple[str | None, str]:
    """Upgrade to `HEAD` and say (revision before, revision after); free if there is nothing to do.

    Raises:
        StorageError: the schema is newer than this version, or the database cannot be written.
    """
    before = current_revision(database)
    require_known(before)
    if before == HEAD:
        return before, HEAD
    with _migration_lock(database):
        before = current_revision(database)  # another planner may just have done it
        require_known(before)
        if before != HEAD:
            failpoint("planner.migration.before")
            _upgrade(database)
            failpoint("planner.migration.after")
    return before, HEAD


def alembic_config(database: Database) -> Any:
    """Alembic's configuration for this database; the scripts are found inside the installed package."""
    from alembic.config import Config

    from stageloom import migrations

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["database"] = database
    return config


def _upgrade(database: Database) -> None:
    from alembic import command

    try:
        command.upgrade(alembic_config(database), HEAD)
    except DBAPIError as error:
        raise StorageError(
            f"the migration to {HEAD} failed: {error.orig}", remedy="nothing was changed; see the cause"
        ) from error


@contextmanager
def _migration_lock(database: Database) -> Iterator[None]:
    path = database.sqlite_path
    if database.is_sqlite:
        with file_lock(path.with_name(path.name + ".migrate")) if path else nullcontext():
            yield
        return
    with database.engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _ADVISORY_LOCK})
        try:
            yield
        finally:
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _ADVISORY_LOCK})


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock on a file; waits for whoever holds it. The file stays.

    Raises:
        StorageError: the file cannot be made.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(
            f"{path}: {error.strerror}", remedy="check that the data directory exists and is writable"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


_TOO_FAR: Final = or_(
    ReportedRow.epoch > CEILING,
    ReportedRow.generation > CEILING,
    ReportedRow.revision > CEILING,
    ReportedRow.local_counter > CEILING,
)


def mend(session: Session) -> None:
    """Make this database's own row at first use, and bring counters back into the wire's range.

    Version 0.1.0 let one device's `hello` raise the epoch above what a message holds: no `welcome` could be
    read any more, and every generation pushed to any device carried that epoch. The device that did it is
    quarantined; the others find themselves in an epoch above every one that is within reach.
    """
    planner = planner_row(session)
    for device in _beyond(session):
        quarantine_device(session, device, f"an older version stored counters of it beyond {CEILING}")
        session.execute(delete(ReportedRow).where(ReportedRow.device == device, _TOO_FAR))
    if planner.epoch > CEILING:
        _lower_epoch(session, planner)
    _lower_generations(session)


def _beyond(session: Session) -> list[DeviceId]:
    """Devices that have counted too far, or have made the planner do so."""
    told = select(ReportedRow.device).where(_TOO_FAR)
    asked = select(DesiredRow.device).where(DesiredRow.generation > CEILING)
    return sorted({DeviceId(name) for name in (*session.scalars(told), *session.scalars(asked))})


def _lower_epoch(session: Session, planner: PlannerRow) -> None:
    columns = (ReportedRow.epoch, DesiredRow.epoch, GenerationRow.epoch)
    epoch = 1 + max(_highest(session, column) for column in columns)
    text = f"epoch {planner.epoch} is out of range; this is epoch {epoch}"
    planner.epoch = epoch
    for row in (DesiredRow, GenerationRow, ReplanRow):
        session.execute(
            update(row).where(row.epoch > CEILING, row.generation <= CEILING).values(epoch=epoch),
            execution_options={"synchronize_session": False},
        )
    add_event(session, None, "epoch", text)


def _lower_generations(session: Session) -> None:
    """A device's desired generation goes back to the highest in its history that is in range."""
    for row in session.scalars(select(DesiredRow).where(DesiredRow.generation > CEILING)):
        row.generation = _highest(session, GenerationRow.generation, GenerationRow.device == row.device)
        row.epoch = min(row.epoch, planner_row(session).epoch)


def _highest(session: Session, column: InstrumentedAttribute[int], *conditions: ColumnElement[bool]) -> int:
    return session.scalar(select(func.max(column)).where(column <= CEILING, *conditions)) or 0

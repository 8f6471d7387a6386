"""A migrated SQLite file to begin with: migrating takes ten times as long as a copy, and imports Alembic."""

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from stageloom.planner.store import schema
from stageloom.planner.store.database import Database, sqlite_url
from stageloom.planner.store.store import Store
from stageloom.planner.store.used_database import DATABASE_FILE
from stageloom.shared.clock import Clock


@lru_cache(1)
def migrated_database() -> Path:
    """The file; made once a process."""
    folder = Path(tempfile.mkdtemp(prefix="stageloom-migrated-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    database = Database(sqlite_url(folder / DATABASE_FILE))
    schema.migrate(database)
    database.close()
    return folder / DATABASE_FILE


def begin_migrated(data_dir: Path) -> None:
    """The data directory of a planner that never ran, with the database that its start would make."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = data_dir / DATABASE_FILE
    if not file.exists():
        shutil.copyfile(migrated_database(), file)
        file.chmod(0o600)


def new_store(data_dir: Path, *, clock: Clock | None = None) -> Store:
    """A store on a SQLite database that is empty unless there is one already."""
    begin_migrated(data_dir)
    return Store(data_dir, clock=clock)

"""A migrated SQLite file to begin with: migrating takes ten times as long as a copy, and imports Alembic."""

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from stageloom.planner.store import schema
from stageloom.planner.store.database import Database, sqlite_url
from stageloom.planner.store.used_database import DATABASE_FILE


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
    """Make the directory of a planner that never ran, with the database that its start would make."""
    data_dir.mkdir(mode=0o700, parents=True)
    shutil.copyfile(migrated_database(), data_dir / DATABASE_FILE)
    (data_dir / DATABASE_FILE).chmod(0o600)

"""A consistent copy of a planner, running or not, as one tar file that unpacks to a data directory."""

import os
import sqlite3
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path

from stageloom.planner.store.database import Database
from stageloom.planner.store.models import Blobs
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.used_database import ARTIFACT_FOLDER, DATABASE_FILE, require_own
from stageloom.shared.durable_file import sync_directory
from stageloom.shared.errors import InputError, StorageError
from stageloom.shared.ids import Digest

_ATTEMPTS = 3


def backup(data_dir: Path, database_url: str, target: Path, files: tuple[str, ...]) -> int:
    """Write database, artifacts of its models, and `files` of the data directory; returns the size in bytes.

    The database is copied as of one moment, while others read and write. The file appears under its name
    only when it is complete and on disk; it holds the planner's secret key, so it gets mode 0600. An older
    version's database is copied as it is: a backup is wanted before the migration above all.

    Raises:
        InputError: the target exists, there is no planner's data, or the database is not SQLite, or not
            the planner's.
        StorageError: the database cannot be read, or the target cannot be written.
    """
    require_own(data_dir, database_url)
    store = ReadStore.open(data_dir, database_url, or_older=True)
    try:
        if store.database.sqlite_path is None:
            raise InputError(
                "a database on a server is not part of this backup",
                remedy=f"use pg_dump, then copy {data_dir / ARTIFACT_FOLDER} and {', '.join(files)}",
            )
        if target.exists():
            raise InputError(f"{target} exists", remedy="choose another name, or remove it")
        if not target.absolute().parent.is_dir():
            raise StorageError(
                f"there is no directory {target.parent} for the backup", remedy="make it first"
            )
        for _ in range(_ATTEMPTS):
            if _attempt(store, target, [data_dir / name for name in files]):
                return target.stat().st_size
    except OSError as error:
        raise StorageError(
            f"{error.filename or target}: {error.strerror}",
            remedy="name a file on a disk with space that can be written",
        ) from error
    finally:
        store.close()
    raise StorageError("models were removed during each of several attempts", remedy="try again")


def _attempt(store: ReadStore, target: Path, files: list[Path]) -> bool:
    """Write the file; False if an artifact that a model of the copy names went away meanwhile."""
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}-") as work:
        copy, archive = Path(work) / DATABASE_FILE, Path(work) / "archive"
        copy_database(store.database, copy)
        with closing(sqlite3.connect(copy)) as opened:
            named = _named_artifacts(opened)
        with archive.open("xb") as out:
            os.fchmod(out.fileno(), 0o600)
            with tarfile.open(fileobj=out, mode="w") as tar:
                tar.add(copy, DATABASE_FILE)
                for path in files:
                    if path.exists():
                        tar.add(path, path.name)
                if not _add_blobs(tar, store.blobs, named):
                    return False
            out.flush()
            os.fsync(out.fileno())
        archive.rename(target)
    sync_directory(target.absolute().parent)
    return True


def _named_artifacts(database: sqlite3.Connection) -> list[Digest]:
    """Those of models: an artifact's row outlives its last model, and its file does not."""
    known = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    table = "model_versions" if "model_versions" in known else "models"  # before revision 0021
    return [Digest(row[0]) for row in database.execute(f"SELECT DISTINCT digest FROM {table}")]


def copy_database(database: Database, target: Path) -> None:
    """Copy a SQLite database into a new file, as of one moment; writers go on meanwhile.

    Raises:
        StorageError: it cannot be read, or the disk is full.
    """
    try:
        with closing(sqlite3.connect(str(database.sqlite_path), isolation_level=None)) as source:
            source.execute("VACUUM INTO ?", (str(target),))
        with closing(sqlite3.connect(target)) as made:
            verdict = made.execute("PRAGMA quick_check").fetchone()[0]
    except sqlite3.Error as error:
        raise StorageError(
            f"the database cannot be copied: {error}", remedy="free space, or see the cause"
        ) from (error)
    if verdict != "ok":
        raise StorageError(f"the copy of the database is damaged: {verdict}", remedy="check the disk")


def _add_blobs(tar: tarfile.TarFile, blobs: Blobs, digests: list[Digest]) -> bool:
    for digest in digests:
        path = blobs.path(digest)
        try:
            tar.add(path, f"{ARTIFACT_FOLDER}/{path.relative_to(blobs.root)}")
        except FileNotFoundError:
            return False
    return True

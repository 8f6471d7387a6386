"""Which database the planner of a data directory uses, in a file there: for whoever reads beside it.

The planner may know it from its service's environment or its configuration file, which no command reads.
"""

from pathlib import Path
from typing import Final

from stageloom.planner.store.database import Database, sqlite_url
from stageloom.shared.durable_file import replace_synced
from stageloom.shared.errors import InputError, StorageError

USED_FILE: Final = "planner.database"

_POSTGRES_PORT: Final = 5432


def keep_url(data_dir: Path, database_url: str) -> None:
    """Keep a planner's URL, for its owner alone: it may hold a password. Empty: SQLite's default file.

    Raises:
        StorageError: the file cannot be written.
    """
    path = data_dir / USED_FILE
    try:
        if not database_url:
            path.unlink(missing_ok=True)
            return
        replace_synced(path, f"{_absolute(database_url)}\n".encode())
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", remedy="check the data directory and its disk"
        ) from error


def kept_url(data_dir: Path) -> str:
    """The URL that the running planner uses, or the last one did; empty: SQLite's default file.

    Raises:
        StorageError: the file cannot be read.
    """
    path = data_dir / USED_FILE
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read: {error.strerror}", remedy="run as the planner's account"
        ) from error


def same_database(one_url: str, other_url: str) -> bool:
    """Whether two URLs name one database; account, password and driver may differ.

    Raises:
        SettingError: one of them does not parse.
    """
    return _place(one_url) == _place(other_url)


def without_password(database_url: str) -> str:
    """A URL as it may be shown.

    Raises:
        SettingError: it does not parse.
    """
    return Database(database_url).url.render_as_string(hide_password=True)


def _absolute(database_url: str) -> str:
    """The URL for a process in any folder."""
    database = Database(database_url)
    path = database.sqlite_path
    url = database.url if path is None else database.url.set(database=str(path.absolute()))
    return url.render_as_string(hide_password=False)


def _place(database_url: str) -> tuple[object, ...]:
    database = Database(database_url)
    url, path = database.url, database.sqlite_path
    if path is not None:
        return ("sqlite", path.resolve())
    host = url.host or url.query.get("host")
    port = url.port or url.query.get("port") or _POSTGRES_PORT
    return (url.get_backend_name(), host, str(port), url.database, url.query.get("options"))


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


def require_chosen(data_dir: Path, database_url: str) -> None:
    """Make sure that a planner begins no empty database because the URL of the last one was forgotten.

    Raises:
        InputError: no URL is given, and the last planner of `data_dir` used another database than SQLite's
            default file.
        SettingError: the URL that it used cannot be used here.
    """
    kept, default_url = kept_url(data_dir), sqlite_url(data_dir / DATABASE_FILE)
    if kept and not database_url and not same_database(kept, default_url):
        raise InputError(
            f"the planner on {data_dir} used the database {without_password(kept)}; without a URL this start "
            f"would use {default_url}",
            remedy="name the one that is meant with --database-url",
        )


def sqlite_file(data_dir: Path, database_url: str) -> Path | None:
    """The file of a planner's database; None where that is on a server.

    Raises:
        SettingError: the URL does not parse.
    """
    return Database(database_url).sqlite_path if database_url else data_dir / DATABASE_FILE

"""One planner per data directory and per SQLite database, by whatever name that is opened."""

import os
from pathlib import Path

import pytest

from stageloom.planner.cli.app import execute
from stageloom.planner.config import load_config
from stageloom.planner.lock import DATABASE_LOCK, lock_data_dir, lock_sqlite
from stageloom.planner.service import Planner
from stageloom.planner.store.database import sqlite_url
from stageloom.planner.store.used_database import DATABASE_FILE, sqlite_file
from stageloom.shared.errors import ExitCode, InputError, StorageError
from tests.planner.processes import PlannerProcess


def test_a_data_directory_is_held_once_and_is_free_afterwards(tmp_path: Path) -> None:
    with lock_data_dir(tmp_path / "new"):
        with pytest.raises(InputError, match=f"process {os.getpid()}.*--data-dir"):
            lock_data_dir(tmp_path / "new")
    lock_data_dir(tmp_path / "new").release()


@pytest.mark.promise("planner-writes-database-sqlite")
@pytest.mark.parametrize("other", ["same", "relative", "symlink", "folder symlink"])
def test_a_sqlite_database_is_held_once_by_whatever_name(
    tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    file = folder / "planner.sqlite"
    file.touch()
    (tmp_path / "link.sqlite").symlink_to(file)
    (tmp_path / "elsewhere").symlink_to(folder)
    monkeypatch.chdir(folder)
    names = {
        "same": file,
        "relative": Path("./planner.sqlite"),
        "symlink": tmp_path / "link.sqlite",
        "folder symlink": tmp_path / "elsewhere/planner.sqlite",
    }
    with lock_sqlite(file, tmp_path / "first"):
        with pytest.raises(InputError, match=f"process {os.getpid()}, data in {tmp_path}/first") as caught:
            lock_sqlite(names[other], tmp_path / "second")
        assert "stop that one, or name another --database-url" in str(caught.value)
    lock_sqlite(names[other], tmp_path / "second").release()


def test_a_database_with_two_names_is_refused_as_sqlite_would_damage_it(tmp_path: Path) -> None:
    (tmp_path / "one.sqlite").touch()
    os.link(tmp_path / "one.sqlite", tmp_path / "two.sqlite")
    with pytest.raises(InputError, match="2 names"):
        lock_sqlite(tmp_path / "two.sqlite", tmp_path)


def test_a_database_that_is_not_there_yet_is_locked_before_it_is_made(tmp_path: Path) -> None:
    with lock_sqlite(tmp_path / "new.sqlite", tmp_path):
        assert (tmp_path / f"new.sqlite{DATABASE_LOCK}").exists()
    with pytest.raises(StorageError, match="--database-url"):
        lock_sqlite(tmp_path / "absent/new.sqlite", tmp_path)


def test_where_the_database_is_follows_from_its_url(tmp_path: Path) -> None:
    assert sqlite_file(tmp_path, "") == tmp_path / "planner.sqlite"
    assert sqlite_file(tmp_path, sqlite_url(tmp_path / "other")) == tmp_path / "other"
    assert sqlite_file(tmp_path, "postgresql+psycopg://nobody@/nothing") is None


def test_a_database_is_not_migrated_under_a_planner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither that of the data directory, nor one that a planner elsewhere has."""
    file, migrate = tmp_path / "shared.sqlite", ["planner", "migrate", "--data-dir", str(tmp_path / "home")]
    with lock_data_dir(tmp_path / "home"):
        assert execute(migrate) == ExitCode.USAGE
    with lock_sqlite(file, tmp_path / "other"):
        assert execute([*migrate, "--database-url", sqlite_url(file)]) == ExitCode.USAGE
    one, other = capsys.readouterr().err.splitlines()
    assert f"a planner already runs on {tmp_path / 'home'} (process {os.getpid()}); stop that one" in one
    assert f"a planner already runs on the database {file} (process {os.getpid()}" in other
    assert not file.exists() and not (tmp_path / "home" / DATABASE_FILE).exists()
    assert execute(migrate) == ExitCode.OK


@pytest.mark.promise("planner-writes-database-sqlite")
@pytest.mark.more
def test_two_planners_with_their_own_folders_do_not_share_a_sqlite_file(tmp_path: Path) -> None:
    """The second one changes nothing and names the first."""
    url = sqlite_url(tmp_path / "shared.sqlite")
    first = PlannerProcess(tmp_path / "first", "--database-url", url)
    settings = {"data_dir": tmp_path / "second", "listen": "127.0.0.1:0", "database_url": url}
    with pytest.raises(InputError, match="a planner already runs on the database") as caught:
        Planner(load_config(overrides=settings))
    assert f"data in {tmp_path}/first" in str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE
    first.stop()
    Planner(load_config(overrides=settings)).close()

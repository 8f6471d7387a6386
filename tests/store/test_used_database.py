"""A data directory says which database its planner uses; who reads beside the planner goes by that."""

import shutil
import stat
from pathlib import Path

import pytest

from stageloom.planner.config import load_config
from stageloom.planner.lock import LOCK_FILE
from stageloom.planner.service import Planner
from stageloom.planner.store.database import sqlite_url
from stageloom.planner.store.devices import device_infos
from stageloom.planner.store.store import ReadStore, Store
from stageloom.planner.store.used_database import (
    DATABASE_FILE,
    USED_FILE,
    keep_url,
    kept_url,
    require_chosen,
    require_own,
    same_database,
)
from stageloom.shared.errors import InputError, StorageError
from tests.planner.processes import ok
from tests.store.helpers import NANO, enrol

ELSEWHERE = "postgresql+psycopg://loom:secret@db.example/loom"


def test_the_last_planners_url_is_kept_with_its_password_for_its_owner_alone(tmp_path: Path) -> None:
    assert kept_url(tmp_path) == ""
    for url in ("sqlite:////srv/other.sqlite", ELSEWHERE):
        keep_url(tmp_path, url)
        assert kept_url(tmp_path) == url
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    keep_url(tmp_path, "")
    assert kept_url(tmp_path) == "" and not any(tmp_path.iterdir())


def test_a_file_named_relative_to_the_planners_folder_is_found_from_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep_url(tmp_path, "sqlite:///other.sqlite")
    assert kept_url(tmp_path) == f"sqlite:///{tmp_path}/other.sqlite"


def test_a_file_that_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / USED_FILE).mkdir()
    with pytest.raises(StorageError, match=r"cannot be read: .*; run as the planner's account"):
        kept_url(tmp_path)
    with pytest.raises(StorageError, match=r"cannot be written: .*; check the data directory"):
        keep_url(tmp_path, ELSEWHERE)


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("postgresql+psycopg://reader@db.example:5432/loom", True),
        ("postgresql+psycopg://loom@/loom?host=db.example", True),
        ("postgresql+psycopg://loom:secret@db.example/other", False),
        ("postgresql+psycopg://loom:secret@db.example:5433/loom", False),
        ("postgresql+psycopg://loom:secret@db.example/loom?options=-csearch_path%3Dother", False),
        ("sqlite:////srv/loom", False),
    ],
)
def test_urls_are_of_one_database_whoever_connects(url: str, same: bool) -> None:
    assert same_database(url, ELSEWHERE) is same


def test_readers_use_what_the_planner_used_and_an_explicit_url_goes_before_it(tmp_path: Path) -> None:
    """1. A planner had a file elsewhere; 2. an older one in the data directory is not taken for it."""
    home, elsewhere = tmp_path / "home", f"sqlite:///{tmp_path}/other.sqlite"
    home.mkdir()
    Store(home).close()
    store = Store(home, elsewhere)
    enrol(store)
    store.close()
    keep_url(home, elsewhere)
    for url, found in (("", [NANO]), (elsewhere, [NANO]), (f"sqlite:///{home / DATABASE_FILE}", [])):
        reading = ReadStore.open(home, url)
        assert [info.device for info in reading.read(device_infos)] == found
        reading.close()


def test_a_url_is_the_planners_own_if_it_names_what_it_used_or_nothing_says_otherwise(tmp_path: Path) -> None:
    default = f"sqlite:///{tmp_path / DATABASE_FILE}"
    require_own(tmp_path, ELSEWHERE)  # nothing is known of a planner there
    (tmp_path / DATABASE_FILE).touch()
    require_own(tmp_path, "")
    require_own(tmp_path, default)
    with pytest.raises(InputError, match=r"another database than the planner on .* uses; leave out --data"):
        require_own(tmp_path, ELSEWHERE)
    keep_url(tmp_path, ELSEWHERE)
    require_own(tmp_path, ELSEWHERE)
    with pytest.raises(InputError, match="another database"):
        require_own(tmp_path, default)


def test_a_start_without_a_url_is_refused_where_the_last_planner_used_another_database(
    tmp_path: Path,
) -> None:
    home, elsewhere = tmp_path / "home", sqlite_url(tmp_path / "other.sqlite")
    home.mkdir()
    keep_url(home, elsewhere)
    names = (
        r"used the database sqlite:\S+/other\.sqlite; .* use sqlite:\S+/home/planner\.sqlite; name the one"
    )
    with pytest.raises(InputError, match=names):
        Planner(load_config(environment={}, overrides={"data_dir": home, "listen": "127.0.0.1:0"}))
    assert kept_url(home) == elsewhere and not (home / DATABASE_FILE).exists()
    keep_url(home, ELSEWHERE)
    with pytest.raises(InputError, match=r"loom:\*\*\*@db\.example/loom"):
        require_chosen(home, "")
    default = sqlite_url(home / DATABASE_FILE)
    require_chosen(home, default)
    keep_url(home, default)
    require_chosen(home, "")


def test_migrate_changes_the_planners_database_and_makes_no_other(
    tmp_path: Path, migrated_file: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(migrated_file, tmp_path / "other.sqlite")
    keep_url(home, f"sqlite:///{tmp_path}/other.sqlite")
    ok(home, "migrate")
    assert sorted(path.name for path in home.iterdir()) == [USED_FILE, LOCK_FILE]

"""Migrations: the declared tables, kept data, two planners at once, a newer schema."""

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from planner.store import schema
from planner.store.database import Database, sqlite_url
from planner.store.store import DATABASE_FILE, ReadStore, Store
from planner.store.tables import Table
from shared.errors import InputError, SettingError, StorageError
from tests.store.helpers import NANO, enrol, finish, start


def test_an_empty_database_is_upgraded_to_the_declared_tables(store: Store) -> None:
    with store.database.engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, Table.metadata) == []


def test_the_list_of_revisions_is_what_the_scripts_say(store: Store) -> None:
    scripts = ScriptDirectory.from_config(schema.alembic_config(store.database))
    newest_first = [script.revision for script in scripts.walk_revisions()]
    assert tuple(reversed(newest_first)) == schema.REVISIONS


def test_a_second_migration_changes_nothing_and_keeps_the_data(tmp_path: Path, database_url: str) -> None:
    first = Store(tmp_path, database_url)
    enrol(first)
    first.close()
    second = Store(tmp_path, database_url)
    assert [info.device for info in second.devices()] == [NANO]
    assert schema.migrate(second.database) == (schema.HEAD, schema.HEAD)
    second.close()


def test_two_planners_migrate_at_once(tmp_path: Path, database_url: str) -> None:
    code = """
import sys
from pathlib import Path
from planner.store.store import Store
store = Store(Path(sys.argv[1]), sys.argv[2])
print(store.epoch())
store.close()
"""
    children = [start(code, str(tmp_path), database_url) for _ in range(3)]
    assert [finish(child).split() for child in children] == [["1"]] * 3


def test_a_newer_schema_is_refused_with_the_remedy(tmp_path: Path, database_url: str) -> None:
    store = Store(tmp_path, database_url)
    with store.database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    for open_it in (Store, ReadStore.open):
        with pytest.raises(StorageError, match=rf"9999, newer than {schema.HEAD}.*; upgrade stageloom"):
            open_it(tmp_path, database_url)


def test_a_reader_does_not_migrate(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no planner data in"):
        ReadStore.open(tmp_path)
    Database(sqlite_url(tmp_path / DATABASE_FILE)).engine.connect().close()
    with pytest.raises(
        StorageError, match=f"schema none, this version needs {schema.HEAD}; start the planner"
    ):
        ReadStore.open(tmp_path)


def test_a_file_that_is_no_database_is_one_line_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / DATABASE_FILE).write_bytes(b"not a database, but long enough to be looked at\n" * 100)
    with pytest.raises(StorageError, match="not a database; restore the database from a backup") as caught:
        Store(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["nonsense", "oracle9://x/y", "mysql+nosuchdriver://x/y"])
def test_an_unusable_database_url_stops_start_up(url: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="database_url cannot be used"):
        Store(tmp_path, url)

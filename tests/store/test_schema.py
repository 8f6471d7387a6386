"""Migrations: the declared tables, kept data, two planners at once, a newer schema."""

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, text

from stageloom.planner.store import schema
from stageloom.planner.store.database import Database, sqlite_url
from stageloom.planner.store.devices import device_infos
from stageloom.planner.store.policies import fitting_policy, keep_verdict, policy_body, policy_infos
from stageloom.planner.store.store import ReadStore, Store
from stageloom.planner.store.tables import LedgerRow, Table
from stageloom.planner.store.telemetry import telemetry_balance
from stageloom.planner.store.used_database import DATABASE_FILE
from stageloom.planner.telemetry import Balance
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError, SettingError, StorageError
from tests.architecture.sources import ROOT
from tests.store.helpers import NANO, enrol, finish, start, verdict_on

pytestmark = pytest.mark.more


@pytest.mark.promise("migrations-equal-declared-tables", "migrations-go-up-older")
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


EVERY_RUN = (schema.REVISIONS[0], *schema.REVISIONS[-3:-1])
"""The way from the first passes all revisions; a new one is reached from the last. The rest is `full`."""


@pytest.mark.promise("migrations-go-up-older")
@pytest.mark.parametrize(
    "oldest",
    [one if one in EVERY_RUN else pytest.param(one, marks=pytest.mark.full) for one in schema.REVISIONS[:-1]],
)
def test_an_older_database_is_upgraded_to_the_declared_tables_and_keeps_its_data(
    tmp_path: Path, database_url: str, oldest: str
) -> None:
    """1. a database of an older revision has two rows in each table; 2. a planner opens it; 3. its tables are
    the declared ones, and every value that was there is there."""
    database = Database(database_url or sqlite_url(tmp_path / DATABASE_FILE))
    command.upgrade(schema.alembic_config(database), oldest)
    tables = MetaData()
    tables.reflect(database.engine)
    with database.engine.begin() as connection:
        for table in tables.sorted_tables:
            if table.name != "alembic_version":
                connection.execute(table.insert(), [_filled(table, number) for number in (1, 2)])
    before = _contents(database, tables)
    database.close()
    store = Store(tmp_path, database_url)
    assert schema.current_revision(store.database) == schema.HEAD
    with store.database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
    del before["alembic_version"]
    if "model_versions" not in before:
        tables.remove(tables.tables["models"])
        assert _first_versions(store.database) == before.pop("models"), "a name's artifact is its version 1"
    after = _contents(store.database, tables)
    assert {name: after[name] for name in before} == before
    assert all(len(rows) == 2 for rows in before.values()) and len(before) >= 14
    store.close()


def _first_versions(database: Database) -> list[tuple[object, ...]]:
    """Name, artifact and time of every model, as tables of before had them."""
    columns = "SELECT model, digest, added_at_us FROM model_versions WHERE number = 1 ORDER BY model"
    with database.engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text(columns))]


def _filled(table: sa.Table, number: int) -> dict[str, object]:
    """A row in which every column has a value that no default would give; keys refer to the row itself."""
    values: dict[str, object] = {}
    for column in table.columns:
        kind = column.type
        if isinstance(kind, sa.Boolean):
            values[column.name] = True
        elif isinstance(kind, sa.Integer):
            values[column.name] = number
        elif isinstance(kind, sa.Float):
            values[column.name] = number + 0.5
        elif isinstance(kind, sa.LargeBinary):
            values[column.name] = b"%d" % number
        else:
            values[column.name] = f"text {number}"
    return values


def _contents(database: Database, tables: MetaData) -> dict[str, list[tuple[object, ...]]]:
    """The rows of the columns that `tables` knows."""
    with database.engine.connect() as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(table.select().order_by(*table.columns))]
            for table in tables.sorted_tables
        }


def test_ledgers_of_the_first_revision_learn_what_is_settled_and_what_was_lost(
    tmp_path: Path, database_url: str
) -> None:
    """A boot that balances, one whose database was restored once, and one that is told by its rows alone."""
    database = Database(database_url or sqlite_url(tmp_path / DATABASE_FILE))
    command.upgrade(schema.alembic_config(database), "0001")
    with database.engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO telemetry_ledgers (device, boot, produced, dropped, stored, version) VALUES "
                "('nano', 1, 10, 4, 6, 1), ('nano', 2, 10, 1, 2, 1), ('nano', 3, 0, 0, 1, 1)"
            )
        )
        connection.execute(
            text(
                "INSERT INTO telemetry (device, boot, sequence, kind, at_us, body) VALUES "
                "('nano', 3, 41, 'event', 5, '')"
            )
        )
    database.close()
    store = Store(tmp_path, database_url)
    with store.database.read() as session:
        found = session.scalars(sa.select(LedgerRow).order_by(LedgerRow.boot)).all()
        assert [(row.lost, row.settled) for row in found] == [(0, 10), (7, 10), (0, 42)]
    assert store.read(telemetry_balance, NANO) == Balance(20, 9, 5, 7)
    store.close()


@pytest.mark.promise("policy-published-through-gate", "migrations-go-up-older")
def test_a_policy_that_was_kept_before_there_were_checks_has_no_say_and_is_there_for_devices_that_have_it(
    tmp_path: Path, database_url: str
) -> None:
    """1. Schema 0024 with such a policy. 2. A planner opens it. 3. The policy passes its check."""
    database = Database(database_url or sqlite_url(tmp_path / DATABASE_FILE))
    command.upgrade(schema.alembic_config(database), "0024")
    body, model = b"policy", digest_bytes([b"model"])
    digest = digest_bytes([body])
    row = {
        "digest": digest, "policy": "maddpg", "device_class": "cpu-2-core",
        "artifacts": json.dumps({model: "relu"}), "settings": "{}", "versions": "{}", "curves": "[]",
        "ratio": 0.9, "steps": 70, "trained_at_us": 5, "body": body,
    }  # fmt: skip
    tables = MetaData()
    tables.reflect(database.engine, only=["checkpoints"])
    with database.engine.begin() as connection:
        connection.execute(tables.tables["checkpoints"].insert(), [row])
    database.close()
    store = Store(tmp_path, database_url)
    (info,) = store.read(policy_infos)
    why = f"policy {digest[:12]} was not checked: stageloom policy check {digest[:12]}"
    assert (info.withheld, info.verdict, info.unchecked, info.unshown) == (why, None, False, "")
    assert store.read(fitting_policy, "maddpg", "cpu-2-core", [model]) == (b"", why)
    assert store.read(policy_body, digest) == body, "a device that has it may fetch it again"
    store.write(keep_verdict, verdict_on(body))
    assert store.read(fitting_policy, "maddpg", "cpu-2-core", [model]) == (body, "")
    store.close()


@pytest.mark.promise("migrations-equal-declared-tables")
def test_a_second_migration_changes_nothing_and_keeps_the_data(tmp_path: Path, database_url: str) -> None:
    first = Store(tmp_path, database_url)
    enrol(first)
    first.close()
    second = Store(tmp_path, database_url)
    assert [info.device for info in second.read(device_infos)] == [NANO]
    assert schema.migrate(second.database) == (schema.HEAD, schema.HEAD)
    second.close()


@pytest.mark.promise("migrations-equal-declared-tables")
def test_two_planners_migrate_at_once(tmp_path: Path, database_url: str) -> None:
    code = """
import sys
from pathlib import Path
from stageloom.planner.store.devices import planner_epoch
from stageloom.planner.store.store import Store
store = Store(Path(sys.argv[1]), sys.argv[2])
print(store.read(planner_epoch))
store.close()
"""
    children = [start(code, str(tmp_path), database_url) for _ in range(3)]
    assert [finish(child).split() for child in children] == [["1"]] * 3


@pytest.mark.promise("migrations-equal-declared-tables")
def test_a_newer_schema_is_refused_with_the_remedy(tmp_path: Path, database_url: str) -> None:
    store = Store(tmp_path, database_url)
    with store.database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    for open_it in (Store, ReadStore.open):
        with pytest.raises(StorageError, match=f"9999, newer than {schema.HEAD}.*; upgrade stageloom"):
            open_it(tmp_path, database_url)


def test_the_page_of_the_store_has_every_table() -> None:
    page = (ROOT / "docs" / "store.md").read_text(encoding="utf-8")
    assert [name for name in Table.metadata.tables if f"`{name}`" not in page] == []


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

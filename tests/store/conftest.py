"""One suite for both databases: SQLite, and Postgres from a wheel or where STAGELOOM_TEST_POSTGRES says."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, inspect, make_url, text

from benchmarks.adversary.postgres import binaries, postgres_server
from stageloom.planner.store import schema
from stageloom.planner.store.database import Database
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import Table
from stageloom.planner.store.used_database import DATABASE_FILE
from stageloom.shared.clock import ManualClock
from tests.store.migrated import migrated_database

POSTGRES = os.environ.get("STAGELOOM_TEST_POSTGRES", "")
"""URL of a database that tests may write in, such as postgresql+psycopg://user@host/stageloom_test; they use
schemas of their own. Without it a server is started from the wheel that the extra `dev` installs."""


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a Postgres database, started once for all tests of this process."""
    if POSTGRES:
        yield POSTGRES
        return
    programs = binaries()
    if programs is None:
        pytest.skip("no Postgres: install the extra `dev`, or set STAGELOOM_TEST_POSTGRES")
    with postgres_server(programs) as server:
        yield server.url


def emptied(server: str, name: str = "stageloom_test") -> str:
    """URL of a schema of this process's own in which nothing is."""
    # Processes of a parallel test run share a server that STAGELOOM_TEST_POSTGRES names, but not a schema.
    name += f"_{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
    url = make_url(server).update_query_dict({"options": f"-csearch_path={name}"})
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA IF EXISTS {name} CASCADE"))
        connection.execute(text(f"CREATE SCHEMA {name}"))
    engine.dispose()
    return url.render_as_string(hide_password=False)


@pytest.fixture(scope="session")
def migrated_schema(postgres: str) -> Iterator[Callable[[], str]]:
    """Gives the URL of a schema as the migrations leave it: emptying tables takes less than making them."""
    database = Database(emptied(postgres, "stageloom_store"))
    schema.migrate(database)
    with database.engine.begin() as connection:
        sequences = inspect(connection).get_sequence_names()
    told = [f"DELETE FROM {table.name}" for table in reversed(Table.metadata.sorted_tables)]
    told += [f"ALTER SEQUENCE {name} RESTART" for name in sequences]

    def cleared() -> str:
        with database.engine.begin() as connection:
            connection.exec_driver_sql(";\n".join(told))
        return database.engine.url.render_as_string(hide_password=False)

    yield cleared
    database.close()


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """Empty text for SQLite in the data directory, or a Postgres database: an empty schema, for the fixture
    `store` one that is migrated."""
    if request.param == "sqlite":
        return ""
    if "store" in request.fixturenames:
        found: str = request.getfixturevalue("migrated_schema")()
        return found
    return emptied(request.getfixturevalue("postgres"))


@pytest.fixture(scope="session")
def migrated_file() -> Path:
    """A SQLite file that was migrated."""
    return migrated_database()


@pytest.fixture(scope="session")
def migration(postgres: str) -> str:
    """All that the migrations tell a Postgres database: told at once it takes a fraction of the time."""
    said: list[str] = []

    def hear(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if not statement.startswith("SELECT"):
            assert not parameters, statement
            said.append(statement)

    database = Database(emptied(postgres, "stageloom_migrated"))
    event.listen(database.engine, "before_cursor_execute", hear)
    schema.migrate(database)
    database.close()
    return ";\n".join(said)


@pytest.fixture
def clock() -> ManualClock:
    """A clock that moves only when told."""
    return ManualClock()


@pytest.fixture
def store(
    request: pytest.FixtureRequest, tmp_path: Path, database_url: str, clock: ManualClock
) -> Iterator[Store]:
    """An empty store, as the migrations leave it."""
    if database_url and "stageloom_store" not in database_url:
        migration = request.getfixturevalue("migration")
        database = Database(database_url)
        with database.engine.begin() as connection:
            connection.exec_driver_sql(migration)
        database.close()
    elif not database_url:
        shutil.copyfile(request.getfixturevalue("migrated_file"), tmp_path / DATABASE_FILE)
    made = Store(tmp_path, database_url, clock)
    yield made
    made.close()

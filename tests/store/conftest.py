"""One suite for both databases: SQLite, and Postgres from a wheel or where STAGELOOM_TEST_POSTGRES says."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from planner.store.store import Store
from shared.clock import ManualClock
from tests.store.embedded import binaries, postgres_server

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
    with postgres_server(programs) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """Empty text for SQLite in the data directory, or a Postgres database whose schema is empty."""
    if request.param == "sqlite":
        return ""
    # Processes of a parallel test run share a server that STAGELOOM_TEST_POSTGRES names, but not a schema.
    schema = f"stageloom_test_{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
    url = make_url(request.getfixturevalue("postgres")).update_query_dict(
        {"options": f"-csearch_path={schema}"}
    )
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA IF EXISTS {schema} CASCADE"))
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    engine.dispose()
    return url.render_as_string(hide_password=False)


@pytest.fixture
def clock() -> ManualClock:
    """A clock that moves only when told."""
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, database_url: str, clock: ManualClock) -> Iterator[Store]:
    """An empty store."""
    made = Store(tmp_path, database_url, clock)
    yield made
    made.close()

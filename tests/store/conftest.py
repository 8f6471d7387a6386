"""One suite for every database: SQLite always, Postgres where STAGELOOM_TEST_POSTGRES names a server."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.store.store import Store
from shared.clock import ManualClock

POSTGRES = os.environ.get("STAGELOOM_TEST_POSTGRES", "")
"""URL of a database that may be emptied, such as postgresql+psycopg://user@host/stageloom_test."""


@pytest.fixture(params=["sqlite", *(["postgres"] if POSTGRES else [])])
def database_url(request: pytest.FixtureRequest) -> str:
    """Empty text for SQLite in the data directory, or the emptied Postgres database."""
    if request.param == "sqlite":
        return ""
    from sqlalchemy import create_engine, text

    engine = create_engine(POSTGRES)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return POSTGRES


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

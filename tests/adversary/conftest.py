"""The rig of these tests: on SQLite in every run, on Postgres, too, with the marker `full`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversary.rig import Rig
from tests.store.conftest import clock, emptied, migrated_file, migrated_schema, migration, postgres, store

__all__ = ["clock", "migrated_file", "migrated_schema", "migration", "postgres", "store"]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.full)])
def database_url(request: pytest.FixtureRequest) -> str:
    """As the store's tests have it. `test_extremes` asks both in every run what they do not take."""
    return "" if request.param == "sqlite" else emptied(request.getfixturevalue("postgres"))


@pytest.fixture
def rig(tmp_path: Path, database_url: str) -> Iterator[Rig]:
    """A running planner on an empty database, SQLite or Postgres."""
    made = Rig(tmp_path, database_url)
    made.start()
    yield made
    made.close()

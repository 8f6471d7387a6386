"""The rig of these tests, on both databases."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversary.rig import Rig
from tests.store.conftest import clock, database_url, migrated_file, migration, postgres, store

__all__ = ["clock", "database_url", "migrated_file", "migration", "postgres", "store"]


@pytest.fixture
def rig(tmp_path: Path, database_url: str) -> Iterator[Rig]:
    """A running planner on an empty database, SQLite or Postgres."""
    made = Rig(tmp_path, database_url)
    made.start()
    yield made
    made.close()

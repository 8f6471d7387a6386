"""One planner per database on a server: whoever claims it writes under a lock, or not at all."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from stageloom.planner.store.database import CLAIM, Database
from stageloom.planner.store.devices import device_info, device_infos
from stageloom.planner.store.schema import current_revision
from stageloom.planner.store.store import Store
from stageloom.shared.errors import StorageError, UnavailableError
from tests.planner.processes import until
from tests.store.helpers import NANO, enrol

on_a_server = pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
HOLDER = f"SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = {CLAIM} AND granted"


@pytest.fixture
def other(database_url: str) -> Iterator[Database]:
    """The same database as another process sees it."""
    database = Database(database_url)
    yield database
    database.close()


def end_the_locks_session(other: Database) -> None:
    with other.engine.connect() as connection:
        assert connection.scalars(
            text(f"SELECT pg_terminate_backend(pid, 10000) FROM ({HOLDER}) AS holder")
        ).all()


def claimed(other: Database) -> bool:
    with other.claim() as alone:
        return alone


def holders(other: Database) -> int:
    with other.engine.connect() as connection:
        return len(connection.scalars(text(HOLDER)).all())


@pytest.mark.promise("planner-writes-database-sqlite")
@on_a_server
def test_a_claimed_database_is_not_claimed_twice_and_is_free_again_afterwards(
    store: Store, other: Database
) -> None:
    with store.database.claim() as alone:
        enrol(store)
        assert alone and not claimed(other)
        assert store.read(device_info, NANO).device == NANO
    until(lambda: claimed(other))  # the server notices in its own time that a connection was closed


@on_a_server
def test_who_lost_the_connection_of_its_lock_takes_the_lock_again_before_it_writes(
    store: Store, other: Database
) -> None:
    with store.database.claim():
        end_the_locks_session(other)
        assert holders(other) == 0
        with pytest.raises(StorageError):
            enrol(store)
        enrol(store)
        assert holders(other) == 1
        store.database.check_claim()
        assert not claimed(other)


@on_a_server
def test_who_lost_its_lock_to_another_planner_writes_nothing_any_more(store: Store, other: Database) -> None:
    """Nor after that other planner ended: what the first one knows is no longer what the database says."""
    with store.database.claim():
        end_the_locks_session(other)
        with other.claim() as taken:
            assert taken
            with pytest.raises(StorageError):
                enrol(store)
            with pytest.raises(UnavailableError, match="another planner took this database"):
                enrol(store)
        with pytest.raises(UnavailableError, match="another planner took this database"):
            enrol(store)
        with pytest.raises(UnavailableError, match="stop that one"):
            store.database.check_claim()
        assert store.read(device_infos) == []
        until(lambda: holders(other) == 0)


@on_a_server
def test_a_lock_that_the_server_keeps_for_a_connection_lost_on_the_way_is_taken_back(
    store: Store, other: Database
) -> None:
    """The network cut a connection, and the server has not noticed: its session has the lock."""
    with store.database.claim():
        with store.database.write() as session:
            lost: Any = session.connection().connection.dbapi_connection
        store.database._writer.dispose(close=False)
        assert holders(other) == 1
        enrol(store)
        assert holders(other) == 1
        lost.close()
        assert holders(other) == 1


@on_a_server
def test_a_database_that_another_planner_has_is_not_migrated(
    other: Database, tmp_path: Path, database_url: str
) -> None:
    with other.claim(), ExitStack() as claim:
        with pytest.raises(UnavailableError, match="another planner runs on this database"):
            Store(tmp_path, database_url, claim=claim)
    assert current_revision(other) is None


def test_a_server_that_cannot_be_reached_is_not_claimed(tmp_path: Path) -> None:
    database = Database(f"postgresql+psycopg://stageloom@/postgres?host={tmp_path}")
    with pytest.raises(StorageError), database.claim():
        pass

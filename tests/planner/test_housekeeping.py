"""The housekeeping thread: begins at once, stops between two steps, outlives a failing database."""

import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageloom.planner import housekeeping
from stageloom.planner.housekeeping import Housekeeper
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.retention import Retention
from stageloom.planner.store.store import Store
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import StorageError
from stageloom.shared.messages.telemetry import RowKind
from tests.planner.processes import until
from tests.store.helpers import enrol, history, write_of
from tests.store.migrated import new_store

DAY = Retention(86_400, 0, 0)


def test_old_rows_are_rolled_up_in_the_background(tmp_path: Path) -> None:
    clock = ManualClock()
    store = new_store(tmp_path, clock=clock)
    enrol(store)
    LinkStore(store).append_telemetry([write_of(0, 99)])
    clock.advance(2 * 86_400)
    housekeeper = Housekeeper(store, DAY)
    (minute,) = until(lambda: _one_minute(store))
    assert minute.rows == 100
    housekeeper.close()
    store.close()


def _one_minute(store: Store) -> object:
    entries = history(store, [RowKind.QUEUE_SAMPLE])
    return entries if [entry.width_s for entry in entries] == [60] else None


def test_a_planner_that_stops_does_not_wait_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "tidy", lambda store, keep: itertools.repeat(1))  # there is always more
    store = new_store(tmp_path)
    Housekeeper(store, DAY).close()
    store.close()


def test_a_failing_database_is_logged_and_tried_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def broken(store: Store, keep: Retention) -> Iterator[int]:
        asked.set()
        raise StorageError("the disk is full", remedy="free space")

    monkeypatch.setattr(housekeeping, "tidy", broken)
    store = new_store(tmp_path)
    with caplog.at_level(logging.WARNING, "stageloom.planner.housekeeping"):
        housekeeper = Housekeeper(store, DAY)
        assert asked.wait(30)
        housekeeper.close()
    assert "the disk is full; free space" in caplog.text
    store.close()

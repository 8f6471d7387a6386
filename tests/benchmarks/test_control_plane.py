"""`benchmarks.control_plane` on a small fleet: every phase ends, and what acknowledged is lost is counted."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control_plane.__main__ import kill, measure
from benchmarks.control_plane.clients import Books, Seen, Tally
from benchmarks.control_plane.planner import Enrolled, enrol
from stageloom.planner.dispatch.ports import ReportRecord
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.store import Store
from stageloom.planner.store.used_database import DATABASE_FILE
from stageloom.shared.messages.control import Report
from tests.store.helpers import write_of
from tests.store.migrated import begin_migrated

BOOT, ROWS = 7, 10


class Fleet:
    """Devices and their planner in one: it is killed, loses what `loses` says, and is told newer reports."""

    def __init__(self, data_dir: Path, fleet: list[Enrolled], loses: str) -> None:
        self.data_dir, self.startup_s = data_dir, 0.0
        self._fleet, self._loses, self._revision = fleet, loses, 0
        with closing(Store(data_dir)) as store:
            rows = [write_of(0, ROWS - 1, BOOT, device=one.device) for one in fleet]
            LinkStore(store).append_telemetry(rows)
        self.report()

    def report(self) -> "Fleet":
        self._revision += 1
        with closing(Store(self.data_dir)) as store:
            report = Report(revision=self._revision)
            LinkStore(store).record_reports([ReportRecord(one.device, BOOT, report) for one in self._fleet])
        return self

    def kill(self) -> float:
        with closing(sqlite3.connect(self.data_dir / DATABASE_FILE)) as database:
            database.execute(self._loses)
            database.commit()
        return time.monotonic()

    def tell(self, order: object) -> None: ...

    def look(self, *, books: bool = False) -> Seen:
        told = [Books(one.device, BOOT, ROWS, self._revision) for one in self._fleet if books]
        return Seen(0.0, 0.0, len(self._fleet), 0, len(self._fleet), 1_000, Tally(), told)


@pytest.mark.parametrize(
    ("loses", "lost"),
    [
        ("SELECT 1", 0),
        ("DELETE FROM reported WHERE device = 'bench-0001'", 1),
        ("UPDATE reported SET revision = 0", 2),
        ("DELETE FROM telemetry WHERE device = 'bench-0000' AND sequence IN (3, 4, 9)", 3),
    ],
)
def test_what_a_kill_loses_of_what_was_acknowledged_counts_once_whatever_comes_after_it(
    tmp_path: Path, loses: str, lost: int
) -> None:
    begin_migrated(tmp_path / "planner")
    fleet = enrol(tmp_path / "planner", 2)
    killed: Any = Fleet(tmp_path / "planner", fleet, loses)
    figures, again = kill(killed, killed, fleet, killed.report)
    assert again is killed and figures["lost_acknowledged"] == lost
    assert figures["acknowledged_rows_at_kill"] == figures["acknowledged_rows_at_end"] == 2 * ROWS


@pytest.mark.full
def test_a_small_fleet_goes_through_every_phase() -> None:
    figures, rows = measure(12, 2.0)
    assert figures["devices"] == 12 and figures["lost_acknowledged"] == 0
    assert figures["heartbeats_per_s"] > 0 and figures["rows_committed_per_s"] > 0
    assert figures["acknowledged_rows_at_end"] >= figures["acknowledged_rows_at_kill"] > 0
    assert [row["phase"] for row in rows] == [
        "connect",
        "heartbeats alone",
        "heartbeats and telemetry",
        "push beside heartbeats and telemetry",
    ]

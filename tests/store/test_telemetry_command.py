"""`stageloom telemetry` shows rows where they are kept, and what they were rolled up to where not."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from stageloom.planner.cli.app import execute
from stageloom.planner.dispatch.ports import StoredRow, TelemetryWrite
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.retention import Retention, tidy
from stageloom.planner.store.store import Store
from stageloom.shared.clock import ManualClock
from stageloom.shared.messages.telemetry import Ledger, QueueSample, RowKind, TaskCounters
from tests.store.helpers import NANO, T0_US, enrol, row

DAY_S = 86_400


def run(home: Path, database_url: str, *arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    where = ("--data-dir", str(home), "--database-url", database_url)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = execute(["telemetry", *arguments, *where])
    return code, out.getvalue(), err.getvalue()


def entries(home: Path, database_url: str, *arguments: str) -> list[dict[str, Any]]:
    code, out, err = run(home, database_url, str(NANO), *arguments, "--json")
    assert (code, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out)
    return found


def fill(store: Store, clock: ManualClock) -> None:
    """Two queue samples and two counters on each of ten days, tidied to one day of rows, four of minutes."""
    enrol(store)
    sequence = 0
    for day in range(10):
        base_us = clock.wall_us() - T0_US
        rows: list[StoredRow] = []
        for offset_us in (0, 1_000_000):
            sample = QueueSample("m", day + offset_us // 1_000_000, 0, 0)
            counters = TaskCounters("m", 1_000_000, 2, 2, 0, 0, 0, 0)
            for data, kind in ((sample, RowKind.QUEUE_SAMPLE), (counters, RowKind.TASK_COUNTERS)):
                made = row(base_us + offset_us, data, kind=kind)
                rows.append(StoredRow(7, sequence, made.at_us, kind, made.body, data))
                sequence += 1
        LinkStore(store).append_telemetry([TelemetryWrite(NANO, tuple(rows), (Ledger(7, sequence, 0),))])
        clock.advance(DAY_S)
    assert sum(tidy(store, Retention(1.5 * DAY_S, 4 * DAY_S, 0))) > 0


def test_history_is_shown_as_fine_as_it_is_kept(
    store: Store, clock: ManualClock, tmp_path: Path, database_url: str
) -> None:
    fill(store, clock)
    found = entries(tmp_path, database_url, "--kind", "queue_sample")
    assert [one.get("width_s", 0) for one in found] == [3600] * 6 + [60] * 3 + [0] * 2
    assert [one.get("rows", 1) for one in found] == [2] * 9 + [1] * 2
    assert found[0] == {
        "at_us": T0_US - T0_US % 3_600_000_000,
        "kind": "queue_sample",
        "width_s": 3600,
        "rows": 2,
        "model": "m",
        "tasks": {"mean": 0.5, "min": 0.0, "max": 1.0, "samples": 2},
        "queued_work_us": {"mean": 0.0, "min": 0.0, "max": 0.0, "samples": 2},
        "oldest_age_us": {"mean": 0.0, "min": 0.0, "max": 0.0, "samples": 2},
    }
    assert found[-1]["tasks"] == 10 and found == sorted(found, key=lambda one: one["at_us"])
    assert entries(tmp_path, database_url, "--kind", "queue_sample", "--limit", "3") == found[-3:]
    since = entries(tmp_path, database_url, "--kind", "queue_sample", "--since-us", str(found[7]["at_us"]))
    assert since == found[7:]


def test_everything_can_be_rolled_up_to_one_width(
    store: Store, clock: ManualClock, tmp_path: Path, database_url: str
) -> None:
    fill(store, clock)
    found = entries(tmp_path, database_url, "--kind", "task_counters", "--by", "hour")
    assert [(one["width_s"], one["rows"], one["completed"]) for one in found] == [(3600, 2, 4)] * 10


def test_people_see_the_span_and_the_books(
    store: Store, clock: ManualClock, tmp_path: Path, database_url: str
) -> None:
    fill(store, clock)
    code, out, err = run(tmp_path, database_url, str(NANO), "--kind", "queue_sample")
    lines = [line.split("\t") for line in out.splitlines()]
    assert code == 0 and lines[0] == ["at (UTC)", "span", "kind", "values"]
    assert [line[1] for line in lines[1:]] == ["hour"] * 6 + ["minute"] * 3 + ["row"] * 2
    assert "tasks=0.5(0..1)" in lines[1][3]
    assert err == "telemetry: 40 rows produced, 40 stored, 0 dropped, 0 lost\n"

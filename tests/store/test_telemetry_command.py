"""`stageloom device telemetry` shows rows where they are kept, and what they were rolled up to where not."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from stageloom.planner.cli.app import execute
from stageloom.planner.store.store import Store
from stageloom.planner.store.used_database import keep_url
from stageloom.shared.clock import ManualClock
from tests.store.helpers import NANO, T0_US
from tests.store.test_telemetry_history import fill


def run(home: Path, database_url: str, *arguments: str) -> tuple[int, str, str]:
    keep_url(home, database_url)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = execute(["device", "telemetry", *arguments, "--data-dir", str(home)])
    return code, out.getvalue(), err.getvalue()


def entries(home: Path, database_url: str, *arguments: str) -> list[dict[str, Any]]:
    code, out, err = run(home, database_url, str(NANO), *arguments, "--json")
    assert (code, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out)
    return found


def test_history_is_shown_as_fine_as_it_is_kept(
    store: Store, clock: ManualClock, tmp_path: Path, database_url: str
) -> None:
    fill(store, clock)
    found = entries(tmp_path, database_url, "--kind", "queue_sample")
    assert [one["width_s"] for one in found] == [3600] * 6 + [60] * 3 + [0] * 2
    assert [one["rows"] for one in found] == [2] * 9 + [1] * 2
    assert found[0] == {
        "at_us": T0_US - T0_US % 3_600_000_000,
        "kind": "queue_sample",
        "width_s": 3600,
        "rows": 2,
        "values": {
            "model": "m",
            "tasks": {"mean": 0.5, "min": 0.0, "max": 1.0, "samples": 2},
            "queued_work_us": {"mean": 0.0, "min": 0.0, "max": 0.0, "samples": 2},
            "oldest_age_us": {"mean": 0.0, "min": 0.0, "max": 0.0, "samples": 2},
        },
    }
    assert found[-1]["values"]["tasks"] == 10 and found == sorted(found, key=lambda one: one["at_us"])
    assert entries(tmp_path, database_url, "--kind", "queue_sample", "--limit", "3") == found[-3:]
    since = entries(tmp_path, database_url, "--kind", "queue_sample", "--since-us", str(found[7]["at_us"]))
    assert since == found[7:]


def test_everything_can_be_rolled_up_to_one_width(
    store: Store, clock: ManualClock, tmp_path: Path, database_url: str
) -> None:
    fill(store, clock)
    found = entries(tmp_path, database_url, "--kind", "task_counters", "--by", "hour")
    assert [(one["width_s"], one["rows"], one["values"]["completed"]) for one in found] == [(3600, 2, 4)] * 10


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

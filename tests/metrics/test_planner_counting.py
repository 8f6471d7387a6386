"""What a planner counts: searches however they end, rows once, requests by route and status."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.metrics.counting import CountedPool, PlannerCounters
from stageloom.planner.metrics.scrape import MOST_DEVICES
from stageloom.planner.store.link import LinkStore
from stageloom.shared.clock import ManualClock
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Origin
from stageloom.shared.messages.telemetry import Ledger, RowKind, TaskCounters, TrialEnded
from stageloom.shared.metrics import SECONDS
from tests.store.helpers import NANO, enrol, row
from tests.store.migrated import new_store


class PlayedPool:
    """Futures that a test ends."""

    workers, where = 3, "processes"

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        if function is not print:
            raise RuntimeError("no such function")
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None: ...


@pytest.mark.promise("metrics-count-each-once")
def test_searches_are_counted_however_they_end() -> None:
    pool, counters, clock = PlayedPool(), PlannerCounters(), ManualClock()
    counted = CountedPool(pool, counters, clock.monotonic_s)
    for _ in range(3):
        counted.submit(print)
    pool.where = "ray"
    counted.submit(print)
    with pytest.raises(RuntimeError):
        counted.submit(len)
    assert counters.copy().searching == {"processes": 3, "ray": 1}
    clock.advance(0.75)
    done, failed, cancelled, on_ray = pool.futures
    done.set_result(None)
    failed.set_exception(ValueError())
    assert cancelled.cancel()
    on_ray.set_result(None)
    now = counters.copy()
    assert now.searching == {"processes": 0, "ray": 0}
    assert now.searches == {
        ("processes", "completed"): 1,
        ("processes", "failed"): 1,
        ("processes", "cancelled"): 1,
        ("ray", "failed"): 1,
        ("ray", "completed"): 1,
    }
    for where in ("processes", "ray"):
        [at] = [at for at, count in enumerate(now.search_s[where].counts) if count]
        assert SECONDS[at - 1] < 0.75 <= SECONDS[at]


def test_copy_does_not_move_on() -> None:
    counters = PlannerCounters()
    counters.request_ended("status", 200, 0.1)
    before = counters.copy()
    counters.request_ended("status", 200, 0.1)
    counters.request_ended("status", 503, 0.1)
    assert (before.requests, sum(before.request_s["status"].counts)) == ({("status", 200): 1}, 1)
    assert counters.copy().requests == {("status", 200): 2, ("status", 503): 1}


@pytest.mark.promise("metrics-count-each-once")
def test_rows_that_come_again_are_counted_once(tmp_path: Path) -> None:
    counters = PlannerCounters()
    store = new_store(tmp_path, clock=ManualClock())
    enrol(store)
    link = LinkStore(store, counters.rows_stored)
    verdict = TrialEnded(
        1, 2, Origin.PLANNER, "trial", "no_gain", Digest("a" * 64), None, None, None, None, 0, 1, 2
    )
    rows = (
        row(0, TaskCounters("a", 1_000_000, 9, 5, 1, 1, 1, 1), kind=RowKind.TASK_COUNTERS),
        row(1, TaskCounters("b", 1_000_000, 2, 2, 0, 0, 0, 0), kind=RowKind.TASK_COUNTERS),
        row(2, verdict, kind=RowKind.TRIAL_ENDED),
    )
    for _ in range(2):
        link.append_telemetry([TelemetryWrite(NANO, rows, (Ledger(7, 3, 0),))])
    store.close()
    now = counters.copy()
    assert now.tasks == {NANO: {"completed": 7, "refused": 1, "cancelled": 1, "expired": 1, "failed": 1}}
    assert {name: count for name, count in now.verdicts.items() if count} == {"no_gain": 1}


@pytest.mark.promise("metrics-count-each-once")
def test_tasks_of_every_device_count_since_others_are_shown_than_reported_first() -> None:
    counters = PlannerCounters()
    counted = row(0, TaskCounters("a", 1, 1, 1, 0, 0, 0, 0))
    names = [DeviceId(f"edge{number}") for number in range(MOST_DEVICES + 2)]
    counters.rows_stored([(name, counted) for name in (*names, names[0])])
    now = counters.copy()
    assert list(now.tasks) == names
    assert now.tasks[names[0]]["completed"] == 2

"""A device's telemetry in pages: together they are the whole history, whatever its age and their size."""

import pytest

from stageloom.planner.dispatch.ports import StoredRow, TelemetryWrite
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.retention import Retention, tidy
from stageloom.planner.store.store import Store
from stageloom.planner.store.telemetry_history import telemetry_history
from stageloom.planner.telemetry import TelemetryEntry, Width
from stageloom.shared.clock import ManualClock
from stageloom.shared.messages.telemetry import Ledger, QueueSample, RowKind, TaskCounters
from tests.store.helpers import NANO, T0_US, enrol, row

DAY_S = 86_400
KINDS = [RowKind.TASK_COUNTERS, RowKind.QUEUE_SAMPLE]


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


def paged(store: Store, by: Width | None, size: int) -> list[TelemetryEntry]:
    """The history in pages of so many entries."""
    entries, after = store.read(telemetry_history, NANO, KINDS, by=by, limit=size)
    assert len(entries) <= size
    while after is not None:
        page, after = store.read(telemetry_history, NANO, KINDS, by=by, limit=size, after=after)
        assert 0 < len(page) <= size
        entries += page
    return entries


@pytest.mark.parametrize(("by", "number"), [(None, 22), (Width.MINUTE, 20), (Width.HOUR, 20)])
def test_pages_of_any_size_are_the_whole_history(
    store: Store, clock: ManualClock, by: Width | None, number: int
) -> None:
    fill(store, clock)
    whole, after = store.read(telemetry_history, NANO, KINDS, by=by)
    assert len(whole) == number and after is None
    assert [entry.at_us for entry in whole] == sorted((entry.at_us for entry in whole), reverse=True)
    for size in (1, 3, number - 1, number):
        assert paged(store, by, size) == whole


def test_rows_of_one_moment_are_told_once_over_several_pages(store: Store) -> None:
    """A device whose clock cannot be right: all of a batch is kept under the moment when it came."""
    enrol(store)
    rows = [row(sequence, QueueSample("m", sequence, 0, 0)) for sequence in range(7)]
    rows = [StoredRow(7, one.sequence, 5, one.kind, one.body, one.data) for one in rows]
    LinkStore(store).append_telemetry([TelemetryWrite(NANO, tuple(rows), (Ledger(7, 7, 0),))])
    for size in (1, 2, 3):
        assert [entry.data for entry in paged(store, None, size)] == [one.data for one in reversed(rows)]

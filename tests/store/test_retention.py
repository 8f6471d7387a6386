"""Telemetry becomes coarser with age, is counted once, and stays bounded."""

import random
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import event, func, select, text

from stageloom.planner.dispatch.ports import StoredRow, TelemetryWrite
from stageloom.planner.store.devices import revoke_device
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.predictions import considered_plans, keep_considered
from stageloom.planner.store.retention import CHUNK, Retention, tidy
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import EventRow, RollupRow, TelemetryRow
from stageloom.planner.store.telemetry import telemetry_balance
from stageloom.planner.telemetry import Balance, TelemetryEntry, Width, merge, span_of
from stageloom.shared.clock import ManualClock
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import DeviceState, Origin
from stageloom.shared.messages.telemetry import (
    KIND_OF,
    Event,
    Ledger,
    QueueSample,
    Row,
    RowData,
    RowKind,
    StateChange,
    StepTrace,
    TaskCounters,
    encode_row,
    histogram_of,
)
from tests.store.helpers import NANO, T0_US, enrol, finish, history, looked_at, start, write_of

pytestmark = pytest.mark.more

HOUR_S = 3600
DAY_S = 24 * HOUR_S
KEEP = Retention(rows_s=DAY_S, minutes_s=3 * DAY_S, hours_s=10 * DAY_S)
ALL = list(KIND_OF.values())


@pytest.fixture(autouse=True)
def _enrolled(store: Store) -> None:
    enrol(store)


class Device:
    """Numbers rows as a device does and sends them with its ledger."""

    def __init__(self, store: Store, boot: int = 7) -> None:
        self.store, self.boot, self.sequence = store, boot, 0

    def send(self, rows: list[tuple[int, RowData]]) -> TelemetryWrite:
        stored = tuple(
            StoredRow(
                self.boot,
                self.sequence + index,
                at_us,
                KIND_OF[type(data)],
                encode_row(Row(at_us, data)),
                data,
            )
            for index, (at_us, data) in enumerate(rows)
        )
        self.sequence += len(rows)
        write = TelemetryWrite(NANO, stored, (Ledger(self.boot, self.sequence, 0),))
        LinkStore(self.store).append_telemetry([write])
        return write


def tidy_all(store: Store) -> int:
    """Until there is nothing left to do."""
    return sum(tidy(store, KEEP))


def rows_and_rolled(store: Store) -> tuple[int, int]:
    """Telemetry rows kept as themselves, and rows that rolled-up ones stand for."""
    with store.database.read() as session:
        rows = session.scalar(select(func.count()).select_from(TelemetryRow)) or 0
        rolled = session.scalar(select(func.coalesce(func.sum(RollupRow.rows), 0))) or 0
        return rows, int(rolled)


def measured(at_us: int, rng: random.Random) -> list[tuple[int, RowData]]:
    """What a device measures in one interval."""
    return [
        (at_us, TaskCounters("m", 1_000_000, 3, 3, 0, 0, 0, 0)),
        (at_us, histogram_of("m", [rng.randrange(1, 10**6) for _ in range(3)])),
        (at_us, QueueSample("m", rng.randrange(9), 5, 7)),
    ]


def by_key(entries: list[TelemetryEntry]) -> dict[tuple[int, RowKind], tuple[int, object]]:
    return {(entry.at_us, entry.kind): (entry.rows, entry.data) for entry in entries}


@pytest.mark.promise("telemetry-bounded-over-simulated")
def test_history_by_the_hour_is_the_same_at_every_age(store: Store, clock: ManualClock) -> None:
    """1. five days of rows, an interval each ten minutes; 2. tidied every few hours, and each time the hours
    of the whole history equal those computed from the rows directly."""
    rng, device = random.Random(5), Device(store)
    sent: list[tuple[int, RowData]] = []
    widths: set[int] = set()
    for step in range(5 * 4):
        begin_us = clock.wall_us()
        rows = [one for at in range(36) for one in measured(begin_us + at * 600_000_000, rng)]
        clock.advance(6 * HOUR_S)
        device.send(rows)
        sent += rows
        tidy_all(store)
        if step % 4 == 3:
            entries = history(store, ALL, by=Width.HOUR)
            direct = merge(span_of(at, KIND_OF[type(data)], data, Width.HOUR) for at, data in sent)
            expected = {key[:2]: (span.rows, span.data) for key, span in direct.items()}
            assert by_key(entries) == expected
            widths |= {entry.width_s for entry in history(store, ALL)}
    assert widths == {0, 60, 3600}
    assert sum(rows_and_rolled(store)) == len(sent)


def test_finer_history_shows_each_age_as_it_is_kept(store: Store, clock: ManualClock) -> None:
    device = Device(store)
    for _ in range(5):
        at_us = clock.wall_us()
        device.send([(at_us + second * 10_000_000, QueueSample("m", 1, 2, 3)) for second in range(12)])
        clock.advance(DAY_S)
    tidy_all(store)
    entries = history(store, [RowKind.QUEUE_SAMPLE])
    assert [entry.at_us for entry in entries] == sorted(entry.at_us for entry in entries)
    shown = Counter((entry.width_s, entry.rows) for entry in entries)
    assert set(shown) >= {(0, 1), (3600, 12)} and {width for width, _ in shown} == {0, 60, 3600}
    assert sum(entry.rows for entry in entries) == 60
    newest = history(store, [RowKind.QUEUE_SAMPLE], limit=3)
    assert newest == entries[-3:]
    minutes = history(store, [RowKind.QUEUE_SAMPLE], by=Width.MINUTE)
    assert {entry.width_s for entry in minutes} == {60, 3600}
    assert sum(entry.rows for entry in minutes) == 60


def test_rows_that_come_late_join_the_minute_and_hour_that_are_there(
    store: Store, clock: ManualClock
) -> None:
    began_us = clock.wall_us()
    early, late = Device(store, boot=1), Device(store, boot=2)
    for age_days in (2, 5):
        early.send([(began_us, TaskCounters("m", 1, 1, 1, 0, 0, 0, 0))])
        clock.advance(age_days * DAY_S)
        tidy_all(store)
        late.send([(began_us + 1, TaskCounters("m", 1, 1, 1, 0, 0, 0, 0))])
        tidy_all(store)
    (hour,) = history(store, ALL)
    assert hour == TelemetryEntry(
        Width.HOUR.begin_us(began_us),
        3600,
        RowKind.TASK_COUNTERS,
        4,
        TaskCounters("m", 4, 4, 4, 0, 0, 0, 0),
        "m",
    )


def test_a_batch_that_comes_again_after_its_rows_were_rolled_up_is_not_counted_twice(
    store: Store, clock: ManualClock
) -> None:
    """1. a batch is committed, and its acknowledgement lost; 2. the device is away for two days and the rows
    are rolled up; 3. it sends the batch again."""
    write = Device(store).send(measured(clock.wall_us(), random.Random(1)))
    clock.advance(2 * DAY_S)
    tidy_all(store)
    assert rows_and_rolled(store) == (0, 3)
    LinkStore(store).append_telemetry([write])
    tidy_all(store)
    assert rows_and_rolled(store) == (0, 3)
    assert store.read(telemetry_balance) == Balance(3, 3, 0, 0)


def test_a_step_treats_few_rows_and_a_write_gets_in_between_two_steps(
    store: Store, clock: ManualClock
) -> None:
    device = Device(store)
    for _ in range(3):
        at_us = clock.wall_us()
        device.send([(at_us + index, QueueSample("m", 1, 2, 3)) for index in range(CHUNK)])
    clock.advance(2 * DAY_S)
    commits: list[int] = []
    event.listen(store.database.engine, "commit", lambda _: commits.append(1))
    steps = tidy(store, KEEP)
    treated = [next(steps)]
    assert (treated, len(commits)) == ([CHUNK], 1)
    device.send([(clock.wall_us(), QueueSample("m", 1, 2, 3))])
    assert rows_and_rolled(store) == (2 * CHUNK + 1, CHUNK)
    treated += steps
    assert max(treated) <= CHUNK and sum(treated[:3]) == 3 * CHUNK
    assert rows_and_rolled(store) == (1, 3 * CHUNK)


def test_facts_stay_with_the_hours_and_traces_go_with_the_rows(store: Store, clock: ManualClock) -> None:
    device, at_us = Device(store), clock.wall_us()
    change = StateChange(1, 1, DeviceState.REJECTED, None, Origin.PLANNER, "too slow")
    device.send([(at_us, change), (at_us, Event("disk")), (at_us, StepTrace("p", 0, 1, 0, 9, ()))])
    clock.advance(9 * DAY_S)
    tidy_all(store)
    assert [entry.data for entry in history(store, ALL)] == [change, Event("disk")]
    clock.advance(2 * DAY_S)
    tidy_all(store)
    assert history(store, ALL) == [] and rows_and_rolled(store) == (0, 0)
    assert store.read(telemetry_balance) == Balance(3, 3, 0, 0)


def test_an_age_of_zero_keeps_for_ever(store: Store, clock: ManualClock) -> None:
    Device(store).send(measured(clock.wall_us(), random.Random(1)))
    clock.advance(1000 * DAY_S)
    assert sum(tidy(store, Retention(0, 0, 0))) == 0
    assert sum(tidy(store, Retention(DAY_S, 0, 0))) == 3
    assert {entry.width_s for entry in history(store, ALL)} == {60}


def test_a_clock_that_cannot_be_right_neither_fills_the_disk_nor_loses_rows(
    store: Store, clock: ManualClock
) -> None:
    """A device without a battery lives in 1970, another in 2100: both rows are kept under the planner's time,
    and go when that has passed."""
    device = Device(store)
    device.send([(5, QueueSample("m", 1, 2, 3)), (2**52, QueueSample("m", 2, 2, 3))])
    tidy_all(store)
    assert rows_and_rolled(store) == (2, 0)
    clock.advance(2 * DAY_S)
    tidy_all(store)
    (minute,) = history(store, ALL)
    assert (minute.at_us, minute.rows) == (Width.MINUTE.begin_us(T0_US), 2)
    clock.advance(20 * DAY_S)
    tidy_all(store)
    assert rows_and_rolled(store) == (0, 0)


@pytest.mark.promise("telemetry-bounded-over-simulated")
def test_telemetry_is_bounded_over_simulated_months(store: Store, clock: ManualClock) -> None:
    """Ninety days: the tables stop growing once the oldest age is reached, SQLite's file does too, and the
    books and the counters of the last ten days are exact."""
    rng, device, rounds, per_round = random.Random(2), Device(store), 30, 8 * 3
    sizes: list[tuple[int, int, int]] = []
    for _ in range(rounds):
        begin_us = clock.wall_us()
        rows = [one for at in range(per_round) for one in measured(begin_us + at * 3 * HOUR_S * 10**6, rng)]
        clock.advance(3 * DAY_S)
        device.send([*rows, (begin_us, Event("three days"))])
        tidy_all(store)
        with store.database.read() as session:
            kept = session.scalar(select(func.count()).select_from(TelemetryRow)) or 0
            rolled = session.scalar(select(func.count()).select_from(RollupRow)) or 0
            pages = 0
            if store.database.is_sqlite:
                pages = session.execute(text("PRAGMA page_count")).scalar_one()
        sizes.append((kept, rolled, pages))
    steady = sizes[4:]
    assert max(kept for kept, _, _ in steady) <= 8 * 3 + 4  # a day of rows, and ten days' events
    assert max(rolled for _, rolled, _ in steady) <= 11 * 8 * 3
    assert sizes[-1][:2] == steady[0][:2] and sizes[-1][2] <= 1.1 * steady[0][2]
    sent = rounds * (per_round * 3 + 1)
    assert store.read(telemetry_balance) == Balance(sent, sent, 0, 0)
    hours = history(store, [RowKind.TASK_COUNTERS], by=Width.HOUR)
    completed = [entry.data.completed for entry in hours if isinstance(entry.data, TaskCounters)]
    assert completed == [3] * (8 * 10)


def test_two_processes_that_tidy_at_once_count_every_row_once(
    store: Store, tmp_path: Path, database_url: str
) -> None:
    enrol(store, DeviceId("other"), 2)
    for boot in range(1, 4):
        LinkStore(store).append_telemetry(
            [write_of(0, 699, boot=boot), write_of(0, 99, boot=boot, device=DeviceId("other"))]
        )
    code = """
import sys
from pathlib import Path
from stageloom.planner.store.retention import Retention, tidy
from stageloom.planner.store.store import Store
store = Store(Path(sys.argv[1]), sys.argv[2])
print(sum(tidy(store, Retention(1, 0, 0))))
store.close()
"""
    children = [start(code, str(tmp_path), database_url) for _ in range(3)]
    treated = [int(finish(child)) for child in children]
    assert sum(treated) == 2400
    assert rows_and_rolled(store) == (0, 2400)


def test_kill_in_mid_tidying_counts_every_row_once(
    store: Store, clock: ManualClock, tmp_path: Path, database_url: str
) -> None:
    """1. a child rolls up, and says so after each step; 2. it is killed at work; 3. every row is either there
    or rolled up, and whoever tidies next finishes."""
    for boot in range(1, 9):
        LinkStore(store).append_telemetry([write_of(0, CHUNK - 1, boot=boot)])
    code = """
import sys
from pathlib import Path
from stageloom.planner.store.retention import Retention, tidy
from stageloom.planner.store.store import Store
store = Store(Path(sys.argv[1]), sys.argv[2])
for treated in tidy(store, Retention(1, 0, 0)):
    print(treated, flush=True)
"""
    child = start(code, str(tmp_path), database_url)
    assert child.stdout is not None and int(child.stdout.readline()) == CHUNK
    child.kill()
    child.communicate(timeout=30)
    kept, rolled = rows_and_rolled(store)
    assert kept + rolled == 8 * CHUNK and rolled >= CHUNK
    clock.advance(DAY_S)
    sum(tidy(store, Retention(1, 0, 0)))
    assert rows_and_rolled(store) == (0, 8 * CHUNK)


def test_old_events_go_too(store: Store, clock: ManualClock) -> None:
    clock.advance(11 * DAY_S)
    store.write(revoke_device, NANO)
    tidy_all(store)
    with store.database.read() as session:
        assert session.scalars(select(EventRow.code)).all() == ["revoked"]


@pytest.mark.promise("plans-were-looked-kept")
def test_plans_that_were_looked_at_go_with_the_oldest_telemetry(store: Store, clock: ManualClock) -> None:
    """More than one step's worth of old ones go, and what was looked at since stays."""
    old, new = looked_at("a"), looked_at("b")
    store.write(keep_considered, [old] * (CHUNK + 1), device_class="cpu", device=NANO, replan=1)
    clock.advance(11 * DAY_S)
    store.write(keep_considered, [new], device_class="cpu", device=NANO, replan=2)
    tidy_all(store)
    ((evaluation, row),) = store.read(considered_plans, new.serves, "cpu")
    assert (evaluation, row.replan, row.device) == (new, 2, NANO)
    assert store.read(considered_plans, old.serves, "cpu") == []

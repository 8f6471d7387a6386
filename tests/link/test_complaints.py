"""A store that fails is a line in the log with the remedy, not a traceback with every batch."""

import threading
from collections.abc import Sequence
from typing import NoReturn

import pytest

from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.dispatch.workers import AGAIN_S, Complaints, StoreWorkers
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import InputError, StorageError, UnavailableError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Desired
from stageloom.shared.messages.telemetry import (
    ProfileResult,
    Row,
    RowRange,
    TelemetryBatch,
    encode_row,
)
from tests.link.memory_store import MemoryStore

BATCH = TelemetryBatch(rows=(), ranges=(), ledgers=())
AWAY = StorageError("connection refused", remedy="see that the server runs")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged since the last look."""
    said = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return said


def test_a_cause_that_lasts_is_told_once_with_its_remedy_and_again_after_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    complaints = Complaints(clock.monotonic_s)
    for _ in range(100):
        complaints.about("the store failed", AWAY)
        complaints.about("an alarm is not stored", AWAY)
    assert lines(caplog) == ["the store failed: connection refused; see that the server runs"]
    complaints.about("the store failed", UnavailableError("no commit within 60 s", remedy="try again"))
    assert lines(caplog) == ["the store failed: no commit within 60 s; try again"]
    clock.advance(AGAIN_S)
    complaints.about("an alarm is not stored", AWAY)
    assert lines(caplog) == ["an alarm is not stored: connection refused; see that the server runs"]


def test_a_refusal_is_told_of_everyone_who_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(ManualClock().monotonic_s)
    for name in ("a", "b"):
        complaints.about(f"the plan of {name} is not adopted", InputError("no such model"))
    said = [f"the plan of {name} is not adopted: no such model" for name in ("a", "b")]
    assert lines(caplog) == said


def test_a_defect_keeps_its_traceback_every_time(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(ManualClock().monotonic_s)
    for _ in range(2):
        complaints.about("the store failed", ValueError("of our own"))
    assert caplog.text.count("ValueError: of our own") == 2


def test_while_the_store_is_away_no_batch_is_acknowledged_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Away(MemoryStore):
        def append_telemetry(self, writes: Sequence[TelemetryWrite]) -> NoReturn:
            raise AWAY

    told: list[ev.Event] = []
    done = threading.Semaphore(0)

    def post(events: Sequence[ev.Event]) -> None:
        told.extend(events)
        done.release()

    workers = StoreWorkers(Away(), post, ManualClock().monotonic_s)
    for ticket in range(5):
        workers.submit(ev.AppendTelemetry(ticket, DeviceId("nano"), BATCH))
        assert done.acquire(timeout=30)
    workers.close()
    assert told == [ev.TelemetryCommitted(ticket, ok=False) for ticket in range(5)]
    assert lines(caplog) == ["the store failed, and devices will send again: " + str(AWAY)]


def test_what_is_desired_anew_of_a_device_that_answered_is_told_and_looked_up_where_the_store_failed() -> (
    None
):
    """A failed commit may be in the database all the same, and no repeat of the rows tells of it."""
    result = encode_row(Row(1, ProfileResult(1, Digest("ab" * 32), 1, "", (), True)))
    ranges = (RowRange(boot=7, first=0, last=0),)
    batch = TelemetryBatch(rows=(result,), ranges=ranges, ledgers=())
    desired = Desired(epoch=1, generation=2)

    class Answered(MemoryStore):
        away = True

        def append_telemetry(self, writes: Sequence[TelemetryWrite]) -> Sequence[tuple[DeviceId, Desired]]:
            if self.away:
                raise AWAY
            return [(write.device, desired) for write in writes]

    told: list[ev.Event] = []
    store, done = Answered(), threading.Semaphore(0)

    def post(events: Sequence[ev.Event]) -> None:
        told.extend(events)
        done.release()

    workers = StoreWorkers(store, post, ManualClock().monotonic_s)
    for store.away in (True, False):
        workers.submit(ev.AppendTelemetry(1, DeviceId("nano"), batch))
        assert done.acquire(timeout=30)
    workers.close()
    assert told == [
        ev.TelemetryCommitted(1, ok=False),
        ev.DesiredInDoubt((DeviceId("nano"),)),
        ev.TelemetryCommitted(1, ok=True),
        ev.DesiredChanged(DeviceId("nano"), desired),
    ]

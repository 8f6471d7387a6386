"""A store that fails is a line in the log with the remedy, not a traceback with every batch."""

import threading
from collections.abc import Sequence

import pytest

from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.dispatch.workers import AGAIN_S, Complaints, StoreWorkers
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import InputError, StorageError, UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import TelemetryBatch
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
        def append_telemetry(self, writes: Sequence[TelemetryWrite]) -> None:
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

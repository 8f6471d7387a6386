"""One record that the database will not take costs that record; a database that is away costs nobody's."""

import threading
from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import text, update
from sqlalchemy.orm import Session

from stageloom.planner.dispatch.ports import ReportRecord, StoredRow, TelemetryWrite
from stageloom.planner.store.database import LostRace, Unstorable
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.events import unreadable_records
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import PlannerRow
from stageloom.planner.store.telemetry import telemetry_balance
from stageloom.planner.store.writer import Writer, isolated
from stageloom.planner.telemetry import Balance, model_rates
from stageloom.shared.errors import InputError, StorageError, UnavailableError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.base import MOST, MOST_REAL
from stageloom.shared.messages.control import Alarm, Origin, Report
from stageloom.shared.messages.telemetry import Ledger, Row, RowKind, TaskCounters, TrialEnded
from tests.store.helpers import NANO, T0_US, enrol, row, write_of

TOO_LARGE = 2**70
"""For 64 bits: what both databases refuse. No message holds it; a wrong version may hand it on."""

BAD = DeviceId("bad")


def poison(sequence: int, boot: int = 7) -> StoredRow:
    plan = Digest("ab" * 32)
    ended = TrialEnded(TOO_LARGE, 1, Origin.PLANNER, "trial", "commit", plan, None, None, None, None, 1, 1, 1)
    return replace(row(sequence, boot=boot), data=ended, kind=RowKind.TRIAL_ENDED)


def alarm(number: int, at_us: int = T0_US) -> Alarm:
    return Alarm(
        boot=7, number=number, at_us=at_us, cause="x", value=1, threshold=1, plan=None, loads=(), samples=()
    )


@pytest.mark.promise("record-database-refuses-costs")
def test_a_poisoned_row_is_kept_as_unreadable_and_every_other_row_as_it_is(store: Store) -> None:
    enrol(store)
    enrol(store, BAD, 2)
    rows = (row(0), poison(1), row(2), poison(3), row(4))
    bad = TelemetryWrite(BAD, rows, (Ledger(7, 5, 0),))
    LinkStore(store).append_telemetry([write_of(0, 9), bad, write_of(0, 2, boot=8)])
    assert store.read(telemetry_balance, NANO) == Balance(13, 13, 0, 0)
    assert store.read(telemetry_balance, BAD) == Balance(5, 5, 0, 0)
    with store.database.read() as session:
        kinds = session.execute(text("SELECT kind FROM telemetry WHERE device = 'bad' ORDER BY sequence"))
        assert [kind for (kind,) in kinds] == [
            "unreadable" if at in (1, 3) else "queue_sample" for at in range(5)
        ]
    assert store.read(unreadable_records) == 2
    assert store.read(device_info, BAD).unreadable == 2 and store.read(device_info, NANO).unreadable == 0
    LinkStore(store).append_telemetry([bad])
    assert store.read(unreadable_records) == 2, "a repeat is recognised as one"


@pytest.mark.promise("record-database-refuses-costs")
def test_a_poisoned_report_or_alarm_is_counted_and_not_asked_for_again(store: Store) -> None:
    enrol(store)
    enrol(store, BAD, 2)
    LinkStore(store).record_reports(
        [
            ReportRecord(BAD, 1, Report(revision=TOO_LARGE)),
            ReportRecord(NANO, 1, Report(revision=5, reason="fine")),
        ]
    )
    assert store.read(device_info, NANO).report.reason == "fine"
    assert LinkStore(store).record_alarm(BAD, alarm(1, at_us=TOO_LARGE)) is None
    assert LinkStore(store).record_alarm(NANO, alarm(1)) is not None
    info = store.read(device_info, BAD)
    assert info.unreadable == 2 and info.report == Report()
    assert info.unreadable_reason.startswith(("alarm: ", "report: "))


@pytest.mark.promise("record-database-refuses-costs")
def test_a_database_that_is_broken_brands_no_record(store: Store) -> None:
    enrol(store)
    with store.database.write() as session:
        session.execute(text("ALTER TABLE telemetry RENAME TO elsewhere"))
    with pytest.raises(StorageError):
        LinkStore(store).append_telemetry([write_of(0, 9)])
    with store.database.write() as session:
        session.execute(text("ALTER TABLE elsewhere RENAME TO telemetry"))
    assert store.read(unreadable_records) == 0
    LinkStore(store).append_telemetry([write_of(0, 9)])
    assert store.read(telemetry_balance, NANO) == Balance(10, 10, 0, 0)


def test_a_work_that_poisons_its_group_fails_alone(store: Store) -> None:
    enrol(store)
    writer = Writer(store.database)
    gate = threading.Event()
    writer.submit(lambda session: gate.wait(30.0))
    works = [writer.submit(partial(store_epoch, epoch=epoch)) for epoch in (2, TOO_LARGE, 3)]
    gate.set()  # they wait together by now, so they share a commit
    results = [work.exception(30.0) for work in works]
    writer.close()
    assert results[0] is None and results[2] is None
    assert isinstance(results[1], Unstorable)
    assert LinkStore(store).epoch() == 3


def store_epoch(session: Session, epoch: int) -> None:
    session.execute(update(PlannerRow).values(epoch=epoch))


@pytest.mark.parametrize("bad", [set(), {0}, {7}, {3, 4}, set(range(8))])
def test_isolating_keeps_all_but_those_to_blame_in_few_transactions(bad: set[int]) -> None:
    kept: list[int] = []
    blamed: list[int] = []
    tries = 0

    def keep(records: list[int]) -> None:
        nonlocal tries
        tries += 1
        if bad & set(records):
            raise Unstorable("no")
        kept.extend(records)

    isolated(keep, list(range(8)), lambda record, _: blamed.append(record))  # type: ignore[arg-type]
    assert kept == sorted(set(range(8)) - bad) and blamed == sorted(bad)
    assert tries <= 1 + 2 * 3 * max(len(bad), 0)


@pytest.mark.parametrize("error", [StorageError("away"), UnavailableError("late"), OSError(), LostRace()])
def test_isolating_blames_no_record_for_what_lies_elsewhere(error: Exception) -> None:
    def keep(records: object) -> None:
        raise error

    with pytest.raises(type(error)):
        isolated(keep, [1], lambda record, _: pytest.fail(str(record)))


@pytest.mark.promise("record-database-refuses-costs")
def test_sums_of_the_largest_counts_end_at_the_wires_largest(store: Store) -> None:
    """1100 of them are more than 64 bits hold."""
    enrol(store)
    ledgers = tuple(Ledger(boot, MOST, 0) for boot in range(1, 1101))
    LinkStore(store).append_telemetry([TelemetryWrite(NANO, (), ledgers)])
    assert store.read(telemetry_balance) == Balance(MOST, 0, 0, MOST)
    counters = TaskCounters("m", 1, *[MOST] * 6)
    (rate,) = model_rates(NANO, [Row(1, counters), Row(2, counters)])
    assert rate.throughput_per_s == MOST_REAL


def test_generations_and_epochs_end_before_the_wires_range_does(store: Store) -> None:
    enrol(store)
    with pytest.raises(InputError, match="no generation above"):
        LinkStore(store).reissue(NANO, above_epoch=0, above_generation=MOST)
    with pytest.raises(InputError, match="beyond"):
        LinkStore(store).reissue(NANO, above_epoch=MOST, above_generation=0)
    assert LinkStore(store).epoch() == 1 and store.read(device_info, NANO).desired_generation == 0

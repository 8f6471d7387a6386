"""Telemetry is stored once; the books balance; profiles become costs."""

from pathlib import Path

import pytest

from stageloom.planner.dispatch.ports import ReportRecord, StoredRow, TelemetryWrite
from stageloom.planner.store.costs import operator_costs
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.generations import generation_history
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.profiles import answer_reasons, open_requests, request_profile
from stageloom.planner.store.store import Store
from stageloom.planner.store.telemetry import telemetry_balance, telemetry_rows
from stageloom.planner.telemetry import Balance
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import DeviceState, Origin, Report
from stageloom.shared.messages.telemetry import (
    Ledger,
    OperatorTiming,
    ProfileResult,
    QueueSample,
    RowKind,
    StateChange,
)
from tests.store.helpers import NANO, T0_US, add_model, enrol, finish, row, small_plan, start, write_of


@pytest.fixture(autouse=True)
def _enrolled(store: Store) -> None:
    enrol(store)


@pytest.mark.promise("telemetry-row-stored-once")
def test_a_batch_that_comes_twice_is_stored_once(store: Store) -> None:
    LinkStore(store).append_telemetry([write_of(0, 9)])
    LinkStore(store).append_telemetry([write_of(0, 9)])
    LinkStore(store).append_telemetry([write_of(5, 14)])
    assert store.read(telemetry_balance, NANO) == Balance(15, 15, 0, 0)
    samples = [entry.data for entry in store.read(telemetry_rows, NANO, [RowKind.QUEUE_SAMPLE])]
    assert [sample.tasks for sample in samples if isinstance(sample, QueueSample)] == list(range(15))


@pytest.mark.promise("telemetry-row-stored-once")
@pytest.mark.more
def test_two_processes_that_store_the_same_rows_store_them_once(
    store: Store, tmp_path: Path, database_url: str
) -> None:
    code = """
import sys
from pathlib import Path
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.store import Store
from tests.store.helpers import write_of
store = Store(Path(sys.argv[1]), sys.argv[2])
for first in range(0, 400, 10):
    LinkStore(store).append_telemetry([write_of(first, first + 19)])
store.close()
"""
    children = [start(code, str(tmp_path), database_url) for _ in range(3)]
    for child in children:
        finish(child)
    assert store.read(telemetry_balance) == Balance(410, 410, 0, 0)


def test_equal_sequences_of_two_boots_and_two_devices_are_different_rows(store: Store) -> None:
    enrol(store, DeviceId("other"), 2)
    LinkStore(store).append_telemetry([write_of(0, 4, boot=1), write_of(0, 4, boot=2)])
    LinkStore(store).append_telemetry([write_of(0, 4, boot=1, device=DeviceId("other"))])
    assert store.read(telemetry_balance) == Balance(15, 15, 0, 0)
    assert store.read(telemetry_balance, NANO) == Balance(10, 10, 0, 0)


@pytest.mark.promise("equal-bytes-two-devices")
def test_a_commit_of_many_writes_is_what_they_are_one_by_one(store: Store) -> None:
    """Repeats and overlaps within one group, of a device with a book and of one without."""
    other = DeviceId("other")
    enrol(store, other, 2)
    LinkStore(store).append_telemetry([write_of(0, 4)])
    group = [write_of(3, 9), write_of(0, 2, device=other), write_of(3, 9), write_of(1, 5, device=other)]
    LinkStore(store).append_telemetry(group)
    assert store.read(telemetry_balance, NANO) == Balance(10, 10, 0, 0)
    assert store.read(telemetry_balance, other) == Balance(6, 6, 0, 0)
    kept = [entry.data for entry in store.read(telemetry_rows, other, [RowKind.QUEUE_SAMPLE])]
    assert [one.tasks for one in kept if isinstance(one, QueueSample)] == list(range(6))


def test_of_a_ledger_the_larger_counts_win(store: Store) -> None:
    LinkStore(store).append_telemetry([TelemetryWrite(NANO, (), (Ledger(7, 100, 10),))])
    LinkStore(store).append_telemetry([TelemetryWrite(NANO, (), (Ledger(7, 90, 4),))])
    assert store.read(telemetry_balance) == Balance(100, 0, 10, 90)


def test_a_row_that_this_planner_cannot_read_is_kept_and_counted(store: Store) -> None:
    unreadable = StoredRow(7, 0, 0, RowKind.UNREADABLE, b"\xc1from the future", None)
    LinkStore(store).append_telemetry([TelemetryWrite(NANO, (unreadable,), (Ledger(7, 1, 0),))])
    assert store.read(telemetry_balance) == Balance(1, 1, 0, 0)


def test_telemetry_is_read_by_kind_and_time_the_newest_rows_first_to_stay(store: Store) -> None:
    LinkStore(store).append_telemetry([write_of(0, 9)])
    assert store.read(telemetry_rows, NANO, [RowKind.EVENT]) == []
    assert len(store.read(telemetry_rows, NANO, [RowKind.QUEUE_SAMPLE], since_us=T0_US + 7)) == 3
    newest = store.read(telemetry_rows, NANO, [RowKind.QUEUE_SAMPLE], limit=2)
    assert [entry.at_us for entry in newest] == [T0_US + 8, T0_US + 9]


def test_a_profile_asked_for_becomes_costs_of_the_device_class(store: Store, tmp_path: Path) -> None:
    digest = add_model(store, tmp_path)
    requests, desired = store.write(request_profile, NANO, ["relu"], budget_s=5.0)
    assert (desired.generation, desired.plan_digest) == (1, None)
    assert [(p.request, p.artifact.digest, p.budget_s) for p in desired.profiles] == [
        (requests[0], digest, 5.0)
    ]
    for sequence, (ops, last) in enumerate([((0, 1), False), ((2, 3), True)]):
        timings = tuple(OperatorTiming(op, 10.0 + op, 1.0, 30) for op in ops)
        data = ProfileResult(requests[0], digest, 1, "cpu-2-core", timings, last)
        assert store.read(open_requests, requests) == requests
        write = TelemetryWrite(NANO, (row(sequence, data, kind=RowKind.PROFILE_RESULT),), ())
        LinkStore(store).append_telemetry([write])
    costs = store.read(operator_costs, "cpu-2-core", digest)
    assert {op: timing.median_us for op, timing in costs.items()} == {0: 10.0, 1: 11.0, 2: 12.0, 3: 13.0}
    assert store.read(open_requests, requests) == [] and store.read(answer_reasons, requests) == {
        requests[0]: ""
    }
    fleet = LinkStore(store).fleet()[0]
    assert fleet.desired is not None and fleet.desired.profiles == ()
    assert store.read(operator_costs, "another class", digest) == {}


def test_a_profile_keeps_the_plan_that_runs(store: Store, tmp_path: Path) -> None:
    add_model(store, tmp_path)
    store.write(add_plan, "first", small_plan(store), "sequential")
    pushed = store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    _, desired = store.write(request_profile, NANO, ["relu"])
    assert (desired.generation, desired.plan_digest) == (2, pushed.plan_digest)
    assert [entry.decided_by for entry in store.read(generation_history, NANO)[0]] == ["profile", "operator"]
    with pytest.raises(InputError, match="no model 'ghost'"):
        store.write(request_profile, NANO, ["ghost"])


def test_a_superseded_generations_end_is_known_from_its_state_change(store: Store, tmp_path: Path) -> None:
    """1. generation 1 is rejected while offline; 2. generation 2 is pushed and reported; 3. the telemetry
    that tells of the rejection arrives: generation 1 has its end, generation 2 is untouched."""
    add_model(store, tmp_path)
    store.write(add_plan, "first", small_plan(store), "sequential")
    store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    said = Report(revision=9, epoch=1, generation=2, state=DeviceState.PROBATION, origin=Origin.PLANNER)
    LinkStore(store).record_reports([ReportRecord(NANO, 7, said)])
    change = StateChange(1, 1, DeviceState.REJECTED, None, Origin.PLANNER, "too slow")
    LinkStore(store).append_telemetry(
        [TelemetryWrite(NANO, (row(0, change, kind=RowKind.STATE_CHANGE),), ())]
    )
    states = {
        entry.generation: (entry.state, entry.reason) for entry in store.read(generation_history, NANO)[0]
    }
    assert states == {1: ("rejected", "too slow"), 2: ("probation", "")}

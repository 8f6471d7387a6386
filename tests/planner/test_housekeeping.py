"""The housekeeping thread: begins at once, stops between two steps, outlives a failing database."""

import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageloom.planner import housekeeping
from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.housekeeping import ANSWERED_S, INTERVAL_S, Housekeeper, UnansweredRequests
from stageloom.planner.store.costs import operator_costs
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.profiles import (
    NO_ANSWER,
    answer_reasons,
    open_requests,
    request_profile,
    request_stage_profile,
)
from stageloom.planner.store.retention import Retention
from stageloom.planner.store.store import Store
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import StorageError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.telemetry import OperatorTiming, ProfileResult, RowKind
from tests.planner.api.context import QuietFleet
from tests.planner.processes import until
from tests.store.helpers import NANO, add_model, enrol, history, row, small_plan, write_of
from tests.store.migrated import new_store

DAY = Retention(86_400, 0, 0)
LOOKS = 1 + round(ANSWERED_S / INTERVAL_S)  # from the first one at a request, until it has had its hour


def test_old_rows_are_rolled_up_in_the_background(tmp_path: Path) -> None:
    clock = ManualClock()
    store = new_store(tmp_path, clock=clock)
    enrol(store)
    LinkStore(store).append_telemetry([write_of(0, 99)])
    clock.advance(2 * 86_400)
    housekeeper = Housekeeper(store, DAY, QuietFleet())
    (minute,) = until(lambda: _one_minute(store))
    assert minute.rows == 100
    housekeeper.close()
    store.close()


class OnlineFleet(QuietFleet):
    def online(self) -> frozenset[DeviceId]:
        return frozenset({NANO})


def test_requests_whose_answers_were_lost_end_after_an_hour_online_and_others_have_their_turn(
    tmp_path: Path,
) -> None:
    """1. Operators are asked for, and the stages of a plan twice: one at a time. 2. The device is online and
    answers nothing. 3. Its answer to what ended comes all the same, and counts."""
    store, fleet = new_store(tmp_path), OnlineFleet()
    enrol(store)
    artifact = add_model(store, tmp_path)
    store.write(add_plan, "runs", small_plan(store), "sequential")
    (operators,), _ = store.write(request_profile, NANO, ["relu"])
    stages = [store.write(request_stage_profile, NANO, "runs")[0] for _ in range(2)]
    unanswered, asked = UnansweredRequests(store, fleet), [operators, *stages]
    for _ in range(LOOKS - 1):
        unanswered.look()
        assert store.read(open_requests, asked) == asked
    unanswered.look()
    assert store.read(open_requests, asked) == stages[1:]
    assert store.read(answer_reasons, [operators]) == {operators: NO_ANSWER}
    assert [one.stage_profile.request for one in fleet.told if one.stage_profile] == stages[1:]
    times = tuple(OperatorTiming(op, 10.0, 1.0, 9) for op in range(4))
    late = row(0, ProfileResult(operators, artifact, 1, "cpu-2-core", times, True))
    LinkStore(store).append_telemetry([TelemetryWrite(NANO, (late,), ())])
    assert len(store.read(operator_costs, "cpu-2-core", artifact)) == 4
    assert store.read(answer_reasons, [operators]) == {operators: ""}
    store.close()


def answer(store: Store, sequence: int, request: int, artifact: Digest) -> None:
    told = row(sequence, ProfileResult(request, artifact, 1, "cpu-2-core", (), True))
    LinkStore(store).append_telemetry([TelemetryWrite(NANO, (told,), ())])


def test_a_lost_answer_ends_its_request_although_newer_ones_are_made_and_answered(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    enrol(store)
    artifact = add_model(store, tmp_path)
    (lost,), _ = store.write(request_profile, NANO, ["relu"])
    unanswered = UnansweredRequests(store, OnlineFleet())
    for sequence in range(LOOKS):
        assert store.read(open_requests, [lost]) == [lost]
        (newer,), _ = store.write(request_profile, NANO, ["relu"])
        unanswered.look()
        answer(store, sequence, newer, artifact)
    assert store.read(open_requests, [lost]) == []
    store.close()


def test_a_request_has_its_hour_from_the_answer_to_the_one_before_it(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    enrol(store)
    artifact = add_model(store, tmp_path)
    (first, second), _ = store.write(request_profile, NANO, ["relu", "relu"])
    unanswered = UnansweredRequests(store, OnlineFleet())
    for _ in range(LOOKS - 1):
        unanswered.look()
    answer(store, 0, first, artifact)
    for _ in range(LOOKS):
        assert store.read(open_requests, [second]) == [second]
        unanswered.look()
    assert store.read(open_requests, [second]) == []
    store.close()


def _one_minute(store: Store) -> object:
    entries = history(store, [RowKind.QUEUE_SAMPLE])
    return entries if [entry.width_s for entry in entries] == [60] else None


def test_a_planner_that_stops_does_not_wait_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "tidy", lambda store, keep: itertools.repeat(1))  # there is always more
    store = new_store(tmp_path)
    Housekeeper(store, DAY, QuietFleet()).close()
    store.close()


def test_a_failing_database_is_logged_and_tried_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def broken(store: Store, keep: Retention) -> Iterator[int]:
        asked.set()
        raise StorageError("the disk is full", remedy="free space")

    monkeypatch.setattr(housekeeping, "tidy", broken)
    store = new_store(tmp_path)
    with caplog.at_level(logging.WARNING, "stageloom.planner.housekeeping"):
        housekeeper = Housekeeper(store, DAY, QuietFleet())
        assert asked.wait(30)
        housekeeper.close()
    assert "the disk is full; free space" in caplog.text
    store.close()

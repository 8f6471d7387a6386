"""A clock that leapt deletes nothing; one that stays ahead, or is confirmed, is believed step by step."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from stageloom.planner.api import routes
from stageloom.planner.dispatch.ports import StoredRow, TelemetryWrite
from stageloom.planner.housekeeping import Housekeeper
from stageloom.planner.replan.observing import BARRED_S, observe
from stageloom.planner.schema.service import ClockTrustRequest
from stageloom.planner.store import schema
from stageloom.planner.store.desired import newest_desired
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.fleet_view import newest_alarms
from stageloom.planner.store.fruitless import measured_us
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.regimes import known_regimes
from stageloom.planner.store.retention import Retention, tidy
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import OperatorCostRow
from stageloom.planner.store.telemetry import filed_rows, newest_telemetry
from stageloom.planner.store.trusted_time import (
    LEAP_S,
    STEP_S,
    ClockTrust,
    advance_clock,
    notices,
    trust_clock,
)
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import InputError
from stageloom.shared.messages.telemetry import QueueSample, Row, RowKind, encode_row
from tests.planner.api.context import QuietFleet, answer_of, planner_context
from tests.planner.processes import until
from tests.store.helpers import NANO, enrol, write_of
from tests.store.migrated import new_store
from tests.store.test_newest import alarm
from tests.store.test_replan_view import CLASS, Rig

DAY_S = 86_400.0
TWO_YEARS_S = 730 * DAY_S
KEEP = Retention(2 * DAY_S, 14 * DAY_S, 400 * DAY_S)
RUN_S = 600.0
T0_US = ManualClock().wall_us()


def after(s: float) -> int:
    return T0_US + round(s * 1e6)


# Pure


def test_a_clock_near_the_trusted_time_is_believed_and_moves_it_a_bounded_step() -> None:
    trust = ClockTrust(T0_US).advance(after(RUN_S), RUN_S)
    assert trust.trusted_us == after(RUN_S)
    weekend = trust.advance(after(LEAP_S), 0.0)
    assert weekend.ahead_s(after(LEAP_S)) == 0.0
    assert weekend.trusted_us == after(RUN_S + STEP_S)


def test_a_clock_that_leapt_is_not_believed_however_often_the_planner_starts() -> None:
    trust = ClockTrust(T0_US)
    for start in range(1000):
        wall_us = after(TWO_YEARS_S + start)
        assert trust.ahead_s(wall_us) == pytest.approx(TWO_YEARS_S + start)
        trust = trust.advance(wall_us, 0.0)
    assert trust == ClockTrust(T0_US)


def test_a_clock_that_stays_ahead_is_believed_after_as_much_real_time_as_it_was_ahead() -> None:
    trust, now_s, ahead_s = ClockTrust(T0_US), 0.0, 30 * DAY_S
    while trust.ahead_s(after(now_s + ahead_s)):
        now_s += RUN_S
        trust = trust.advance(after(now_s + ahead_s), RUN_S)
    assert now_s == pytest.approx(ahead_s - LEAP_S, rel=0.01)


def test_a_confirmed_clock_is_followed_by_a_bounded_step_a_run() -> None:
    wall_us = after(TWO_YEARS_S)
    trust = ClockTrust(T0_US, confirmed_us=wall_us)
    assert trust.ahead_s(wall_us) == 0.0
    runs = 0
    while trust.now_us(wall_us) < wall_us:
        before_us, trust = trust.trusted_us, trust.advance(wall_us, RUN_S)
        assert trust.trusted_us - before_us <= STEP_S * 1e6
        runs += 1
    assert runs == TWO_YEARS_S / STEP_S


@pytest.mark.promise("clock-leapt-deletes-nothing")
@pytest.mark.parametrize("seed", range(20))
def test_ages_never_grow_faster_than_twice_real_time_and_the_slack_whatever_the_clock_does(seed: int) -> None:
    rng, trust, real_s, absorbed_s = random.Random(seed), ClockTrust(T0_US), 0.0, 0.0
    for _ in range(300):
        elapsed_s = rng.choice([0.0, RUN_S])
        real_s += elapsed_s
        wall_us = after(real_s + rng.choice([-400, 0, 0, 0, 4, 40, 4000]) * DAY_S)
        before = trust
        trust = trust.advance(wall_us, elapsed_s)
        assert trust.trusted_us >= before.trusted_us and trust.now_us(wall_us) <= wall_us
        if before.ahead_s(wall_us):
            assert trust.trusted_us - before.trusted_us <= 2e6 * elapsed_s
        else:
            absorbed_s += (trust.trusted_us - before.trusted_us) / 1e6
    assert trust.trusted_us <= after(2 * real_s + absorbed_s)


# In the store


def rows(store: Store) -> int:
    with store.database.read() as session:
        return int(session.execute(text("SELECT COUNT(*) FROM telemetry")).scalar_one())


def events(store: Store) -> int:
    with store.database.read() as session:
        return int(session.execute(text("SELECT COUNT(*) FROM events")).scalar_one())


def send(store: Store, sequence: int, row: Row) -> None:
    """A row of a queue arrives."""
    sent = StoredRow(7, sequence, row.at_us, RowKind.QUEUE_SAMPLE, encode_row(row), row.data)
    LinkStore(store).append_telemetry([TelemetryWrite(NANO, (sent,), ())])


def run(store: Store, elapsed_s: float = RUN_S) -> float:
    """One run of housekeeping; how far ahead the clock was."""
    ahead_s = store.write(advance_clock, elapsed_s)
    for _ in tidy(store, KEEP):
        pass
    return ahead_s


@pytest.mark.promise("clock-leapt-deletes-nothing")
def test_one_start_with_the_clock_two_years_ahead_deletes_nothing_and_the_operator_is_told(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A planner runs. 2. It starts two years ahead, again and again. 3. The clock is right again."""
    enrol(store)
    LinkStore(store).append_telemetry([write_of(0, 99)])
    run(store, 0.0)
    kept = (rows(store), events(store))
    clock.advance(TWO_YEARS_S)
    for _ in range(5):
        assert run(store, 0.0) == pytest.approx(TWO_YEARS_S)
    assert (rows(store), events(store)) == kept
    (notice,) = store.read(notices)
    assert "730.0 days ahead" in notice and "`stageloom planner trust-clock`" in notice
    right = ManualClock()
    right.advance(RUN_S)
    monkeypatch.setattr(store.database, "_clock", right)
    assert run(store, 0.0) == 0.0 and store.read(notices) == []
    assert (rows(store), events(store)) == kept


@pytest.mark.promise("clock-leapt-deletes-nothing")
@pytest.mark.parametrize("wrong_us", [0, after(TWO_YEARS_S)], ids=["in 1970", "two years ahead"])
def test_rows_of_right_devices_outlive_a_planner_that_starts_with_a_wrong_clock(
    store: Store, monkeypatch: pytest.MonkeyPatch, wrong_us: int
) -> None:
    """1. A planner runs. 2. It starts with a wrong clock, and stores rows. 3. The clock is right again: they
    are there, under the devices' time, and so is what comes then."""
    enrol(store)
    run(store, 0.0)
    monkeypatch.setattr(store.database, "_clock", ManualClock(wall_us=wrong_us))
    run(store, 0.0)
    LinkStore(store).append_telemetry([write_of(0, 9)])
    monkeypatch.setattr(store.database, "_clock", ManualClock(wall_us=after(RUN_S)))
    run(store, 0.0)
    found, _ = store.read(newest_telemetry, NANO, [RowKind.QUEUE_SAMPLE], 1_000_000)
    assert [one.at_us for one in found] == [T0_US + at for at in range(10)]
    late = Row(after(RUN_S), QueueSample("relu", 1, 2, 3))
    send(store, 10, late)
    assert store.read(newest_telemetry, NANO, [RowKind.QUEUE_SAMPLE], 1_000_000)[0] == [late]


def test_a_clock_that_was_ahead_at_the_first_start_of_all_is_mended_by_an_operator(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A planner knows no time but one years ahead. 2. Its clock is set right. 3. An operator says so."""
    monkeypatch.setattr(store.database, "_clock", ManualClock(wall_us=after(TWO_YEARS_S)))
    enrol(store)
    run(store, 0.0)
    first, second = (Row(T0_US + at, QueueSample("relu", 1, 2, 3)) for at in range(2))
    send(store, 0, first)
    assert LinkStore(store).record_alarm(NANO, alarm(1)) is not None
    monkeypatch.setattr(store.database, "_clock", ManualClock())
    run(store)
    (notice,) = store.read(notices)
    assert "730.0 days behind" in notice and "`stageloom planner trust-clock --yes`" in notice
    api = planner_context(store, ManualClock())
    with pytest.raises(InputError, match=r"1 row of telemetry .* 730\.0 days earlier.*--yes"):
        answer_of(api, routes.CLOCK_TRUST, ClockTrustRequest())
    answer_of(api, routes.CLOCK_TRUST, ClockTrustRequest(confirmed=True))
    assert store.read(notices) == []
    send(store, 1, second)
    assert store.read(filed_rows, NANO, [RowKind.QUEUE_SAMPLE]) == [(T0_US, first), (T0_US + 1, second)]
    assert store.read(device_info, NANO).last_seen_us == T0_US
    assert LinkStore(store).record_alarm(NANO, alarm(2)) is not None, "the re-plan of then holds up none"
    assert [one.number for one in store.read(newest_alarms, NANO)] == [2, 1]


def test_what_was_tried_and_measured_while_the_clock_was_ahead_is_of_now_once_an_operator_says_so(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. By a clock years ahead costs are measured, and a plan gains nothing. 2. It is set right, and an
    operator says so: the plan is barred for as long as any other, and searches from now on count."""
    monkeypatch.setattr(store.database, "_clock", ManualClock(wall_us=after(TWO_YEARS_S)))
    rig = Rig(store, tmp_path)
    rig.profiled()
    other = replace(rig.runs, lanes=2)
    rig.replanned(other, "")
    rig.tried(other, "no_gain", known=False, generation=store.read(newest_desired, NANO))
    monkeypatch.setattr(store.database, "_clock", ManualClock())
    store.write(trust_clock, confirmed=True)
    number = rig.replan(rig.runs)
    barred = [observe(store, NANO, number, after(s)).barred for s in (0.0, 2.0 * BARRED_S)]
    assert barred == [((other.digest, other.structure),), ()]
    assert store.read(measured_us, NANO, CLASS, CLASS) == T0_US
    assert [regime.at_us for regime in store.read(known_regimes, NANO, CLASS)] == [T0_US]


def test_a_clock_that_fell_back_takes_no_times_from_telemetry_unasked(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A planner stores rows. 2. It starts in 1970, and an operator takes that for right. 3. It is not."""
    enrol(store)
    LinkStore(store).append_telemetry([write_of(0, 9)])
    run(store, 0.0)
    kept = store.read(filed_rows, NANO, [RowKind.QUEUE_SAMPLE])
    monkeypatch.setattr(store.database, "_clock", ManualClock(wall_us=0))
    with pytest.raises(InputError, match="10 rows of telemetry"):
        store.write(trust_clock)
    assert store.read(filed_rows, NANO, [RowKind.QUEUE_SAMPLE]) == kept
    assert "days behind" in store.read(notices)[0]


def test_rows_that_were_once_filed_in_the_future_are_not_the_newest(store: Store, clock: ManualClock) -> None:
    enrol(store)
    send(store, 0, Row(T0_US, QueueSample("relu", 1, 2, 3)))
    with store.database.write() as session:
        session.execute(text(f"UPDATE telemetry SET at_us = {after(TWO_YEARS_S)}"))
    right = Row(T0_US, QueueSample("relu", 4, 5, 6))
    send(store, 1, right)
    assert store.read(newest_telemetry, NANO, [RowKind.QUEUE_SAMPLE], 1_000_000)[0] == [right]


@pytest.mark.promise("clock-leapt-deletes-nothing")
def test_what_an_operator_confirms_goes_step_by_step(store: Store, clock: ManualClock) -> None:
    enrol(store)
    LinkStore(store).append_telemetry([write_of(0, 99)])
    run(store, 0.0)
    clock.advance(30 * DAY_S)
    assert run(store, 0.0) > 0
    store.write(trust_clock)
    assert store.read(notices) == []
    runs = 0
    while rows(store):
        assert run(store) == 0.0
        runs += 1
    assert runs == pytest.approx(KEEP.rows_s / STEP_S, abs=1)


@pytest.mark.promise("clock-leapt-deletes-nothing")
def test_a_database_of_before_trusts_the_newest_time_that_it_holds(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    """1. A database of schema 0011 with events. 2. It is upgraded by a planner two years ahead."""
    enrol(store)
    LinkStore(store).append_telemetry([write_of(0, 9)])
    with store.database.write() as session:
        for index in ("events_by_device", "trials_of_plans", "pending_replans"):
            session.execute(text(f"DROP INDEX {index}"))
        for table in (
            "clock_trust",
            "access_tokens",
            "audit",
            "api_answers",
            "machines",
            "executor_times",
            "regimes",
            "expected_regimes",
            "webhooks",
            "webhook_messages",
            "rollout_devices",
            "rollouts",
            "device_labels",
            "model_versions",
            "models",
            "part_costs",
            "handover_costs",
        ):
            session.execute(text(f"DROP TABLE {table}"))
        session.execute(text("CREATE TABLE models (name TEXT, digest TEXT, added_at_us BIGINT)"))
        for column in ("executor", "intra_op_threads"):
            session.execute(text(f"ALTER TABLE profiles DROP COLUMN {column}"))
        for table, column in (
            *(("trials", name) for name in ("figure", "latency_ratio", "busy_ratio", "outputs")),
            ("desired", "compare_outputs"),
            ("profiles", "parts"),
            *(("checkpoints", name) for name in ("verdict", "unchecked")),
            ("replans", "figure"),
            *(("considered_plans", name) for name in ("p50_s", "share_in_time", "chance")),
        ):
            session.execute(text(f"ALTER TABLE {table} DROP COLUMN {column}"))
        columns = ", ".join(one.name for one in OperatorCostRow.__table__.columns if one.name != "executor")
        session.execute(text(f"CREATE TABLE costs AS SELECT {columns} FROM operator_costs"))
        session.execute(text("DROP TABLE operator_costs"))
        session.execute(text("ALTER TABLE costs RENAME TO operator_costs"))
        session.execute(text("UPDATE alembic_version SET version_num = '0011'"))
    clock.advance(TWO_YEARS_S)
    assert schema.migrate(store.database) == ("0011", schema.HEAD)
    assert run(store, 0.0) == pytest.approx(TWO_YEARS_S, abs=1.0)
    assert rows(store) == 10


def test_the_log_says_once_that_old_rows_are_held_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    store = new_store(tmp_path, clock=clock)
    enrol(store)
    LinkStore(store).append_telemetry([write_of(0, 9)])
    run(store, 0.0)
    clock.advance(TWO_YEARS_S)
    housekeeper = Housekeeper(store, KEEP, QuietFleet())
    until(lambda: "held back" in caplog.text)
    housekeeper.close()
    assert rows(store) == 10
    store.close()

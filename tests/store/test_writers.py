"""Several real processes write one database; group commit; what was acknowledged survives kill -9."""

import os
import signal
import sqlite3
import threading
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path

import pytest
from sqlalchemy import event, select, text
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from stageloom.planner.store.devices import device_infos, revoke_device
from stageloom.planner.store.generations import generation_history
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.rows import insert_rows
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import DeviceRow, PlannerRow
from stageloom.planner.store.telemetry import telemetry_balance, telemetry_rows
from stageloom.planner.store.used_database import DATABASE_FILE
from stageloom.planner.store.writer import GROUP
from stageloom.planner.telemetry import Balance
from stageloom.shared.errors import InputError, StorageError, UnavailableError
from stageloom.shared.messages.telemetry import RowKind
from tests.store.helpers import NANO, add_model, enrol, finish, small_plan, start, write_of

pytestmark = pytest.mark.more

WRITERS = 4
CHANGES = 25


@pytest.mark.promise("read-modify-write-four")
def test_four_writers_of_one_value_lose_no_change(tmp_path: Path, database_url: str) -> None:
    """SQLAlchemy's default mode on SQLite loses about two thirds of these."""
    store = Store(tmp_path, database_url)
    enrol(store)
    add_model(store, tmp_path)
    store.write(add_plan, "first", small_plan(store), "sequential")
    code = """
import sys
from pathlib import Path
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.store import Store
store = Store(Path(sys.argv[1]), sys.argv[2])
for _ in range(int(sys.argv[3])):
    desired = store.write(push, Push(device="nano", plan="first", decided_by="operator"))
    print(desired.generation)
store.close()
"""
    children = [start(code, str(tmp_path), database_url, str(CHANGES)) for _ in range(WRITERS)]
    given = [int(line) for child in children for line in finish(child).split()]
    assert sorted(given) == list(range(1, WRITERS * CHANGES + 1))
    assert store.read(device_infos)[0].desired_generation == WRITERS * CHANGES
    entries, _ = store.read(generation_history, NANO, limit=256)
    assert sorted(entry.generation for entry in entries) == sorted(given)
    store.close()


@pytest.mark.promise("read-modify-write-four")
def test_sqlite_transactions_begin_as_writers_and_commits_reach_the_disk(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.database.engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2  # FULL
    other = sqlite3.connect(tmp_path / DATABASE_FILE, timeout=0, isolation_level=None)
    with store.database.write() as session:
        session.connection()  # begun, and nothing written yet
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
    with store.database.read() as session:
        session.connection()
        other.execute("BEGIN IMMEDIATE")  # a reader is in nobody's way
        other.execute("ROLLBACK")
    other.close()
    store.close()


def test_a_versioned_row_refuses_a_write_over_a_newer_one(store: Store) -> None:
    enrol(store)
    with store.database.read() as session:
        stale = session.get_one(DeviceRow, NANO)
        session.expunge(stale)
    store.write(revoke_device, NANO)
    with pytest.raises(StaleDataError), store.database.write() as session:
        stale.device_class = "changed from an old copy"
        session.add(stale)
    with store.database.read() as session:
        assert session.get_one(DeviceRow, NANO).revoked


def test_a_change_that_loses_the_race_runs_again(store: Store) -> None:
    tries: list[int] = []

    def work(session: Session) -> int:
        tries.append(1)
        if len(tries) < 3:
            raise StaleDataError("another writer was first")
        session.get_one(PlannerRow, 1).epoch = 41
        return 41

    assert store.database.change(work) == 41
    assert (len(tries), LinkStore(store).epoch()) == (3, 41)


def test_a_group_is_one_commit_and_a_failing_work_undoes_only_itself(store: Store) -> None:
    """The writer is held in one work while others queue up behind it: those become one group."""
    held, go = threading.Event(), threading.Event()

    def hold(session: Session) -> None:
        held.set()
        assert go.wait(30)

    def raise_by(amount: int, fail: bool = False) -> "Future[int]":
        def work(session: Session) -> int:
            row = session.get_one(PlannerRow, 1)
            row.epoch += amount
            session.flush()
            if fail:
                raise InputError("refused after its write")
            return row.epoch

        return store.writer.submit(work)

    first = store.writer.submit(hold)
    assert held.wait(30)
    futures = [raise_by(1), raise_by(100, fail=True), raise_by(10)]
    go.set()
    first.result(30)
    assert futures[0].result(30) == 2
    with pytest.raises(InputError, match="refused after its write"):
        futures[1].result(30)
    assert futures[2].result(30) == 12
    assert LinkStore(store).epoch() == 12


@pytest.mark.parametrize("under_way", [True, False], ids=["under way", "waiting"])
def test_a_work_whose_caller_gives_up_is_committed_and_so_are_those_after_it(
    store: Store, under_way: bool
) -> None:
    held, go = threading.Event(), threading.Event()

    def hold(session: Session) -> None:
        held.set()
        assert go.wait(30)

    def raise_epoch(session: Session) -> int:
        row = session.get_one(PlannerRow, 1)
        row.epoch += 1
        session.flush()
        return row.epoch

    first = store.writer.submit(hold)
    assert held.wait(30)
    given_up = first if under_way else store.writer.submit(raise_epoch)
    given_up.cancel()
    go.set()
    assert store.writer.submit(raise_epoch).result(30) == (2 if under_way else 3)


@pytest.mark.promise("read-modify-write-four")
def test_a_group_whose_commit_fails_is_not_acknowledged(store: Store) -> None:
    def broken(session: Session) -> None:
        session.execute(text("INSERT INTO no_such_table VALUES (1)"))

    with pytest.raises(StorageError, match="no_such_table"):
        store.writer.run(broken)
    enrol(store)  # the writer lives on
    assert [info.device for info in store.read(device_infos)] == [NANO]


def test_a_closed_store_refuses_and_what_was_submitted_before_is_kept(
    tmp_path: Path, database_url: str
) -> None:
    store = Store(tmp_path, database_url)
    enrol(store)
    LinkStore(store).append_telemetry([write_of(0, 9)])
    store.close()
    with pytest.raises(UnavailableError, match="closed"):
        store.write(revoke_device, NANO)
    again = Store(tmp_path, database_url)
    assert again.read(telemetry_balance) == Balance(10, 10, 0, 0)
    again.close()


@pytest.mark.promise("read-modify-write-four")
def test_kill_in_mid_write_loses_nothing_acknowledged(tmp_path: Path, database_url: str) -> None:
    """1. a child stores batches of 20 rows and prints a batch's last row once the call returned;
    2. it is killed while writing; 3. every row it printed is there, and no batch is there by half."""
    store = Store(tmp_path, database_url)
    enrol(store)
    code = """
import itertools, sys
from pathlib import Path
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.store import Store
from tests.store.helpers import write_of
store = Store(Path(sys.argv[1]), sys.argv[2])
for first in itertools.count(0, 20):
    LinkStore(store).append_telemetry([write_of(first, first + 19)])
    print(first + 19, flush=True)
"""
    child = start(code, str(tmp_path), database_url)
    assert child.stdout is not None
    acknowledged = [int(child.stdout.readline()) for _ in range(10)]
    os.kill(child.pid, signal.SIGKILL)
    rest, _ = child.communicate(timeout=30)
    acknowledged += [int(line) for line in rest.split("\n")[:-1]]
    produced, stored, dropped, lost = store.read(telemetry_balance)
    assert stored >= acknowledged[-1] + 1
    assert stored % 20 == 0 and produced == stored and dropped == lost == 0
    rows = store.read(telemetry_rows, NANO, [RowKind.QUEUE_SAMPLE])
    assert len(rows) == stored
    store.close()


def test_a_reader_keeps_its_snapshot_while_a_writer_commits(store: Store) -> None:
    enrol(store)
    with store.database.read() as session:
        before = session.scalars(select(DeviceRow.revoked)).all()
        store.write(revoke_device, NANO)
        assert session.scalars(select(DeviceRow.revoked)).all() == before == [False]


def test_a_full_disk_is_one_line_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    """1. rows are acknowledged until the disk is full; 2. the next write is refused with the remedy;
    3. space is made: every acknowledged row is there, and the refused rows can be sent again."""
    store = Store(tmp_path)
    enrol(store)
    pages: list[int] = []

    def limit(connection: sqlite3.Connection, _record: object, _proxy: object) -> None:
        connection.execute(f"PRAGMA max_page_count={pages[-1]}")

    event.listen(store.database.engine, "checkout", limit)
    with store.database.read() as session:
        pages.append(1)  # SQLite rounds up to what is used
        used = session.connection().exec_driver_sql("PRAGMA page_count").scalar_one()
    pages.append(used + 4)
    acknowledged = 0
    with pytest.raises(StorageError, match="full; free space on the disk") as caught:
        for first in range(0, 100_000, 100):
            LinkStore(store).append_telemetry([write_of(first, first + 99)])
            acknowledged = first + 100
    assert "\n" not in str(caught.value)
    assert store.read(telemetry_balance) == Balance(acknowledged, acknowledged, 0, 0)
    pages.append(used + 10_000)
    LinkStore(store).append_telemetry([write_of(acknowledged, acknowledged + 99)])
    assert store.read(telemetry_balance) == Balance(acknowledged + 100, acknowledged + 100, 0, 0)
    store.close()


@pytest.mark.promise("requests-wait-store-wait")
def test_small_writes_go_ahead_of_bulk_and_do_not_starve_it(store: Store) -> None:
    """While the writer is held, more bulk work queues up than small, and first."""
    held, go, order = threading.Event(), threading.Event(), list[str]()

    def hold(session: Session) -> None:
        held.set()
        assert go.wait(30)

    store.writer.submit(hold)
    assert held.wait(30)
    bulk = [store.writer.submit(lambda session: order.append("bulk"), bulk=True) for _ in range(GROUP + 1)]
    small = [store.writer.submit(lambda session: order.append("small")) for _ in range(GROUP + 1)]
    go.set()
    for future in bulk + small:
        future.result(30)
    assert [next(run) for _, run in groupby(order)] == ["bulk", "small", "bulk", "small"]
    assert order.index("small") == GROUP, "one bulk commit ahead, as the commit before it was a small one"


@pytest.mark.parametrize("count", [0, 1, 127, 128, 300])
def test_rows_inserted_by_the_hundred_are_the_rows_given(store: Store, count: int) -> None:
    rows = [(at, None, f"code {at}", "it's :v1") for at in range(count)]
    statements: list[str] = []
    event.listen(store.database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    with store.database.write() as session:
        insert_rows(session.connection(), "events", ("at_us", "device", "code", "text"), rows)
    assert sum(one.startswith("INSERT") for one in statements) <= count / 128 + 7
    with store.database.read() as session:
        found = session.execute(text("SELECT at_us, device, code, text FROM events ORDER BY at_us")).all()
    assert [tuple(one) for one in found] == rows


def test_a_statement_of_our_own_that_is_wrong_is_in_the_log_with_its_traceback(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    statement = "INSERT INTO planner (id) VALUES (NULL)"
    with pytest.raises(StorageError):
        store.writer.run(lambda session: session.execute(text(statement)))
    assert f"[SQL: {statement}]" in caplog.text and "Traceback" in caplog.text

"""Re-plans under way are found without reading those that ended, which are many."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.replans import OVERDUE_US, end_overdue, end_replan, unfinished_replans
from stageloom.planner.store.store import Store
from stageloom.shared.clock import ManualClock
from stageloom.shared.messages.control import Alarm
from tests.store.helpers import NANO, T0_US, enrol


def query_plan(store: Store, function: Callable[[Session], Any]) -> str:
    """How the database finds what a function of one statement asks for."""
    heard: list[tuple[str, Any]] = []

    def hear(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        heard.append((statement, parameters))

    event.listen(store.database.engine, "before_cursor_execute", hear)
    store.write(function)
    event.remove(store.database.engine, "before_cursor_execute", hear)
    ((statement, parameters),) = [one for one in heard if "FROM replans" in one[0]]
    with store.database.read() as session:
        connection = session.connection()
        if store.database.is_sqlite:
            rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
            return "\n".join(row[-1] for row in rows)
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")  # it reads a small table as a whole
        return "\n".join(row[0] for row in connection.exec_driver_sql(f"EXPLAIN {statement}", parameters))


@pytest.mark.parametrize("function", [unfinished_replans, end_overdue])
def test_replans_under_way_are_found_by_their_own_index(
    store: Store, function: Callable[[Session], Any]
) -> None:
    assert "pending_replans" in query_plan(store, function)


def alarm(number: int) -> Alarm:
    return Alarm(
        boot=7, number=number, at_us=T0_US, cause="age", value=1, threshold=1, plan=None, loads=(), samples=()
    )


def test_an_alarm_that_comes_again_names_the_replan_that_it_began_until_that_is_decided(store: Store) -> None:
    """The answer to its commit may have been lost: nobody carries the re-plan out then."""
    enrol(store)
    link = LinkStore(store)
    replan = link.record_alarm(NANO, alarm(1))
    assert replan is not None
    assert link.record_alarm(NANO, alarm(2)) is None, "it is noted against the first one's"
    assert link.record_alarm(NANO, alarm(1)) == replan
    assert link.record_alarm(NANO, alarm(2)) is None
    assert store.read(unfinished_replans) == [(NANO, replan)]
    store.write(end_replan, replan, "nothing better")
    assert link.record_alarm(NANO, alarm(1)) is None


def test_an_alarm_that_comes_again_long_after_names_no_replan(store: Store, clock: ManualClock) -> None:
    """Its load is gone."""
    enrol(store)
    assert LinkStore(store).record_alarm(NANO, alarm(1)) is not None
    clock.advance(OVERDUE_US / 1e6 + 1.0)
    assert LinkStore(store).record_alarm(NANO, alarm(1)) is None

"""Re-plans under way are found without reading those that ended, which are many."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from stageloom.planner.store.replans import end_overdue, unfinished_replans
from stageloom.planner.store.store import Store


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

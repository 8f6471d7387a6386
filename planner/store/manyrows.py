"""Many rows in few statements.

A driver that runs one statement per row gives up the interpreter and takes it back for each; beside a thread
that is always busy each taking back costs up to a switch interval (`sys.setswitchinterval`). A thousand rows
of telemetry waited for half a second that way, without any of the two cores being busy.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Connection

_MOST: Final = 128  # rows a statement; times columns far below any database's bound on variables


def insert_rows(
    connection: Connection,
    table: str,
    columns: tuple[str, ...],
    rows: Sequence[tuple[Any, ...]],
    *,
    conflict: str = "",
) -> None:
    """Insert `rows`, whose values are plain ones in the order of `columns`.

    `conflict` is an SQL clause that both databases know, `ON CONFLICT ... DO UPDATE SET ...`; the rows must
    then be distinct in its target.
    """
    run_on_rows(connection, f"INSERT INTO {table} ({', '.join(columns)}) VALUES {{rows}} {conflict}", rows)


def run_on_rows(connection: Connection, statement: str, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run a statement whose `{rows}` stands for a list of rows, each in parentheses; returns what it finds.

    An update reads them as a table: `WITH given (a, b) AS (VALUES {rows}) UPDATE ... FROM given WHERE ...`.
    Goes to the driver as it is: naming and binding a thousand values takes SQLAlchemy longer than the
    database takes to store them.
    """
    found: list[Any] = []
    at, size = 0, _MOST
    while at < len(rows):
        while size > len(rows) - at:
            size //= 2  # few sizes, so few statements to prepare
        values = tuple(value for row in rows[at : at + size] for value in row)
        made = _statement(statement, len(rows[at]), size, connection.dialect.paramstyle)
        result = connection.exec_driver_sql(made, values)
        if result.returns_rows:
            found += result.all()
        at += size
    return found


@lru_cache(256)
def _statement(statement: str, columns: int, rows: int, paramstyle: str) -> str:
    mark = "?" if paramstyle == "qmark" else "%s"
    one_row = f"({', '.join([mark] * columns)})"
    return statement.format(rows=", ".join([one_row] * rows))

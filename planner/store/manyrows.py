"""Many rows in few statements.

A driver that runs one statement per row gives up the interpreter and takes it back for each; beside a thread
that is always busy each taking back costs up to a switch interval (`sys.setswitchinterval`). A thousand rows
of telemetry waited for half a second that way, without any of the two cores being busy.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Connection, TextClause, text

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


def run_on_rows(connection: Connection, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Run a statement whose `{rows}` stands for a list of rows, each of them in parentheses.

    An update reads them as a table: `WITH given (a, b) AS (VALUES {rows}) UPDATE ... FROM given WHERE ...`.
    Where a column holds only nulls or a statement compares it, Postgres wants it cast.
    """
    at, size = 0, _MOST
    while at < len(rows):
        while size > len(rows) - at:
            size //= 2  # few sizes, so few statements to prepare
        values = [value for row in rows[at : at + size] for value in row]
        names = _names(len(values))
        made = _statement(statement, len(rows[at]), size)
        connection.execute(made, dict(zip(names, values, strict=True)))
        at += size


@lru_cache
def _names(count: int) -> tuple[str, ...]:
    return tuple(f"v{at}" for at in range(count))


@lru_cache(256)
def _statement(statement: str, columns: int, rows: int) -> TextClause:
    names = iter(_names(rows * columns))
    one_row = [f"({', '.join(f':{next(names)}' for _ in range(columns))})" for _ in range(rows)]
    return text(statement.format(rows=", ".join(one_row)))

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
    at, size = 0, _MOST
    while at < len(rows):
        while size > len(rows) - at:
            size //= 2  # few sizes, so few statements to prepare
        values = [value for row in rows[at : at + size] for value in row]
        names = _names(len(values))
        connection.execute(_statement(table, columns, size, conflict), dict(zip(names, values, strict=True)))
        at += size


@lru_cache
def _names(count: int) -> tuple[str, ...]:
    return tuple(f"v{at}" for at in range(count))


@lru_cache
def _statement(table: str, columns: tuple[str, ...], rows: int, conflict: str) -> TextClause:
    names = iter(_names(rows * len(columns)))
    one_row = [f"({', '.join(f':{next(names)}' for _ in columns)})" for _ in range(rows)]
    return text(f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join(one_row)} {conflict}")

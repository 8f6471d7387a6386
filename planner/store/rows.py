"""Rows: many in few statements, those that must exist, sums of counts, and rows that nobody can read.

A driver that runs one statement per row releases and retakes the interpreter's lock for each; beside a busy
thread each retake costs up to a switch interval (`sys.setswitchinterval`). A thousand rows of telemetry took
half a second that way on two idle cores.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect
from sqlalchemy import ColumnElement, Connection, Float, cast, func
from sqlalchemy.orm import InstrumentedAttribute, Session

from stageloom.planner.store.database import now_us
from stageloom.planner.store.tables import DeviceRow, EventRow, PlannerRow
from stageloom.shared.errors import DecodeError, NotFoundError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.base import MOST
from stageloom.shared.messages.telemetry import Row, decode_row
from stageloom.shared.text import bounded, counted

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


def sum_of(column: InstrumentedAttribute[int]) -> ColumnElement[float]:
    """The sum of a column of counts, for `saturated`; 0 over no rows."""
    return func.coalesce(func.sum(cast(column, Float(53))), 0.0)


def saturated(total: Any) -> int:
    """What `sum_of` found, as a count."""
    return min(int(total or 0), MOST)


T = TypeVar("T", bound=msgspec.Struct)

_BLANK: Final[dict[type, Callable[[], Any]]] = {
    inspect.StrType: str,
    inspect.BytesType: bytes,
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.BoolType: bool,
    inspect.VarTupleType: tuple,
    inspect.DictType: dict,
    inspect.UnionType: lambda: None,
}
"""Makes what a field of such a type holds where nothing is known. No enum: none of its values says that."""


def message_of(kind: type[T], row: Any, **others: Any) -> T:
    """A message whose fields are the columns of their names; `others` are the fields that are not."""
    return kind(
        **{name: getattr(row, name) for name in kind.__struct_fields__ if name not in others}, **others
    )


def blank_of(kind: type[T], **known: Any) -> T:
    """A message of which only this is known; its other fields are as by default, or empty."""
    fields = inspect.type_info(kind).fields  # type: ignore[attr-defined]  # it is a struct's
    unknown = [field for field in fields if field.required and field.name not in known]
    return kind(**{field.name: _blank(field.type) for field in unknown}, **known)


def _blank(field_type: inspect.Type) -> Any:
    if isinstance(field_type, inspect.StructType):
        return blank_of(field_type.cls)
    return _BLANK[type(field_type)]()


def shown(make: Callable[[], T], instead: Callable[[str], T]) -> T:
    """What `make` makes, or what `instead` makes of the reason why nobody could read that."""
    try:
        made = make()
        return msgspec.convert(msgspec.to_builtins(made), type(made))
    except (ValueError, DecodeError) as error:
        return instead(bounded(f"cannot be shown: {error}"))


def read_row(body: bytes) -> Row | DecodeError:
    """A stored telemetry row, or why this version cannot read it."""
    try:
        return decode_row(body)
    except DecodeError as error:
        return error


def readable(bodies: Iterable[bytes]) -> tuple[list[Row], str]:
    """Stored telemetry rows, and what of them this version cannot read; empty where it reads all."""
    found = [read_row(body) for body in bodies]
    errors = [one for one in found if isinstance(one, DecodeError)]
    unread = f"{counted(len(errors), 'telemetry row')}: {errors[-1].cause}" if errors else ""
    return [one for one in found if isinstance(one, Row)], bounded(unread)


def planner_row(session: Session) -> PlannerRow:
    """This database's own row, made at first use with epoch 1."""
    row = session.get(PlannerRow, 1)
    if row is None:
        row = PlannerRow(id=1, epoch=1, created_at_us=now_us(session))
        session.add(row)
        session.flush()
    return row


def known_device(session: Session, device: DeviceId) -> DeviceRow:
    """The device's row.

    Raises:
        InputError: there is no such device.
    """
    row = session.get(DeviceRow, device)
    if row is None:
        raise NotFoundError(f"there is no device {device!r}", remedy="see `stageloom device list`")
    return row


def add_event(session: Session, device: DeviceId | None, code: str, text: str) -> None:
    """Keep an event of a device, or of the planner itself (None)."""
    session.add(EventRow(at_us=now_us(session), device=device, code=code, text=text))

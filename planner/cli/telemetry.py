"""`stageloom telemetry`: what a device measured, row by row, for whoever wants to analyse it."""

from typing import Annotated, Any

import msgspec
import typer

from planner.cli.options import DatabaseUrl, DataDir, Json, data_dir_of
from planner.cli.output import emit_json, emit_table, when
from shared.errors import InputError
from shared.ids import DeviceId
from shared.messages.telemetry import KIND_OF, Row, RowKind

_KINDS = [kind.value for kind in KIND_OF.values()]


def telemetry(
    device: Annotated[str, typer.Argument(metavar="DEVICE")],
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help=f"Repeatable; default all: {', '.join(_KINDS)}."),
    ] = None,
    since_us: Annotated[
        int, typer.Option(metavar="US", min=0, help="From this moment on, microseconds since 1970.")
    ] = 0,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="The newest N rows.")] = 10_000,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Print stored telemetry of a device, oldest first. Works while the planner is down, too.

    \b
    stageloom telemetry shop-7 --kind queue_sample --json > queues.json
    """
    from planner.store.store import ReadStore

    kinds = [_kind(name) for name in kind or _KINDS]
    store = ReadStore.open(data_dir_of(data_dir), database_url)
    try:
        store.device(DeviceId(device))
        rows = store.telemetry(DeviceId(device), kinds, since_us=since_us, limit=limit)
    finally:
        store.close()
    if json:
        emit_json([_flat(row) for row in rows])
        return
    emit_table(
        ("at", "kind", "values"),
        [(when(row.at_us), KIND_OF[type(row.data)].value, _values(row)) for row in rows],
        empty=f"{device} has sent no such rows",
    )


def _kind(name: str) -> RowKind:
    if name not in _KINDS:
        raise InputError(f"there is no kind of row {name!r}", remedy=f"choose among {', '.join(_KINDS)}")
    return RowKind(name)


def _fields(row: Row) -> dict[str, Any]:
    """Field names and plain values; rows are arrays on the wire, so the names come from the type."""
    return {name: _plain(getattr(row.data, name)) for name in row.data.__struct_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    return value


def _flat(row: Row) -> dict[str, Any]:
    return {"at_us": row.at_us, "kind": KIND_OF[type(row.data)].value, **_fields(row)}


def _values(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in _fields(row).items())

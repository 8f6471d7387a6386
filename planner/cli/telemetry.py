"""`stageloom device telemetry`: what a device measured."""

from typing import Annotated, Any, Final

import typer

from stageloom.planner.api import routes
from stageloom.planner.cli.connection import LONG_S, Caller, connected
from stageloom.planner.cli.options import MOST_ROWS, checked
from stageloom.planner.cli.output import books_line, emit_table, progress, show, when
from stageloom.planner.schema.service import TelemetryBooks
from stageloom.planner.schema.telemetry import (
    END_US,
    TELEMETRY_PAGE,
    DeviceBooksRequest,
    DeviceTelemetryRequest,
    RollUp,
    TelemetryItem,
)
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import RowKind

_KINDS: Final = [kind.value for kind in RowKind]
_SPANS: Final = {0: "row", 60: "minute", 3600: "hour"}


def telemetry(
    device: Annotated[str, typer.Argument(metavar="DEVICE")],
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help=f"Repeatable; default all: {', '.join(_KINDS)}."),
    ] = None,
    by: Annotated[
        RollUp | None,
        typer.Option("--by", help="Roll everything up to this. Default: as fine as it is kept."),
    ] = None,
    since_us: Annotated[
        int,
        typer.Option(metavar="US", min=0, max=END_US, help="From this moment on, microseconds since 1970."),
    ] = 0,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_ROWS, help="The newest N rows.")
    ] = 10_000,
) -> None:
    """Print stored telemetry of a device, oldest first. Works while the planner is down, too.

    Old rows are rolled up into minutes, then hours: such a row says its `width_s` and how many `rows` it
    stands for. Samples then have a mean and bounds, and count `samples`.

    \b
    stageloom device telemetry shop-7 --kind queue_sample --json > queues.json
    stageloom device telemetry shop-7 --kind task_counters --by hour
    """
    request = checked(
        DeviceTelemetryRequest(
            device=DeviceId(device),
            kind=tuple(_kind(name) for name in kind or ()),
            by=by,
            since_us=since_us,
            limit=min(limit, TELEMETRY_PAGE),
        )
    )
    with connected(live=False) as caller:
        items = _newest(caller, request, limit)
        books = caller.call(routes.DEVICE_BOOKS, DeviceBooksRequest(device=request.device))
    show(items, lambda: _tell(device, items, books))


def _newest(caller: Caller, request: DeviceTelemetryRequest, number: int) -> list[TelemetryItem]:
    """So many at most, oldest first."""
    items: list[TelemetryItem] = []
    for item in caller.pages(routes.DEVICE_TELEMETRY, request, timeout_s=LONG_S):
        items.append(item)
        if len(items) == number:
            break
    return sorted(reversed(items), key=lambda item: item.at_us)


def _tell(device: str, items: list[TelemetryItem], books: TelemetryBooks) -> None:
    emit_table(
        ("at (UTC)", "span", "kind", "values"),
        [(when(item.at_us), _SPANS[item.width_s], item.kind.value, _values(item.values)) for item in items],
        empty=f"{device} has sent no such rows",
    )
    progress(books_line(books))


def _kind(name: str) -> RowKind:
    if name not in _KINDS:
        raise InputError(f"there is no kind of row {name!r}", remedy=f"choose among {', '.join(_KINDS)}")
    return RowKind(name)


def _values(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, dict) and "mean" in value:
        return f"{value['mean']:.6g}({value['min']:g}..{value['max']:g})"
    return str(value)

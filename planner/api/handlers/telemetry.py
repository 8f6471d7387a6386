"""What devices measured, and what became of the rows that they produced."""

from concurrent.futures import Future
from typing import Any, Final

import msgspec

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiCall, ApiContext, handles
from stageloom.planner.api.handlers.plans import position
from stageloom.planner.schema.base import Page
from stageloom.planner.schema.service import TelemetryBooks
from stageloom.planner.schema.telemetry import DeviceBooksRequest, DeviceTelemetryRequest, TelemetryItem
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.telemetry import telemetry_balance
from stageloom.planner.store.telemetry_history import TelemetryPosition, telemetry_history
from stageloom.planner.telemetry import Gauge, TelemetryEntry, Width
from stageloom.shared.messages.telemetry import RowKind

_ALL: Final = tuple(RowKind)


@handles(routes.DEVICE_BOOKS)
def device_books(api: ApiContext, request: DeviceBooksRequest, call: ApiCall) -> TelemetryBooks:
    api.reader.read(device_info, request.device)
    return TelemetryBooks(**api.reader.read(telemetry_balance, request.device)._asdict())


@handles(routes.DEVICE_TELEMETRY)
def device_telemetry(
    api: ApiContext, request: DeviceTelemetryRequest, call: ApiCall
) -> "Page[TelemetryItem] | Future[Page[TelemetryItem]]":
    if request.by is not None:  # a page of it stands for any number of rows
        return api.apart(telemetry_page, request)
    return telemetry_page(api.reader, request)


def telemetry_page(store: ReadStore, request: DeviceTelemetryRequest) -> Page[TelemetryItem]:
    """One page of a device's telemetry.

    Raises:
        InputError: there is no such device, or `after` is no page's `next`.
    """
    at, _, seen = request.after.partition(".")
    store.read(device_info, request.device)
    entries, following = store.read(
        telemetry_history,
        request.device,
        request.kind or _ALL,
        by=None if request.by is None else Width[request.by.name],
        since_us=request.since_us,
        after=TelemetryPosition(position(at), position(seen)) if request.after else None,
        limit=request.limit,
    )
    after = "" if following is None else f"{following.at_us}.{following.seen}"
    return Page(items=tuple(map(_item, entries)), next=after)


def _item(entry: TelemetryEntry) -> TelemetryItem:
    return TelemetryItem(
        at_us=entry.at_us,
        kind=entry.kind,
        width_s=entry.width_s,
        rows=entry.rows,
        values=_fields(entry.data),
    )


def _fields(data: msgspec.Struct) -> dict[str, Any]:
    """Field names and plain values; rows are arrays on the wire, so the names come from the type."""
    return {name: _plain(getattr(data, name)) for name in data.__struct_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Gauge):
        return {"mean": value.mean, "min": value.low, "max": value.high, "samples": value.samples}
    return _fields(value) if isinstance(value, msgspec.Struct) else value

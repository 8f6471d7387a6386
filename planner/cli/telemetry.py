"""What devices measured, and what was re-planned for them."""

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from stageloom.planner.cli.options import END_US, MOST_ROWS, DatabaseUrl, DataDir, Json, reading
from stageloom.planner.cli.output import books_line, emit_json, emit_table, interval, pair, progress, when
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.admin import ReplanInfo, TelemetryBooks
from stageloom.shared.messages.telemetry import RowKind

if TYPE_CHECKING:
    from stageloom.planner.telemetry import TelemetryEntry

replans = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at re-plans of devices.")


@replans.callback()
def group() -> None:
    """Look at re-plans of devices."""


_KINDS = [kind.value for kind in RowKind]


class By(str, Enum):
    """The widths to which telemetry can be rolled up."""

    MINUTE = "minute"
    HOUR = "hour"


def telemetry(
    device: Annotated[str, typer.Argument(metavar="DEVICE")],
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help=f"Repeatable; default all: {', '.join(_KINDS)}."),
    ] = None,
    by: Annotated[
        By | None,
        typer.Option("--by", help="Roll everything up to this. Default: as fine as it is kept."),
    ] = None,
    since_us: Annotated[
        int,
        typer.Option(metavar="US", min=0, max=END_US, help="From this moment on, microseconds since 1970."),
    ] = 0,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_ROWS, help="The newest N rows.")
    ] = 10_000,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Print stored telemetry of a device, oldest first. Works while the planner is down, too.

    Old rows are rolled up into minutes, then hours: such a row says its `width_s` and how many `rows` it
    stands for. Samples then have a mean and bounds, and count `samples`.

    \b
    stageloom telemetry shop-7 --kind queue_sample --json > queues.json
    stageloom telemetry shop-7 --kind task_counters --by hour
    """
    from stageloom.planner.store.devices import device_info
    from stageloom.planner.store.telemetry import telemetry_balance, telemetry_history
    from stageloom.planner.telemetry import Width

    name, kinds = DeviceId(device), [_kind(one) for one in kind or _KINDS]
    width = None if by is None else Width[by.name]
    with reading(data_dir, database_url) as store:
        store.read(device_info, name)
        entries = store.read(telemetry_history, name, kinds, by=width, since_us=since_us, limit=limit)
        books = store.read(telemetry_balance, name)
    if json:
        emit_json([_flat(entry) for entry in entries])
        return
    emit_table(
        ("at (UTC)", "span", "kind", "values"),
        [
            (when(entry.at_us), _SPANS[entry.width_s], entry.kind.value, _values(entry.data))
            for entry in entries
        ],
        empty=f"{device} has sent no such rows",
    )
    progress(books_line(TelemetryBooks(**books._asdict())))


_SPANS = {0: "row", 60: "minute", 3600: "hour"}


def _kind(name: str) -> RowKind:
    if name not in _KINDS:
        raise InputError(f"there is no kind of row {name!r}", remedy=f"choose among {', '.join(_KINDS)}")
    return RowKind(name)


def _fields(data: msgspec.Struct) -> dict[str, Any]:
    """Field names and plain values; rows are arrays on the wire, so the names come from the type."""
    return {name: _plain(getattr(data, name)) for name in data.__struct_fields__}


def _plain(value: Any) -> Any:
    from stageloom.planner.telemetry import Gauge

    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Gauge):
        return {"mean": value.mean, "min": value.low, "max": value.high, "samples": value.samples}
    if isinstance(value, msgspec.Struct):
        return _fields(value)
    return value


def _flat(entry: "TelemetryEntry") -> dict[str, Any]:
    span = {"width_s": entry.width_s, "rows": entry.rows} if entry.width_s else {}
    return {"at_us": entry.at_us, "kind": entry.kind.value, **span, **_fields(entry.data)}


def _values(data: msgspec.Struct) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in _fields(data).items())


def _short(value: Any) -> str:
    if isinstance(value, dict) and "mean" in value:
        return f"{value['mean']:.6g}({value['min']:g}..{value['max']:g})"
    return str(value)


@replans.command("list")
def list_replans(
    device: Annotated[str | None, typer.Argument(metavar="DEVICE")] = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_ROWS, help="Newest entries to show.")
    ] = 50,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """List re-plans, newest first. Of each the trigger, the plan, its trial, and the times from its trigger.

    An outcome of no_gain is an answer, not a failure: the plan that runs is as good as any that was found.

    \b
    stageloom replan list shop-7
    stageloom plan compare shop-7      # the newest one in detail
    """
    from stageloom.planner.store.replans import replan_infos

    with reading(data_dir, database_url) as store:
        found = store.read(replan_infos, DeviceId(device) if device is not None else None, limit=limit)
    if json:
        emit_json(list(found))
        return
    emit_table(
        (
            *("device", "at (UTC)", "cause", "value", "threshold", "generation", "plan", "how", "outcome"),
            *("ratio", "decided ms", "active ms", "reason", "remark"),
        ),
        [_row(one) for one in found],
        empty="nothing was re-planned",
    )


def _row(one: ReplanInfo) -> tuple[object, ...]:
    return (
        one.device,
        when(one.at_us),
        one.cause,
        f"{one.value:.3g}",
        f"{one.threshold:.3g}",
        pair(one.epoch, one.generation),
        one.plan,
        one.how,
        one.outcome,
        interval(one.ratio, one.ratio_low, one.ratio_high),
        one.trigger_to_decision_ms,
        one.trigger_to_active_ms,
        one.reason,
        one.remark,
    )

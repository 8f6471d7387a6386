"""`stageloom predictions`: what the twin predicted, and what became of it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from stageloom.planner.cli.options import MOST_ROWS, DatabaseUrl, DataDir, Json, data_dir_of
from stageloom.planner.cli.output import emit_json, emit_table, when
from stageloom.shared.ids import DeviceId

if TYPE_CHECKING:
    from stageloom.planner.store.predictions import KeptPrediction
    from stageloom.planner.store.store import ReadStore

_SHOWN = ("throughput_per_s", "p50_ms", "p99_ms", "steps_running")


def list_predictions(
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="Of this device alone. Default: of all.")
    ] = "",
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=MOST_ROWS, help="The newest N.")] = 20,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Show the twin's predictions beside what was measured. Of a plan on a device, each.

    Measured is the last time that the plan ran since the prediction was made.

    \b
    stageloom predictions --device shop-7
    stageloom predictions --limit 5 --json
    """
    from stageloom.planner.store.devices import device_info
    from stageloom.planner.store.predictions import newest_predictions
    from stageloom.planner.store.store import ReadStore

    store = ReadStore.open(data_dir_of(data_dir), database_url)
    try:
        name = DeviceId(device) if device else None
        if name is not None:
            store.read(device_info, name)
        found = [(one, _measured(store, one)) for one in store.read(newest_predictions, name, limit=limit)]
    finally:
        store.close()
    if json:
        emit_json([flat(one, measured) for one, measured in found])
        return
    emit_table(
        ("number", "made (UTC)", "device", "plan", "figure", "predicted", "measured", "error %"),
        [row for one, measured in found for row in _rows(one, measured)],
        empty="nothing was predicted yet; see `stageloom simulate`",
    )


def _rows(one: "KeptPrediction", measured: Mapping[str, float] | None) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for name in _SHOWN:
        predicted = one.figures.get(name)
        known = None if measured is None else measured.get(name)
        error = 100.0 * (predicted / known - 1.0) if predicted is not None and known else None
        about = (one.number, when(one.made_at_us), one.device or "-", one.plan)
        rows.append((*about, name, shown(predicted), shown(known), shown(error)))
    return rows


def flat(one: "KeptPrediction", measured: Mapping[str, float] | None) -> dict[str, object]:
    """For JSON."""
    from stageloom.planner.twin.replay import relative_errors

    return {
        "number": one.number,
        "made_at_us": one.made_at_us,
        "device": one.device,
        "plan": one.plan,
        "digest": one.digest,
        "twin": one.twin,
        "arrivals": one.arrivals,
        "seconds": one.seconds,
        "predicted": dict(one.figures),
        "measured": None if measured is None else dict(measured),
        "relative_errors": None if measured is None else relative_errors(one.figures, measured),
    }


def _measured(store: "ReadStore", one: "KeptPrediction") -> dict[str, float] | None:
    """The figures of the plan's last run on the device since the prediction; None while there is none."""
    from stageloom.planner.store.plans import plan_info
    from stageloom.planner.store.telemetry import telemetry_rows
    from stageloom.planner.twin.replay import active_spans, figures, measured_window
    from stageloom.shared.messages.telemetry import RowKind
    from stageloom.shared.plan import decode_plan

    if one.device is None:
        return None
    kinds = [
        RowKind.PLAN_ACTIVATED,
        RowKind.TASK_COUNTERS,
        RowKind.LATENCY_HISTOGRAM,
        RowKind.QUEUE_SAMPLE,
        RowKind.STEP_TIMINGS,
    ]
    activated = store.read(telemetry_rows, one.device, kinds[:1], limit=1000)
    newer = store.read(telemetry_rows, one.device, kinds[1:], since_us=one.made_at_us, limit=200_000)
    spans = active_spans(sorted([*activated, *newer], key=lambda row: row.at_us), one.digest)
    plan = decode_plan(store.read(plan_info, one.plan).wire)
    windows = (
        measured_window(newer, plan, max(begin_us, one.made_at_us), end_us)
        for begin_us, end_us in reversed(spans)
    )
    found = next((window for window in windows if window is not None), None)
    return None if found is None else figures(found)


def shown(value: float | None) -> str:
    """A figure as tables have it; nothing where there is none."""
    return "" if value is None else f"{value:.4g}"

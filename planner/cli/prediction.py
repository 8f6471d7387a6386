"""`stageloom prediction ...`: what the twin predicted, beside what was measured since."""

from typing import Annotated, Final

import typer

from stageloom.planner.api import routes
from stageloom.planner.cli.connection import first
from stageloom.planner.cli.options import MOST_ROWS, checked
from stageloom.planner.cli.output import emit_table, progress, show, when
from stageloom.planner.schema.base import PAGE_MAX
from stageloom.planner.schema.prediction import PredictionInfo, PredictionListRequest
from stageloom.shared.ids import DeviceId

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Predict plans, and see what was measured since."
)

_SHOWN: Final = ("throughput_per_s", "p50_ms", "p99_ms", "steps_running")


@app.command("list")
def list_predictions(
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="Of this device alone. Default: of all.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=MOST_ROWS, help="The newest N.")] = 20,
) -> None:
    """Show the twin's predictions beside what was measured. Of a plan on a device, each.

    Measured is the last time that the plan ran since the prediction was made.

    \b
    stageloom prediction list --device shop-7
    stageloom prediction list --limit 5 --json
    """
    request = PredictionListRequest(
        device=None if device is None else DeviceId(device), limit=min(limit, PAGE_MAX)
    )
    infos = first(routes.PREDICTION_LIST, checked(request), limit)
    columns = ("number", "made (UTC)", "device", "plan", "figure", "predicted", "measured", "error %")
    rows = [row for info in infos for row in _rows(info)]
    empty = "nothing was predicted yet; see `stageloom prediction create`"
    show(infos, lambda: emit_table(columns, rows, empty=empty))
    for info in infos:
        if info.doubt:
            progress(f"prediction {info.number}: {info.doubt}")


def _rows(info: PredictionInfo) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for name in _SHOWN:
        predicted = info.predicted.get(name)
        measured = None if info.measured is None else info.measured.get(name)
        if name.endswith("_ms"):  # 0 is the latency where no task was completed
            predicted, measured = predicted or None, measured or None
        error = 100.0 * (predicted / measured - 1.0) if predicted is not None and measured else None
        about = (info.number, when(info.made_at_us), info.device, info.plan)
        rows.append((*about, name, figure(predicted), figure(measured), figure(error)))
    return rows


def figure(value: float | None) -> str:
    """A figure as tables have it; nothing where there is none."""
    return "" if value is None else f"{value:.4g}"

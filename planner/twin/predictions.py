"""Predictions that were kept, beside what devices measured of the same plans since."""

from collections.abc import Sequence
from typing import Final, TypeAlias

from msgspec import structs

from stageloom.planner.schema.prediction import PredictionInfo
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.telemetry import filed_rows, telemetry_rows
from stageloom.planner.twin.doubts import doubt_of
from stageloom.planner.twin.replay import active_spans, figures, measured_window, relative_errors
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import Row, RowKind
from stageloom.shared.plan import decode_plan

_MEASURED: Final = (
    RowKind.TASK_COUNTERS,
    RowKind.LATENCY_HISTOGRAM,
    RowKind.QUEUE_SAMPLE,
    RowKind.STEP_TIMINGS,
)
_MOST_ACTIVATIONS: Final = 1000
_MOST_ROWS: Final = 200_000


_Filed: TypeAlias = tuple[int, Row]
"""A row, and when it was filed: by the planner's clock where its own cannot be right."""


def measured_since(store: ReadStore, predictions: Sequence[PredictionInfo]) -> list[PredictionInfo]:
    """Predictions with the figures of their plan's last run on their device since, and relative errors."""
    since_us: dict[DeviceId, int] = {}
    for one in predictions:
        if one.device is not None:
            since_us[one.device] = min(one.made_at_us, since_us.get(one.device, one.made_at_us))
    rows = {device: _rows(store, device, began_us) for device, began_us in since_us.items()}
    return [one if one.device is None else _measured(store, one, *rows[one.device]) for one in predictions]


def _rows(store: ReadStore, device: DeviceId, since_us: int) -> tuple[list[Row], list[_Filed]]:
    """(activations of plans, what was measured from a moment on), oldest first."""
    activated = store.read(telemetry_rows, device, [RowKind.PLAN_ACTIVATED], limit=_MOST_ACTIVATIONS)
    return activated, store.read(filed_rows, device, _MEASURED, since_us=since_us, limit=_MOST_ROWS)


def _measured(
    store: ReadStore, one: PredictionInfo, activated: Sequence[Row], measured: Sequence[_Filed]
) -> PredictionInfo:
    """As it is where the plan has not run since, or is not kept any more."""
    newer = [row for filed_us, row in measured if filed_us >= one.made_at_us]
    made_us = _by_its_clock(one.made_at_us, measured)
    spans = active_spans(sorted([*activated, *newer], key=lambda row: row.at_us), one.digest)
    try:
        plan = decode_plan(store.read(plan_info, one.plan).wire)
    except InputError:
        return one
    windows = (
        measured_window(newer, plan, max(begin_us, made_us), end_us) for begin_us, end_us in reversed(spans)
    )
    found = next((window for window in windows if window is not None), None)
    if found is None:
        return structs.replace(one, doubt=doubt_of(one.predicted, None, plan.lanes))
    then = figures(found)
    return structs.replace(
        one,
        measured=then,
        relative_errors=relative_errors(one.predicted, then),
        doubt=doubt_of(one.predicted, then, plan.lanes),
    )


def _by_its_clock(made_us: int, measured: Sequence[_Filed]) -> int:
    """When a prediction was made, by the clock of its device.

    One that is far off told at its first row since, at the latest.
    """
    newer = [(filed_us, row.at_us) for filed_us, row in measured if filed_us >= made_us]
    if any(filed_us == at_us for filed_us, at_us in newer):
        return made_us
    return min((at_us for _, at_us in newer), default=made_us)

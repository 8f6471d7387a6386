"""`stageloom replans`: what triggers asked for, what was decided, and how it ended."""

from typing import Annotated

import typer

from stageloom.planner.cli.options import MOST_ROWS, DatabaseUrl, DataDir, Json, data_dir_of
from stageloom.planner.cli.output import emit_json, emit_table, pair, when
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.admin import ReplanInfo


def replans(
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
    stageloom replans shop-7
    stageloom plan compare shop-7     # the newest one in detail
    """
    from stageloom.planner.store.replans import replan_infos
    from stageloom.planner.store.store import ReadStore

    store = ReadStore.open(data_dir_of(data_dir), database_url)
    try:
        found = store.read(replan_infos, DeviceId(device) if device is not None else None, limit=limit)
    finally:
        store.close()
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


def interval(ratio: float | None, low: float | None, high: float | None) -> str:
    """A ratio with its 95 % interval."""
    if ratio is None:
        return ""
    if low is None or high is None:
        return f"{ratio:.3f}"
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})"

"""`stageloom replan ...`: what was re-planned for devices, how it ended, and what is known since."""

from typing import Annotated

import typer

from stageloom.planner.api import routes
from stageloom.planner.cli.connection import every, first
from stageloom.planner.cli.options import MOST_ROWS, checked
from stageloom.planner.cli.output import compared, emit_table, pair, show, when
from stageloom.planner.schema.base import PAGE_MAX
from stageloom.planner.schema.replan import RegimeListRequest, ReplanInfo, ReplanListRequest
from stageloom.shared.ids import DeviceId

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at re-plans of devices.")


@app.command("list")
def list_replans(
    device: Annotated[str | None, typer.Argument(metavar="DEVICE")] = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_ROWS, help="Newest entries to show.")
    ] = 50,
) -> None:
    """List re-plans, newest first. Of each the trigger, the plan, its trial, and the times from its trigger.

    An outcome of no_gain is an answer, not a failure: the plan that runs is as good as any that was found.

    \b
    stageloom replan list shop-7
    stageloom plan compare shop-7      # the newest one in detail
    """
    request = ReplanListRequest(
        device=None if device is None else DeviceId(device), limit=min(limit, PAGE_MAX)
    )
    infos = first(routes.REPLAN_LIST, checked(request), limit)
    columns = (
        *("device", "at (UTC)", "cause", "value", "threshold", "generation", "plan", "how", "outcome"),
        *("ratio", "decided ms", "active ms", "reason", "remark"),
    )
    show(infos, lambda: emit_table(columns, list(map(_row, infos)), empty="nothing was re-planned"))


@app.command()
def regimes(device: Annotated[str, typer.Argument(metavar="DEVICE")]) -> None:
    """List what a device is known to be best with. Of each regime the arrivals, and the plan that won then.

    A re-plan for arrivals within a factor of 1.5 of these pushes that plan at once, without a search.
    A plan that is "expected" was found ahead, for arrivals that recur; it is judged again and tried when
    they come.

    \b
    stageloom replan regimes shop-7
    """
    infos = every(routes.REGIME_LIST, checked(RegimeListRequest(device=DeviceId(device))))
    rows = [
        (
            ", ".join(f"{load.model} {load.arrivals_per_s:.3g}" for load in info.loads),
            info.plan,
            info.digest[:12],
            info.active,
            "proven" if info.proven_at_us is not None else _expected(info.chance),
            when(info.proven_at_us or info.expected_at_us or 0),
        )
        for info in infos
    ]
    columns = ("arrivals per s", "plan", "digest", "runs", "is", "since (UTC)")
    empty = "no trial has compared plans under its costs of today, and no plan was found ahead"
    show(infos, lambda: emit_table(columns, rows, empty=empty))


def _expected(chance: float | None) -> str:
    return "expected to stay" if chance is None else f"expected, {chance:.0%} likely"


def _row(info: ReplanInfo) -> tuple[object, ...]:
    return (
        info.device,
        when(info.at_us),
        info.cause,
        f"{info.value:.3g}",
        f"{info.threshold:.3g}",
        pair(info.epoch, info.generation),
        info.plan,
        info.how,
        info.outcome,
        compared(info.figure, info.ratio, info.ratio_low, info.ratio_high),
        info.trigger_to_decision_ms,
        info.trigger_to_active_ms,
        info.reason,
        info.remark,
    )

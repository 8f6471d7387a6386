"""`stageloom scheduler ...`: which schedulers there are, how they compare, and a check of one."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stageloom.planner.api import routes
from stageloom.planner.cli.connection import every
from stageloom.planner.cli.jobs import ProgressLine, run_job
from stageloom.planner.cli.options import Combine, Partition, model_options, parse_duration
from stageloom.planner.cli.output import compared, emit_table, progress, show
from stageloom.planner.cli.request_file import From, request_from
from stageloom.planner.cli.settings import EPILOG_WITHOUT_PLANNER
from stageloom.planner.schema import scheduler as schema
from stageloom.planner.schema.job import JobProgress
from stageloom.shared.errors import ExitCode, InputError
from stageloom.shared.search.registry import require_scheduler
from stageloom.shared.text import counted

if TYPE_CHECKING:
    from stageloom.planner.scheduler_check import SchedulerCheck

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List schedulers, compare and check them."
)


@app.command("list")
def list_schedulers() -> None:
    """List what --scheduler and --policy take, and what each does. Installed packages may add some.

    \b
    stageloom scheduler list
    """
    infos = every(routes.SCHEDULER_LIST, schema.SchedulerListRequest())
    usable = [info for info in infos if not info.problem]
    show(
        infos,
        lambda: emit_table(
            ["option", "name", "what it does", "from"],
            [(f"--{info.kind.value}", info.name, info.help, info.distribution) for info in usable],
            empty="there is none",
        ),
    )
    for info in infos:
        if info.problem:
            progress(f"{info.kind.value} {info.problem}")


@app.command()
def compare(
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME[:KEY=VALUE,...]",
            help="A model to schedule, as for `plan create`. Repeatable. Default: those of the --from file.",
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--scheduler", metavar="NAME", help="Only this one. Repeatable. Default: all."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="D", help="Use this device's measured costs.")
    ] = None,
    partition: Partition = None,
    combine: Combine = None,
    measure: Annotated[
        float | None,
        typer.Option(
            "--measure", metavar="S", help="Have --device measure every plan found, S seconds a plan at most."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it, too, as .svg, .png or .pdf (extra `plot`)."),
    ] = None,
    file: From = None,
) -> None:
    """Compare schedulers on models of the planner.

    Predicted milliseconds of one task of each model; how much that is over what no schedule can beat (the
    bound) and over the cheapest stages within r and s (the optimum, where it can be known); search time;
    what --device measured of the plan, and how its trial there ended. Without --device costs are estimates.
    Only --measure needs a running planner.

    \b
    stageloom scheduler compare --model inception_v3 --partition paper
    stageloom scheduler compare --model resnet50 --model squeezenet --combine aligned --device D --measure 5
    stageloom scheduler compare --model resnet50 --scheduler ios --scheduler beam --plot resnet.svg

    \b
    Fields for --from alone:
      members_max   blocks per combined block at most; 2
      executor      onnx, openvino, onnx_cuda, torch_cuda, torch_cpu or null; onnx
      r             operators per group at most
      s             groups per stage at most
    """
    if not models and (file is None or partition is not None):
        raise InputError(
            "no model is named", remedy="name it with --model, or in a --from file and without --partition"
        )
    named = tuple(model_options(text, partition=partition or "whole") for text in models or ())
    request = request_from(
        schema.SchedulerCompareRequest,
        file,
        {
            "models": named or None,
            "schedulers": tuple(names) if names else None,
            "device": device,
            "combination": combine,
            "measure_s": measure,
        },
    )
    if request.measure_s is not None and request.device is None:
        raise InputError("--measure needs a device", remedy="name it with --device")
    if plot is not None:
        from stageloom.planner.cli import comparison_plot

        comparison_plot.check_file(plot)
    reply = run_job(routes.SCHEDULER_COMPARE, request)
    if plot is not None:
        comparison_plot.save(list(map(comparison_plot.drawn, reply.compared)), plot)
        progress(f"drawn to {plot}")
    for failure in reply.failed:
        progress(f"left out: {failure}")
    for reason in reply.reasons:
        progress(f"not all stages were measured: {reason}")
    show(reply.compared, lambda: _tell(reply.compared))


@app.command(epilog=EPILOG_WITHOUT_PLANNER)
def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The scheduler, as `scheduler list` has it.")],
    graphs: Annotated[
        int, typer.Option(metavar="N", min=0, max=100_000, help="Random graphs beside the known shapes.")
    ] = 40,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the random graphs.")] = 0,
    limit: Annotated[
        str, typer.Option("--limit", metavar="TIME", help="That one call may take, such as 10s.")
    ] = "10s",
) -> None:
    """Check that a scheduler keeps what all must. Exit code 1 if it does not.

    It is called on shapes of known networks and on random graphs, in two processes of this machine: its
    schedules must be legal, complete, within the limits, the same each time, and there in time. No planner
    is asked. A schedule that takes longer than one operator after another breaks no rule, but is counted.

    \b
    stageloom scheduler check ios
    stageloom scheduler check mine --graphs 2000 --json
    """
    from stageloom.planner.scheduler_check import check_scheduler
    from stageloom.shared.search.cases import cases

    require_scheduler(name)
    limit_s = parse_duration(limit, "--limit")
    tried, line, began_s = list(cases(graphs, seed)), ProgressLine(), time.monotonic()

    def told(done: int) -> None:
        text = f"{done} of {counted(len(tried), 'case')} tried"
        line.show(JobProgress(text=text, elapsed_s=time.monotonic() - began_s))

    try:
        found = check_scheduler(name, tried, limit_s, told)
    finally:
        line.end()
    show(found, lambda: _tell_check(found))
    if not found.passed:
        raise typer.Exit(ExitCode.FAILED)


def _tell_check(found: "SchedulerCheck") -> None:
    emit_table(
        ("rule", "a schedule or its search", "broken", "for example"),
        [(rule.rule, rule.meaning, rule.broken, rule.example) for rule in found.rules],
        empty="there is no rule",
    )
    progress(
        f"{found.tried} of {found.cases} cases tried; cheaper than sequential in {found.cheaper}, dearer in "
        f"{found.dearer}, {found.worst:.3g} times as long at worst"
    )


def _tell(rows: Sequence[schema.ComparedScheduler]) -> None:
    emit_table(
        (
            *("scheduler", "predicted ms", "over bound %", "over optimum %", "search ms", "stages"),
            *("groups at most", "streams at most", "measured ms", "trial", "plan"),
        ),
        [_cells(row) for row in rows],
        empty="no scheduler was compared",
    )


def _cells(row: schema.ComparedScheduler) -> tuple[Any, ...]:
    trial = row.trial
    ratio = "" if trial is None else compared(trial.figure, trial.ratio, trial.ratio_low, trial.ratio_high)
    return (
        row.scheduler,
        f"{row.predicted_ms:.3f}",
        100.0 * row.over_bound,
        None if row.over_optimum is None else 100.0 * row.over_optimum,
        row.search_ms,
        row.stages,
        row.groups_max,
        row.streams_max,
        None if row.measured_ms is None else f"{row.measured_ms:.3f}",
        "" if trial is None else f"{trial.verdict} {ratio}".strip(),
        row.plan[:12],
    )

"""`stageloom scheduler compare`: every scheduler on models of the store."""

from pathlib import Path
from typing import Annotated

import typer

from stageloom.planner.cli import plan_create as opt
from stageloom.planner.cli.options import (
    DatabaseUrl,
    DataDir,
    Json,
    checked,
    data_dir_of,
    model_options,
    require_own,
)
from stageloom.planner.cli.output import progress
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import admin

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Compare schedulers.")


@app.callback()
def group() -> None:
    """Compare schedulers."""


@app.command()
def compare(
    models: Annotated[
        list[str],
        typer.Option(
            "--model",
            metavar="NAME[:KEY=VALUE,...]",
            help="A model to schedule, as for `plan create`. Repeatable.",
        ),
    ],
    names: Annotated[
        list[str] | None,
        typer.Option("--scheduler", metavar="NAME", help="Only this one. Repeatable. Default: all."),
    ] = None,
    device: opt.Device = None,
    partition: opt.Partition = "whole",
    combine: opt.Combine = "alone",
    members: opt.Members = 2,
    executor: opt.Executor = "onnx",
    r: opt.LimitR = None,
    s: opt.LimitS = None,
    measure: Annotated[
        float | None,
        typer.Option(
            "--measure",
            metavar="S",
            help="Have --device measure every plan found, S seconds a plan at most.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it, too, as .svg, .png or .pdf (extra `plot`)."),
    ] = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Compare schedulers on models of the store.

    Predicted milliseconds of one task of each model; how much that is over what no schedule can beat (the
    bound) and over the cheapest stages within -r and -s (the optimum, where it can be known); search time;
    what --device measured of the plan, and how its trial there ended. Without --device costs are estimates.
    Only --measure needs a running planner.

    \b
    stageloom scheduler compare --model inception_v3 --partition paper
    stageloom scheduler compare --model resnet50 --model squeezenet --combine aligned --device D --measure 5
    stageloom scheduler compare --model resnet50 --scheduler ios --scheduler beam -r 3 -s 8 --plot resnet.svg
    """
    request = checked(
        admin.PlanCreateRequest(
            models=tuple(model_options(text, partition=partition) for text in models),
            scheduler="sequential",
            device=DeviceId(device) if device is not None else None,
            combination=combine,
            members_max=members,
            executor=executor,
            r=r,
            s=s,
        )
    )
    from stageloom.planner.cli import comparison_plot
    from stageloom.planner.cli.compare_schedulers import chosen, compare_schedulers, show

    folder = data_dir_of(data_dir)
    if measure is not None:
        if device is None:
            raise InputError("--measure needs a device", remedy="name it with --device")
        require_own(folder, database_url)
    if plot is not None:
        comparison_plot.check_file(plot)
    rows = compare_schedulers(folder, database_url, request, chosen(names), measure)
    if plot is not None:
        comparison_plot.save([(row.standing, row.measured) for row in rows], plot)
        progress(f"drawn to {plot}")
    show(rows, json)

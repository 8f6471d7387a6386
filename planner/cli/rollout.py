"""`stageloom rollout ...`: a version of a model on its way to many devices."""

from typing import Annotated

import typer

from stageloom.planner.api import routes
from stageloom.planner.cli.connection import call, connected, every
from stageloom.planner.cli.options import checked, parse_duration
from stageloom.planner.cli.output import emit, emit_table, pair, progress, show, when
from stageloom.planner.labels import label_text, parse_selection
from stageloom.planner.rollout.waves import parse_waves
from stageloom.planner.schema import rollout as schema
from stageloom.planner.schema.rollout import AskState

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Bring a version of a model to devices, in waves.",
)

Rollout = Annotated[str, typer.Argument(metavar="ROLLOUT")]


@app.command()
def create(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME[@VERSION]", help="What to bring. Default: the newest.")
    ],
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME=VALUE", help="Only to devices that have it. Repeatable."),
    ] = None,
    waves: Annotated[
        str,
        typer.Option(
            "--waves", metavar="LIST", help="Devices up to the end of each wave, as numbers or shares."
        ),
    ] = "1,10%,100%",
    max_failed: Annotated[
        int, typer.Option("--max-failed", metavar="N", help="One failure more than this stops it.")
    ] = 0,
    reach: Annotated[
        str,
        typer.Option("--reach", metavar="TIME", help="How long to wait for a device that is offline."),
    ] = "30m",
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Default: after the version.")
    ] = None,
) -> None:
    """Begin a rollout. Each device takes the version in its own plan, and its own trial decides.

    \b
    stageloom rollout create --model detector@2 --label site=a --waves 1,10%,100% --max-failed 2
    stageloom rollout show detector-v2
    """
    parse_selection(label or ())
    parse_waves(waves)
    request = schema.RolloutCreateRequest(
        model=model,
        label=tuple(label or ()),
        waves=waves,
        max_failed=max_failed,
        reach_s=parse_duration(reach, "--reach"),
        rollout=name,
    )
    info = call(routes.ROLLOUT_CREATE, checked(request, {"rollout": "--name"}))
    show(info, lambda: emit(info.rollout))
    progress(
        f"{info.model}@{info.version} goes to {info.devices} devices in {info.waves} waves; "
        f"see `stageloom rollout show {info.rollout}`"
    )


@app.command("list")
def list_rollouts() -> None:
    """List the rollouts, newest first.

    \b
    stageloom rollout list
    stageloom rollout list --json | jq -r '.[] | select(.state == "stopped") | .rollout'
    """
    infos = every(routes.ROLLOUT_LIST, schema.RolloutListRequest())
    columns = ["rollout", "version", "state", "wave", "devices", "done", "failed", "unreached", "since (UTC)"]
    rows = [
        (
            info.rollout,
            f"{info.model}@{info.version}",
            info.state.value,
            f"{info.wave} of {info.waves}",
            *(info.devices, info.done, info.failed, info.unreached),
            when(info.changed_at_us),
        )
        for info in infos
    ]
    empty = "there is no rollout; begin one with `stageloom rollout create`"
    show(infos, lambda: emit_table(columns, rows, empty=empty))


@app.command("show")
def show_rollout(name: Rollout) -> None:
    """Show a rollout, and how far each of its devices is.

    \b
    stageloom rollout show detector-v2
    """
    with connected(live=False) as caller:
        info = caller.call(routes.ROLLOUT_SHOW, checked(schema.RolloutShowRequest(rollout=name)))
        request = schema.RolloutDevicesRequest(rollout=name)
        devices = list(caller.pages(routes.ROLLOUT_DEVICES, request))
    show({"rollout": info, "devices": devices}, lambda: _tell(info, devices))


def _tell(info: schema.RolloutInfo, devices: list[schema.RolloutDeviceInfo]) -> None:
    numbers = {state.value: getattr(info, state.value) for state in AskState}
    lines = {
        "rollout": info.rollout,
        "version": f"{info.model}@{info.version}",
        "state": info.state.value + (info.reason and f": {info.reason}"),
        "wave": f"{info.wave} of {info.waves}",
        "labels": label_text(info.labels) or "any",
        "failures": f"{info.failed}, {info.max_failed} may",
        "reach": f"{info.reach_s:g} s",
        "devices": ", ".join(f"{number} {state}" for state, number in numbers.items() if number),
    }
    emit("\n".join(f"{name + ':':<10} {text}" for name, text in lines.items()))
    emit_table(
        ["device", "wave", "state", "generation", "plan", "before", "at (UTC)", "reason"],
        [
            (
                *(one.device, one.wave, one.state.value, pair(one.epoch, one.generation)),
                *(one.new_plan, one.old_plan, when(one.changed_at_us), one.reason),
            )
            for one in devices
        ],
        empty="it has no devices",
    )


@app.command()
def pause(name: Rollout) -> None:
    """Ask no further device. Those that were asked still decide.

    \b
    stageloom rollout pause detector-v2
    """
    info = call(routes.ROLLOUT_PAUSE, checked(schema.RolloutPauseRequest(rollout=name)))
    show(info, lambda: None)
    progress(f"{name} is paused in wave {info.wave} of {info.waves}; go on with `stageloom rollout resume`")


@app.command()
def resume(name: Rollout) -> None:
    """Go on with a rollout that is paused.

    It goes on without devices that its wave did not reach.

    \b
    stageloom rollout resume detector-v2
    """
    info = call(routes.ROLLOUT_RESUME, checked(schema.RolloutResumeRequest(rollout=name)))
    show(info, lambda: None)
    progress(f"{name} goes on in wave {info.wave} of {info.waves}")


@app.command()
def abort(
    name: Rollout,
    rollback: Annotated[
        bool,
        typer.Option("--rollback", help="Give devices that keep the version their old plans back, too."),
    ] = False,
) -> None:
    """End a rollout. Devices that have not decided yet get their old plans back.

    \b
    stageloom rollout abort detector-v2
    stageloom rollout abort detector-v2 --rollback
    """
    request = schema.RolloutAbortRequest(rollout=name, rollback=rollback)
    info = call(routes.ROLLOUT_ABORT, checked(request))
    show(info, lambda: None)
    progress(
        f"{name} is aborted: {info.withdrawn} devices had not decided, {info.returned} go back, "
        f"{info.done} keep the version"
    )

"""`stageloom device ...`: enrolment, the list, revocation, how devices are re-planned, what they measure."""

from typing import Annotated, Final

import msgspec
import typer

from stageloom.planner.api import routes
from stageloom.planner.cli import telemetry
from stageloom.planner.cli.connection import call, connected
from stageloom.planner.cli.jobs import run_job
from stageloom.planner.cli.options import checked, parse_duration
from stageloom.planner.cli.output import (
    desired_state,
    emit,
    emit_table,
    pair,
    presence,
    progress,
    show,
    tell_troubles,
    waits_for,
    when,
)
from stageloom.planner.labels import label_text, parse_changes, parse_selection
from stageloom.planner.schema import device as schema
from stageloom.planner.schema.replan import (
    Proposer,
    Replanning,
    ReplanningChangeRequest,
    ReplanningShowRequest,
)
from stageloom.shared.errors import ExitCode, InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.text import counted

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Enrol devices, look at them, release them, take their key away.",
)

_WHO: Final = {
    Proposer.ALL: "the learned policy and the searches propose",
    Proposer.LEARNED: "the learned policy alone proposes, where one fits",
    Proposer.PLAIN: "all but the learned policy propose",
}
_ANSWER_S: Final = 120.0  # for a device to become idle and to answer, beside what it may spend on measuring
_ONLINE: Final[dict[object, str]] = {True: "yes", False: "no", None: "unknown"}

Device = Annotated[str, typer.Argument(metavar="DEVICE")]


@app.command()
def token(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Fix the name that the device gets.")
    ] = None,
    lifetime: Annotated[
        str, typer.Option("--lifetime", metavar="TIME", help="When it expires, such as 10m or 24h.")
    ] = "1h",
) -> None:
    """Print a one-time join token. It is a secret: whoever has it can enrol one device.

    \b
    stageloom device token shop-7
    stageloom device token | ssh shop-7 stageloom-agent join -
    """
    request = checked(
        schema.DeviceTokenRequest(
            device=DeviceId(name) if name is not None else None,
            lifetime_s=parse_duration(lifetime, "--lifetime"),
        )
    )
    reply = call(routes.DEVICE_TOKEN, request)
    show(reply, lambda: emit(reply.token))
    progress(f"good for one device until {when(reply.expires_at_us)} UTC; there: stageloom-agent join TOKEN")


@app.command("list")
def list_devices(
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME=VALUE", help="Only devices that have it. Repeatable."),
    ] = None,
) -> None:
    """List the enrolled devices. Without a running planner nobody knows who is online: `online` is `-`.

    \b
    stageloom device list
    stageloom device list --label site=a --label tier=b
    stageloom device list --json | jq -r '.[] | select(.online | not) | .device'
    """
    parse_selection(label or ())
    request = checked(schema.DeviceListRequest(label=tuple(label or ())))
    with connected(live=False) as caller:
        infos, live = list(caller.pages(routes.DEVICE_LIST, request)), caller.live
    columns = ["device", "online", "state", "generation", "plan", "last seen (UTC)", "class", "labels"]
    rows = [
        (
            info.device,
            presence(info, live=live),
            desired_state(info),
            pair(info.desired_epoch, info.desired_generation),
            (info.desired_plan or "")[:12],
            when(info.last_seen_us),
            info.device_class,
            label_text(info.labels),
        )
        for info in infos
    ]
    empty = "no device is enrolled; make a token with `stageloom device token`"
    if label:
        empty = f"no device has {' and '.join(label)}; `stageloom device label` gives labels"
    show([_known(info, live=live) for info in infos], lambda: emit_table(columns, rows, empty=empty))
    tell_troubles(infos)


@app.command("show")
def show_device(device: Device) -> None:
    """Show one device. What it should run, what it runs, and its latest generations.

    \b
    stageloom device show shop-7
    """
    with connected(live=False) as caller:
        reply = caller.call(routes.DEVICE_SHOW, checked(schema.DeviceShowRequest(device=DeviceId(device))))
        live = caller.live
    waits = waits_for(reply.device, live=live)
    document = {
        **_known(reply.device, live=live),
        "machine": reply.machine,
        "waits_for": waits or None,
        "history": reply.history,
    }
    show(document, lambda: _tell(reply, live=live))


def _tell(reply: schema.DeviceShowReply, *, live: bool) -> None:
    info, report = reply.device, reply.device.report
    said = presence(info, live=live)
    lines = {
        "device": info.device,
        "online": _ONLINE.get(said, said),
        "class": info.device_class,
        "agent": info.agent_version,
        "enrolled": when(info.enrolled_at_us),
        "last seen": when(info.last_seen_us),
        "labels": label_text(info.labels) or "-",
        "desired": _generation(info.desired_epoch, info.desired_generation, info.desired_plan),
        "reported": _generation(report.epoch, report.generation, report.active),
        "state": (report.state.value if report.state else "-") + (report.reason and f": {report.reason}"),
    }
    if reply.machine is not None:
        lines["cores"] = ", ".join(map(str, reply.machine.cores)) or "-"
        lines["executors"] = "; ".join(
            one.name + (f": {one.problem}" if one.problem else "") for one in reply.machine.executors
        )
    if waits := waits_for(info, live=live):
        lines["waits for"] = waits
    emit("\n".join(f"{name + ':':<11} {text}" for name, text in lines.items()))
    tell_troubles([info])
    emit_table(
        ["generation", "plan", "decided by", "state", "at (UTC)", "reason"],
        [
            (
                pair(entry.epoch, entry.generation),
                entry.plan,
                entry.decided_by,
                entry.state,
                when(entry.at_us),
                entry.reason,
            )
            for entry in reply.history[:10]
        ],
        empty="nothing was ever pushed to it; see `stageloom plan push --help`",
    )


app.command()(telemetry.telemetry)


@app.command()
def label(
    device: Device,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE|NAME-", help="Labels to give, or with `-` to take away."),
    ] = None,
) -> None:
    """Give labels to a device, or take them away. They select devices for `device list` and rollouts.

    \b
    stageloom device label shop-7 site=a tier=b
    stageloom device label shop-7 site-          # takes it away
    stageloom device label shop-7                # shows them
    """
    wanted = parse_changes(changes or ())
    name = DeviceId(device)
    if changes:
        request = schema.DeviceLabelRequest(device=name, labels=wanted.given, remove=wanted.removed)
        labels = call(routes.DEVICE_LABEL, checked(request)).labels
    else:
        with connected(live=False) as caller:
            shown = caller.call(routes.DEVICE_SHOW, checked(schema.DeviceShowRequest(device=name)))
        labels = shown.device.labels
    show(
        schema.DeviceLabels(device=name, labels=labels),
        lambda: emit(label_text(labels) or f"{device} has no labels"),
    )


@app.command()
def revoke(device: Device) -> None:
    """Take a device's key away. It is refused from its next message on, and keeps serving on its own.

    \b
    stageloom device revoke shop-7
    """
    call(routes.DEVICE_REVOKE, checked(schema.DeviceRevokeRequest(device=DeviceId(device))))
    show({"device": device, "revoked": True}, lambda: None)
    progress(f"{device} is revoked; it can join again with a new token")


@app.command()
def release(device: Device) -> None:
    """Let a quarantined device in again. One that still counts too far is quarantined again.

    \b
    stageloom device show shop-7       # says why it is refused
    stageloom device release shop-7
    """
    call(routes.DEVICE_RELEASE, checked(schema.DeviceReleaseRequest(device=DeviceId(device))))
    show({"device": device, "quarantined": False}, lambda: None)
    progress(f"{device} is let in when it comes again, within a minute")


@app.command()
def replan(
    device: Device,
    on: Annotated[
        bool | None, typer.Option("--on/--off", help="Whether alarms of the device are answered with plans.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="NAME", help="What searches schedules: ios, ios_rooted, greedy...")
    ] = None,
    members_max: Annotated[
        int | None, typer.Option("--members-max", metavar="H", help="Blocks per combined block at most.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="TIME", help="For the searches of one re-plan, such as 10s."),
    ] = None,
    proposer: Annotated[
        Proposer | None,
        typer.Option(
            help="Who proposes plans: all, by predicted cost; the learned policy, at once; or all but it."
        ),
    ] = None,
    attach: Annotated[
        bool | None,
        typer.Option(
            "--attach/--no-attach",
            help="Whether re-plans send the trained policy along that fits their plan, for the device to "
            "plan with alone. `stageloom policy attach` turns it off.",
        ),
    ] = None,
) -> None:
    """Show or change how a device is re-planned. That happens when its queues diverge.

    \b
    stageloom device replan shop-7
    stageloom device replan shop-7 --off
    stageloom device replan shop-7 --proposer learned
    """
    name = DeviceId(device)
    given = (on, scheduler, members_max, budget, proposer, attach)
    if all(value is None for value in given):
        reply = call(routes.REPLANNING_SHOW, checked(ReplanningShowRequest(device=name)))
    else:
        request = ReplanningChangeRequest(
            device=name,
            enabled=on,
            scheduler=scheduler,
            members_max=members_max,
            budget_s=None if budget is None else parse_duration(budget, "--budget"),
            proposer=proposer,
            attach=attach,
        )
        reply = call(routes.REPLANNING_CHANGE, checked(request))
    show(reply, lambda: emit(_replanning_line(device, reply)))


def _replanning_line(device: str, reply: Replanning) -> str:
    return (
        f"re-planning {device} is {'on' if reply.enabled else 'off'}: {reply.scheduler}, up to "
        f"{reply.members_max} blocks combined, {reply.budget_s:g} s to search; {_WHO[reply.proposer]}; "
        f"trained policies that fit are {'sent along' if reply.attach else 'not sent along'}"
    )


@app.command()
def profile(
    device: Device,
    models: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="Repeatable. Default: all models.")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option("--plan", metavar="PLAN", help="Measure this plan's stages, not operators."),
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(
            "--executor",
            metavar="NAME",
            help="One of those that `device show` lists. Default: what runs a model there.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Of --executor, inside one operator.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Tasks per measured run.")] = 1,
    splits: Annotated[
        bool,
        typer.Option(
            "--splits",
            help="Also parts of the operators that a plan may split over two resources: what "
            "`plan create --scheduler eop` needs.",
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="TIME",
            help="What the device may spend, such as 20s or 2m. Default: 20s; with --splits 60s.",
        ),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout",
            metavar="TIME",
            help="How long to wait for the results. Default: 2m longer than the device may spend.",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the results.")] = True,
) -> None:
    """Have a device measure models, whole and every operator. Plans for it are then made with its own times.

    \b
    stageloom device profile shop-7 --model resnet50 --budget 10s
    stageloom device profile shop-7 --executor openvino      # for plans with several executors
    stageloom device profile shop-7 --model resnet50 --splits  # for plans with operators split over cores
    stageloom device profile shop-7 --plan inception
    """
    if plan is not None and (models or batch != 1 or executor or threads or splits):
        raise InputError(
            "--plan measures the stages of one plan as it is",
            remedy="leave out --model, --batch, --executor, --threads, --splits",
        )
    if timeout is not None and not wait:
        raise InputError("--timeout and --no-wait exclude each other", remedy="leave one of them out")
    budget_s = parse_duration(budget or ("60s" if splits else "20s"), "--budget")
    wait_s = _ANSWER_S + budget_s if timeout is None else parse_duration(timeout, "--timeout")
    request = schema.DeviceProfileRequest(
        device=DeviceId(device),
        models=tuple(models or ()),
        plan=plan,
        batch=batch,
        executor=executor,
        intra_op_threads=threads,
        budget_s=budget_s,
        splits=splits,
        wait_s=wait_s if wait else 0.0,
    )
    reply = run_job(routes.DEVICE_PROFILE, checked(request))
    show(reply, lambda: _tell_measured(device, reply))
    for reason in reply.reasons:
        progress(f"not all was measured: {reason}")
    if reply.reasons:
        raise typer.Exit(ExitCode.FAILED)


def _tell_measured(device: str, reply: schema.DeviceProfileReply) -> None:
    if reply.measured:
        columns = [
            *("model", "batch", "executor", "intra_op_threads", "whole_us"),
            *("operators", "measured", "total_us", "parts", "reason"),
        ]
        rows = [tuple(getattr(row, name) for name in columns) for row in reply.measured]
        emit_table(columns, rows, empty="nothing was measured")
    elif reply.stages is not None:
        emit(f"{counted(reply.stages, 'stage')} measured")
    else:
        progress(f"asked {device} in generation {pair(reply.epoch, reply.generation)}")


def _known(info: schema.DeviceInfo, *, live: bool) -> dict[str, object]:
    """A device as JSON; who is online only a running planner knows."""
    document: dict[str, object] = msgspec.to_builtins(info)
    return document if live else {**document, "online": None}


def _generation(epoch: int, generation: int, digest: str | None) -> str:
    if not generation:
        return "nothing yet"
    return f"generation {pair(epoch, generation)}, {f'plan {digest[:12]}' if digest else 'no plan'}"

"""`stageloom device ...`: enrolment, the list, revocation, profiles."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stageloom.planner.admin.client import ask, is_running, socket_path
from stageloom.planner.cli.options import (
    DatabaseUrl,
    DataDir,
    Json,
    checked,
    data_dir_of,
    parse_duration,
    reading,
    require_own,
)
from stageloom.planner.cli.output import (
    emit,
    emit_json,
    emit_table,
    pair,
    presence,
    progress,
    tell_troubles,
    when,
)
from stageloom.planner.cli.searching import measure_stages
from stageloom.shared.errors import ExitCode, InputError, UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import admin

if TYPE_CHECKING:
    from stageloom.planner.store.store import ReadStore

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Enrol devices, look at them, release them, take their key away.",
)

_POLL_S = 0.2
_WHO = {
    admin.Proposer.ALL: "the learned policy and the searches propose",
    admin.Proposer.LEARNED: "the learned policy alone proposes, where one fits",
    admin.Proposer.PLAIN: "all but the learned policy propose",
}


@app.command()
def token(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Fix the name that the device gets.")
    ] = None,
    lifetime: Annotated[
        str, typer.Option("--lifetime", metavar="TIME", help="When it expires, such as 10m or 24h.")
    ] = "1h",
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Print a one-time join token. It is a secret: whoever has it can enrol one device.

    \b
    stageloom device token shop-7
    stageloom-agent join "$(stageloom device token)"
    """
    request = checked(
        admin.DeviceTokenRequest(
            device=DeviceId(name) if name is not None else None,
            lifetime_s=parse_duration(lifetime, "--lifetime"),
        )
    )
    reply = ask(data_dir_of(data_dir), request, admin.DeviceTokenReply)
    if json:
        emit_json({"token": reply.token, "expires_at_us": reply.expires_at_us})
        return
    emit(reply.token)
    progress(f"good for one device until {when(reply.expires_at_us)} UTC; there: stageloom-agent join TOKEN")


@app.command("list")
def list_devices(data_dir: DataDir = None, database_url: DatabaseUrl = "", json: Json = False) -> None:
    """List the enrolled devices. Without a running planner nobody knows who is online: `online` is `-`.

    \b
    stageloom device list
    stageloom device list --json | jq -r '.[] | select(.online | not) | .device'
    """
    infos, live = _devices(data_dir_of(data_dir), database_url)
    if json:
        emit_json([_builtins(info, live) for info in infos])
        return
    emit_table(
        ["device", "online", "state", "generation", "plan", "last seen (UTC)", "class"],
        [
            (
                info.device,
                presence(info, live=live),
                info.report.state.value if info.report.state else None,
                pair(info.desired_epoch, info.desired_generation),
                (info.desired_plan or "")[:12],
                when(info.last_seen_us),
                info.device_class,
            )
            for info in infos
        ],
        empty="no device is enrolled; make a token with `stageloom device token`",
    )
    tell_troubles(infos)


@app.command()
def show(
    device: Annotated[str, typer.Argument(metavar="DEVICE")],
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Show one device. What it should run, what it runs, and its latest generations.

    \b
    stageloom device show shop-7
    """
    from stageloom.planner.store.devices import device_info
    from stageloom.planner.store.generations import generation_history

    wanted = checked(admin.DeviceShowRequest(device=DeviceId(device)))
    folder = data_dir_of(data_dir)
    live = is_running(socket_path(folder))
    if live:
        require_own(folder, database_url)
        reply = ask(folder, wanted, admin.DeviceShowReply)
        info, history = reply.device, list(reply.history)
    else:
        with reading(folder, database_url) as store:
            info, (history, _) = (
                store.read(device_info, wanted.device),
                store.read(generation_history, wanted.device),
            )
    if json:
        emit_json({**_builtins(info, live), "history": history})
        return
    report = info.report
    lines = {
        "device": info.device,
        "online": _ONLINE.get(said := presence(info, live=live), said),
        "class": info.device_class,
        "agent": info.agent_version,
        "enrolled": when(info.enrolled_at_us),
        "last seen": when(info.last_seen_us),
        "desired": _generation(info.desired_epoch, info.desired_generation, info.desired_plan),
        "reported": _generation(report.epoch, report.generation, report.active),
        "state": (report.state.value if report.state else "-") + (report.reason and f": {report.reason}"),
    }
    emit("\n".join(f"{name + ':':<11} {text}" for name, text in lines.items()))
    tell_troubles([info])
    emit_table(
        ["generation", "plan", "decided by", "state", "at (UTC)", "reason"],
        [
            (pair(e.epoch, e.generation), e.plan, e.decided_by, e.state, when(e.at_us), e.reason)
            for e in history[:10]
        ],
        empty="nothing was ever pushed to it; see `stageloom plan push --help`",
    )


@app.command()
def revoke(
    device: Annotated[str, typer.Argument(metavar="DEVICE")], data_dir: DataDir = None, json: Json = False
) -> None:
    """Take a device's key away. It is refused from its next message on, and keeps serving on its own.

    \b
    stageloom device revoke shop-7
    """
    ask(
        data_dir_of(data_dir),
        checked(admin.DeviceRevokeRequest(device=DeviceId(device))),
        admin.Done,
    )
    if json:
        emit_json({"device": device, "revoked": True})
    progress(f"{device} is revoked; it can join again with a new token")


@app.command()
def release(
    device: Annotated[str, typer.Argument(metavar="DEVICE")], data_dir: DataDir = None, json: Json = False
) -> None:
    """Let a quarantined device in again. One that still counts too far is quarantined again.

    \b
    stageloom device show shop-7       # says why it is refused
    stageloom device release shop-7
    """
    ask(data_dir_of(data_dir), checked(admin.DeviceReleaseRequest(device=DeviceId(device))), admin.Done)
    if json:
        emit_json({"device": device, "quarantined": False})
    progress(f"{device} is let in when it comes again, within a minute")


@app.command()
def replan(
    device: Annotated[str, typer.Argument(metavar="DEVICE")],
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
        admin.Proposer | None,
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
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show or change how a device is re-planned. That happens when its queues diverge.

    \b
    stageloom device replan shop-7
    stageloom device replan shop-7 --off
    stageloom device replan shop-7 --proposer learned
    """
    request = checked(
        admin.DeviceReplanRequest(
            device=DeviceId(device),
            enabled=on,
            scheduler=scheduler,
            members_max=members_max,
            budget_s=None if budget is None else parse_duration(budget, "--budget"),
            proposer=proposer,
            attach=attach,
        )
    )
    reply = ask(data_dir_of(data_dir), request, admin.DeviceReplanReply)
    if json:
        names = ("enabled", "scheduler", "members_max", "budget_s", "attach", "proposer")
        emit_json({name: getattr(reply, name) for name in names})
        return
    emit(
        f"re-planning {device} is {'on' if reply.enabled else 'off'}: {reply.scheduler}, up to "
        f"{reply.members_max} blocks combined, {reply.budget_s:g} s to search; {_WHO[reply.proposer]}; "
        f"trained policies that fit are {'sent along' if reply.attach else 'not sent along'}"
    )


@app.command()
def profile(
    device: Annotated[str, typer.Argument(metavar="DEVICE")],
    models: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="Repeatable. Default: all models.")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option("--plan", metavar="PLAN", help="Measure this plan's stages, not operators."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Tasks per measured run.")] = 1,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="What the device may spend, such as 20s or 2m.")
    ] = "20s",
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="How long to wait for the results.")
    ] = "2m",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the results.")] = True,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Have a device measure every operator. Plans for it are then searched with its own times.

    \b
    stageloom device profile shop-7 --model resnet50 --budget 10s
    stageloom device profile shop-7 --plan inception
    """
    from stageloom.planner.store.models import model_infos
    from stageloom.planner.store.profiles import open_requests

    folder = data_dir_of(data_dir)
    require_own(folder, database_url)
    budget_s, timeout_s = parse_duration(budget, "--budget"), parse_duration(timeout, "--timeout")
    if plan is not None:
        if models or batch != 1 or not wait:
            raise InputError(
                "--plan measures the stages of one plan as it is",
                remedy="leave out --model, --batch and --no-wait, or --plan",
            )
        _profile_stages(folder, database_url, DeviceId(device), plan, budget_s, json)
        return
    with reading(folder, database_url) as store:
        names = models or [info.model for info in store.read(model_infos)]
        if not names:
            raise InputError(
                "the planner has no models to measure", remedy="add some with `stageloom model add`"
            )
        request = checked(
            admin.DeviceProfileRequest(
                device=DeviceId(device), models=tuple(names), batch=batch, budget_s=budget_s
            )
        )
        reply = ask(folder, request, admin.DeviceProfileReply)
        progress(
            f"asked {device} to profile {', '.join(names)} in generation {reply.generation}"
            + (f"; waiting up to {timeout_s:g} s" if wait else "")
        )
        if wait:
            give_up_s = time.monotonic() + timeout_s
            while store.read(open_requests, list(reply.requests)):
                if time.monotonic() > give_up_s:
                    raise UnavailableError(
                        f"{device} has not answered within {timeout_s:g} s",
                        remedy="it answers when it is online and idle; see `stageloom device show`",
                    )
                time.sleep(_POLL_S)
            _emit_costs(store, request, reply, json)
        elif json:
            emit_json({"requests": reply.requests, "epoch": reply.epoch, "generation": reply.generation})


def _profile_stages(
    folder: Path, database_url: str, device: DeviceId, plan: str, budget_s: float, json: bool
) -> None:
    found = measure_stages(folder, database_url, device, plan, budget_s=budget_s)
    if json:
        emit_json(
            {"device": device, "plan": plan, "requests": found.requests, "reasons": list(found.reasons)}
        )
    if not found.reasons:
        progress(f"{device} measured the stages of {plan}")


def _emit_costs(
    store: "ReadStore", request: admin.DeviceProfileRequest, reply: admin.DeviceProfileReply, json: bool
) -> None:
    from stageloom.planner.store.costs import calibration_of, operator_costs
    from stageloom.planner.store.models import named_models
    from stageloom.planner.store.profiles import answer_reasons

    key = store.read(calibration_of, request.device).costs_key
    reasons = store.read(answer_reasons, list(reply.requests))
    rows = []
    for number, info in zip(reply.requests, store.read(named_models, list(request.models)), strict=True):
        timings = store.read(operator_costs, key, info.digest, request.batch)
        total_us = sum(timing.median_us for timing in timings.values())
        rows.append(
            (
                info.model,
                request.batch,
                info.operators,
                len(timings),
                round(total_us, 1),
                reasons.get(number, ""),
            )
        )
    columns = ["model", "batch", "operators", "measured", "total_us", "reason"]
    if json:
        emit_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        emit_table(columns, rows, empty="nothing was measured")
    if any(reason for *_, reason in rows):
        raise typer.Exit(ExitCode.FAILED)


_ONLINE: dict[object, str] = {True: "yes", False: "no", None: "unknown"}


def _devices(folder: Path, database_url: str) -> tuple[list[admin.DeviceInfo], bool]:
    """All devices, and whether a running planner was asked (only it knows who is online)."""
    from stageloom.planner.store.devices import device_infos

    if not is_running(socket_path(folder)):
        with reading(folder, database_url) as store:
            infos = store.read(device_infos, limit=1_000_000)
        return infos, False
    require_own(folder, database_url)
    infos, more = [], True
    while more:
        request = admin.DeviceListRequest(after=infos[-1].device if infos else "")
        reply = ask(folder, request, admin.DeviceListReply)
        infos, more = [*infos, *reply.devices], reply.more
    return infos, True


def _builtins(info: admin.DeviceInfo, live: bool) -> dict[str, object]:
    import msgspec

    made: dict[str, object] = msgspec.to_builtins(info)
    return made if live else {**made, "online": None}


def _generation(epoch: int, generation: int, digest: str | None) -> str:
    if not generation:
        return "nothing yet"
    return f"generation {pair(epoch, generation)}, {f'plan {digest[:12]}' if digest else 'no plan'}"

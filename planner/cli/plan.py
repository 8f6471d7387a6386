"""`stageloom plan ...`: search plans, read them, push them, see who decided what."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from stageloom.planner.cli import compare, create, explain, pushing
from stageloom.planner.cli.options import MOST_ROWS, DatabaseUrl, DataDir, Json, checked, data_dir_of
from stageloom.planner.cli.output import emit, emit_json, emit_table, pair, progress, when
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import admin

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Make plans, read them, push them to devices."
)

app.command()(create.create)
app.command()(compare.compare)
app.command()(explain.explain)


@app.command()
def schedulers(json: Json = False) -> None:
    """List what --scheduler and --policy take, and what each does.

    \b
    stageloom plan schedulers
    """
    from stageloom.shared.search.registry import help_line
    from stageloom.shared.search.registry import schedulers as known_schedulers
    from stageloom.shared.search.rivals import policies

    rows = [
        *(("--scheduler", name, help_line(name)) for name in known_schedulers()),
        *(("--policy", name, rival.help) for name, rival in policies().items()),
    ]
    if json:
        emit_json([{"option": option, "name": name, "help": text} for option, name, text in rows])
    else:
        emit_table(["option", "name", "what it does"], rows, empty="there is none")


@app.command("list")
def list_plans(data_dir: DataDir = None, database_url: DatabaseUrl = "", json: Json = False) -> None:
    """List the plans.

    \b
    stageloom plan list
    """
    from stageloom.planner.store.plans import plan_infos
    from stageloom.planner.store.store import ReadStore

    store = ReadStore.open(data_dir_of(data_dir), database_url)
    infos = store.read(plan_infos, limit=1_000_000)
    store.close()
    if json:
        emit_json(infos)
        return
    emit_table(
        ["plan", "digest", "scheduler", "models", "wire bytes", "created (UTC)"],
        [
            (p.plan, p.digest[:12], p.scheduler, ", ".join(p.models), p.wire_bytes, when(p.created_at_us))
            for p in infos
        ],
        empty="there is no plan; make one with `stageloom plan create`",
    )


@app.command()
def show(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="Its name, or 8 or more characters of its digest.")
    ],
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Print a plan as text. Its rules, and the stage string of every combined block.

    \b
    stageloom plan show inception
    stageloom plan explain inception     # the same in words, with costs and what else was tried
    """
    from stageloom.planner.store.plans import plan_info
    from stageloom.planner.store.store import ReadStore

    store = ReadStore.open(data_dir_of(data_dir), database_url)
    info = store.read(plan_info, plan)
    store.close()
    if json:
        emit_json(info)
        return
    emit(info.text)
    progress(f"{info.text_bytes} bytes as text, {info.wire_bytes} on the wire, digest {info.digest}")


class _PushCommand(TyperCommand):
    """Its one argument takes devices and then a plan, which no metavar of one argument can say."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What stands behind the command's name."""
        return ["[OPTIONS]", "[DEVICE]...", "PLAN"]


@app.command(cls=_PushCommand)
def push(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="DEVICES PLAN",
            help="Devices, and last the plan: its name, or 8 or more characters of its digest.",
        ),
    ],
    everyone: Annotated[
        bool, typer.Option("--all", help="To every enrolled device, with no DEVICE named.")
    ] = False,
    autonomy: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="What the agent may re-plan by itself: off, proven or full; without this, as before "
            "(off at first).",
        ),
    ] = None,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="No trial: run it at once and go back only if tasks fail or the engine crashes."
        ),
    ] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Make a plan what devices should run, as their next generation. An absent one gets it when it returns.

    A device compares it with the plan that it runs, for up to a minute under its own load, and keeps it
    only if it is better: see `stageloom plan history DEVICE`. There is no trial where nothing comparable
    runs, or where the plan was committed on the device before.

    \b
    stageloom plan push shop-7 inception
    stageloom plan push shop-7 inception --now
    stageloom plan push shop-7 shop-8 shop-9 inception
    stageloom plan push --all inception
    """
    from stageloom.shared.messages.control import Activation, Autonomy

    *devices, plan = names
    if everyone == bool(devices):
        raise InputError(
            "name devices and then the plan, or --all and the plan", remedy="see `stageloom plan push --help`"
        )
    if autonomy is not None and autonomy not in {one.value for one in Autonomy}:
        raise InputError(f"there is no autonomy {autonomy!r}", remedy="choose off, proven or full")
    request = checked(
        admin.FleetPushRequest(
            plan=plan,
            autonomy=Autonomy(autonomy) if autonomy is not None else None,
            activation=Activation.NOW if now else Activation.TRIAL,
        )
    )
    if len(devices) == 1:
        pushing.push_to_one(data_dir_of(data_dir), request, devices[0], json)
    else:
        pushing.push_to_many(data_dir_of(data_dir), request, devices, json)


@app.command()
def history(
    device: Annotated[str | None, typer.Argument(metavar="DEVICE")] = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_ROWS, help="Newest entries to show.")
    ] = 50,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """List generations, newest first. Of each which plan, who decided it, how it ended.

    \b
    stageloom plan history shop-7
    """
    from stageloom.planner.store.generations import generation_history
    from stageloom.planner.store.store import ReadStore

    store = ReadStore.open(data_dir_of(data_dir), database_url)
    entries, _ = store.read(generation_history, DeviceId(device) if device is not None else None, limit=limit)
    store.close()
    if json:
        emit_json(entries)
        return
    emit_table(
        ["device", "generation", "plan", "digest", "decided by", "state", "at (UTC)", "reason"],
        [
            (
                e.device,
                pair(e.epoch, e.generation),
                e.plan,
                (e.digest or "")[:12],
                e.decided_by,
                e.state,
                when(e.at_us),
                e.reason,
            )
            for e in entries
        ],
        empty="nothing was ever pushed",
    )

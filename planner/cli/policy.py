"""`stageloom policy ...`: learned policies; which there are, those of devices, those from elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.cli.connection import call, connected, every
from stageloom.planner.cli.options import checked
from stageloom.planner.cli.output import emit, emit_table, progress, pushed_text, show, when
from stageloom.planner.schema import policy as schema
from stageloom.planner.schema.device import PolicyAttachRequest
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List learned policies, take them over, give them to devices.",
)


@app.command("list")
def list_policies() -> None:
    """List the policies that are kept, newest first. Works while the planner is down, too.

    A ratio is what a task costs under the policy on blocks or arrivals that it did not learn from: of maddpg
    over every block alone, of gpg over one operator after another. Below 1 is better.

    \b
    stageloom policy list
    """
    infos = every(routes.POLICY_LIST, schema.PolicyListRequest())
    columns = ["digest", "policy", "models", "steps", "ratio", "trained (UTC)", "class"]
    rows = [
        (
            info.digest[:12],
            info.policy,
            ", ".join(name or artifact[:12] for artifact, name in info.artifacts.items()),
            info.steps,
            f"{info.ratio:.3f}",
            when(info.trained_at_us),
            info.device_class or "any",
        )
        for info in infos
    ]
    empty = "no policy is kept; train one with `stageloom policy train`, or see `policy import --help`"
    show(infos, lambda: emit_table(columns, rows, empty=empty))
    for info in infos:
        if info.unshown:
            progress(f"{info.digest[:12]}: {info.unshown}")


@app.command()
def attach(
    device: Annotated[str, typer.Argument(metavar="DEVICE")],
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY",
            help="8 or more characters of its digest; maddpg: the newest for the device's class; none.",
        ),
    ],
) -> None:
    """Send a policy to a device. Where no planner answers it plans with it, as far as its autonomy goes.

    A re-plan does the same by itself where the store has a policy that fits its plan; this command turns that
    off, `stageloom device replan DEVICE --attach` on again.

    The device refuses one that was trained for other models or another device class: see
    `stageloom-agent status` there.

    \b
    stageloom policy attach shop-7 maddpg
    stageloom policy attach shop-7 none
    """
    wanted = "" if policy == "none" else policy
    reply = call(routes.POLICY_ATTACH, checked(PolicyAttachRequest(device=DeviceId(device), policy=wanted)))
    done = f"attached to {device}" if wanted else f"no policy is attached to {device} from now on,"
    show(reply, lambda: progress(f"{done} as {pushed_text(reply)}"))


@app.command("import")
def import_policy(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="As `stageloom policy train maddpg --output` wrote it.")
    ],
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="D", help="Adopt it for this device's class. Default: the class it names."
        ),
    ] = None,
) -> None:
    """Keep a policy that was trained elsewhere. The next re-plan of a device of its class asks it.

    A policy has a say only on the device class it was trained for. With --device it is adopted for that
    device's class, and for the planner's artifacts with the same graphs where its own are not here. Its plans
    must win a trial on the device like any.

    \b
    stageloom policy import maddpg.checkpoint --device shop-7
    stageloom policy attach shop-7 maddpg
    """
    request = checked(schema.PolicyImportRequest(device=None if device is None else DeviceId(device)))
    reply = _uploaded(request, file)
    show(reply, lambda: _tell(reply))


def _tell(reply: schema.PolicyImportReply) -> None:
    emit(reply.policy)
    same = reply.device_class == reply.trained_for
    adoption = "" if same else f", adopted from {reply.trained_for}"
    progress(f"policy {reply.policy[:12]} is kept for {reply.device_class}{adoption}")


def _uploaded(request: schema.PolicyImportRequest, file: Path) -> schema.PolicyImportReply:
    try:
        file.open("rb").close()
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror}",
            remedy="name a checkpoint as `stageloom policy train maddpg --output` writes it",
        ) from error
    with connected() as caller:
        assert isinstance(caller, PlannerClient)
        return caller.upload(routes.POLICY_IMPORT, request, file)


@app.command("export")
def export_policy(
    digest: Annotated[
        str, typer.Argument(metavar="DIGEST", help="8 or more characters, as `policy list` shows it.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To be written; it must not exist.")],
) -> None:
    """Write a policy to a file. `policy import` takes it on another planner.

    \b
    stageloom policy export 3f2a9c01 maddpg.checkpoint
    """
    request = checked(schema.PolicyExportRequest(policy=digest))
    with connected(live=False) as caller:
        size = caller.download(routes.POLICY_EXPORT, request, file)
    show({"file": str(file), "size_bytes": size}, lambda: progress(f"{size} bytes in {file}"))

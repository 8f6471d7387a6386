"""`stageloom policy ...`: learned policies that devices plan with while the planner is away."""

from typing import Annotated

import typer

from planner.admin.client import ask
from planner.cli.options import DataDir, Json, checked, data_dir_of
from planner.cli.output import emit_json, progress
from planner.cli.pushing import as_json, in_words
from shared.ids import DeviceId
from shared.messages import admin

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Give devices a learned policy to plan with alone."
)


@app.callback()
def group() -> None:
    """Give devices a learned policy to plan with alone."""


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
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Send a policy to a device, which plans with it where no planner answers, as far as its autonomy goes.

    A re-plan does the same by itself where the store has a policy that fits its plan; this command turns that
    off, `stageloom device replan DEVICE --attach` on again.

    The device refuses one that was trained for other models or another device class: see
    `stageloom-agent status` there.

    \b
    stageloom policy attach shop-7 maddpg
    stageloom policy attach shop-7 none
    """
    wanted = "" if policy == "none" else policy
    request = checked(admin.PolicyAttachRequest(device=DeviceId(device), policy=wanted))
    reply = ask(data_dir_of(data_dir), request, admin.PlanPushReply)
    if json:
        emit_json({"device": device, **as_json(reply)})
    else:
        progress(f"attached to {device} as {in_words(reply)}")

"""`stageloom policy ...`: learned policies; which there are, those of devices, those from elsewhere."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stageloom.planner.admin.client import ask
from stageloom.planner.cli.options import DatabaseUrl, DataDir, Json, checked, data_dir_of, reading
from stageloom.planner.cli.output import emit, emit_json, emit_table, progress, pushed_json, pushed_text, when
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages import admin

if TYPE_CHECKING:
    from stageloom.planner.store.database import Database

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List learned policies, take them over, give them to devices.",
)

_KINDS = ("maddpg", "gpg")


@app.callback()
def group() -> None:
    """List learned policies, take them over, give them to devices."""


@app.command("list")
def list_policies(data_dir: DataDir = None, database_url: DatabaseUrl = "", json: Json = False) -> None:
    """List the policies that are kept, newest first. Works while the planner is down, too.

    A ratio is what a task costs under the policy on blocks or arrivals that it did not learn from: of maddpg
    over every block alone, of gpg over one operator after another. Below 1 is better.

    \b
    stageloom policy list
    """
    from stageloom.planner.store.policies import kept_policies

    with reading(data_dir, database_url) as store:
        with store.database.read() as session:
            found = [one for kind in _KINDS for one in kept_policies(session, kind)]
    found.sort(key=lambda one: -one.trained_at_us)
    if json:
        names = ("digest", "policy", "device_class", "artifacts", "settings", "versions", "ratio", "steps")
        emit_json(
            [
                {**{name: getattr(one, name) for name in names}, "trained_at_us": one.trained_at_us}
                for one in found
            ]
        )
        return
    emit_table(
        ["digest", "policy", "models", "steps", "ratio", "trained (UTC)", "class"],
        [
            (
                one.digest[:12],
                one.policy,
                ", ".join(name or artifact[:12] for artifact, name in one.artifacts.items()),
                one.steps,
                f"{one.ratio:.3f}",
                when(one.trained_at_us),
                one.device_class or "any",
            )
            for one in found
        ],
        empty="no policy is kept; train one with `stageloom train`, or see `stageloom policy import --help`",
    )


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
    request = checked(admin.PolicyAttachRequest(device=DeviceId(device), policy=wanted))
    reply = ask(data_dir_of(data_dir), request, admin.PlanPushReply)
    if json:
        emit_json({"device": device, **pushed_json(reply)})
    else:
        done = f"attached to {device}" if wanted else f"no policy is attached to {device} from now on,"
        progress(f"{done} as {pushed_text(reply)}")


@app.command("import")
def import_policy(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="As `stageloom train maddpg --output` wrote it.")
    ],
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="D", help="Adopt it for this device's class. Default: the class it names."
        ),
    ] = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Keep a policy that was trained elsewhere. The next re-plan of a device of its class asks it.

    A policy has a say only on the device class it was trained for. With --device it is adopted for that
    device's class, and for the planner's artifacts with the same graphs where its own are not here. Its plans
    must win a trial on the device like any.

    \b
    stageloom policy import maddpg.checkpoint --device shop-7
    stageloom policy attach shop-7 maddpg
    """
    from stageloom.planner.replan.learned import adopted
    from stageloom.planner.store.devices import device_info
    from stageloom.planner.store.models import model_infos
    from stageloom.shared.ids import DeviceId
    from stageloom.shared.policy.maddpg.checkpoint import MAX_BYTES, decode, encode

    try:
        with file.open("rb") as opened:
            found = decode(opened.read(MAX_BYTES + 1))
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror}",
            remedy="name a checkpoint as `stageloom train maddpg --output` writes it",
        ) from error
    own = found
    with reading(data_dir, database_url) as store:
        if device is not None:
            known = {one.digest: store.graph(one.digest) for one in store.read(model_infos, limit=1_000_000)}
            own = adopted(found, store.read(device_info, DeviceId(device)).device_class, known)
        digest = keep_policy(store.database, encode(own))
    told = {"policy": digest, "device_class": own.space.device_class, "trained_for": found.space.device_class}
    if json:
        emit_json({**told, "models": [one.artifact for one in own.space.models]})
        return
    emit(digest)
    adoption = "" if own is found else f", adopted from {found.space.device_class}"
    progress(f"policy {digest[:12]} is kept for {own.space.device_class}{adoption}")


def keep_policy(database: "Database", body: bytes, curves: Sequence[Mapping[str, Any]] = ()) -> Digest:
    """Keep a checkpoint's bytes for the device class that it names; returns its digest.

    Raises:
        DecodeError: it is no checkpoint.
        StorageError: the database cannot be written.
    """
    from stageloom.planner.store.policies import store_policy
    from stageloom.shared.policy.maddpg.checkpoint import KIND, decode

    found = decode(body)
    about = found.provenance
    names = {artifact: name for name, artifact in about.get("models", {}).items()}
    digest: Digest = database.change(
        store_policy,
        body,
        policy=KIND,
        device_class=found.space.device_class,
        provenance={
            "models": {model.artifact: names.get(model.artifact, "") for model in found.space.models},
            "settings": about.get("settings", {}),
            "versions": about.get("versions", {}),
            "steps": about.get("transitions", 0),
            "validation_ratio": _ratio(about),
        },
        curves=curves,
        trained_at_us=time.time_ns() // 1000,
    )
    return digest


def _ratio(about: Mapping[str, Any]) -> float:
    """What a task costs under the policy, over that with every block alone; 1 where it is not known."""
    policy, alone = about.get("policy") or {}, about.get("rivals", {}).get("alone, fast", {})
    served = policy.get("throughput_per_s", 0.0)
    return float(alone.get("throughput_per_s", 0.0) / served) if alone and served > 0.0 else 1.0

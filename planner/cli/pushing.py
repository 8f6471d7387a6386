"""A plan to one device, or to many with a transaction for up to 512 of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from stageloom.planner.admin.client import ask
from stageloom.planner.cli.options import checked
from stageloom.planner.cli.output import emit_json, pair, progress
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import admin
from stageloom.shared.text import counted

_SHOWN: Final = 16


def push_to_one(folder: Path, wanted: admin.FleetPushRequest, device: str, json: bool) -> None:
    """Push to one device, and tell what came of it.

    Raises:
        AdminRefused: it was refused.
    """
    request = admin.PlanPushRequest(
        plan=wanted.plan,
        device=DeviceId(device),
        autonomy=wanted.autonomy,
        activation=wanted.activation,
    )
    reply = ask(folder, checked(request), admin.PlanPushReply)
    if json:
        emit_json({"device": device, **as_json(reply)})
    else:
        progress(f"pushed to {device} as {in_words(reply)}; see `stageloom watch {device}`")


def push_to_many(folder: Path, wanted: admin.FleetPushRequest, devices: Sequence[str], json: bool) -> None:
    """Push to the devices named, or to all where none is, and tell what came of it.

    Raises:
        InputError: some were refused; the others have it.
    """
    pushed = [one for reply in _replies(folder, wanted, devices) for one in reply.pushed]
    refused = [one for one in pushed if one.cause]
    if json:
        emit_json(pushed)
    else:
        by_autonomy = Counter(one.autonomy.value for one in pushed if one.autonomy is not None)
        some = ", ".join(f"{number} {name}" for name, number in sorted(by_autonomy.items()))
        done = f"pushed to {counted(by_autonomy.total(), 'device')}"
        progress(f"{done}{some and f', autonomy: {some}'}; see `stageloom watch`")
    for one in refused[:_SHOWN]:
        progress(f"{one.device}: {one.cause}")
    if refused:
        raise InputError(
            f"{len(refused)} of {len(pushed)} devices were refused",
            remedy="the others have it; push to these again once the cause is gone",
        )


def in_words(reply: admin.PlanPushReply) -> str:
    """What is desired of one device now."""
    return f"generation {pair(reply.epoch, reply.generation)}, autonomy {reply.autonomy.value}"


def as_json(reply: admin.PlanPushReply) -> dict[str, object]:
    """The same for scripts."""
    return {"epoch": reply.epoch, "generation": reply.generation, "autonomy": reply.autonomy.value}


def _replies(
    folder: Path, wanted: admin.FleetPushRequest, devices: Sequence[str]
) -> Iterator[admin.FleetPushReply]:
    for at in range(0, len(devices), admin.MAX_PUSHED):
        some = tuple(DeviceId(name) for name in devices[at : at + admin.MAX_PUSHED])
        yield ask(folder, checked(replace(wanted, devices=some)), admin.FleetPushReply)
    after, more = "", not devices
    while more:
        reply = ask(folder, replace(wanted, after=after), admin.FleetPushReply)
        after, more = reply.pushed[-1].device if reply.pushed else "", reply.more
        yield reply

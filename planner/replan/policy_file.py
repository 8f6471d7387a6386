"""Policies from files: checked, adopted for a device class here, with what is kept beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from stageloom.planner.replan.learned import adopted
from stageloom.planner.schema.policy import PolicyImportReply
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.models import model_infos
from stageloom.planner.store.store import ReadStore
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import DecodeError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.base import Count, ShortText
from stageloom.shared.policy.maddpg.checkpoint import KIND, MAX_BYTES, MaddpgCheckpoint, decode, encode


class CheckedPolicy(NamedTuple):
    """A policy that may be kept: its kind and bytes, what is kept beside them, what the operator is told."""

    kind: str
    body: bytes
    provenance: Mapping[str, Any]
    reply: PolicyImportReply


def checked_policy(store: ReadStore, path: Path, device: DeviceId | None) -> CheckedPolicy:
    """The policy in a file; with `device` as that device's class may use it.

    Raises:
        InputError: there is no such device, or a model of the policy is not here, nor one with its graph.
        DecodeError: it is no checkpoint.
    """
    with path.open("rb") as file:
        found = decode(file.read(MAX_BYTES + 1))
    own = found
    if device is not None:
        device_class = store.read(device_info, device).device_class
        here = {info.digest: store.graph(info.digest) for info in store.read(model_infos, limit=None)}
        own = adopted(found, device_class, here)
    body = encode(own)
    reply = PolicyImportReply(
        policy=digest_bytes([body]),
        device_class=own.space.device_class,
        trained_for=found.space.device_class,
        models=tuple(model.artifact for model in own.space.models),
    )
    return CheckedPolicy(KIND, body, provenance_of(own), reply)


class _Served(msgspec.Struct, frozen=True):
    """What was served under a policy where it was validated."""

    throughput_per_s: float = 0.0


class _About(msgspec.Struct, frozen=True):
    """What the store keeps of a checkpoint's provenance (`stageloom.planner.learning.maddpg.train`)."""

    models: Annotated[dict[str, str], Meta(max_length=64)] = {}
    settings: Annotated[dict[str, Any], Meta(max_length=256)] = {}
    versions: Annotated[dict[str, ShortText], Meta(max_length=64)] = {}
    transitions: Count = 0
    policy: _Served | None = None
    rivals: dict[str, _Served] = {}


def provenance_of(found: MaddpgCheckpoint) -> dict[str, Any]:
    """What `stageloom.planner.store.policies.store_policy` keeps beside a checkpoint's bytes.

    Raises:
        DecodeError: what it says of its training has another form.
    """
    try:
        about = msgspec.convert(found.provenance, _About)
    except msgspec.ValidationError as error:
        raise DecodeError(
            f"what the policy says of its training cannot be read: {error}",
            remedy="train it again: stageloom policy train maddpg",
        ) from error
    names = {artifact: name for name, artifact in about.models.items()}
    return {
        "models": {model.artifact: names.get(model.artifact, "") for model in found.space.models},
        "settings": about.settings,
        "versions": about.versions,
        "steps": about.transitions,
        "validation_ratio": _ratio(about),
    }


def _ratio(about: _About) -> float:
    """What a task costs under the policy, over that with every block alone; 1 where it is not known."""
    alone = about.rivals.get("alone, fast")
    served = 0.0 if about.policy is None else about.policy.throughput_per_s
    return alone.throughput_per_s / served if alone is not None and served > 0.0 else 1.0

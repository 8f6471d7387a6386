"""Keeps a policy of maddpg in the store, with what its checkpoint says of itself."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stageloom.shared.ids import Digest

if TYPE_CHECKING:
    from stageloom.planner.store.database import Database


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
    return database.change(
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


def _ratio(about: Mapping[str, Any]) -> float:
    """What a task costs under the policy, over that with every block alone; 1 where it is not known."""
    policy, alone = about.get("policy") or {}, about.get("rivals", {}).get("alone, fast", {})
    served = policy.get("throughput_per_s", 0.0)
    return float(alone.get("throughput_per_s", 0.0) / served) if alone and served > 0.0 else 1.0

"""Trained policies in the store: kept whole, found by class, the newest first."""

import json
from typing import Any

import pytest

from stageloom.planner.costs.measured import trained_policy
from stageloom.planner.schema.policy import PolicyInfo
from stageloom.planner.store.policies import (
    fitting_policy,
    newest_policy,
    policy_infos,
    store_policy,
)
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import CheckpointRow
from stageloom.shared.digest import digest_bytes
from stageloom.shared.search.gpg import packaged_checkpoint

PROVENANCE: dict[str, Any] = {
    "models": {"ab" * 32: "resnet50"},
    "settings": {"seed": 3, "reward": "latency"},
    "versions": {"torch": "2.13.0"},
    "steps": 70,
    "validation_ratio": 0.75,
}
CURVES = [{"step": 50, "phase": "imitation", "ratio": 0.8}, {"step": 70, "phase": "imitation", "ratio": 0.75}]


def keep(store: Store, body: bytes, at_us: int, device_class: str = "") -> str:
    return store.database.change(
        store_policy,
        body,
        policy="gpg",
        device_class=device_class,
        provenance=PROVENANCE,
        curves=CURVES,
        trained_at_us=at_us,
    )


def test_a_policy_is_kept_with_artifacts_settings_versions_and_curves(store: Store) -> None:
    digest = keep(store, b"weights", 7)
    (found,) = store.read(policy_infos)
    assert found == PolicyInfo(
        digest=digest_bytes([b"weights"]),
        policy="gpg",
        device_class="",
        artifacts={"ab" * 32: "resnet50"},
        settings={"seed": 3, "reward": "latency"},
        versions={"torch": "2.13.0"},
        ratio=0.75,
        steps=70,
        trained_at_us=7,
    )
    with store.database.read() as session:
        curves = session.get_one(CheckpointRow, digest).curves
    assert digest == found.digest and json.loads(curves) == CURVES


def test_the_newest_of_the_class_comes_before_those_for_any_device(store: Store) -> None:
    assert store.read(newest_policy, "gpg", "orin") is None
    keep(store, b"any", 3)
    keep(store, b"old", 1, "orin")
    keep(store, b"new", 2, "orin")
    assert store.read(newest_policy, "gpg", "orin") == b"new"
    assert store.read(newest_policy, "gpg", "nano") == b"any"
    assert store.read(newest_policy, "maddpg", "orin") is None
    keep(store, b"old", 4, "orin")  # trained again, with the same result
    assert store.read(newest_policy, "gpg", "orin") == b"old"
    assert len(store.read(policy_infos)) == 3


def test_a_policy_that_cannot_be_used_leaves_the_search_the_packaged_one(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    assert trained_policy(store, "orin") == b""
    keep(store, b"of another version", 1, "orin")
    assert trained_policy(store, "orin") == b""
    assert "packaged policy" in caplog.text
    keep(store, packaged_checkpoint(), 2, "orin")
    assert trained_policy(store, "orin") == packaged_checkpoint()


def test_a_policy_over_the_devices_own_models_comes_before_a_newer_one_over_others(store: Store) -> None:
    """Where none fits the newest is given: it says itself why it has no say."""
    mine, other = digest_bytes([b"mine"]), digest_bytes([b"other"])
    assert store.read(fitting_policy, "maddpg", "orin", [mine]) == b""
    for at_us, artifacts in ((1, [mine, other]), (2, [mine]), (3, [other])):
        store.database.change(
            store_policy,
            b"at %d" % at_us,
            policy="maddpg",
            device_class="orin",
            provenance={**PROVENANCE, "models": dict.fromkeys(artifacts, "name")},
            curves=CURVES,
            trained_at_us=at_us,
        )
    assert store.read(fitting_policy, "maddpg", "orin", [mine]) == b"at 2"
    assert store.read(fitting_policy, "maddpg", "orin", [other, mine]) == b"at 1"
    assert store.read(fitting_policy, "maddpg", "orin", [digest_bytes([b"third"])]) == b"at 3"
    assert store.read(fitting_policy, "maddpg", "nano", [mine]) == b""

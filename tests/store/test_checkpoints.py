"""Trained policies in the store: kept whole, found by class, the newest first."""

from typing import Any

import pytest

from stageloom.planner.costs.measured import trained_policy
from stageloom.planner.store import checkpoints
from stageloom.planner.store.store import Store
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
    return checkpoints.keep(
        store.database,
        body,
        policy="gpg",
        device_class=device_class,
        provenance=PROVENANCE,
        curves=CURVES,
        now_us=at_us,
    )


def test_a_policy_is_kept_with_artifacts_settings_versions_and_curves(store: Store) -> None:
    digest = keep(store, b"weights", 7)
    with store.database.read() as session:
        (found,) = checkpoints.kept(session, "gpg")
    assert found == checkpoints.KeptPolicy(
        digest=digest_bytes([b"weights"]),
        policy="gpg",
        device_class="",
        artifacts={"ab" * 32: "resnet50"},
        settings={"seed": 3, "reward": "latency"},
        versions={"torch": "2.13.0"},
        curves=CURVES,
        ratio=0.75,
        steps=70,
        trained_at_us=7,
    )
    assert digest == found.digest


def test_the_newest_of_the_class_comes_before_those_for_any_device(store: Store) -> None:
    assert store.newest_checkpoint("gpg", "orin") is None
    keep(store, b"any", 3)
    keep(store, b"old", 1, "orin")
    keep(store, b"new", 2, "orin")
    assert store.newest_checkpoint("gpg", "orin") == b"new"
    assert store.newest_checkpoint("gpg", "nano") == b"any"
    assert store.newest_checkpoint("maddpg", "orin") is None
    keep(store, b"old", 4, "orin")  # trained again, with the same result
    assert store.newest_checkpoint("gpg", "orin") == b"old"
    with store.database.read() as session:
        assert len(checkpoints.kept(session, "gpg")) == 3


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
    assert store.fitting_checkpoint("maddpg", "orin", [mine]) == b""
    for at_us, artifacts in ((1, [mine, other]), (2, [mine]), (3, [other])):
        checkpoints.keep(
            store.database,
            b"at %d" % at_us,
            policy="maddpg",
            device_class="orin",
            provenance={**PROVENANCE, "models": dict.fromkeys(artifacts, "name")},
            curves=CURVES,
            now_us=at_us,
        )
    assert store.fitting_checkpoint("maddpg", "orin", [mine]) == b"at 2"
    assert store.fitting_checkpoint("maddpg", "orin", [other, mine]) == b"at 1"
    assert store.fitting_checkpoint("maddpg", "orin", [digest_bytes([b"third"])]) == b"at 3"
    assert store.fitting_checkpoint("maddpg", "nano", [mine]) == b""

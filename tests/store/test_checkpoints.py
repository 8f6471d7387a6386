"""Trained policies in the store: kept whole, found by class, the newest first."""

import json
from typing import Any

import pytest

from stageloom.planner.costs.measured import trained_policy
from stageloom.planner.schema.policy import MODELS_MAX, PolicyInfo
from stageloom.planner.store.policies import (
    FittingPolicy,
    fitting_policy,
    keep_verdict,
    newest_policy,
    policy_infos,
    store_policy,
)
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import CheckpointRow
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import Digest
from stageloom.shared.search.gpg import packaged_checkpoint
from tests.store.helpers import verdict_on

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


def test_a_policy_of_as_many_models_as_a_training_takes_is_shown(store: Store) -> None:
    trained(store, b"weights", 1, [digest_bytes([b"%d" % at]) for at in range(MODELS_MAX)])
    (info,) = store.read(policy_infos)
    assert info.unshown == "" and len(info.artifacts) == MODELS_MAX


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
    assert fitting(store, MINE) == (b"", "")
    for at_us, artifacts in ((1, [MINE, OTHER]), (2, [MINE]), (3, [OTHER])):
        trained(store, b"at %d" % at_us, at_us, artifacts, verdict=verdict_on(b"at %d" % at_us))
    assert fitting(store, MINE) == (b"at 2", "")
    assert fitting(store, OTHER, MINE) == (b"at 1", "")
    assert fitting(store, digest_bytes([b"third"])) == (b"at 3", "")
    assert store.read(fitting_policy, "maddpg", "nano", [MINE]) == (b"", "")


MINE, OTHER = digest_bytes([b"mine"]), digest_bytes([b"other"])


def trained(store: Store, body: bytes, at_us: int, artifacts: list[Digest], **more: Any) -> str:
    """A policy of maddpg over these artifacts, for the class `orin`."""
    return store.database.change(
        store_policy,
        body,
        policy="maddpg",
        device_class="orin",
        provenance={**PROVENANCE, "models": dict.fromkeys(artifacts, "name")},
        curves=CURVES,
        trained_at_us=at_us,
        **more,
    )


def fitting(store: Store, *artifacts: Digest) -> FittingPolicy:
    return store.read(fitting_policy, "maddpg", "orin", artifacts)


@pytest.mark.promise("policy-published-through-gate")
def test_the_newest_policy_that_passed_is_asked_before_newer_ones_that_did_not(store: Store) -> None:
    """1. One that passed. 2. Newer ones, not checked and not passed. 3. One that may plan unchecked."""
    trained(store, b"good", 1, [MINE], verdict=verdict_on(b"good"))
    trained(store, b"new", 2, [MINE])
    trained(store, b"bad", 3, [MINE], verdict=verdict_on(b"bad", "it is behind"))
    assert fitting(store, MINE) == (b"good", "")
    trained(store, b"mine to try", 4, [MINE], unchecked=True)
    assert fitting(store, MINE) == (b"mine to try", "")


@pytest.mark.promise("policy-published-through-gate")
def test_where_none_may_plan_the_newests_reason_is_said_and_listed(store: Store) -> None:
    old = trained(store, b"old", 1, [MINE])
    assert fitting(store, MINE) == (
        b"",
        f"policy {old[:12]} was not checked: stageloom policy check {old[:12]}",
    )
    bad = trained(store, b"bad", 2, [MINE], verdict=verdict_on(b"bad", "it is behind"))
    why = f"policy {bad[:12]} did not pass its check: it is behind"
    assert fitting(store, MINE) == (b"", why)
    newest, _ = store.read(policy_infos)
    assert newest.withheld == why and newest.verdict == verdict_on(b"bad", "it is behind")


@pytest.mark.promise("policy-published-through-gate")
def test_a_verdict_stays_with_the_bytes_until_another_check(store: Store) -> None:
    """1. Kept later than the policy. 2. The same bytes come again. 3. Checked again."""
    trained(store, b"mine", 1, [MINE])
    store.write(keep_verdict, verdict_on(b"mine"))
    trained(store, b"mine", 2, [MINE])
    assert fitting(store, MINE) == (b"mine", "")
    store.write(keep_verdict, verdict_on(b"mine", "it is behind"))
    assert fitting(store, MINE).body == b""
    store.write(keep_verdict, verdict_on(b"removed meanwhile"))
    assert len(store.read(policy_infos)) == 1


@pytest.mark.promise("policy-published-through-gate")
def test_a_verdict_that_another_version_wrote_is_none(store: Store) -> None:
    digest = trained(store, b"mine", 1, [MINE])
    with store.database.write() as session:
        session.get_one(CheckpointRow, digest).verdict = '{"passed": 7}'
    assert "was not checked" in fitting(store, MINE).withheld


def test_a_policy_that_schedules_needs_no_check(store: Store) -> None:
    keep(store, b"weights", 1)
    (info,) = store.read(policy_infos)
    assert info.withheld == "" and store.read(newest_policy, "gpg", "orin") == b"weights"

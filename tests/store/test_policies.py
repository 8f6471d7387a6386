"""Policies on devices: attached by operators, by re-plans where one fits, and taken away."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from stageloom.planner.replan.policy import ReplanSettings
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.devices import revoke_device
from stageloom.planner.store.generations import generation_history, set_states
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.policies import attach_policy, store_policy
from stageloom.planner.store.replan_pushes import push_replan
from stageloom.planner.store.replan_settings import replan_settings, set_replan_settings
from stageloom.planner.store.store import Store
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError, RefusedError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Alarm, Autonomy, Desired, DeviceState, PolicyNeed
from stageloom.shared.plan import Plan
from stageloom.shared.search.compose import ModelChoice, compose
from tests.store.helpers import NANO, T0_US, add_model, enrol, verdict_on
from tests.store.test_checkpoints import CURVES, PROVENANCE

CLASS = "cpu-2-core"


@dataclass
class Rig:
    """A device that runs a plan, and may plan alone."""

    store: Store
    plan: Plan
    alarms: int = 0

    def trained(
        self,
        body: bytes,
        at_us: int,
        device_class: str = CLASS,
        checked: str | None = "",
        kind: str = "maddpg",
    ) -> Digest:
        """`checked`: why its check failed, empty where it passed; None: it was not checked."""
        return self.store.database.change(
            store_policy,
            body,
            policy=kind,
            device_class=device_class,
            provenance=PROVENANCE,
            curves=CURVES,
            trained_at_us=at_us,
            verdict=None if checked is None else verdict_on(body, checked),
        )

    def replanned(self, policy: Digest | None) -> Desired:
        """A re-plan pushes a plan that such a policy fits."""
        self.alarms += 1
        desired = self.desired()
        alarm = Alarm(
            boot=7, number=self.alarms, at_us=T0_US, cause="variance", value=2.0, threshold=1.0, plan=None,
            loads=(), samples=(),
        )  # fmt: skip
        replan = LinkStore(self.store).record_alarm(NANO, alarm)
        assert replan is not None
        pushed = self.store.write(
            push_replan,
            NANO,
            replan,
            self.plan,
            scheduler="ios",
            above=(desired.epoch, desired.generation),
            how="search",
            predicted=0.5,
            fitting=policy,
        )
        assert pushed is not None
        epoch, generation = pushed.epoch, pushed.generation
        state = (NANO, epoch, generation, DeviceState.COMMITTED, "", self.alarms)
        self.store.write(set_states, [state])
        return pushed

    def desired(self) -> Desired:
        """As a restarted planner reads it."""
        (member,) = LinkStore(self.store).fleet()
        assert member.desired is not None
        return member.desired


@pytest.fixture
def rig(store: Store, tmp_path: Path) -> Rig:
    enrol(store)
    artifact = add_model(store, tmp_path)
    plan = compose([ModelChoice(name="relu", artifact=artifact, graph=store.graph(artifact))])
    store.write(add_plan, "runs", plan, "sequential")
    store.write(push, Push(device=NANO, plan="runs", decided_by="operator", autonomy=Autonomy.PROVEN))
    return Rig(store, plan)


def test_a_policy_is_attached_by_kind_or_by_digest_and_its_bytes_are_there_for_the_device(rig: Rig) -> None:
    """1. The newest of the device's own class. 2. A named one. 3. The plan that runs goes on."""
    old, new = rig.trained(b"old", 1), rig.trained(b"newer", 2)
    rig.trained(b"of another class", 3, "orin")
    assert rig.store.write(attach_policy, NANO, "maddpg").policy == PolicyNeed(new, 5)
    found = rig.store.write(attach_policy, NANO, old[:12])
    assert found.policy == PolicyNeed(old, 3) == rig.desired().policy
    assert (found.generation, found.plan_digest) == (3, rig.plan.digest)
    file = LinkStore(rig.store).artifact(old)
    assert file is not None and file.path.read_bytes() == b"old" and file.size_bytes == 3
    decided = [entry.decided_by for entry in rig.store.read(generation_history, NANO)[0]]
    assert decided == ["operator"] * 3


def test_a_policy_that_is_taken_away_is_gone_and_a_push_keeps_what_is_attached(rig: Rig) -> None:
    digest = rig.trained(b"body", 1)
    rig.store.write(attach_policy, NANO, digest)
    assert rig.store.write(push, Push(device=NANO, plan="runs", decided_by="operator")).policy == PolicyNeed(
        digest, 4
    )
    assert rig.store.write(attach_policy, NANO, "").policy is None
    assert rig.desired().policy is None


@pytest.mark.parametrize("asked", ["maddpg", "gpg", "0" * 12])
def test_a_policy_that_is_not_there_is_refused_and_nothing_changes(rig: Rig, asked: str) -> None:
    rig.trained(b"of another class", 1, "orin")
    before = rig.desired()
    with pytest.raises(InputError, match="there is no policy"):
        rig.store.write(attach_policy, NANO, asked)
    assert rig.desired() == before
    assert rig.store.read(replan_settings, NANO).attach, "who was refused has decided nothing"


@pytest.mark.parametrize("unchecked", [False, True])
def test_a_policy_that_no_device_plans_with_does_not_take_the_place_of_one_that_works(
    rig: Rig, unchecked: bool
) -> None:
    rig.store.write(attach_policy, NANO, rig.trained(b"works", 1))
    before = rig.desired()
    digest = rig.trained(b"schedules", 2, kind="gpg")
    for asked in (digest[:12], "gpg"):
        with pytest.raises(InputError, match="is of gpg, with which no device plans"):
            rig.store.write(attach_policy, NANO, asked, unchecked=unchecked)
    assert rig.desired() == before and before.policy is not None


@pytest.mark.promise("policy-published-through-gate")
@pytest.mark.parametrize(
    ("checked", "why"),
    [
        ("it says the same always", "did not pass its check: it says the same always"),
        (None, "was not checked"),
    ],
)
def test_a_policy_that_did_not_pass_is_attached_only_unchecked(
    rig: Rig, checked: str | None, why: str
) -> None:
    """1. Neither by digest nor by kind; nothing changes. 2. By either where the operator says so."""
    digest = rig.trained(b"body", 1, checked=checked)
    before = rig.desired()
    for asked in (digest, "maddpg"):
        with pytest.raises(RefusedError, match=why):
            rig.store.write(attach_policy, NANO, asked)
    assert rig.desired() == before and rig.store.read(replan_settings, NANO).attach
    for asked in (digest, "maddpg"):
        assert rig.store.write(attach_policy, NANO, asked, unchecked=True).policy == PolicyNeed(digest, 4)


@pytest.mark.promise("policy-published-through-gate")
def test_of_a_kind_the_newest_that_passed_is_attached(rig: Rig) -> None:
    good = rig.trained(b"good", 1)
    rig.trained(b"newer, and worse", 2, checked="it is behind")
    assert rig.store.write(attach_policy, NANO, "maddpg").policy == PolicyNeed(good, 4)


def test_an_unknown_device_and_a_revoked_one_get_none(rig: Rig) -> None:
    digest = rig.trained(b"body", 1)
    with pytest.raises(InputError, match="there is no device"):
        rig.store.write(attach_policy, DeviceId("nobody"), digest)
    rig.store.write(revoke_device, NANO)
    with pytest.raises(InputError, match="revoked"):
        rig.store.write(attach_policy, NANO, digest)


@pytest.mark.promise("re-plan-sends-policy")
def test_a_replan_sends_the_policy_along_that_fits_its_plan_where_the_device_may_plan_alone(rig: Rig) -> None:
    """1. One that fits. 2. None that does: what is attached stays. 3. A newer one. 4. Autonomy off."""
    first, second = rig.trained(b"first", 1), rig.trained(b"second", 2)
    assert rig.replanned(first).policy == PolicyNeed(first, 5)
    assert rig.replanned(None).policy == PolicyNeed(first, 5)
    assert rig.replanned(second).policy == PolicyNeed(second, 6)
    rig.store.write(push, Push(device=NANO, plan="runs", decided_by="operator", autonomy=Autonomy.OFF))
    assert rig.replanned(first).policy == PolicyNeed(second, 6)


@pytest.mark.promise("re-plan-sends-policy")
def test_whoever_attached_or_removed_one_has_decided_until_it_is_turned_on_again(rig: Rig) -> None:
    mine, other = rig.trained(b"mine", 1), rig.trained(b"other", 2)
    rig.store.write(attach_policy, NANO, mine)
    assert rig.replanned(other).policy == PolicyNeed(mine, 4)
    rig.store.write(attach_policy, NANO, "")
    assert rig.replanned(other).policy is None
    rig.store.write(set_replan_settings, NANO, ReplanSettings(attach=True))
    assert rig.replanned(other).policy == PolicyNeed(other, 5)
    rig.store.write(set_replan_settings, NANO, ReplanSettings(attach=False))
    assert rig.replanned(mine).policy == PolicyNeed(other, 5)


def test_a_policy_trained_twice_with_the_same_result_is_one_and_becomes_the_newest(rig: Rig) -> None:
    again = rig.trained(b"again", 1)
    rig.trained(b"between", 2)
    assert rig.trained(b"again", 3) == again == digest_bytes([b"again"])
    assert rig.store.write(attach_policy, NANO, "maddpg").policy == PolicyNeed(again, 5)

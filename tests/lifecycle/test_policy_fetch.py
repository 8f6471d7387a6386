"""The policy that is desired, in the device's link core: fetched like an artifact, then used."""

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.statefile import decode_state, encode_state
from stageloom.shared.digest import digest_bytes
from stageloom.shared.messages.control import ArtifactNeed, Autonomy, DeviceState, PolicyNeed
from tests.lifecycle import orders
from tests.lifecycle.driver import Driver, desired, kinds

POLICY = PolicyNeed(digest_bytes([b"policy"]), 4_000_000)
FETCH = ev.FetchArtifact(ArtifactNeed("policy", POLICY.digest, POLICY.size_bytes))


def test_a_desired_policy_is_fetched_and_then_used_once_while_the_plan_does_not_wait_for_it() -> None:
    driver = Driver().online()
    actions = driver.do(ev.Received(desired(1, policy=POLICY, autonomy=Autonomy.FULL)))
    assert FETCH in actions and "VerifyPlan" in kinds(actions) and "UsePolicy" not in kinds(actions)
    assert FETCH in driver.do(ev.TimePassed(), after_s=3.0), "asked for again while it is missing"
    assert ev.UsePolicy(POLICY.digest) in driver.do(ev.ArtifactPresent(POLICY.digest))
    assert not {"UsePolicy", "FetchArtifact"} & set(kinds(driver.do(ev.TimePassed(), after_s=5.0)))


def test_a_policy_that_was_fetched_is_used_after_a_restart_without_the_planner() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1, policy=POLICY)))
    revived = Driver(decode_state(encode_state(driver.disk)), boot=False)
    assert ev.UsePolicy(POLICY.digest) in revived.boot(frozenset({POLICY.digest}))


def test_a_policy_that_went_is_fetched_again_and_one_that_is_named_no_more_is_dropped() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1, policy=POLICY)))
    driver.do(ev.ArtifactPresent(POLICY.digest))
    assert FETCH in driver.do(ev.ArtifactGone(POLICY.digest), after_s=3.0)
    assert ev.UsePolicy(POLICY.digest) in driver.do(ev.ArtifactPresent(POLICY.digest))
    assert ev.UsePolicy(None) in driver.do(ev.Received(desired(2)))


def test_another_policy_alone_does_not_try_a_rejected_plan_again() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1)))
    driver.do(orders.PlanFailed((1, 1), "it does not load"))
    driver.do(ev.Received(desired(2, policy=POLICY)))
    assert driver.state is DeviceState.REJECTED

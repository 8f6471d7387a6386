"""How a staged plan comes to run, and what trials leave behind, in the device's link core."""

from dataclasses import replace
from typing import Any

import pytest

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.attempts import MAX_PROVEN, proven_with, structure_of
from stageloom.edge_agent.lifecycle.statefile import decode_state, encode_state
from stageloom.edge_agent.lifecycle.states import LinkState, PlanRef, Proven, RunnablePlan
from stageloom.edge_agent.lifecycle.trial_runner import IDLE
from stageloom.shared.digest import digest_bytes
from stageloom.shared.engine.trial import TrialRecord, TrialResult, Verdict
from stageloom.shared.messages import control
from stageloom.shared.messages.control import Activation, ArtifactNeed, DeviceState, Origin
from stageloom.shared.messages.telemetry import TrialEnded
from stageloom.shared.plan import CombinedBlock, Member, ModelPlan, Plan
from stageloom.shared.stage_string import parse
from tests.lifecycle import orders
from tests.lifecycle.driver import GOOD, Driver, desired, kinds

PLAN = digest_bytes([b"plan"])
ATTEMPT = (1, 1)
RECORD = TrialRecord(candidate=PLAN, control=GOOD.ref.digest, environment="env", began_us=5)
STAGED = ev.PlanStaged(ATTEMPT, GOOD.ref.digest)


def staged(driver: Driver, answer: ev.PlanStaged = STAGED, **fields: Any) -> list[ev.Action]:
    driver.do(ev.Received(desired(1, **fields)))
    driver.do(orders.PlanVerified(ATTEMPT))
    return driver.do(answer)


def on_trial() -> Driver:
    driver = Driver(LinkState(last_good=GOOD)).online()
    staged(driver)
    driver.do(orders.TrialBegins(ATTEMPT, RECORD))
    assert driver.state is DeviceState.TRIAL
    return driver


def decided(verdict: Verdict, reason: str = "because") -> orders.TrialDecided:
    result = TrialResult(verdict=verdict, reason=reason, ratio=1.1, interval=(1.05, 1.15), pairs=9)
    return orders.TrialDecided(ATTEMPT, GOOD.ref.digest, result)


def rows(actions: list[ev.Action]) -> list[TrialEnded]:
    return [action for action in actions if isinstance(action, TrialEnded)]


@pytest.mark.promise("record-trial-disk-before")
def test_the_record_is_durable_before_the_candidate_may_run() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    actions = staged(driver)
    assert "RunTrial" in kinds(actions)
    assert driver.state is DeviceState.STAGED, "timing the models is no reason to reject at boot"
    actions = driver.do(orders.TrialBegins(ATTEMPT, RECORD))
    assert kinds(actions).index("Persist") < kinds(actions).index("TrialRecorded")
    assert driver.disk.trial == RECORD


def test_a_record_that_cannot_be_written_keeps_the_candidate_from_running() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    staged(driver)
    driver.full = True
    assert "TrialRecorded" not in kinds(driver.do(orders.TrialBegins(ATTEMPT, RECORD)))
    assert driver.state is DeviceState.STAGED
    driver.full = False
    assert "RunTrial" in kinds(driver.do(ev.TimePassed(), after_s=6.0)), "asked again, answered again"


@pytest.mark.parametrize(
    ("verdict", "then"),
    [
        (Verdict.COMMIT, DeviceState.PROBATION),
        (Verdict.REJECT, DeviceState.REJECTED),
        (Verdict.REFUSED, DeviceState.REJECTED),
        (Verdict.NO_GAIN, DeviceState.NO_GAIN),
        (Verdict.ABANDONED, DeviceState.VERIFIED),
    ],
)
def test_each_verdict_has_its_state_and_its_row(verdict: Verdict, then: DeviceState) -> None:
    driver = on_trial()
    actions = driver.do(decided(verdict))
    assert driver.state is then
    (row,) = rows(actions)
    assert (row.how, row.verdict, row.ratio, row.pairs, row.began_us) == ("trial", verdict.value, 1.1, 9, 5)
    assert driver.disk.trial is None
    wanted = {DeviceState.PROBATION: "ActivatePlan", DeviceState.VERIFIED: "StagePlan"}.get(then)
    assert wanted is None or wanted in kinds(actions)


def test_a_verdict_that_could_not_be_written_is_asked_for_again() -> None:
    driver = on_trial()
    driver.full = True
    driver.do(decided(Verdict.REJECT))
    assert driver.state is DeviceState.TRIAL
    driver.full = False
    assert "TrialRecorded" in kinds(driver.do(ev.TimePassed(), after_s=6.0))
    driver.do(decided(Verdict.REJECT))
    assert driver.disk.state is DeviceState.REJECTED


def test_three_abandoned_trials_leave_the_plan_undecided() -> None:
    driver = on_trial()
    for _ in range(2):
        assert "StagePlan" in kinds(driver.do(decided(Verdict.ABANDONED, "the control crashed")))
        driver.do(STAGED)
        driver.do(orders.TrialBegins(ATTEMPT, RECORD))
    driver.do(decided(Verdict.ABANDONED, "the control crashed"))
    assert driver.state is DeviceState.REJECTED
    assert "undecided after 3 trials" in driver.core.report().reason


def test_a_trial_found_at_boot_is_a_rejection_with_a_row() -> None:
    state = LinkState(
        desired=desired(1), state=DeviceState.TRIAL, last_good=GOOD, trial=RECORD, environment="env"
    )
    driver = Driver(decode_state(encode_state(state)))
    assert driver.state is DeviceState.REJECTED
    assert driver.disk.trial is None
    (row,) = rows(driver.booted)
    assert (row.verdict, row.candidate, row.control) == ("reject", PLAN, GOOD.ref.digest)
    assert row.environment == "env"
    assert "StagePlan" not in kinds(driver.online().do(ev.TimePassed()))


@pytest.mark.parametrize("way", ["now", "first", "guard", "proven"])
def test_a_plan_found_twice_under_probation_is_not_proven_and_its_failure_is_told(way: str) -> None:
    """New launch intervals alone cost no proof; of a desired plan that is proven a row was told before."""
    structure = structure_of(RunnablePlan(PlanRef(PLAN, Origin.PLANNER), b"plan", ()))
    proven = (Proven(structure, "env"),)
    state = LinkState(
        desired=desired(1),
        state=DeviceState.PROBATION,
        last_good=GOOD,
        trial=RECORD,
        way=way,
        probation_boots=1,
        proven=proven,
        environment="env",
    )
    driver = Driver(decode_state(encode_state(state)))
    assert driver.state is DeviceState.ROLLED_BACK
    assert driver.core.report().reason == "the agent stopped twice while it was under probation"
    assert driver.disk.proven == (proven if way == "guard" else ())
    told = [(row.how, row.verdict) for row in rows(driver.booted)]
    assert told == ([] if way == "proven" else [(way, "reject")])


@pytest.mark.parametrize(
    ("answer", "fields", "way", "guarded"),
    [
        (STAGED, {"activation": Activation.NOW}, "now", False),
        (ev.PlanStaged(ATTEMPT), {}, "first", False),
        (ev.PlanStaged(ATTEMPT, GOOD.ref.digest, intervals_only=True), {}, "guard", True),
    ],
)
def test_some_plans_need_no_trial(
    answer: ev.PlanStaged, fields: dict[str, Any], way: str, guarded: bool
) -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    actions = staged(driver, answer, **fields)
    assert driver.state is DeviceState.PROBATION
    assert driver.core.state.way == way
    (order,) = [one for one in actions if isinstance(one, orders.ActivatePlan)]
    assert order.guarded is guarded


@pytest.mark.parametrize("way", ["now", "first", "guard", "idle"])
def test_what_was_compared_with_nothing_is_not_proven(way: str) -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    answer = {
        "first": ev.PlanStaged(ATTEMPT),
        "guard": ev.PlanStaged(ATTEMPT, GOOD.ref.digest, intervals_only=True),
    }.get(way, STAGED)
    staged(driver, answer, activation=Activation.NOW if way == "now" else Activation.TRIAL)
    if way == "idle":
        driver.do(decided(Verdict.IDLE))
    assert driver.core.state.way == way
    actions = driver.do(orders.ProbationPassed(ATTEMPT))
    assert driver.disk.state is DeviceState.COMMITTED
    assert driver.disk.last_good is not None and driver.disk.last_good.ref.digest == PLAN
    assert driver.disk.proven == ()
    (row,) = rows(actions)
    assert (row.how, row.verdict) == ("guard" if way == "idle" else way, "commit")


def test_an_idle_device_takes_the_plan_under_guard_and_says_so() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    staged(driver)
    actions = driver.do(decided(Verdict.IDLE, IDLE))
    assert driver.disk.state is DeviceState.PROBATION
    assert driver.disk.trial is not None, "a crash from here on is found at boot"
    assert driver.core.report().reason == "no load to compare under: runs guarded"
    (order,) = [one for one in actions if isinstance(one, orders.ActivatePlan)]
    assert (order.guarded, order.idle) == (True, True)
    (row,) = rows(driver.do(orders.PlanFailed(ATTEMPT, "the oldest task's age is 2 s")))
    assert (row.how, row.verdict) == ("guard", "reject")
    assert driver.state is DeviceState.ROLLED_BACK


def test_a_replans_plan_is_no_gain_on_an_idle_device_which_keeps_what_runs() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    staged(driver, needs_load=True)
    actions = driver.do(decided(Verdict.IDLE, IDLE))
    assert driver.disk.state is DeviceState.NO_GAIN and driver.disk.last_good == GOOD
    assert driver.core.report().reason == "no load to compare under"
    assert orders.AbandonPlan(ATTEMPT) in actions and "ActivatePlan" not in kinds(actions)
    assert [row.verdict for row in rows(actions)] == ["no_gain"]


def test_the_report_says_how_long_a_trial_takes_before_its_first_window() -> None:
    driver = on_trial()
    assert driver.core.report().reason == "the trial takes up to 60 s"


def test_a_committed_plan_is_proven_in_its_environment_until_it_fails() -> None:
    driver = on_trial()
    driver.do(decided(Verdict.COMMIT))
    driver.do(orders.ProbationPassed(ATTEMPT))
    assert driver.disk.proven == (Proven(PLAN, "env"),)

    again = Driver(LinkState(last_good=GOOD, proven=driver.disk.proven)).online()
    actions = staged(again)
    (row,) = rows(actions)
    assert (row.how, row.verdict, row.ratio) == ("proven", "commit", None)
    (order,) = [one for one in actions if isinstance(one, orders.ActivatePlan)]
    assert order.guarded
    again.do(orders.PlanFailed(ATTEMPT, "p99 rose"))
    assert again.disk.proven == ()


@pytest.mark.promise("proven-plan-but-launch")
def test_a_proven_plan_is_proven_whatever_its_launch_intervals_which_fail_by_themselves() -> None:
    chain = ModelPlan(name="net", artifact=digest_bytes([b"net"]))
    paced = replace(chain, launch_interval_us=500)
    plans = [
        Plan(models=(model,), combined=(CombinedBlock((Member(0, 0, 0),), parse("0-3")),))
        for model in (chain, paced)
    ]
    state = LinkState(last_good=GOOD, proven=(Proven(plans[0].structure, "env"),))
    driver = Driver(state).online()
    staged(driver, plan=plans[1].wire)
    assert driver.core.state.way == "proven"

    guarded = Driver(state).online()
    staged(guarded, ev.PlanStaged(ATTEMPT, GOOD.ref.digest, intervals_only=True), plan=plans[1].wire)
    guarded.do(orders.PlanFailed(ATTEMPT, "p99 rose"))
    assert guarded.disk.proven == (), "what was activated as proven and failed is proven no more"

    unproven = Driver(LinkState(last_good=GOOD, proven=(Proven(PLAN, "env"),))).online()
    staged(unproven, ev.PlanStaged(ATTEMPT, GOOD.ref.digest, intervals_only=True), plan=plans[1].wire)
    assert unproven.core.state.way == "guard"
    unproven.do(orders.PlanFailed(ATTEMPT, "p99 rose"))
    assert unproven.disk.proven == (Proven(PLAN, "env"),), "intervals that fail take no proof away"


def test_a_change_of_intervals_is_told_when_its_guard_has_decided() -> None:
    for event, verdict in (
        (orders.ProbationPassed(ATTEMPT), "commit"),
        (orders.PlanFailed(ATTEMPT, "p99 rose"), "reject"),
    ):
        driver = Driver(LinkState(last_good=GOOD)).online()
        first = staged(driver, ev.PlanStaged(ATTEMPT, GOOD.ref.digest, intervals_only=True))
        assert rows(first) == []
        (row,) = rows(driver.do(event))
        assert (row.how, row.verdict, row.control) == ("guard", verdict, GOOD.ref.digest)


def test_intervals_below_what_arrives_are_refused_unless_ordered() -> None:
    starving = ev.PlanStaged(ATTEMPT, GOOD.ref.digest, intervals_only=True, starves="50 tasks/s arrive")
    driver = Driver(LinkState(last_good=GOOD)).online()
    assert "AbandonPlan" in kinds(staged(driver, starving)), "it is unloaded"
    assert driver.state is DeviceState.REJECTED
    assert driver.core.report().reason == "50 tasks/s arrive"
    ordered = Driver(LinkState(last_good=GOOD)).online()
    staged(ordered, starving, activation=Activation.NOW)
    assert ordered.state is DeviceState.PROBATION


def test_a_newer_plan_ends_the_trial_and_its_late_verdict_changes_nothing() -> None:
    driver = on_trial()
    actions = driver.do(ev.Received(desired(2, b"newer")))
    assert orders.AbandonPlan(ATTEMPT) in actions
    assert [row.verdict for row in rows(actions)] == ["abandoned"]
    driver.do(decided(Verdict.COMMIT))
    assert driver.state is DeviceState.RECEIVED


def test_another_environment_ends_the_trial_and_it_begins_anew() -> None:
    driver = on_trial()
    actions = driver.do(ev.EnvironmentChanged("15 W"))
    assert driver.state is DeviceState.VERIFIED
    names = kinds(actions)
    assert names.index("AbandonPlan") < names.index("StagePlan")
    assert driver.disk.trial is None
    assert driver.core.state.abandoned == 0


def test_another_environment_ends_a_guard_as_open_and_last_known_good_runs_first() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    staged(driver, ev.PlanStaged(ATTEMPT, GOOD.ref.digest, intervals_only=True))
    assert driver.state is DeviceState.PROBATION
    actions = driver.do(ev.EnvironmentChanged("15 W"))
    names = kinds(actions)
    assert names.index("RestorePlan") < names.index("VerifyPlan")
    assert driver.disk.state is DeviceState.RECEIVED and driver.disk.active == GOOD.ref
    (row,) = (one for one in actions if isinstance(one, TrialEnded))
    assert (row.how, row.verdict) == ("guard", "abandoned")


def test_a_plan_that_was_ordered_stays_under_probation_in_another_environment() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    staged(driver, ev.PlanStaged(ATTEMPT, GOOD.ref.digest), activation=Activation.NOW)
    assert "RestorePlan" not in kinds(driver.do(ev.EnvironmentChanged("15 W")))
    assert driver.state is DeviceState.PROBATION


def test_a_request_for_measurements_does_not_try_a_rejected_plan_again() -> None:
    driver = on_trial()
    driver.do(decided(Verdict.REJECT, "worse"))
    request = control.ProfileRequest(3, ArtifactNeed("m", digest_bytes([b"artifact"]), 8))
    actions = driver.do(ev.Received(desired(2, profiles=(request,))))
    report = driver.core.report()
    stands = "only measurements were asked for; of the plan: worse"
    assert (report.state, report.generation, report.reason) == (DeviceState.REJECTED, 2, stands)
    assert "VerifyPlan" not in kinds(actions)
    assert "VerifyPlan" in kinds(driver.do(ev.Received(desired(3, profiles=(request,))))), "pushed again"


def test_the_set_of_proven_plans_is_bounded_and_keeps_the_newest() -> None:
    state = LinkState(environment="env")
    for number in range(MAX_PROVEN + 9):
        one = LinkState(environment="env", proven=state.proven)
        plan = RunnablePlan(PlanRef(digest_bytes([b"%d" % number]), Origin.PLANNER), b"%d" % number, ())
        state = LinkState(proven=proven_with(one, plan, holds=True))
    assert len(state.proven) == MAX_PROVEN
    assert state.proven[-1].structure == digest_bytes([b"%d" % (MAX_PROVEN + 8)])

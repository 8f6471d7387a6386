"""The device's core, event by event, without sockets, clocks or files."""

import pytest
from msgspec import structs

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.attempts import HELD_MOST
from stageloom.edge_agent.lifecycle.statefile import decode_state, encode_state
from stageloom.edge_agent.lifecycle.states import LinkState, RunnablePlan
from stageloom.shared.digest import digest_bytes
from stageloom.shared.engine.trial import TrialRecord, TrialResult, Verdict
from stageloom.shared.messages import control
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.control import DeviceState, Origin
from tests.lifecycle import orders
from tests.lifecycle.driver import GOOD, NEED, Driver, desired, kinds


def test_a_plan_goes_from_received_to_committed() -> None:
    driver = Driver().online()
    assert "VerifyPlan" in kinds(driver.do(ev.Received(desired(1))))
    assert "StagePlan" in kinds(driver.do(orders.PlanVerified((1, 1))))
    actions = kinds(driver.do(ev.PlanStaged((1, 1))))
    assert actions.index("Persist") < actions.index("ActivatePlan"), "the record comes first"
    assert driver.state is DeviceState.PROBATION
    driver.do(orders.ProbationPassed((1, 1)))
    report = driver.core.report()
    assert (report.state, report.active, report.origin) == (
        DeviceState.COMMITTED,
        digest_bytes([b"plan"]),
        Origin.PLANNER,
    )


def test_a_missing_artifact_is_fetched_and_waited_for() -> None:
    driver = Driver().online()
    actions = driver.do(ev.Received(desired(1, artifacts=(NEED,))))
    assert ev.FetchArtifact(NEED) in actions and driver.state is DeviceState.WAITING
    driver.do(ev.FetchFailed(NEED.digest, "no such artifact"))
    assert "no such artifact" in driver.core.report().reason
    assert ev.FetchArtifact(NEED) in driver.do(ev.TimePassed(), after_s=2.0), "asked for again"
    assert "VerifyPlan" in kinds(driver.do(ev.ArtifactPresent(NEED.digest)))


def test_an_artifact_that_is_damaged_after_the_check_is_fetched_again_before_the_plan_is_staged() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1, artifacts=(NEED,))))
    driver.do(ev.ArtifactPresent(NEED.digest))
    driver.do(orders.PlanVerified((1, 1)))
    driver.do(ev.ArtifactGone(NEED.digest))
    assert driver.state is DeviceState.WAITING
    assert "StagePlan" not in kinds(driver.do(orders.ManagerRestarted()))
    assert ev.FetchArtifact(NEED) in driver.do(ev.TimePassed(), after_s=2.0)
    assert "VerifyPlan" in kinds(driver.do(ev.ArtifactPresent(NEED.digest)))


@pytest.mark.promise("last-known-good-whose")
def test_last_known_good_whose_artifact_is_damaged_waits_for_it_and_is_committed_again() -> None:
    """1. A committed plan's artifact is found damaged at a start. 2. It is fetched. 3. The plan runs."""
    driver = Driver().online()
    driver.do(ev.ArtifactPresent(NEED.digest))
    driver.do(ev.Received(desired(1, artifacts=(NEED,))))
    driver.do(orders.PlanVerified((1, 1)))
    driver.do(ev.PlanStaged((1, 1)))
    driver.do(orders.ProbationPassed((1, 1)))
    again = Driver(driver.disk).online()
    again.do(ev.ArtifactGone(NEED.digest))
    actions = again.do(orders.RestoreFailed("missing or damaged artifacts"))
    assert again.state is DeviceState.WAITING and ev.FetchArtifact(NEED) in actions
    again.do(orders.ActiveChanged(None))
    assert "VerifyPlan" in kinds(again.do(ev.ArtifactPresent(NEED.digest)))
    again.do(orders.PlanVerified((1, 1)))
    assert "ActivatePlan" in kinds(again.do(ev.PlanStaged((1, 1))))
    again.do(orders.ProbationPassed((1, 1)))
    assert again.core.report().state is DeviceState.COMMITTED and again.core.report().active == digest_bytes(
        [b"plan"]
    )


@pytest.mark.promise("late-answer-revive-superseded")
def test_late_answers_do_not_revive_a_superseded_plan() -> None:
    driver = Driver().online()
    driver.to_probation(1)
    assert orders.AbandonPlan((1, 1)) in driver.do(ev.Received(desired(2, b"newer")))
    for late in (
        orders.ProbationPassed((1, 1)),
        orders.PlanVerified((1, 1)),
        orders.PlanFailed((1, 1), "slow"),
    ):
        driver.do(late)
        assert driver.state is DeviceState.RECEIVED and driver.core.state.last_good is None


@pytest.mark.parametrize(("epoch", "generation"), [(1, 4), (1, 5), (0, 9)])
def test_an_older_or_equal_generation_is_ignored_and_answered_with_a_report(
    epoch: int, generation: int
) -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(5)))
    before = driver.core.state
    actions = driver.do(ev.Received(desired(generation, b"other", epoch=epoch)))
    assert driver.core.state == before
    assert any(
        isinstance(one, ev.SendMessage) and isinstance(one.message, control.Reported) for one in actions
    )


def test_a_higher_epoch_supersedes_a_higher_generation() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(50)))
    driver.do(ev.Received(desired(1, b"restored", epoch=2)))
    assert (driver.core.report().epoch, driver.core.report().generation) == (2, 1)


def _good_lost(*, named: bool) -> Driver:
    """1. A plan ended as rejected. 2. At the next start the artifact of last-known-good is damaged."""
    good = RunnablePlan(GOOD.ref, GOOD.wire, (NEED,))
    wanted = desired(1, artifacts=(NEED,) if named else ())
    state = LinkState(
        desired=wanted,
        state=DeviceState.REJECTED,
        reason="p99 is 30 % worse",
        last_good=good,
        environment="env",
    )
    driver = Driver(state, boot=False)
    driver.boot(present=frozenset({NEED.digest}))
    driver.online()
    driver.do(ev.ArtifactGone(NEED.digest))
    return driver


@pytest.mark.promise("last-known-good-whose")
def test_last_known_good_whose_artifact_is_damaged_after_a_verdict_is_fetched_and_restored() -> None:
    driver = _good_lost(named=True)
    assert ev.FetchArtifact(NEED) in driver.do(orders.RestoreFailed("missing or damaged artifacts"))
    assert driver.state is DeviceState.REJECTED, "the verdict stands"
    assert "waits for artifacts" in driver.disk.reason and "p99 is 30 % worse" in driver.disk.reason
    assert ev.FetchArtifact(NEED) in driver.do(ev.TimePassed(), after_s=2.0), "asked for again"
    good = driver.core.state.last_good
    assert good is not None
    assert orders.RestorePlan(good) in driver.do(ev.ArtifactPresent(NEED.digest))
    assert (driver.disk.state, driver.disk.reason) == (DeviceState.REJECTED, "p99 is 30 % worse")
    assert "RestorePlan" not in kinds(driver.do(ev.TimePassed(), after_s=2.0)), "once"


def test_last_known_good_whose_lost_artifact_nobody_names_is_reported() -> None:
    driver = _good_lost(named=False)
    assert "FetchArtifact" not in kinds(driver.do(orders.RestoreFailed("missing or damaged artifacts")))
    assert "push a plan" in driver.core.report().reason
    assert driver.core.report().state is DeviceState.REJECTED


@pytest.mark.promise("late-answer-revive-superseded")
def test_a_rolled_back_device_never_reports_up_to_date() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    driver.to_probation()
    actions = driver.do(orders.PlanFailed((1, 1), "p99 is 30 % worse"))
    assert orders.RestorePlan(GOOD) in actions
    report = driver.core.report()
    assert report.state is DeviceState.ROLLED_BACK and report.active == GOOD.ref.digest != report.seen
    assert driver.do(ev.Received(desired(1))) == [], "the verdict is final for its generation"


def test_a_verdict_falls_with_the_environment_it_was_found_in() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1)))
    driver.do(orders.PlanFailed((1, 1), "illegal"))
    assert driver.do(ev.EnvironmentChanged("env")) == [] and driver.state is DeviceState.REJECTED
    assert "VerifyPlan" in kinds(driver.do(ev.EnvironmentChanged("other power mode")))


def test_a_power_mode_that_flips_tries_a_refused_plan_once_in_each_mode_until_it_is_pushed_again() -> None:
    driver = Driver().online()
    for generation in (1, 2):
        driver.do(ev.Received(desired(generation)))
        driver.do(orders.PlanFailed((1, generation), "illegal"))
        assert "VerifyPlan" in kinds(driver.do(ev.EnvironmentChanged("15 W")))
        assert orders.AbandonPlan((1, generation)) in driver.do(ev.EnvironmentChanged("env"))
        assert driver.disk.state is DeviceState.REJECTED, "it was on its way"
        assert "VerifyPlan" in kinds(driver.do(ev.EnvironmentChanged("15 W")))
        driver.do(orders.PlanFailed((1, generation), "illegal"))
        for mode in ("env", "15 W", "env"):
            assert "VerifyPlan" not in kinds(driver.do(ev.EnvironmentChanged(mode)))
            assert (driver.state, driver.disk.environment) == (DeviceState.REJECTED, mode)


AFTER_A_KILL = [
    (DeviceState.RECEIVED, 0, DeviceState.RECEIVED),
    (DeviceState.WAITING, 0, DeviceState.RECEIVED),
    (DeviceState.VERIFIED, 0, DeviceState.RECEIVED),
    (DeviceState.STAGED, 0, DeviceState.RECEIVED),
    (DeviceState.TRIAL, 0, DeviceState.REJECTED),
    (DeviceState.PROBATION, 0, DeviceState.RECEIVED),
    (DeviceState.PROBATION, 1, DeviceState.ROLLED_BACK),
    (DeviceState.COMMITTED, 0, DeviceState.COMMITTED),
    (DeviceState.REJECTED, 0, DeviceState.REJECTED),
    (DeviceState.NO_GAIN, 0, DeviceState.NO_GAIN),
    (DeviceState.ROLLED_BACK, 0, DeviceState.ROLLED_BACK),
]
"""Per state found at boot, with the boots under probation so far: the state that it becomes."""


@pytest.mark.promise("late-answer-revive-superseded")
@pytest.mark.parametrize(("found", "boots", "then"), AFTER_A_KILL)
def test_every_state_survives_a_kill(found: DeviceState, boots: int, then: DeviceState) -> None:
    state = LinkState(
        desired=desired(3), state=found, last_good=GOOD, probation_boots=boots, environment="env"
    )
    driver = Driver(decode_state(encode_state(state)))
    assert driver.booted[0] == orders.RestorePlan(GOOD), "it serves before anything else"
    assert driver.state is then
    assert driver.core.report().active == GOOD.ref.digest


@pytest.mark.promise("full-disk-boot-postpones")
@pytest.mark.parametrize(("found", "boots", "then"), AFTER_A_KILL)
def test_a_full_disk_at_boot_only_postpones_what_the_state_means(
    found: DeviceState, boots: int, then: DeviceState
) -> None:
    state = LinkState(
        desired=desired(3), state=found, last_good=GOOD, probation_boots=boots, environment="env"
    )
    driver = Driver(state, boot=False)
    driver.full = True
    booted = [action for action in driver.boot() if not isinstance(action, ev.Hold)]
    assert booted == [orders.RestorePlan(GOOD)], "it serves, and decides nothing that it cannot write down"
    assert driver.state is found
    assert driver.do(ev.TimePassed(), after_s=1.0) == [], "not again at once"
    driver.full = False
    driver.do(ev.TimePassed(), after_s=6.0)
    assert driver.state is then
    once = found is DeviceState.PROBATION and not boots
    assert driver.disk.probation_boots == (1 if once else boots), "a second stop would be the last"


def test_a_plan_that_is_committed_and_runs_is_not_swapped_for_itself() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    actions = driver.do(ev.Received(desired(7, b"good")))
    assert driver.state is DeviceState.COMMITTED and "VerifyPlan" not in kinds(actions)


def test_a_full_disk_changes_nothing_and_the_next_offer_is_taken() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    before = driver.core.state
    driver.full = True
    assert "VerifyPlan" not in kinds(driver.do(ev.Received(desired(1))))
    assert driver.core.state == before and driver.core.disk.error == "disk full"
    driver.full = False
    driver.do(ev.Received(desired(1)))
    assert driver.core.state == before, "not again at once"
    driver.now_s += 6
    assert "VerifyPlan" in kinds(driver.do(ev.Received(desired(1))))
    assert driver.core.disk.error is None


@pytest.mark.promise("late-answer-revive-superseded")
def test_a_plan_is_never_activated_if_its_record_cannot_be_written() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1)))
    driver.do(orders.PlanVerified((1, 1)))
    driver.full = True
    assert "ActivatePlan" not in kinds(driver.do(ev.PlanStaged((1, 1))))
    assert driver.stored() is DeviceState.RECEIVED and driver.state is DeviceState.STAGED
    driver.full = False
    actions = kinds(driver.do(ev.TimePassed(), after_s=6.0))
    assert actions.index("Persist") < actions.index("ActivatePlan"), "tried again"


@pytest.mark.promise("steps-start-would-undo")
def test_steps_that_a_start_would_undo_are_believed_and_reported_but_not_written() -> None:
    driver = Driver().online()
    assert kinds(driver.do(ev.Received(desired(1)))).count("Persist") == 1
    assert "Persist" not in kinds(driver.do(orders.PlanVerified((1, 1))))
    assert driver.core.report().state is DeviceState.VERIFIED
    assert driver.stored() is DeviceState.RECEIVED
    actions = driver.do(ev.PlanStaged((1, 1)))
    assert kinds(actions).count("Persist") == 1 and driver.stored() is DeviceState.PROBATION


@pytest.mark.promise("steps-start-would-undo")
def test_what_is_reported_counts_on_over_a_start_that_undoes_steps() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1, artifacts=(NEED,))))
    reported = 0
    for number in range(200):
        driver.do(ev.FetchFailed(NEED.digest, f"reason {number}"))
        reported = driver.core.report().revision
        again = Driver(driver.disk)
        assert again.core.report().revision > reported
        third = Driver(again.disk)
        assert third.core.report().revision > again.core.report().revision
    assert reported >= 200


def test_a_write_that_fails_after_a_step_that_is_not_written_leaves_what_was_reported() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1)))
    driver.do(orders.PlanVerified((1, 1)))
    before = driver.core.report()
    driver.full = True
    driver.do(orders.ActiveChanged(GOOD.ref))
    told = driver.core.report()
    unsaid = structs.replace(told, reason=before.reason, revision=before.revision)
    assert unsaid == before and "disk full" in told.reason


@pytest.mark.promise("disk-artifact-fit-fills")
def test_the_planner_is_told_once_why_a_staged_plan_waits_for_a_full_disk() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1)))
    driver.do(orders.PlanVerified((1, 1)))
    driver.full = True
    told = [
        one.message.report.reason
        for _ in range(200)
        for event in (
            ev.Received(control.HeartbeatAck(epoch=1, generation=1, revision=0)),
            ev.PlanStaged((1, 1)),
        )
        for one in driver.do(event, after_s=3.0)
        if isinstance(one, ev.SendMessage) and isinstance(one.message, control.Reported)
    ]
    assert "disk full" in told[-1]
    assert driver.core.report().revision < HELD_MOST, "nothing is told anew at each try"
    driver.full = False
    driver.do(ev.TimePassed(), after_s=6.0)
    assert driver.state is DeviceState.PROBATION and not driver.core.report().reason


def test_an_abandoned_trial_is_written_although_its_plan_is_only_verified_then() -> None:
    """On disk stands that a trial runs: a start would reject the plan for it."""
    driver = Driver(LinkState(last_good=GOOD)).online()
    driver.do(ev.Received(desired(1)))
    driver.do(orders.PlanVerified((1, 1)))
    driver.do(ev.PlanStaged((1, 1), control=GOOD.ref.digest))
    record = TrialRecord(
        candidate=digest_bytes([b"plan"]), control=GOOD.ref.digest, environment="env", began_us=1
    )
    driver.do(orders.TrialBegins((1, 1), record))
    assert driver.stored() is DeviceState.TRIAL
    ended = TrialResult(verdict=Verdict.ABANDONED, reason="the engine crashed")
    driver.do(orders.TrialDecided((1, 1), GOOD.ref.digest, ended))
    assert driver.stored() is DeviceState.VERIFIED


def test_a_fallback_during_a_full_disk_is_reported_once_the_disk_is_back() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    driver.full = True
    driver.do(orders.ActiveChanged(None))
    driver.full = False
    driver.do(ev.TimePassed(), after_s=6.0)
    assert driver.core.report().active is None


def test_a_restarted_manager_is_asked_again() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1)))
    assert "VerifyPlan" not in kinds(driver.do(ev.TimePassed()))
    assert "VerifyPlan" in kinds(driver.do(orders.ManagerRestarted()))


def test_a_report_is_repeated_until_the_planner_has_it() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1)))
    revision = driver.core.report().revision

    def reports(actions: list[ev.Action]) -> int:
        return sum(
            isinstance(one, ev.SendMessage) and isinstance(one.message, control.Reported) for one in actions
        )

    assert sum(reports(driver.do(ev.TimePassed(), after_s=0.5)) for _ in range(8)) == 4
    driver.do(ev.Received(control.ReportedAck(revision=revision)))
    assert sum(reports(driver.do(ev.TimePassed(), after_s=0.5)) for _ in range(4)) == 0


def test_a_silent_planner_is_left() -> None:
    driver = Driver().online()
    assert "Reconnect" not in kinds(driver.do(ev.TimePassed(), after_s=3.9))
    assert "Reconnect" in kinds(driver.do(ev.TimePassed(), after_s=0.2))


@pytest.mark.parametrize("code", [RefusalCode.REVOKED, RefusalCode.QUARANTINED])
def test_a_refused_device_serves_on_and_asks_seldom(code: RefusalCode) -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    (action,) = driver.do(ev.Received(Refused(code=code, reason="no")))
    assert isinstance(action, ev.Reconnect) and action.delay_s == 60.0
    assert driver.core.session.denied is not None and driver.core.report().active == GOOD.ref.digest


def test_a_profile_is_run_once_its_artifact_is_there_and_not_again_when_answered() -> None:
    request = control.ProfileRequest(3, NEED)
    driver = Driver().online()
    wanted = desired(1, profiles=(request,))
    assert ev.FetchArtifact(NEED) in driver.do(ev.Received(wanted))
    assert ev.RunProfile(request) in driver.do(ev.ArtifactPresent(NEED.digest))
    driver.do(ev.ProfileAnswered(3))
    again = Driver(driver.disk)
    again.core.handle(ev.ArtifactPresent(NEED.digest), 0.0)
    assert not any(isinstance(one, ev.RunProfile) for one in again.do(ev.TimePassed()))
    driver.do(ev.Received(desired(2)))
    assert driver.core.state.answered == (), "forgotten with the request"


@pytest.mark.parametrize(
    ("epoch", "generations", "answered_in"),
    [(1, (2, 3), 1), (2, (2, 3), 2), (2, (3,), 1)],
    ids=["later", "answered meanwhile", "at once"],
)
def test_another_request_with_a_number_that_was_answered_is_measured(
    epoch: int, generations: tuple[int, ...], answered_in: int
) -> None:
    """A planner's database was restored, and the number was given again."""
    driver, another = Driver().online(), control.ProfileRequest(3, NEED, batch=2)
    driver.do(ev.ArtifactPresent(NEED.digest))
    asked = {1: (control.ProfileRequest(3, NEED),), generations[-1]: (another,)}
    for generation in (1, *generations):
        value = desired(generation, epoch=epoch if generation > 1 else 1, profiles=asked.get(generation, ()))
        actions = driver.do(ev.Received(value))
        if generation == answered_in:
            driver.do(ev.ProfileAnswered(3))
    assert ev.RunProfile(another) in actions

"""Plans made on the device, in its link core: when they are tried, what they leave, how they are adopted."""

from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs

from stageloom.edge_agent.lifecycle import attempts, local
from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.attempts import Way
from stageloom.edge_agent.lifecycle.statefile import decode_state, encode_state
from stageloom.edge_agent.lifecycle.states import (
    LOCAL_EPOCH,
    NEVER,
    TRANSITIONS,
    AttemptId,
    LinkState,
    PlanAttempt,
    Planned,
    PlanRef,
    Proven,
    RunnablePlan,
    TransitionCause,
)
from stageloom.shared.digest import digest_bytes
from stageloom.shared.engine.trial import TrialRecord, TrialResult, Verdict
from stageloom.shared.messages import control
from stageloom.shared.messages.control import ArtifactNeed, Autonomy, DeviceState, Origin
from stageloom.shared.messages.telemetry import TrialEnded
from tests.lifecycle import orders
from tests.lifecycle.driver import GOOD, Driver, desired, kinds
from tests.lifecycle.test_alarms import raised

LOCAL = RunnablePlan(PlanRef(digest_bytes([b"local"]), Origin.LOCAL), b"local", ())
OTHER = RunnablePlan(PlanRef(digest_bytes([b"other"]), Origin.LOCAL), b"other", ())
FIRST = (LOCAL_EPOCH, 1)
CONTROL = digest_bytes([b"plan"])


def committed(autonomy: Autonomy = Autonomy.FULL, **fields: Any) -> Driver:
    """A device that runs generation 1 and is connected."""
    driver = Driver().online()
    driver.do(ev.Received(desired(1, autonomy=autonomy, **fields)))
    driver.do(orders.PlanVerified((1, 1)))
    driver.do(ev.PlanStaged((1, 1)))
    driver.do(orders.ProbationPassed((1, 1)))
    assert driver.state is DeviceState.COMMITTED
    return driver


def away(autonomy: Autonomy = Autonomy.FULL) -> Driver:
    driver = committed(autonomy)
    driver.do(ev.Lost())
    return driver


def staged(attempt: AttemptId = FIRST, **fields: Any) -> ev.PlanStaged:
    given: dict[str, Any] = {"control": CONTROL, "intervals_only": True}
    return ev.PlanStaged(attempt, **(given | fields))


def alarmed(driver: Driver, *plans: RunnablePlan, after_s: float = 0.0) -> list[ev.Action]:
    """A trigger fires, and these plans answer it."""
    return driver.do(raised(), after_s=after_s) + driver.do(ev.PlansMade(plans), after_s=0.0)


def on_probation(driver: Driver, plan: RunnablePlan = LOCAL) -> list[ev.Action]:
    alarmed(driver, plan)
    attempt = (LOCAL_EPOCH, driver.core.state.local_counter)
    driver.do(orders.PlanVerified(attempt))
    return driver.do(staged(attempt))


def rows(actions: list[ev.Action]) -> list[TrialEnded]:
    return [action for action in actions if isinstance(action, TrialEnded)]


def told(actions: list[ev.Action]) -> list[control.LocalPlan]:
    return [
        a.message
        for a in actions
        if isinstance(a, ev.SendMessage) and isinstance(a.message, control.LocalPlan)
    ]


def connected_for(driver: Driver, seconds: float) -> list[ev.Action]:
    """Time passes while the planner answers heartbeats and nothing else."""
    actions: list[ev.Action] = []
    while seconds > 0:
        step_s = min(seconds, 1.0)
        seconds -= step_s
        actions += driver.do(ev.TimePassed(), after_s=step_s)
        revision = driver.core.state.revision
        actions += driver.do(ev.Received(control.HeartbeatAck(epoch=1, generation=1, revision=revision)))
    return actions


def test_a_plan_that_an_agent_without_a_planner_measured_takes_over_under_the_guard() -> None:
    driver = Driver(LinkState(last_good=GOOD))
    assert driver.core.state.desired is None
    assert "VerifyPlan" in kinds(driver.do(ev.PlanMeasured(LOCAL, "measured")))
    driver.do(orders.PlanVerified(FIRST))
    actions = driver.do(staged(intervals_only=False))
    (activate,) = [action for action in actions if isinstance(action, orders.ActivatePlan)]
    assert activate.guarded
    driver.do(orders.ProbationPassed(FIRST))
    assert driver.core.state.last_good == structs.replace(
        LOCAL, ref=PlanRef(LOCAL.ref.digest, Origin.LOCAL, 1)
    )


def test_a_local_plan_goes_from_the_alarm_to_last_known_good_while_the_planner_is_away() -> None:
    driver = away()
    assert "VerifyPlan" in kinds(alarmed(driver, LOCAL))
    assert "StagePlan" in kinds(driver.do(orders.PlanVerified(FIRST)))
    actions = driver.do(staged())
    assert kinds(actions).index("Persist") < kinds(actions).index("ActivatePlan"), "the record comes first"
    activate = next(action for action in actions if isinstance(action, orders.ActivatePlan))
    assert activate.guarded and activate.attempt == FIRST
    report = driver.core.report()
    assert (report.active, report.origin, report.local_counter) == (LOCAL.ref.digest, Origin.LOCAL, 1)
    assert report.state is DeviceState.COMMITTED and report.seen == CONTROL, "desired stays what it was"
    (row,) = rows(driver.do(orders.ProbationPassed(FIRST)))
    assert (row.origin, row.how, row.verdict, row.candidate, row.control) == (
        Origin.LOCAL,
        "guard",
        "commit",
        LOCAL.ref.digest,
        CONTROL,
    )
    assert (row.epoch, row.generation) == (1, 1)
    good = driver.disk.last_good
    assert good is not None and good.ref == PlanRef(LOCAL.ref.digest, Origin.LOCAL, 1)


@pytest.mark.parametrize(
    ("autonomy", "proven", "runs"),
    [
        (Autonomy.OFF, False, False),
        (Autonomy.OFF, True, False),
        (Autonomy.PROVEN, False, False),
        (Autonomy.PROVEN, True, True),
        (Autonomy.FULL, False, True),
    ],
)
def test_autonomy_bounds_what_runs_without_the_planner(autonomy: Autonomy, proven: bool, runs: bool) -> None:
    driver = away(autonomy)
    if proven:
        state = driver.disk
        known = (*state.proven, Proven(LOCAL.ref.digest, state.environment))
        driver.core.state = structs.replace(state, proven=known)
    assert ("VerifyPlan" in kinds(alarmed(driver, LOCAL))) is runs


def test_a_connected_planner_is_given_time_to_answer() -> None:
    driver = committed()
    assert "VerifyPlan" not in kinds(alarmed(driver, LOCAL))
    assert "VerifyPlan" not in kinds(connected_for(driver, 4.5))
    assert "VerifyPlan" in kinds(connected_for(driver, 0.6))


def test_a_newer_desired_value_is_the_planners_answer_and_no_local_plan_follows() -> None:
    driver = committed()
    alarmed(driver, LOCAL)
    driver.do(ev.Received(desired(2, b"answer", autonomy=Autonomy.FULL)), after_s=1.0)
    driver.do(orders.PlanVerified((1, 2)))
    driver.do(ev.PlanStaged((1, 2)))
    driver.do(orders.ProbationPassed((1, 2)))
    connected_for(driver, 60.0)
    assert driver.core.state.local is None and driver.core.state.local_counter == 0


def test_a_planner_that_goes_away_before_it_answers_is_not_waited_for() -> None:
    driver = committed()
    alarmed(driver, LOCAL)
    assert "VerifyPlan" in kinds(driver.do(ev.Lost(), after_s=1.0))


def test_a_plan_that_nothing_compares_with_or_that_would_starve_a_model_is_not_run_here() -> None:
    for answer in (staged(control=None), staged(starves="too slow")):
        driver = away()
        alarmed(driver, LOCAL)
        driver.do(orders.PlanVerified(FIRST))
        actions = driver.do(answer)
        assert "ActivatePlan" not in kinds(actions)
        assert orders.AbandonPlan(FIRST) in actions, "it is unloaded"
        assert driver.core.state.local is None and driver.core.report().origin is Origin.PLANNER


def test_a_plan_whose_artifacts_are_not_here_is_not_tried() -> None:
    needy = structs.replace(LOCAL, artifacts=(ArtifactNeed("m", digest_bytes([b"absent"]), 8),))
    assert "VerifyPlan" not in kinds(alarmed(away(), needy))


def test_a_failed_local_plan_gives_way_to_what_ran_and_is_not_tried_again_in_this_environment() -> None:
    driver = away()
    on_probation(driver)
    actions = driver.do(orders.PlanFailed(FIRST, "the oldest task's age rose"))
    assert "RestorePlan" in kinds(actions)
    (row,) = rows(actions)
    assert (row.verdict, row.origin) == ("reject", Origin.LOCAL)
    report = driver.core.report()
    assert (report.active, report.origin, report.state) == (CONTROL, Origin.PLANNER, DeviceState.COMMITTED)
    assert "VerifyPlan" not in kinds(alarmed(driver, LOCAL, after_s=60.0))
    assert "VerifyPlan" in kinds(alarmed(driver, OTHER, after_s=60.0))
    driver.do(orders.PlanFailed((LOCAL_EPOCH, 2), "it does not load"))
    driver.do(ev.EnvironmentChanged("another power mode"))
    assert "VerifyPlan" in kinds(alarmed(driver, LOCAL))


def test_a_late_answer_of_an_earlier_local_attempt_changes_nothing() -> None:
    driver = away()
    on_probation(driver)
    driver.do(orders.PlanFailed(FIRST, "worse"))
    alarmed(driver, OTHER)
    before = driver.core.state
    for late in (
        orders.ProbationPassed(FIRST),
        orders.PlanVerified(FIRST),
        staged(),
        orders.PlanFailed(FIRST, ""),
    ):
        assert rows(driver.do(late)) == []
    assert driver.core.state == before


def test_a_kill_at_any_point_of_a_local_attempt_leaves_last_known_good() -> None:
    steps: list[Any] = [raised(), ev.PlansMade((LOCAL,)), orders.PlanVerified(FIRST), staged()]
    for count in range(1, len(steps) + 1):
        driver = away()
        for event in steps[:count]:
            driver.do(event)
        disk = decode_state(encode_state(driver.disk))
        revived = Driver(disk)
        restored = next(a for a in revived.booted if isinstance(a, orders.RestorePlan))
        assert restored.plan.ref.digest == CONTROL
        report = revived.core.report()
        assert (report.active, report.origin) == (CONTROL, Origin.PLANNER)
        assert report.state is DeviceState.COMMITTED and report.revision >= driver.disk.revision
        ran = count == len(steps)
        assert [row.verdict for row in rows(revived.booted)] == ["reject"] * ran
        assert ("VerifyPlan" in kinds(alarmed(revived, LOCAL))) is not ran
        assert revived.core.state.local_counter >= 1, "counters never fall"


def test_a_committed_local_plan_survives_a_restart_and_is_told_again() -> None:
    driver = away()
    on_probation(driver)
    driver.do(orders.ProbationPassed(FIRST))
    revived = Driver(decode_state(encode_state(driver.disk)))
    assert revived.core.report().origin is Origin.LOCAL
    revived.do(ev.Connected())
    welcome = control.Welcome(device="d", epoch=1, heartbeat_interval_s=1.0, bulk_credits=4)  # type: ignore[arg-type]
    (message,) = told(revived.do(ev.Received(welcome)))
    assert (message.epoch, message.generation, message.local_counter) == (1, 1, 1)
    assert (message.plan_digest, message.plan, message.cause) == (LOCAL.ref.digest, b"local", "variance")


def test_the_planner_is_told_after_every_hello_and_ever_more_rarely_while_it_is_silent() -> None:
    driver = committed()
    on_probation_connected(driver)
    assert told(connected_for(driver, 2.0)) == [], "not before it has passed"
    assert len(told(driver.do(orders.ProbationPassed(FIRST)))) == 1
    heard = [at for at in range(200) if told(connected_for(driver, 1.0))]
    gaps = [after - before for before, after in pairwise(heard)]
    assert 3 <= len(heard) <= 8 and gaps == sorted(gaps) and max(gaps) <= 61
    driver.do(ev.Lost())
    driver.do(ev.Connected())
    welcome = control.Welcome(device="d", epoch=1, heartbeat_interval_s=1.0, bulk_credits=4)  # type: ignore[arg-type]
    assert len(told(driver.do(ev.Received(welcome)))) == 1


@pytest.mark.promise("desired-changed-twice-while")
def test_a_desired_value_that_names_the_local_plan_adopts_it_without_a_swap() -> None:
    driver = committed()
    on_probation_connected(driver)
    driver.do(orders.ProbationPassed(FIRST))
    actions = driver.do(ev.Received(desired(2, b"local", autonomy=Autonomy.FULL)))
    assert driver.state is DeviceState.COMMITTED
    assert not {"VerifyPlan", "StagePlan", "ActivatePlan"} & set(kinds(actions))
    report = driver.core.report()
    assert (report.generation, report.active, report.origin) == (2, LOCAL.ref.digest, Origin.PLANNER)
    assert told(connected_for(driver, 10.0)) == [], "nothing is left to tell"


def on_probation_connected(driver: Driver) -> None:
    alarmed(driver, LOCAL)
    connected_for(driver, 5.1)
    driver.do(orders.PlanVerified(FIRST))
    driver.do(staged())


@pytest.mark.promise("desired-changed-twice-while")
def test_a_newer_desired_plan_is_tried_against_the_local_one_which_is_told_no_more() -> None:
    driver = committed()
    on_probation_connected(driver)
    driver.do(orders.ProbationPassed(FIRST))
    driver.do(ev.Received(desired(2, b"newer", autonomy=Autonomy.FULL)))
    driver.do(orders.PlanVerified((1, 2)))
    driver.do(ev.PlanStaged((1, 2), control=LOCAL.ref.digest))
    assert told(connected_for(driver, 10.0)) == []
    driver.do(orders.PlanFailed((1, 2), "it does not load"))
    assert driver.core.report().origin is Origin.LOCAL
    driver.do(ev.Lost())
    assert Driver(driver.disk).core.report().active == LOCAL.ref.digest


def test_a_desired_value_ends_a_local_attempt_and_what_runs_runs_on() -> None:
    driver = committed()
    on_probation_connected(driver)
    actions = driver.do(ev.Received(desired(2, b"newer", autonomy=Autonomy.FULL)))
    assert orders.AbandonPlan(FIRST) in actions
    assert driver.core.state.local is None and driver.core.report().active == LOCAL.ref.digest
    assert rows(driver.do(orders.ProbationPassed(FIRST))) == [], "its late end says nothing"
    assert driver.disk.last_good is not None and driver.disk.last_good.ref.digest == CONTROL


def test_a_local_plan_that_runs_on_after_a_desired_value_ended_its_probation_is_told_once_a_session() -> None:
    """Alarms name it, and the planner has it from nowhere else. It lasts until another plan runs."""
    driver = committed()
    on_probation_connected(driver)
    (message,) = told(driver.do(ev.Received(desired(2, b"newer", autonomy=Autonomy.FULL))))
    assert (message.epoch, message.generation, message.local_counter) == (1, 1, 1)
    assert (message.plan_digest, message.plan) == (LOCAL.ref.digest, b"local")
    assert told(connected_for(driver, 100.0)) == []
    driver.do(ev.Lost())
    assert len(told(welcomed(driver))) == 1
    driver.do(orders.PlanVerified((1, 2)))
    driver.do(ev.PlanStaged((1, 2), control=None))
    driver.do(orders.ProbationPassed((1, 2)))
    driver.do(ev.Lost())
    assert told(welcomed(driver)) == []


@pytest.mark.parametrize("verdict", [Verdict.COMMIT, Verdict.NO_GAIN, Verdict.REJECT])
def test_a_local_plan_whose_probation_another_environment_ended_is_told_once_the_desired_one_has_lost_to_it(
    verdict: Verdict,
) -> None:
    """Told before, it would be adopted, and end that trial."""
    driver = committed()
    driver.do(ev.Received(desired(2, b"newer", autonomy=Autonomy.FULL)))
    driver.do(orders.PlanFailed((1, 2), "it does not load"))
    on_probation_connected(driver)
    actions = driver.do(ev.EnvironmentChanged("env at 15 W"))
    assert orders.AbandonPlan(FIRST) in actions and driver.core.report().active == LOCAL.ref.digest
    actions += driver.do(orders.PlanVerified((1, 2)))
    actions += driver.do(ev.PlanStaged((1, 2), control=LOCAL.ref.digest))
    record = TrialRecord(
        candidate=digest_bytes([b"newer"]), control=LOCAL.ref.digest, environment="env at 15 W", began_us=5
    )
    actions += driver.do(orders.TrialBegins((1, 2), record))
    assert told(actions + connected_for(driver, 10.0)) == []
    result = TrialResult(verdict=verdict, reason="as measured", pairs=9)
    actions = driver.do(orders.TrialDecided((1, 2), LOCAL.ref.digest, result)) + connected_for(driver, 10.0)
    messages = [(one.plan_digest, one.epoch, one.generation) for one in told(actions)]
    assert messages == ([] if verdict is Verdict.COMMIT else [(LOCAL.ref.digest, 1, 2)])


def test_a_local_plan_whose_probation_failed_or_that_never_ran_is_not_told() -> None:
    for ran in (True, False):
        driver = committed()
        if ran:
            on_probation_connected(driver)
            driver.do(orders.PlanFailed(FIRST, "worse"))
        else:
            alarmed(driver, LOCAL)
            connected_for(driver, 5.1)
        actions = driver.do(ev.Received(desired(2, b"newer", autonomy=Autonomy.FULL)))
        assert told(actions + connected_for(driver, 10.0)) == []


def welcomed(driver: Driver) -> list[ev.Action]:
    """The planner is back."""
    driver.do(ev.Connected())
    welcome = control.Welcome(device="d", epoch=1, heartbeat_interval_s=1.0, bulk_credits=4)  # type: ignore[arg-type]
    return driver.do(ev.Received(welcome))


def test_a_local_last_known_good_that_crashes_gives_way_to_the_desired_plan_which_stays_committed() -> None:
    driver = away()
    on_probation(driver)
    driver.do(orders.ProbationPassed(FIRST))
    actions = driver.do(orders.RestoreFailed("the engine crashed 3 times under it"))
    (restored,) = [action for action in actions if isinstance(action, orders.RestorePlan)]
    assert restored.plan.ref.digest == CONTROL
    assert driver.state is DeviceState.COMMITTED
    assert "VerifyPlan" not in kinds(alarmed(driver, LOCAL))


def test_nothing_is_tried_beside_an_attempt_at_the_desired_plan() -> None:
    driver = committed()
    driver.do(ev.Received(desired(2, b"other", autonomy=Autonomy.FULL)))
    driver.do(ev.Lost())
    alarmed(driver, LOCAL)
    assert driver.core.state.local is None
    driver.do(orders.PlanVerified((1, 2)))
    assert "VerifyPlan" in kinds(driver.do(orders.PlanFailed((1, 2), "it does not load")))


def test_a_full_disk_holds_a_local_attempt_up_and_it_goes_on_later() -> None:
    driver = away()
    driver.full = True
    assert "ActivatePlan" not in kinds(alarmed(driver, LOCAL))
    driver.full = False
    alarmed(driver, LOCAL, after_s=6.0)
    assert "StagePlan" in kinds(driver.do(orders.PlanVerified((LOCAL_EPOCH, driver.disk.local_counter))))


def test_a_stage_profile_waits_for_its_artifacts_is_asked_once_and_not_again_when_answered() -> None:
    absent = ArtifactNeed("m", digest_bytes([b"absent"]), 8)
    wanted = control.StageProfileRequest(
        request=9, plan_digest=CONTROL, plan=b"plan", artifacts=(absent,), budget_s=5.0
    )
    driver = Driver().online()
    assert "FetchArtifact" in kinds(driver.do(ev.Received(desired(1, stage_profile=wanted))))
    assert ev.RunProfile(wanted) in driver.do(ev.ArtifactPresent(absent.digest))
    assert "RunProfile" not in kinds(driver.do(ev.TimePassed(), after_s=1.0))
    driver.do(ev.ProfileAnswered(9))
    revived = Driver(decode_state(encode_state(driver.disk)), boot=False)
    actions = revived.boot(frozenset({absent.digest}))
    assert "RunProfile" not in kinds(actions), "it was answered before the restart"
    driver.do(ev.Received(desired(2, stage_profile=wanted)))
    assert driver.core.state.answered == (9,), "a newer desired value that still names it"


def on_trial(driver: Driver) -> TrialRecord:
    """A plan of another structure, under the autonomy to try one, up to the moment before it runs."""
    alarmed(driver, LOCAL)
    driver.do(orders.PlanVerified(FIRST))
    actions = driver.do(staged(intervals_only=False))
    order = next(action for action in actions if isinstance(action, orders.RunTrial))
    assert (order.attempt, order.plan.ref.digest) == (FIRST, LOCAL.ref.digest)
    assert driver.core.report().active == CONTROL, "nothing runs but what ran"
    record = TrialRecord(candidate=LOCAL.ref.digest, control=CONTROL, environment="env", began_us=1)
    actions = driver.do(orders.TrialBegins(FIRST, record))
    assert kinds(actions).index("Persist") < kinds(actions).index("TrialRecorded"), "the record comes first"
    return record


def decided(verdict: Verdict) -> orders.TrialDecided:
    result = TrialResult(verdict=verdict, reason="measured", ratio=1.2, interval=(1.1, 1.3), pairs=9)
    return orders.TrialDecided(FIRST, CONTROL, result)


@pytest.mark.promise("local-plan-another-structure")
def test_a_local_plan_of_another_structure_wins_a_trial_before_it_is_last_known_good() -> None:
    driver = away()
    on_trial(driver)
    actions = driver.do(decided(Verdict.COMMIT))
    (row,) = rows(actions)
    assert (row.how, row.verdict, row.origin, row.ratio, row.pairs) == (
        "trial", "commit", Origin.LOCAL, 1.2, 9,
    )  # fmt: skip
    (activate,) = [action for action in actions if isinstance(action, orders.ActivatePlan)]
    assert not activate.guarded and driver.core.report().active == LOCAL.ref.digest
    assert driver.disk.last_good is not None and driver.disk.last_good.ref.digest == CONTROL
    assert rows(driver.do(orders.ProbationPassed(FIRST))) == [], "its verdict was told"
    good = driver.disk.last_good
    assert good is not None and good.ref.digest == LOCAL.ref.digest


@pytest.mark.promise("local-plan-another-structure")
@pytest.mark.parametrize("verdict", [Verdict.REJECT, Verdict.NO_GAIN, Verdict.REFUSED])
def test_a_local_plan_that_lost_its_trial_is_not_offered_again_in_this_environment(verdict: Verdict) -> None:
    driver = away()
    on_trial(driver)
    assert [row.verdict for row in rows(driver.do(decided(verdict)))] == [verdict.value]
    report = driver.core.report()
    assert (report.active, report.origin, report.state) == (CONTROL, Origin.PLANNER, DeviceState.COMMITTED)
    assert "VerifyPlan" not in kinds(alarmed(driver, LOCAL, after_s=3600.0))
    assert "VerifyPlan" in kinds(alarmed(driver, LOCAL, OTHER)), "the next best is"
    assert driver.core.state.local is not None and driver.core.state.local.plan.wire == OTHER.wire


@pytest.mark.promise("local-plan-another-structure")
def test_the_structure_that_lost_its_trial_is_not_offered_under_other_launch_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same = digest_bytes([b"structure"])
    monkeypatch.setattr(attempts, "structure_of", lambda plan: same)
    monkeypatch.setattr(local, "structure_of", lambda plan: same)
    driver = away()
    driver.core.state = structs.replace(driver.core.state, proven=())
    on_trial(driver)
    driver.do(decided(Verdict.NO_GAIN))
    assert "VerifyPlan" not in kinds(alarmed(driver, OTHER))


def test_a_local_trial_without_a_verdict_says_nothing_of_the_plan() -> None:
    driver = away()
    on_trial(driver)
    assert [row.verdict for row in rows(driver.do(decided(Verdict.ABANDONED)))] == ["abandoned"]
    assert driver.core.state.local is None
    assert "VerifyPlan" in kinds(alarmed(driver, LOCAL))


@pytest.mark.promise("local-plan-another-structure")
def test_a_kill_during_a_local_trial_rejects_the_plan_at_the_next_start() -> None:
    driver = away()
    on_trial(driver)
    revived = Driver(decode_state(encode_state(driver.disk)))
    assert [(row.verdict, row.how) for row in rows(revived.booted)] == [("reject", "trial")]
    assert revived.core.report().active == CONTROL
    assert "VerifyPlan" not in kinds(alarmed(revived, LOCAL))


def test_a_desired_value_or_another_environment_ends_a_local_trial_without_a_verdict() -> None:
    for event in (
        ev.Received(desired(2, b"newer", autonomy=Autonomy.FULL)),
        ev.EnvironmentChanged("another power mode"),
    ):
        driver = committed()
        alarmed(driver, LOCAL)
        connected_for(driver, 5.1)
        driver.do(orders.PlanVerified(FIRST))
        driver.do(staged(intervals_only=False))
        record = TrialRecord(candidate=LOCAL.ref.digest, control=CONTROL, environment="env", began_us=1)
        driver.do(orders.TrialBegins(FIRST, record))
        actions = driver.do(event)
        assert orders.AbandonPlan(FIRST) in actions and driver.core.state.local is None
        assert "abandoned" in [row.verdict for row in rows(actions)]
        assert rows(driver.do(decided(Verdict.COMMIT))) == [], "its late verdict says nothing"


def test_a_local_attempt_ends_where_another_environment_has_the_desired_plan_tried_again() -> None:
    """Two attempts at once would share the one candidate of the plan manager.

    1. The desired plan was rejected, and a plan made here is under probation.
    2. The power mode changes: the verdict falls, and the desired plan is verified again.
    3. The attempt at the local plan is over; what runs runs on.
    """
    driver = committed()
    driver.do(ev.Received(desired(2, b"worse", autonomy=Autonomy.FULL)))
    driver.do(orders.PlanFailed((1, 2), "illegal"))
    driver.do(ev.Lost())
    on_probation(driver)
    actions = driver.do(ev.EnvironmentChanged("another power mode"))
    assert kinds(actions).index("AbandonPlan") < kinds(actions).index("VerifyPlan")
    assert driver.core.state.local is None and driver.state is DeviceState.RECEIVED
    assert driver.core.report().active == LOCAL.ref.digest


@pytest.mark.promise("autonomy-proven-runs-unproven")
def test_under_proven_autonomy_the_first_proven_plan_is_taken_and_not_a_better_unproven_one() -> None:
    driver = away(Autonomy.PROVEN)
    state = driver.disk
    driver.core.state = structs.replace(
        state, proven=(*state.proven, Proven(OTHER.ref.digest, state.environment))
    )
    assert "VerifyPlan" in kinds(alarmed(driver, LOCAL, OTHER))
    assert driver.core.state.local is not None and driver.core.state.local.plan.wire == OTHER.wire


@pytest.mark.promise("autonomy-proven-runs-unproven")
def test_a_plan_that_was_proven_in_the_environment_before_is_not_run_under_proven_autonomy() -> None:
    """The power mode changes while the plan is checked, or loaded."""
    for prepared in ([], [orders.PlanVerified(FIRST)]):
        driver = away(Autonomy.PROVEN)
        state = driver.disk
        known = (*state.proven, Proven(LOCAL.ref.digest, state.environment))
        driver.core.state = structs.replace(state, proven=known)
        alarmed(driver, LOCAL)
        for event in prepared:
            driver.do(event)
        assert orders.AbandonPlan(FIRST) in driver.do(ev.EnvironmentChanged("another power mode"))
        late = driver.do(orders.PlanVerified(FIRST)) + driver.do(staged())
        assert driver.core.state.local is None and "ActivatePlan" not in kinds(late)


@pytest.mark.promise("autonomy-proven-runs-unproven")
def test_plans_that_come_after_the_planner_has_answered_are_not_tried() -> None:
    driver = committed()
    driver.do(raised())
    driver.do(ev.Received(desired(2, b"answer", autonomy=Autonomy.FULL)))
    driver.do(orders.PlanVerified((1, 2)))
    driver.do(ev.PlanStaged((1, 2)))
    driver.do(orders.ProbationPassed((1, 2)))
    driver.do(ev.PlansMade((LOCAL,)))
    connected_for(driver, 60.0)
    assert driver.core.state.local is None and driver.core.state.local_counter == 0


@pytest.mark.parametrize("won", [True, False])
def test_what_was_made_from_the_plan_that_ran_is_not_tried_after_another_has_won_its_trial(won: bool) -> None:
    """Known arrivals come back during a trial, the planner knows no plan for them, and the device is cut off:
    the plan before would take the place of the winner."""
    driver = committed()
    driver.do(ev.Received(desired(2, b"other", autonomy=Autonomy.FULL)))
    driver.do(orders.PlanVerified((1, 2)))
    driver.do(ev.PlanStaged((1, 2), CONTROL))
    record = TrialRecord(candidate=OTHER.ref.digest, control=CONTROL, environment="env", began_us=1)
    driver.do(orders.TrialBegins((1, 2), record, ""))
    assert driver.core.state.trial == record
    alarmed(driver, LOCAL)
    verdict = Verdict.COMMIT if won else Verdict.REJECT
    driver.do(orders.TrialDecided((1, 2), CONTROL, TrialResult(verdict=verdict, reason="")))
    if won:
        driver.do(orders.ProbationPassed((1, 2)))
    driver.do(ev.Lost())
    driver.do(ev.TimePassed(), after_s=60.0)
    assert driver.state is (DeviceState.COMMITTED if won else DeviceState.REJECTED)
    assert (driver.core.state.local is None) == won


def attempt_in(state: DeviceState, way: Way) -> tuple[Driver, PlanAttempt]:
    """A device on a plan of its own, with an attempt at another one that has come so far."""
    driver = away()
    on_probation(driver)
    driver.do(orders.ProbationPassed(FIRST))
    record = TrialRecord(candidate=OTHER.ref.digest, control=LOCAL.ref.digest, environment="env", began_us=1)
    plan = structs.replace(OTHER, ref=structs.replace(OTHER.ref, local_counter=1))
    planned = Planned(epoch=1, generation=1, cause="age")
    tried = PlanAttempt(plan=plan, planned=planned, state=state, record=record, way=way.value)
    driver.core.state = structs.replace(driver.core.state, local=tried)
    return driver, tried


def after(cause: TransitionCause, driver: Driver, attempt: PlanAttempt) -> LinkState:
    """The state once the cause has come to the attempt."""
    core, before = driver.core, driver.core.state
    assert attempt.record is not None
    verdicts = {verdict_cause: verdict for verdict, verdict_cause in attempts.VERDICT_CAUSES.items()}
    ran = attempt.state is DeviceState.PROBATION
    match cause:
        case TransitionCause.VERIFIED:
            core.verified(FIRST)
        case TransitionCause.REFUSED | TransitionCause.PROBATION_FAILED:
            # A plan that fails is refused before it runs, and failed its probation from then on.
            if ran == (cause is TransitionCause.PROBATION_FAILED):
                core.failed(FIRST, "it fails")
        case TransitionCause.STAGED:
            core.staged(staged())
        case TransitionCause.NOT_NOW | TransitionCause.ACTIVATE:
            if attempt.state is DeviceState.STAGED:
                core.staged(staged(control=None if cause is TransitionCause.NOT_NOW else CONTROL))
                core.next(0.0)
        case TransitionCause.TRIAL_BEGINS:
            core.trial_begins(FIRST, attempt.record, "")
        case (
            TransitionCause.TRIAL_WON
            | TransitionCause.TRIAL_LOST
            | TransitionCause.TRIAL_EVEN
            | TransitionCause.TRIAL_ABANDONED
        ):
            core.trial_decided(*decided(verdicts[cause]))
        case TransitionCause.PROBATION_PASSED:
            core.passed(FIRST)
        case TransitionCause.DESIRED:
            return attempts.superseded(before, 1)[0]
        case TransitionCause.ENVIRONMENT:
            return attempts.environment_changed(before, "another power mode", 1)[0]
        case TransitionCause.BOOT:
            return attempts.at_boot(before, 1)[0]
        case TransitionCause.RESTORE_FAILED:
            core.restore_failed("it does not load")
        case _:
            raise AssertionError(f"{cause} does not come to a local attempt")
    return core.state


_LOCAL_STEPS = {step: after for step, (_, after) in TRANSITIONS.items() if after is not NEVER}


@pytest.mark.promise("step-local-attempt-published")
@pytest.mark.parametrize("cause", sorted({cause for _, cause in _LOCAL_STEPS}))
@pytest.mark.parametrize("state", sorted({state for state, _ in _LOCAL_STEPS if state is not None}))
def test_a_local_attempt_takes_the_published_steps_and_no_other(
    state: DeviceState, cause: TransitionCause
) -> None:
    """What comes late, in a state that it is not meant for, changes nothing."""
    guarded = cause is TransitionCause.ACTIVATE or (state, cause) == (
        DeviceState.PROBATION,
        TransitionCause.ENVIRONMENT,
    )
    way = Way.GUARD if guarded else Way.TRIAL
    driver, attempt = attempt_in(state, way)
    if (state, cause) == (DeviceState.STAGED, TransitionCause.TRIAL_WON):
        with pytest.raises(RuntimeError, match="no step of a plan made here from staged by trial_won"):
            after(cause, driver, attempt)
        return
    expected = _LOCAL_STEPS.get((state, cause), state)
    found = after(cause, driver, attempt).local
    assert (found.state if found is not None else None) == expected

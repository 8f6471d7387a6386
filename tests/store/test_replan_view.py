"""What a re-plan reads of its device, and what of that a policy sees."""

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from stageloom.planner.costs.measured import STALE_S
from stageloom.planner.dispatch.ports import ReportRecord, TelemetryWrite
from stageloom.planner.replan.observing import BARRED_S, observe, without_costs
from stageloom.planner.replan.policy import ReplanSettings
from stageloom.planner.replan.regimes import RegimeRate
from stageloom.planner.schema.replan import Proposer, RegimeLoad
from stageloom.planner.store.database import now_us
from stageloom.planner.store.desired import Push, desired, newest_desired, push
from stageloom.planner.store.expected import MOST, expected_regimes, keep_expected
from stageloom.planner.store.generations import ENDS, set_states
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan, plan_info, plan_wires
from stageloom.planner.store.profiles import request_profile
from stageloom.planner.store.regime_view import regime_infos
from stageloom.planner.store.regimes import known_regimes
from stageloom.planner.store.replan_pushes import awaits_trial, is_trying, push_replan, tries_anothers
from stageloom.planner.store.replan_settings import set_replan_settings
from stageloom.planner.store.replans import end_overdue, replan_infos, unfinished_replans
from stageloom.planner.store.retention import Retention, tidy
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import GenerationRow, ReplanRow
from stageloom.planner.store.trials import committed_plans, newest_trials, trial_infos
from stageloom.shared.clock import ManualClock
from stageloom.shared.engine.trial import NO_LOAD, UNDECIDED
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import (
    Alarm,
    DeviceState,
    LocalPlan,
    ModelLoad,
    Origin,
    Report,
    UsualLoad,
)
from stageloom.shared.messages.telemetry import (
    CoreRange,
    ExecutorFact,
    MachineFacts,
    OperatorTiming,
    ProfileResult,
    RowData,
    TrialEnded,
)
from stageloom.shared.plan import Plan
from tests.store.helpers import NANO, T0_US, add_model, enrol, row, small_plan

CLASS = "cpu-2-core"
YEAR_S = 365 * 86_400


def alarm(number: int, plan: Plan | None, arrivals_per_s: float = 10.0, usual_per_s: float = 0.0) -> Alarm:
    load = ModelLoad("relu", arrivals_per_s, 1000.0, 3, 20_000)
    return Alarm(
        boot=7,
        number=number,
        at_us=T0_US,
        cause="variance",
        value=2.0,
        threshold=1.0,
        plan=plan.digest if plan is not None else None,
        loads=(load,),
        samples=(),
        usual=(UsualLoad(usual_per_s, 0),),
    )


def paced(plan: Plan, interval_us: int) -> Plan:
    models = tuple(replace(one, launch_interval_us=interval_us) for one in plan.models)
    return replace(plan, models=models)


class Rig:
    """A device that runs a plan, and trials of other plans there."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        enrol(store)
        self.artifact = add_model(store, folder)
        self.runs = small_plan(store)
        self.rows = 0
        self.numbers = 0
        store.write(add_plan, "runs", self.runs, "sequential")
        store.write(push, Push(device=NANO, plan="runs", decided_by="operator"))

    def replanned(self, plan: Plan, verdict: str, *, how: str = "trial", usual_per_s: float = 0.0) -> int:
        """An alarm under the plan that runs led to a trial of another one, or to no verdict."""
        number = self.replan(self.runs, usual_per_s=usual_per_s)
        above = self.store.read(newest_desired, NANO)
        self.store.write(
            push_replan, NANO, number, plan, scheduler="ios", above=above, how="search", predicted=None
        )
        if verdict:
            self.tried(plan, verdict, known=False, generation=self.store.read(newest_desired, NANO), how=how)
        self.store.write(_ended, number, verdict)
        return number

    def tried(
        self,
        plan: Plan,
        verdict: str,
        *,
        known: bool = True,
        generation: tuple[int, int] = (1, 1),
        how: str = "trial",
        after_us: int = 0,
        pairs: int = 8,
        reason: str = "",
        environment: str = "",
        device: DeviceId = NANO,
    ) -> None:
        """A trial of a plan ended; later ones are newer."""
        if known:
            self.store.write(add_plan, plan.digest[:12], plan, "search")
        ended = TrialEnded(
            epoch=generation[0],
            generation=generation[1],
            origin=Origin.PLANNER,
            how=how,
            verdict=verdict,
            candidate=plan.digest,
            control=self.runs.digest,
            ratio=None,
            ratio_low=None,
            ratio_high=None,
            pairs=pairs,
            began_us=T0_US,
            decided_us=T0_US + after_us + self.rows,
            reason=reason,
            environment=environment,
        )
        self.tells(ended, device)

    def profiled(self) -> None:
        """Its operators were measured."""
        times = tuple(OperatorTiming(op, 10.0 * (op + 1), 1.0, 9) for op in range(4))
        (request,), _ = self.store.write(request_profile, NANO, ["relu"])
        self.tells(ProfileResult(request, self.artifact, 1, CLASS, times, True))

    def tells(self, data: RowData, device: DeviceId = NANO) -> None:
        self.rows += 1
        LinkStore(self.store).append_telemetry([TelemetryWrite(device, (row(self.rows, data),), ())])

    def replan(self, plan: Plan | None, arrivals_per_s: float = 10.0, usual_per_s: float = 0.0) -> int:
        """An alarm under a plan begins a re-plan; what was pending has ended."""
        self.numbers += 1
        number = LinkStore(self.store).record_alarm(
            NANO, alarm(self.numbers, plan, arrivals_per_s, usual_per_s)
        )
        assert number is not None
        return number


@pytest.fixture
def rig(store: Store, tmp_path: Path) -> Rig:
    return Rig(store, tmp_path)


def test_an_observation_is_what_the_store_holds_of_the_device(rig: Rig) -> None:
    rig.profiled()
    rig.store.write(
        set_replan_settings, NANO, ReplanSettings(scheduler="greedy", budget_s=3.0, proposer=Proposer.LEARNED)
    )
    other = paced(rig.runs, 5)
    rig.tried(other, "commit")
    seen = observe(rig.store, NANO, rig.replan(rig.runs), T0_US)
    assert (seen.incumbent, seen.desired, seen.cause) == (rig.runs, (1, 2), "variance")
    assert seen.settings == ReplanSettings(scheduler="greedy", budget_s=3.0, proposer=Proposer.LEARNED)
    assert {op: s for (_, op), s in seen.costs.measured_s.items()} == pytest.approx(
        {0: 1e-5, 1: 2e-5, 2: 3e-5, 3: 4e-5}
    )
    assert seen.loads[0].queued == 3 and seen.loads[0].service_s == pytest.approx(1e-3)
    assert seen.proven == (other,) and list(seen.graphs) == [rig.artifact]


def test_without_a_plan_in_the_alarm_the_desired_one_is_taken_to_run(rig: Rig) -> None:
    assert observe(rig.store, NANO, rig.replan(None), T0_US).incumbent == rig.runs


def test_a_plan_that_lost_its_newest_trial_is_not_proven_and_an_unknown_one_is_left_out(rig: Rig) -> None:
    one, two, unknown = (paced(rig.runs, us) for us in (5, 6, 7))
    rig.tried(one, "commit")
    rig.tried(one, "reject")
    rig.tried(two, "reject")
    rig.tried(two, "commit")
    rig.tried(unknown, "commit", known=False)
    assert observe(rig.store, NANO, rig.replan(rig.runs), T0_US).proven == (two,)


@pytest.mark.parametrize("how", ["now", "first", "guard"])
def test_a_plan_that_was_compared_with_nothing_is_not_proven(rig: Rig, how: str) -> None:
    ordered, won, failed = (paced(rig.runs, us) for us in (5, 6, 7))
    rig.tried(ordered, "commit", how=how)
    rig.tried(won, "commit")
    rig.tried(won, "commit", how=how)
    rig.tried(failed, "commit")
    rig.tried(failed, "reject", how=how)
    assert observe(rig.store, NANO, rig.replan(rig.runs), T0_US).proven == (won,)


@pytest.mark.promise("plans-differ-launch-intervals")
def test_plans_that_differ_in_launch_intervals_alone_crowd_no_other_out(rig: Rig) -> None:
    """Each re-plan paces anew, so one structure may fill any number of newest trials."""
    other = replace(rig.runs, max_skips=rig.runs.max_skips + 1)
    rig.tried(other, "commit")
    for us in range(1, 20):
        rig.tried(paced(rig.runs, us), "commit")
    assert observe(rig.store, NANO, rig.replan(rig.runs), T0_US).proven == (paced(rig.runs, 19), other)


@pytest.mark.parametrize(
    ("outcome", "pairs", "arrivals_per_s", "barred", "reason"),
    [
        ("no_gain", 8, 10.0, True, ""),
        ("no_gain", 8, 14.9, True, ""),
        ("no_gain", 8, 15.1, False, ""),
        ("no_gain", 0, 10.0, False, NO_LOAD),
        ("rejected", 8, 2.0, False, ""),
        ("rejected", 0, 2.0, True, ""),
        ("rolled_back", 8, 2.0, True, ""),
    ],
)
def test_what_gained_nothing_is_barred_for_arrivals_like_those_of_its_trial(
    rig: Rig, outcome: str, pairs: int, arrivals_per_s: float, barred: bool, reason: str
) -> None:
    other = replace(rig.runs, max_skips=rig.runs.max_skips + 1)
    rig.store.write(_ended, rig.replanned(other, "reject"), outcome, pairs, reason)
    number, now = rig.replan(rig.runs, arrivals_per_s), rig.store.read(now_us)
    expected = ((other.digest, other.structure),) if barred else ()
    assert observe(rig.store, NANO, number, now).barred == expected
    assert observe(rig.store, NANO, number, now + round(BARRED_S * 2e6)).barred == ()


@pytest.mark.parametrize(
    ("verdict", "pairs", "reason", "kept"),
    [
        ("no_gain", 8, "no difference of 2% is sure after 8 pairs", True),
        ("no_gain", 7, "only 7 pairs before time was up", False),
        ("reject", 4, "worse by more than 25%: latency 1.40 of before", True),
        ("reject", 5, f"{UNDECIDED}3 trials, the last abandoned: the control crashed", False),
    ],
)
def test_a_trial_that_ended_before_it_compared_is_no_win_of_the_plan_that_runs(
    rig: Rig, verdict: str, pairs: int, reason: str, kept: bool
) -> None:
    other = replace(rig.runs, lanes=2)
    rig.replanned(other, "")
    generation = rig.store.read(newest_desired, NANO)
    rig.tried(other, verdict, known=False, generation=generation, pairs=pairs, reason=reason)
    assert bool(rig.store.read(known_regimes, NANO, CLASS)) == kept


@pytest.mark.parametrize("outcome", ["committed", "rolled_back"])
def test_a_verdict_is_filed_under_the_environment_that_it_was_found_in_whatever_the_device_is_by_then(
    rig: Rig, outcome: str
) -> None:
    """1. An alarm in one mode. 2. The trial is in a second one. 3. Its row comes when there is a third."""
    other = replace(rig.runs, lanes=2)
    number = rig.replanned(other, "")
    LinkStore(rig.store).record_reports([ReportRecord(NANO, 7, Report(), "0.1.0", "third")])
    generation = rig.store.read(newest_desired, NANO)
    rig.tried(other, "commit", known=False, generation=generation, environment="second")
    rig.store.write(_ended, number, outcome)
    kept = {of: len(rig.store.read(known_regimes, NANO, of)) for of in (CLASS, "second", "third")}
    assert kept == {CLASS: 0, "second": int(outcome == "committed"), "third": 0}
    proven = {of: rig.store.read(committed_plans, NANO, of) for of in (CLASS, "second", "third")}
    assert proven == {CLASS: [], "second": [other.digest] if outcome == "committed" else [], "third": []}


def test_a_replan_that_ended_stays_as_it_is_where_its_plan_is_tried_again_in_another_mode(rig: Rig) -> None:
    """Not where the first of two trials had no verdict, as the mode changed during it."""
    for abandoned, found in ((False, ("no_gain", 8, "first")), (True, ("no_gain", 9, "second"))):
        other = replace(rig.runs, lanes=3 if abandoned else 2)
        rig.replanned(other, "")
        rig.store.write(_pending)
        at = rig.store.read(newest_desired, NANO)
        verdict = "abandoned" if abandoned else "no_gain"
        rig.tried(other, verdict, known=False, generation=at, environment="first")
        rig.store.write(set_states, [(NANO, *at, DeviceState.NO_GAIN, "", T0_US)])
        rig.tried(other, "no_gain", known=False, generation=at, environment="second", pairs=9)
        (info, *_) = rig.store.read(replan_infos, NANO)
        environment = rig.store.read(_environment, info.replan)
        assert (info.outcome, info.pairs, environment) == found


@pytest.mark.parametrize(
    ("heard_s", "moved_s", "moved_heard_s", "ended_s", "set_s", "met_per_s"),
    [
        (0, 2, 2, 3, 0, 40.0),
        (0, 4, 4, 3, 0, 10.0),
        (0, 2, 2, 3, YEAR_S, 40.0),
        (0, 2, 2, 3, -YEAR_S, 40.0),
        (0, 20, 100, 60, 0, 40.0),
        (50, 120, 120, 100, 0, 10.0),
    ],
)
def test_a_verdict_is_about_the_arrivals_that_came_when_it_was_said(
    rig: Rig,
    clock: ManualClock,
    heard_s: int,
    moved_s: int,
    moved_heard_s: int,
    ended_s: int,
    set_s: int,
    met_per_s: float,
) -> None:
    """1. A plan is tried at 10/s; the device's clock may be set. 2. Arrivals move to 40/s; nothing is pushed
    for them. 3. The trial ends. Seconds are since the first alarm; the planner may hear of either later."""
    other = replace(rig.runs, lanes=2)
    clock.advance(heard_s)
    number = rig.replanned(other, "")
    rig.store.write(_pending)
    clock.advance(moved_heard_s - heard_s)
    at_us = T0_US + (moved_s + set_s) * 1_000_000
    moved = structs.replace(alarm(50, rig.runs, 40.0), cause="regime", at_us=at_us)
    overtaking = LinkStore(rig.store).record_alarm(NANO, moved)
    assert overtaking is not None
    clock.advance(max(ended_s - moved_heard_s, 0))
    generation, ended_us = rig.store.read(newest_desired, NANO), (ended_s + set_s) * 1_000_000
    rig.tried(other, "reject", known=False, generation=generation, after_us=ended_us)
    for ended in (number, overtaking):
        rig.store.write(_ended, ended, "rejected", 8)
    (entry,) = rig.store.read(known_regimes, NANO, CLASS)
    assert [rate.arrivals_per_s for rate in entry.rates] == [met_per_s]
    for per_s in (10.0, 40.0):
        asking = rig.replan(rig.runs, per_s)
        barred = observe(rig.store, NANO, asking, rig.store.read(now_us)).barred
        assert bool(barred) == (per_s == met_per_s)
        rig.store.write(_ended, asking, "")


def test_a_verdict_is_about_usual_arrivals_and_not_about_the_burst_that_raised_the_alarm(rig: Rig) -> None:
    """At 10/s in the last seconds each time, ten times the usual and the usual."""
    other = replace(rig.runs, lanes=2)
    rig.store.write(_ended, rig.replanned(other, "no_gain", usual_per_s=1.0), "no_gain", 8)
    (entry,) = rig.store.read(known_regimes, NANO, CLASS)
    assert [rate.arrivals_per_s for rate in entry.rates] == [1.0]
    for usual_per_s in (1.0, 10.0):
        asking = rig.replan(rig.runs, usual_per_s=usual_per_s)
        barred = observe(rig.store, NANO, asking, rig.store.read(now_us)).barred
        assert bool(barred) == (usual_per_s == 1.0)
        rig.store.write(_ended, asking, "")


@pytest.mark.parametrize("outcome", ["rejected", "rolled_back"])
def test_launch_intervals_that_failed_bar_neither_the_plan_that_ran_nor_what_it_won(
    rig: Rig, outcome: str
) -> None:
    """1. The plan that runs won. 2. Other intervals of it failed. 3. Another plan runs."""
    other, paced_anew = replace(rig.runs, lanes=2), paced(rig.runs, 7)
    rig.replanned(other, "reject")
    rig.store.write(_ended, rig.replanned(paced_anew, "reject", how="guard"), outcome)
    rig.store.write(add_plan, "other", other, "search")
    number, now = rig.replan(other, 2.0), rig.store.read(now_us)
    barred = observe(rig.store, NANO, number, now).barred
    assert (paced_anew.digest, paced_anew.digest) in barred
    assert rig.runs.structure not in {structure for _, structure in barred}
    assert [one.winner for one in rig.store.read(known_regimes, NANO, CLASS)] == [rig.runs]


def test_an_unknown_plan_or_replan_is_named(rig: Rig) -> None:
    with pytest.raises(InputError, match="there is no re-plan 99"):
        observe(rig.store, NANO, 99, T0_US)
    with pytest.raises(InputError, match="is not known here"):
        observe(rig.store, NANO, rig.replan(paced(rig.runs, 9)), T0_US)


def test_a_plan_that_a_device_made_and_that_came_too_late_to_be_adopted_is_what_its_re_plans_begin_with(
    rig: Rig,
) -> None:
    """An operator has pushed another plan meanwhile, which loses its trial."""
    local, at = paced(rig.runs, 9), rig.store.read(newest_desired, NANO)
    told = LocalPlan(
        boot=7,
        epoch=at[0],
        generation=at[1],
        local_counter=1,
        plan_digest=local.digest,
        plan=local.wire,
        artifacts=(),
        cause="variance",
    )
    rig.store.write(push, Push(device=NANO, plan="runs", decided_by="operator"))
    assert LinkStore(rig.store).adopt_local(NANO, told) is None
    assert observe(rig.store, NANO, rig.replan(local), T0_US).incumbent == local


def test_models_without_costs_are_named_until_they_are_measured_and_a_month_later(rig: Rig) -> None:
    number = rig.replan(rig.runs)
    assert without_costs(rig.store, number, T0_US) == ["relu"]
    rig.profiled()
    assert without_costs(rig.store, number, T0_US) == []
    later_us = T0_US + round(STALE_S * 1e6)
    assert without_costs(rig.store, number, later_us) == []
    assert without_costs(rig.store, number, later_us + 1) == ["relu"]


@pytest.mark.parametrize("change", ["batch", "precision"])
def test_a_plan_of_other_batches_or_another_precision_asks_for_no_more_than_a_profile_tells(
    rig: Rig, change: str
) -> None:
    """Profiles are of one task at a time in fp32: others would be asked for at every alarm."""
    plan = replace(rig.runs, models=tuple(replace(one, batch=4) for one in rig.runs.models))
    if change == "precision":
        plan = replace(rig.runs, executor=replace(rig.runs.executor, precision="bf16"))
    rig.store.write(add_plan, "other", plan, "search")
    rig.tells(MachineFacts((CoreRange(0, 1),), (ExecutorFact(plan.executor.name),), 1))
    number = rig.replan(plan)
    assert without_costs(rig.store, number, T0_US) == ["relu"]
    rig.profiled()
    assert without_costs(rig.store, number, T0_US) == []


def test_an_alarm_begins_a_replan_once_and_what_it_pushes_is_noted(rig: Rig) -> None:
    """1. An alarm begins a re-plan, its repeat no other, the next is noted. 2. A push ends what was
    undecided."""
    number = rig.replan(rig.runs)
    assert LinkStore(rig.store).record_alarm(NANO, alarm(1, rig.runs)) == number
    assert LinkStore(rig.store).record_alarm(NANO, alarm(2, rig.runs)) is None
    plan = paced(rig.runs, 5)

    def push(above: tuple[int, int]) -> object:
        return rig.store.write(
            push_replan, NANO, number, plan, scheduler="proven", above=above, how="proven", predicted=0.5
        )

    assert push((1, 0)) is None, "somebody decided something newer"
    assert push((1, 1)) is not None
    assert push((1, 2)) is None, "it has pushed already"
    (info,) = rig.store.read(replan_infos, NANO)
    assert (info.later_alarms, info.digest, info.how) == (1, plan.digest, "proven")
    assert (info.epoch, info.generation, info.predicted) == (1, 2, 0.5)


def test_what_a_replan_pushed_needs_load_while_it_is_under_way_and_what_a_person_pushed_does_not(
    rig: Rig,
) -> None:
    """Through a generation that only measures, too, until another plan is pushed."""

    def needs_load() -> bool:
        wanted = rig.store.read(desired, NANO)
        return wanted is not None and wanted.needs_load is True

    assert not needs_load()
    number, plan, above = rig.replan(rig.runs), replace(rig.runs, lanes=2), (1, 1)
    pushed = rig.store.write(
        push_replan, NANO, number, plan, scheduler="ios", above=above, how="search", predicted=None
    )
    assert pushed == rig.store.read(desired, NANO) and needs_load()
    _, measuring = rig.store.write(request_profile, NANO, ["relu"])
    assert measuring.generation == 3 and measuring == rig.store.read(desired, NANO) and needs_load()
    rig.store.write(push, Push(device=NANO, plan="runs", decided_by="operator"))
    assert not needs_load()


def test_arrivals_that_came_to_stay_overtake_a_replan_and_what_it_pushed_once_another_plan_is(
    rig: Rig,
) -> None:
    """1. A re-plan has pushed nothing: it ends. 2. It has: it goes on beside the next, until that pushes."""
    link = LinkStore(rig.store)

    def push(number: int, interval_us: int, above: tuple[int, int]) -> object:
        plan = paced(rig.runs, interval_us)
        return rig.store.write(
            push_replan, NANO, number, plan, scheduler="proven", above=above, how="proven", predicted=0.5
        )

    def outcomes() -> list[str]:
        return [one.outcome for one in reversed(rig.store.read(replan_infos, NANO))]

    first = rig.replan(rig.runs)
    second = link.record_alarm(NANO, structs.replace(alarm(2, rig.runs), cause="regime"))
    assert outcomes() == ["no_gain", "pending"]
    assert push(first, 5, (1, 1)) is None
    assert second is not None and push(second, 5, (1, 1)) is not None
    third = link.record_alarm(NANO, structs.replace(alarm(3, rig.runs), cause="regime"))
    assert outcomes() == ["no_gain", "pending", "pending"]
    assert third is not None
    assert rig.store.read(is_trying, NANO, third, rig.runs.structure), "launch intervals make no other plan"
    assert not rig.store.read(is_trying, NANO, third, replace(rig.runs, lanes=2).structure)
    assert push(third, 6, (1, 2)) is not None
    assert outcomes() == ["no_gain", "no_gain", "pending"]
    newest, overtaken, _ = rig.store.read(replan_infos, NANO)
    assert overtaken.reason == f"overtaken by generation {newest.epoch}.{newest.generation}"
    assert observe(rig.store, NANO, third, rig.store.read(now_us)).barred == (), "it has lost to nothing"


def test_a_replan_on_trial_goes_on_under_a_generation_that_only_measures_and_ends_with_another_plan(
    rig: Rig,
) -> None:
    """1. Its device is to measure something: the trial begins anew under another number, and counts.
    2. Somebody pushes another plan while the next one is tried."""
    plan = replace(rig.runs, lanes=2)
    rig.replanned(plan, "")
    rig.store.write(_pending)
    rig.store.write(request_profile, NANO, ["relu"])
    (info,) = rig.store.read(replan_infos, NANO)
    assert ((info.epoch, info.generation), info.outcome) == (rig.store.read(newest_desired, NANO), "pending")
    rig.tried(plan, "commit", known=False, generation=(info.epoch, info.generation))
    rig.store.write(set_states, [(NANO, info.epoch, info.generation, DeviceState.COMMITTED, "", T0_US)])
    (info,) = rig.store.read(replan_infos, NANO)
    assert (info.outcome, info.how) == ("committed", "trial")
    assert [one.winner for one in rig.store.read(known_regimes, NANO, CLASS)] == [plan]

    rig.replanned(replace(rig.runs, lanes=3), "")
    rig.store.write(_pending)
    now = rig.store.write(push, Push(device=NANO, plan="runs", decided_by="operator"))
    newest, _ = rig.store.read(replan_infos, NANO)
    assert newest.outcome == "no_gain"
    assert newest.reason == f"overtaken by generation {now.epoch}.{now.generation}"


@pytest.mark.parametrize(("cause", "why"), [("drift", "drifted"), ("power_mode", "power mode changed")])
def test_what_makes_another_device_overtakes_a_replan_that_has_pushed_nothing_since_it_is_told_once(
    rig: Rig, cause: str, why: str
) -> None:
    link, changed = LinkStore(rig.store), structs.replace(alarm(2, rig.runs), cause=cause)
    rig.replan(rig.runs)
    number = link.record_alarm(NANO, changed)
    newest, overtaken = rig.store.read(replan_infos, NANO)
    assert (newest.replan, newest.outcome) == (number, "pending")
    assert overtaken.outcome == "no_gain" and why in overtaken.reason
    assert number is not None
    plan = paced(rig.runs, 5)
    pushed = rig.store.write(
        push_replan, NANO, number, plan, scheduler="proven", above=(1, 1), how="proven", predicted=0.5
    )
    assert pushed is not None
    queues = structs.replace(changed, number=3, cause="variance")
    assert link.record_alarm(NANO, queues) is None, "a plan is on its way, and queues are told of again"


@pytest.mark.parametrize("cause", ["drift", "power_mode"])
def test_what_is_told_once_begins_a_replan_beside_one_on_trial_and_waits_for_its_end(
    rig: Rig, cause: str
) -> None:
    """The device tells it after the trial; the report of how that ended may come later than the alarm."""
    rig.replanned(replace(rig.runs, lanes=2), "")
    rig.store.write(_pending)
    generation = rig.store.read(newest_desired, NANO)
    rig.store.write(set_states, [(NANO, *generation, DeviceState.TRIAL, "", T0_US)])
    number = LinkStore(rig.store).record_alarm(NANO, structs.replace(alarm(9, rig.runs), cause=cause))
    assert number is not None
    newest, tried = rig.store.read(replan_infos, NANO)
    assert (newest.outcome, tried.outcome, tried.later_alarms) == ("pending", "pending", 0)
    assert rig.store.read(awaits_trial, NANO, number)
    rig.store.write(set_states, [(NANO, *generation, DeviceState.NO_GAIN, "", T0_US)])
    assert not rig.store.read(awaits_trial, NANO, number)


@pytest.mark.parametrize("days", [-2, 2])
def test_what_a_planner_left_too_long_ago_ends_and_what_it_left_just_now_goes_on(rig: Rig, days: int) -> None:
    """Or in a time to come: its clock was ahead."""
    first = rig.replan(rig.runs)
    rig.store.write(end_overdue)
    assert rig.store.read(unfinished_replans) == [(NANO, first)]
    rig.store.write(_begun_in, first, days)
    rig.store.write(end_overdue)
    assert rig.store.read(unfinished_replans) == []
    (info,) = rig.store.read(replan_infos, NANO)
    assert (info.outcome, info.reason) == ("no_gain", "no outcome within 900 s")


@pytest.mark.parametrize("state", list(DeviceState))
@pytest.mark.parametrize("decided_by", ["operator", "replan"])
def test_a_plan_that_an_operator_pushed_is_being_tried_until_its_device_says_what_came_of_it(
    rig: Rig, state: DeviceState, decided_by: str
) -> None:
    rig.store.write(push, Push(device=NANO, plan="runs", decided_by=decided_by))
    generation = rig.store.read(newest_desired, NANO)
    rig.store.write(set_states, [(NANO, *generation, state, "", T0_US)])
    assert rig.store.read(tries_anothers, NANO) == (state not in ENDS and decided_by == "operator")


@pytest.mark.parametrize("decided_by", ["replan", "operator"])
def test_a_measurement_that_is_asked_for_during_a_trial_leaves_it_to_whoever_pushed_the_plan(
    rig: Rig, decided_by: str
) -> None:
    other = replace(rig.runs, lanes=2)
    if decided_by == "replan":
        rig.replanned(other, "")
        rig.store.write(_pending)
    else:
        rig.store.write(add_plan, "other", other, "search")
        rig.store.write(push, Push(device=NANO, plan="other", decided_by="operator"))
    rig.store.write(request_profile, NANO, ["relu"])
    generation = rig.store.read(newest_desired, NANO)
    rig.store.write(set_states, [(NANO, *generation, DeviceState.TRIAL, "", T0_US)])
    assert rig.store.read(tries_anothers, NANO) == (decided_by == "operator")


def test_no_alarm_begins_a_replan_where_replanning_is_off(rig: Rig) -> None:
    rig.store.write(set_replan_settings, NANO, ReplanSettings(enabled=False))
    assert LinkStore(rig.store).record_alarm(NANO, alarm(1, rig.runs)) is None
    assert not rig.store.read(replan_infos, NANO)


def test_digests_are_what_plans_are_asked_for_by(rig: Rig) -> None:
    with rig.store.snapshot() as view:
        assert view.read(plan_wires, {rig.runs.digest, Digest("0" * 64)}) == {rig.runs.digest: rig.runs.wire}


def test_the_library_holds_who_won_a_re_plans_trial_under_the_alarms_load(rig: Rig) -> None:
    """One candidate lost, a later one won; neither a repeat nor a plan activated unproven is an entry."""
    other, third = (replace(rig.runs, lanes=lanes) for lanes in (2, 3))
    assert rig.store.read(known_regimes, NANO, CLASS) == []
    rig.replanned(other, "no_gain")
    rig.replanned(third, "commit")
    rig.replanned(paced(rig.runs, 7), "commit", how="guard")
    newest, older = rig.store.read(known_regimes, NANO, CLASS)
    assert (newest.winner, newest.lost) == (third, rig.runs.structure)
    assert (older.winner, older.lost) == (rig.runs, other.structure)
    assert (newest.replaced, older.replaced) == (rig.runs, None)
    assert newest.rates == (RegimeRate("relu", 10.0, 1e-3),)
    assert rig.store.read(known_regimes, NANO, "another class") == []
    assert rig.store.read(known_regimes, NANO, CLASS, newest.at_us) == [newest]
    shown = rig.store.read(regime_infos, NANO)
    assert [(one.digest, one.proven_at_us) for one in shown] == [
        (third.digest, newest.at_us),
        (rig.runs.digest, older.at_us),
    ]
    assert shown[0].loads == (RegimeLoad(model="relu", arrivals_per_s=10.0, service_s=1e-3),)
    names = [rig.store.read(plan_info, one.plan).digest for one in shown]
    assert names == [one.digest for one in shown], "named so that other commands find them"
    with pytest.raises(InputError, match="there is no device"):
        rig.store.read(regime_infos, DeviceId("nobody"))


@pytest.mark.parametrize("set_s", [-YEAR_S, YEAR_S])
def test_a_device_clock_that_is_set_during_a_trial_puts_its_verdict_at_no_other_time(
    rig: Rig, clock: ManualClock, set_s: int
) -> None:
    other = replace(rig.runs, lanes=2)
    rig.replanned(other, "")
    clock.advance(90.0)
    generation, ended_us = rig.store.read(newest_desired, NANO), (90 + set_s) * 1_000_000
    rig.tried(other, "commit", known=False, generation=generation, after_us=ended_us)
    (entry,) = rig.store.read(known_regimes, NANO, CLASS)
    assert entry.at_us == T0_US + 90_000_000
    assert rig.store.read(replan_infos, NANO)[0].trigger_to_decision_ms == 90_000.0


def test_the_newest_trial_is_that_of_the_newest_generation_whatever_the_device_clock_said(rig: Rig) -> None:
    """Its verdict counts and is shown first, beside other devices' as well; the older one goes first."""
    other, far = replace(rig.runs, lanes=2), enrol(rig.store, DeviceId("far"), 2)
    rig.tried(other, "commit", after_us=YEAR_S * 1_000_000)
    rig.tried(other, "reject", known=False, generation=(1, 2))
    rig.tried(other, "no_gain", known=False, after_us=2 * YEAR_S * 1_000_000, device=far)
    for device, verdict in ((NANO, "reject"), (far, "no_gain"), (None, "no_gain")):
        found = rig.store.read(newest_trials, [other.digest], CLASS, device)
        assert found[other.digest].verdict == verdict
    assert rig.store.read(committed_plans, NANO, CLASS) == []
    assert [trial.generation for trial in rig.store.read(trial_infos, NANO)] == [2, 1]
    sum(tidy(rig.store, Retention(0.0, 0.0, 0.0, history_rows=1)))
    assert [trial.generation for trial in rig.store.read(trial_infos, NANO)] == [2]


@pytest.mark.parametrize("ahead_s", [-86_400, 86_400])
def test_whether_costs_were_renewed_since_is_asked_by_the_planners_clock_whatever_the_devices_says(
    rig: Rig, ahead_s: int
) -> None:
    """The trial is decided two seconds after its alarm."""
    other, ahead_us, now = replace(rig.runs, lanes=2), ahead_s * 1_000_000, rig.store.read(now_us)
    raised = structs.replace(alarm(1, rig.runs), at_us=T0_US + ahead_us)
    number = LinkStore(rig.store).record_alarm(NANO, raised)
    assert number is not None
    rig.store.write(
        push_replan, NANO, number, other, scheduler="ios", above=(1, 1), how="search", predicted=None
    )
    rig.tried(other, "commit", known=False, generation=(1, 2), after_us=ahead_us + 2_000_000)
    assert len(rig.store.read(known_regimes, NANO, CLASS, now + 1_000_000)) == 1
    assert rig.store.read(known_regimes, NANO, CLASS, now + 3_000_000) == []


def test_a_winner_that_was_rolled_back_since_is_not_in_the_library(rig: Rig) -> None:
    other = replace(rig.runs, lanes=2)
    rig.replanned(other, "commit")
    assert len(rig.store.read(known_regimes, NANO, CLASS)) == 1
    number = rig.replanned(other, "")
    rig.store.write(_rolled_back, number)
    assert rig.store.read(known_regimes, NANO, CLASS) == []


def test_a_winner_that_was_rolled_back_right_after_its_own_trial_is_not_in_the_library(
    rig: Rig,
) -> None:
    """Nor is one that was rolled back before another won; the other's entry stays."""
    first, other, third = (replace(rig.runs, lanes=lanes) for lanes in (2, 3, 4))
    rig.store.write(_ended, rig.replanned(first, "commit"), "rolled_back")
    rig.replanned(third, "commit")
    rig.store.write(_ended, rig.replanned(other, "commit"), "rolled_back")
    assert [one.winner for one in rig.store.read(known_regimes, NANO, CLASS)] == [third]


@pytest.mark.parametrize("interval_us", [0, 7])
def test_a_winner_that_was_committed_and_later_did_not_start_is_neither_known_nor_proven_until_it_wins_again(
    rig: Rig, clock: ManualClock, interval_us: int
) -> None:
    """1. A plan wins its trial. 2. It, or the same with other launch intervals, runs, until its device
    reports that it does not start any more. The outcome of the re-plan stays what it was."""
    other = replace(rig.runs, lanes=2)
    first = _commit(rig, other)
    last = _commit(rig, paced(other, interval_us), how="proven") if interval_us else first
    assert rig.store.read(committed_plans, NANO, CLASS)
    assert [one.winner for one in rig.store.read(known_regimes, NANO, CLASS)] == [other]
    rig.store.write(set_states, [(NANO, *last, DeviceState.ROLLED_BACK, "", T0_US)])
    assert rig.store.read(replan_infos, NANO)[0].outcome == "committed"
    assert rig.store.read(committed_plans, NANO, CLASS) == []
    assert rig.store.read(known_regimes, NANO, CLASS) == []
    clock.advance(60.0)
    _commit(rig, other)
    assert rig.store.read(committed_plans, NANO, CLASS) == [other.digest]
    assert rig.store.read(known_regimes, NANO, CLASS)[0].winner == other


def test_launch_intervals_that_were_committed_and_later_did_not_start_take_nothing_from_their_plan(
    rig: Rig,
) -> None:
    rig.replanned(replace(rig.runs, lanes=2), "reject")
    rig.tried(rig.runs, "commit", known=False)
    last = _commit(rig, paced(rig.runs, 7), how="guard")
    rig.store.write(set_states, [(NANO, *last, DeviceState.ROLLED_BACK, "", T0_US)])
    assert rig.store.read(committed_plans, NANO, CLASS) == [rig.runs.digest]
    assert [one.winner for one in rig.store.read(known_regimes, NANO, CLASS)] == [rig.runs]


def test_a_winner_that_an_operator_pushed_and_that_was_rolled_back_is_not_in_the_library(
    rig: Rig, clock: ManualClock
) -> None:
    other = replace(rig.runs, lanes=2)
    _commit(rig, other)
    clock.advance(60.0)
    rig.store.write(add_plan, "other", other, "search")
    rig.store.write(push, Push(device=NANO, plan="other", decided_by="operator"))
    generation = rig.store.read(newest_desired, NANO)
    assert rig.store.read(known_regimes, NANO, CLASS)
    rig.store.write(set_states, [(NANO, *generation, DeviceState.ROLLED_BACK, "", T0_US)])
    assert rig.store.read(known_regimes, NANO, CLASS) == []


def test_what_is_found_ahead_takes_the_place_of_what_was_for_such_arrivals_until_a_trial_tells(
    rig: Rig,
) -> None:
    other = replace(rig.runs, lanes=2)

    def keep(per_s: float, plan: Plan) -> None:
        rates = (RegimeRate("relu", per_s, 1e-3),)
        rig.store.write(keep_expected, NANO, CLASS, rates, plan, "arranged", None)

    keep(10.0, rig.runs)
    keep(12.0, other)
    (found,) = rig.store.read(expected_regimes, NANO, CLASS)
    assert (found.plan, found.rates[0].arrivals_per_s) == (other, 12.0)
    for at in range(1, MOST + 1):
        keep(100.0 * 2.0**at, rig.runs)
    assert len(rig.store.read(expected_regimes, NANO, CLASS)) == MOST
    assert rig.store.read(expected_regimes, NANO, "another class") == []
    keep(12.0, other)
    rig.replanned(replace(rig.runs, lanes=3), "commit")
    shown = rig.store.read(regime_infos, NANO)
    assert len(shown) == MOST, "of the arrivals at which a trial compared, that is shown"
    assert [one.loads[0].arrivals_per_s for one in shown if one.proven_at_us is not None] == [10.0]


def _commit(rig: Rig, plan: Plan, how: str = "trial") -> tuple[int, int]:
    """A re-plan's plan is committed; returns its generation."""
    rig.replanned(plan, "")
    rig.store.write(_pending)
    generation = rig.store.read(newest_desired, NANO)
    rig.tried(plan, "commit", known=False, generation=generation, how=how)
    rig.store.write(set_states, [(NANO, *generation, DeviceState.COMMITTED, "", T0_US)])
    return generation


def _ended(session: Session, number: int, verdict: str, pairs: int = 0, reason: str = "") -> None:
    """As the device's report of its generation's state ends a re-plan."""
    values = {"outcome": verdict or "no_gain", "pairs": pairs, "reason": reason}
    session.execute(update(ReplanRow).where(ReplanRow.replan == number).values(values))
    pushed = select(ReplanRow.generation).where(ReplanRow.replan == number).scalar_subquery()
    of_device = (GenerationRow.device == NANO, GenerationRow.generation == pushed)
    session.execute(update(GenerationRow).where(*of_device).values(state=values["outcome"]))


def _environment(session: Session, replan: int) -> str:
    return session.scalars(select(ReplanRow.environment).where(ReplanRow.replan == replan)).one()


def _pending(session: Session) -> None:
    """The device has not said yet how the newest re-plan ends."""
    newest = select(func.max(ReplanRow.replan)).scalar_subquery()
    session.execute(update(ReplanRow).where(ReplanRow.replan == newest).values(outcome="pending"))


def _begun_in(session: Session, number: int, days: int) -> None:
    values = {"begun_at_us": ReplanRow.begun_at_us + days * 86_400_000_000}
    session.execute(update(ReplanRow).where(ReplanRow.replan == number).values(values))


def _rolled_back(session: Session, number: int) -> None:
    session.execute(
        update(ReplanRow)
        .where(ReplanRow.replan == number)
        .values(outcome="rolled_back", begun_at_us=ReplanRow.begun_at_us + 1_000_000)
    )

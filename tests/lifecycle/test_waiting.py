"""What guards and admission read: waiting times, arrivals, and what plans have in common."""

import math
from random import Random

import pytest

from stageloom.edge_agent.lifecycle import probation
from stageloom.edge_agent.lifecycle.facts import PlanFacts, strict_intervals_s
from stageloom.edge_agent.lifecycle.probation import Probation, ProbationConfig, WaitingLog
from stageloom.shared.engine.interval_guard import GuardVerdict
from stageloom.shared.ids import Digest
from stageloom.shared.plan import ModelPlan
from tests.engine.generate import chain, digest, members_of, plan_of


def filled(
    latency_s: float, from_s: float = 0.0, to_s: float = 10.0, log: WaitingLog | None = None
) -> WaitingLog:
    """Twenty tasks a second that take this long, seen twice a second."""
    log = log or WaitingLog()
    steps = round((to_s - from_s) * 20)
    for step in range(steps):
        at_s = from_s + step / 20
        log.task_completed(at_s, at_s + latency_s)
        if step % 10 == 0:
            log.seen(at_s, 0.001, {"m": 100 + round(at_s * 20)})
    return log


def test_p99_is_of_the_tasks_that_arrived_in_the_interval() -> None:
    log = filled(0.010)
    filled(0.020, 10.0, 20.0, log)
    assert log.between(0.0, 9.99).p99_s == pytest.approx(0.010)
    assert log.between(10.0, 20.0).p99_s == pytest.approx(0.020)
    assert log.since(10.0, 20.0).tasks == 200
    assert WaitingLog().since(0.0, 1.0).tasks == 0


def test_arrivals_are_a_rate_and_start_anew_with_the_engine() -> None:
    log = filled(0.010)
    assert log.last_arrivals_per_s(5.0) == {"m": pytest.approx(20.0)}
    log.engine_restarted()
    assert log.last_arrivals_per_s(5.0) == {}
    log.seen(20.0, 0.0, {"m": 3})
    assert log.last_arrivals_per_s(5.0) == {}


def test_growth_of_the_oldest_age() -> None:
    log = WaitingLog()
    for second in range(11):
        log.seen(float(second), 0.1 * second, {})
    assert log.age_growth(0.0, 10.0) == pytest.approx(0.1)
    assert log.age_growth(20.0, 30.0) == 0.0


def guarded(log: WaitingLog) -> Probation:
    return Probation(10.0, ProbationConfig(length_s=1.0), log)


def test_guarded_plan_under_which_tasks_wait_longer_fails_within_ten_seconds() -> None:
    log = filled(0.010)
    probation = guarded(log)
    filled(0.013, 10.0, 16.0, log)
    probation.tick(16.0)
    assert probation.verdict is GuardVerdict.ROLL_BACK
    assert "p99 rose from 0.01 s to 0.013 s" in probation.reason


def _rolled_back(worse: float, seed: int) -> bool:
    """Ten seconds of 25 tasks a second before and under a plan, with latencies that spread by a half."""
    log, rng = WaitingLog(), Random(seed)
    probation = guarded(log)
    for step in range(500):
        at_s = step / 25
        latency_s = 0.02 * (worse if at_s >= 10.0 else 1.0) * math.exp(rng.gauss(0.0, 0.5))
        log.task_completed(at_s, at_s + latency_s)
        log.seen(at_s, 0.001, {"m": step})
        if step == 250:
            probation = guarded(log)
        if at_s > 10.0:
            probation.tick(at_s)
    return probation.verdict is GuardVerdict.ROLL_BACK


def test_chance_seldom_rolls_a_plan_back_and_latencies_three_times_as_long_always_do() -> None:
    assert sum(_rolled_back(1.0, seed) for seed in range(100)) <= 5
    assert all(_rolled_back(3.0, seed) for seed in range(20))


def test_the_p99_itself_would_often_roll_back_what_is_like_the_plan_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulation can fail: without standard deviations what a p99 surely is, is what it seems."""
    monkeypatch.setattr(probation, "_SURE", 0.0)
    assert sum(_rolled_back(1.0, seed) for seed in range(100)) >= 15


def test_guarded_plan_passes_when_the_guards_time_is_over_and_not_before() -> None:
    log = filled(0.010)
    probation = guarded(log)
    filled(0.011, 10.0, 20.0, log)
    probation.tick(12.0)
    verdicts = [probation.verdict]
    probation.tick(20.0)
    verdicts.append(probation.verdict)
    assert verdicts == [GuardVerdict.OPEN, GuardVerdict.KEEP], "longer than the plain probation of a second"


def plan_with(interval_us: int, *, strict: bool = True, cuts: tuple[int, ...] = ()):  # type: ignore[no-untyped-def]
    model = ModelPlan(
        name="a",
        artifact=digest(0),
        cuts=cuts,
        launch_interval_us=interval_us,
        work_conserving=not strict,
    )
    graphs = {digest(0): chain("a", 6)}
    return plan_of([model], [[m] for m in members_of([model])], graphs).plan


def test_plans_that_differ_in_intervals_only_are_told_from_others() -> None:
    assert plan_with(100).structure == plan_with(200).structure == plan_with(0).structure
    assert plan_with(100).structure != plan_with(100, cuts=(3,)).structure
    assert strict_intervals_s(plan_with(100)) == {"a": pytest.approx(1e-4)}
    assert strict_intervals_s(plan_with(100, strict=False)) == {}


def test_interval_that_admits_fewer_tasks_than_arrive_is_named_with_both_rates() -> None:
    facts = PlanFacts(Digest("1" * 64), {}, {}, strict_s={"a": 0.02})
    reason = facts.starves({"a": 80.0})
    assert "every 20.0 ms" in reason
    assert "80.0 arrive per second" in reason
    assert facts.starves({"a": 50.0}) == ""
    assert facts.starves({"a": 51.0}) == "", "rates over a few seconds are noisy"
    assert facts.starves({}) == ""


def test_plans_compare_if_they_do_the_same_work() -> None:
    one = PlanFacts(Digest("1" * 64), {}, {"m": Digest("a" * 64)})
    other = PlanFacts(Digest("2" * 64), {}, {"m": Digest("a" * 64)})
    third = PlanFacts(Digest("3" * 64), {}, {"m": Digest("b" * 64)})
    assert one.compares_with(other)
    assert not one.compares_with(one)
    assert not one.compares_with(third)

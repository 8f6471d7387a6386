"""What guards and admission read: waiting times, arrivals, and what plans have in common."""

import math
from random import Random

import pytest

from stageloom.edge_agent.lifecycle.facts import PlanFacts, strict_intervals_s
from stageloom.edge_agent.lifecycle.probation import Probation, ProbationConfig
from stageloom.edge_agent.lifecycle.waiting import WaitingLog
from stageloom.shared.engine.interval_guard import GuardConfig, GuardVerdict
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


CONFIG = GuardConfig()


def test_p99_before_is_the_greatest_of_windows_that_have_half_the_tasks_it_needs() -> None:
    """Of twenty tasks a second five seconds have a hundred; the first two have fewer than fifty."""
    log = filled(0.030, 0.0, 2.0)
    filled(0.010, 2.0, 14.0, log)
    filled(0.020, 14.0, 20.0, log)
    before = log.before(20.0, CONFIG)
    assert before.window_s == pytest.approx(5.0, abs=0.1)
    assert before.p99_s == pytest.approx(0.030), "that of 0 to 5 s"
    assert before.arrivals_per_s == pytest.approx(20.0)
    assert log.before(62.5, CONFIG).p99_s == pytest.approx(0.020), "the first ones are a minute ago"
    assert filled(0.010, 0.0, 2.0).before(2.0, CONFIG).p99_s == 0.0


def test_arrivals_of_a_model_that_was_gone_and_came_back_count_on() -> None:
    """Ten a second of each; no plan serves "m" from 2 to 4 s, then for less than a glance."""
    log = WaitingLog()
    counted = [(0, 500), (1, 510), (2, None), (3, None), (4, 0), (5, 10), (6, 5), (7, 15)]
    for at_s, count in counted:
        log.seen(float(at_s), 0.001, {"n": 10 * at_s} | ({} if count is None else {"m": count}))
    assert log.arrivals_per_s(4.0, 5.0) == {"n": 10.0, "m": 10.0}
    assert log.arrivals_per_s(0.0, 7.0)["m"] == pytest.approx((10 + 10 + 15) / 7)
    assert log.arrivals_per_s(6.0, 7.0) == {"n": 10.0, "m": 10.0}


def test_p99_since_is_of_the_tasks_that_arrived_since_the_change_in_the_newest_window() -> None:
    log = filled(0.010)
    before = log.before(10.0, CONFIG)
    filled(0.020, 10.0, 16.0, log)
    filled(0.015, 16.0, 20.0, log)
    assert log.since(10.0, 13.0, before, CONFIG).tasks == 61
    assert log.since(10.0, 13.0, before, CONFIG).p99_s == pytest.approx(0.020)
    newest = log.since(10.0, 22.0, before, CONFIG)
    assert newest.p99_s == pytest.approx(0.015) and newest.tasks < 100
    assert WaitingLog().since(0.0, 1.0, before, CONFIG).tasks == 0


def test_the_age_since_is_the_least_of_the_last_second() -> None:
    log = WaitingLog()
    before = log.before(0.0, CONFIG)
    for look, age_s in enumerate([0.5, 0.1, 0.3, 0.4, 0.6, 0.7, 0.2, 0.9, 0.8, 0.9, 0.7, 0.6]):
        log.seen(0.1 * look, age_s, {})
    assert log.since(0.05, 0.85, before, CONFIG).oldest_age_s == 0.1
    assert log.since(0.05, 1.15, before, CONFIG).oldest_age_s == 0.2
    assert log.since(2.0, 3.0, before, CONFIG).oldest_age_s == 0.0


def test_tasks_that_expired_count_by_their_arrival_and_since_arrivals_moved() -> None:
    log = filled(0.010)
    for at_s in (1.0, 2.0, 2.5, 8.5, 9.0, 9.5):
        log.task_expired(at_s, at_s + 0.05)
    assert log.before(10.0, CONFIG).missed == pytest.approx(3 / 64), "the first three seconds"
    log.arrivals_moved(8.0)
    before = log.before(10.0, CONFIG)
    assert before.moved and before.missed == pytest.approx(3 / 43)
    assert before.p99_s == pytest.approx(0.010) and not log.before(70.0, CONFIG).moved
    since = log.since(9.0, 10.0, before, CONFIG)
    assert (since.missed, since.ended) == (2 / 22, 22)


def test_a_device_without_tasks_before_has_no_share_to_compare_with() -> None:
    assert WaitingLog().before(10.0, CONFIG).missed == 1.0


def test_arrivals_are_a_rate_and_start_anew_with_the_engine() -> None:
    log = filled(0.010)
    assert log.last_arrivals_per_s(5.0) == {"m": pytest.approx(20.0)}
    log.engine_restarted()
    assert log.last_arrivals_per_s(5.0) == {}
    log.seen(20.0, 0.0, {"m": 3})
    assert log.last_arrivals_per_s(5.0) == {}


def test_growth_of_the_oldest_age_is_the_steeper_of_two_slopes() -> None:
    log = WaitingLog()
    for look in range(101):
        log.seen(look / 10, 0.1 * look / 10, {})
    assert log.age_growth(0.0, 10.0) == pytest.approx(0.1)
    assert log.age_growth(20.0, 30.0) == log.age_growth(9.95, 10.0) == 0.0
    for look in range(1, 16):
        log.seen(10.0 + look / 10, 1.0 + 0.5 * look / 10, {})
    assert log.before(11.5, CONFIG).age_growth == pytest.approx(0.5)


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

"""The trial's state machine: order of events and actions, decisions, guards, crashes."""

import math
from collections.abc import Callable
from random import Random

import pytest

from stageloom.shared.engine.trial import (
    Activate,
    Decide,
    MeasureSide,
    SaveRecord,
    TrialAction,
    TrialConfig,
    TrialCore,
    TrialResult,
    Verdict,
    found_at_boot,
)
from stageloom.shared.engine.windows import Side, WindowFigures
from tests.engine.trials import RECORD, figures, setup

Figure = Callable[[Side, int], WindowFigures]


class Device:
    """Carries out a trial's actions at once; `figure` says what the window of a side shows."""

    def __init__(self, core: TrialCore, figure: Figure) -> None:
        self.core = core
        self.figure = figure
        self.now = 100.0
        self.done: list[TrialAction] = []
        self.todo = core.begin(self.now)

    def step(self) -> TrialAction:
        """Carry out one action and report it."""
        action, *self.todo = self.todo
        self.done.append(action)
        core = self.core
        match action:
            case SaveRecord():
                self.todo += core.recorded(self.now)
            case Activate():
                assert core.activated(self.now) == []
                self.now += 0.01
                self.todo += core.settled(self.now)
            case MeasureSide(window=window, side=side, to_s=to_s):
                self.now = to_s
                self.todo += core.window_ended(window, self.figure(side, window), self.now)
        return action

    def until(self, kind: type[TrialAction], side: Side | None = None) -> TrialAction:
        """Carry out actions up to one of this kind (and side), which is next and not carried out."""
        while not isinstance(self.todo[0], kind) or (side and getattr(self.todo[0], "side", side) != side):
            self.step()
        return self.todo[0]

    def run(self) -> TrialResult:
        """To the end."""
        while self.todo:
            self.step()
        assert self.core.result is not None
        return self.core.result


def speeds(ratio: float, spread: float = 0.02) -> Figure:
    """A candidate that is so much faster; windows differ a little, by a fixed rule."""

    def figure(side: Side, window: int) -> WindowFigures:
        wobble = math.exp(Random(window).gauss(0.0, spread))
        slowness = wobble / (ratio if side is Side.CANDIDATE else 1.0)
        return figures(0.008 * slowness, busy_s=0.1 * slowness)

    return figure


CONTROL_FIRST = 1
"""A seed: windows are of A BB A, then B AA B, where A is the control."""


def device(figure: Figure, seed: int = 0, **fields: object) -> Device:
    return Device(TrialCore(setup(**fields), Random(seed)), figure)


# The order of things


def test_the_record_is_durable_before_anything_is_touched() -> None:
    core = TrialCore(setup(), Random(0))
    assert core.begin(0.0) == [SaveRecord(RECORD)]
    assert core.settled(0.1) == core.activated(0.1) == core.tick(0.1) == []
    (first,) = core.recorded(0.2)
    assert isinstance(first, Activate | MeasureSide)


def test_a_window_is_cut_by_its_first_tenth() -> None:
    trial = device(speeds(1.0))
    window = trial.until(MeasureSide)
    assert isinstance(window, MeasureSide)
    assert window.from_s == pytest.approx(trial.now + 0.025)
    assert window.to_s == pytest.approx(trial.now + 0.25)


def test_slow_models_have_windows_of_twenty_instances() -> None:
    trial = device(speeds(1.0), instance_s=(0.1,))
    window = trial.until(MeasureSide)
    assert isinstance(window, MeasureSide)
    assert (window.from_s, window.to_s) == pytest.approx((trial.now + 0.2, trial.now + 2.0))


@pytest.mark.promise("trial-statistics-pair-gives")
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.1])
def test_each_window_is_of_one_plan_and_begins_once_the_other_is_empty(seed: int, ratio: float) -> None:
    trial = device(speeds(ratio), seed)
    result = trial.run()
    record, *middle, activate, decide = trial.done
    assert isinstance(record, SaveRecord)
    assert decide == Decide(result)
    wanted = Side.CANDIDATE if result.verdict is Verdict.COMMIT else Side.CONTROL
    assert activate == Activate(wanted)
    end_s, number, runs = 0.0, 0, Side.CONTROL
    for action in middle:
        if isinstance(action, Activate):
            assert action.side is runs.other, "only the other plan needs to be activated"
            runs, end_s = action.side, end_s + 0.01
        else:
            assert isinstance(action, MeasureSide)
            assert (action.window, action.side) == (number, runs)
            assert action.from_s == pytest.approx(max(end_s, 100.0) + 0.025, abs=0.011)
            number, end_s = number + 1, action.to_s
    assert number == 2 * result.pairs


def test_late_repeated_and_foreign_events_change_nothing() -> None:
    trial = device(speeds(1.1))
    trial.until(Activate)
    window = trial.until(MeasureSide)
    assert isinstance(window, MeasureSide)
    core, now = trial.core, trial.now
    assert core.recorded(now) == core.settled(now) == core.activated(now) == []
    assert core.window_ended(window.window + 1, figures(), now) == []
    trial.step()
    assert core.window_ended(window.window, figures(busy_s=9.0), trial.now) == []
    assert trial.run().verdict is Verdict.COMMIT


def test_nothing_happens_after_the_decision() -> None:
    trial = device(speeds(1.1))
    result = trial.run()
    core, now = trial.core, trial.now + 100
    assert core.tick(now, 99.0) == core.settled(now) == core.activated(now) == core.recorded(now) == []
    assert core.crashed("late", now) == core.abandon("late", now) == []
    assert core.window_ended(0, figures(), now) == []
    assert core.next_wakeup is None
    assert core.result is result


def test_a_trial_begins_once() -> None:
    trial = device(speeds(1.0))
    with pytest.raises(ValueError, match="begun already"):
        trial.core.begin(1.0)


# Decisions


def test_a_better_plan_commits_with_its_ratio_and_interval() -> None:
    trial = device(speeds(1.1))
    result = trial.run()
    assert result.verdict is Verdict.COMMIT
    assert result.ratio == pytest.approx(1.1, rel=0.03)
    assert result.interval is not None
    assert 1.02 < result.interval[0] < 1.1 < result.interval[1]
    assert result.pairs >= 8
    changes = sum(isinstance(action, Activate) for action in trial.done) - 1  # the last one is for good
    assert 1.0 <= changes / result.pairs <= 1.5, "half of the quads begin with the plan that runs"
    assert result.seconds_s == pytest.approx(2 * result.pairs * 0.25 + changes * 0.01)


def test_a_worse_plan_is_rejected_and_the_control_runs_again() -> None:
    trial = device(speeds(0.9))
    result = trial.run()
    assert result.verdict is Verdict.REJECT
    assert "worse by more than 2%" in result.reason
    assert trial.done[-2] == Activate(Side.CONTROL)


@pytest.mark.parametrize(("ratio", "pairs"), [(1.2, 8), (3.0, 4), (0.8, 8), (0.3, 4)])
def test_the_first_look_is_at_the_eighth_pair_and_at_the_fourth_for_gross_differences(
    ratio: float, pairs: int
) -> None:
    result = device(speeds(ratio)).run()
    assert (result.verdict, result.pairs) == (Verdict.COMMIT if ratio > 1 else Verdict.REJECT, pairs)


def test_equal_plans_give_no_gain_when_time_is_up() -> None:
    result = device(speeds(1.0)).run()
    assert result.verdict is Verdict.NO_GAIN
    assert result.ratio == pytest.approx(1.0, rel=0.01)
    assert 59.0 < result.seconds_s <= 60.0


@pytest.mark.parametrize("ratio", [1.015, 0.985])
def test_a_sure_difference_that_is_too_small_is_no_gain(ratio: float) -> None:
    result = device(speeds(ratio, spread=0.0)).run()
    assert result.verdict is Verdict.NO_GAIN
    assert result.ratio == pytest.approx(ratio)


@pytest.mark.parametrize("ratio", [1.021, 0.979])
def test_two_percent_is_the_border(ratio: float) -> None:
    verdict = device(speeds(ratio, spread=0.0)).run().verdict
    assert verdict is (Verdict.COMMIT if ratio > 1 else Verdict.REJECT)


def test_time_is_up_between_windows_too() -> None:
    core = TrialCore(setup(), Random(0), TrialConfig(stall_s=1000.0))
    core.begin(0.0)
    core.recorded(0.0)
    assert core.next_wakeup == 60.0
    assert core.tick(59.9) == []
    activate, decide = core.tick(60.0)
    assert activate == Activate(Side.CONTROL)
    assert isinstance(decide, Decide)
    assert decide.result.verdict is Verdict.NO_GAIN
    assert "only 0 pairs" in decide.result.reason


def test_windows_without_tasks_decide_nothing() -> None:
    empty = figures(completed=(0,), p99_s=0.0, busy_s=0.0, judged=(0,), log_latency=(0.0,))
    result = device(lambda side, window: empty).run()
    assert result.verdict is Verdict.NO_GAIN
    assert (result.pairs, result.ratio, result.interval) == (0, None, None)
    assert "without a task on both sides" in result.reason


# Refusals


def test_plans_that_do_not_fit_together_are_refused_untouched() -> None:
    core = TrialCore(setup(memory_bytes=149), Random(0))
    (decide,) = core.begin(0.0)
    assert isinstance(decide, Decide)
    assert decide.result.verdict is Verdict.REFUSED
    assert "150 bytes" in decide.result.reason
    assert TrialCore(setup(memory_bytes=150), Random(0)).begin(0.0) == [SaveRecord(RECORD)]


@pytest.mark.parametrize("instance_s", [0.005, 0.2, 3.0, 90.0])
@pytest.mark.parametrize("rate_per_s", [0.001, 0.1, 1.0, 11.0, 100.0])
def test_no_load_is_too_slow_for_a_trial_and_its_length_is_known_beforehand(
    instance_s: float, rate_per_s: float
) -> None:
    trial = device(speeds(1.0), instance_s=(instance_s,), arrivals_per_s=(rate_per_s,))
    core = trial.core
    assert 2 * 8 * core.window_s < core.limit_s <= 600.0
    assert core.limit_s >= 60.0
    result = trial.run()
    assert result.pairs >= 8
    assert result.seconds_s <= core.limit_s


def test_a_trial_of_many_evenly_loaded_models_begins() -> None:
    alike: dict[str, object] = {"models": tuple(map(str, range(12)))}
    alike |= {name: (0.005,) * 12 for name in ("service_s", "instance_s")}
    core = TrialCore(setup(**alike, arrivals_per_s=(10.0,) * 12), Random(0))
    assert core.begin(0.0) == [SaveRecord(RECORD)]
    assert core.window_s == 0.25


def test_short_windows_leave_a_trial_its_minute() -> None:
    assert TrialCore(setup(arrivals_per_s=(100.0,)), Random(0)).limit_s == 60.0
    slow = TrialCore(setup(arrivals_per_s=(0.1,)), Random(0))
    assert (slow.limit_s, slow.window_s) == pytest.approx((600.0, 33.75)), "eight pairs fit"


@pytest.mark.parametrize(
    "broken",
    [
        {"models": ()},
        {"service_s": (1.0, 2.0)},
        {"instance_s": (math.nan,)},
        {"arrivals_per_s": (1.0, 2.0)},
    ],
)
def test_a_setup_without_a_time_per_model_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a trial needs"):
        setup(**broken)


# Guards


def latencies(field: str, factor: float, speed: float = 1.1) -> Figure:
    def figure(side: Side, window: int) -> WindowFigures:
        mine = side is Side.CANDIDATE
        slowness = 1 / speed if mine else 1.0
        late = {field: 0.2 * factor if mine else 0.2}
        return figures(0.008 * slowness, busy_s=0.1 * slowness, **late)

    return figure


@pytest.mark.parametrize(("field", "name"), [("p99_s", "p99 latency"), ("oldest_age_s", "oldest task's age")])
def test_a_faster_plan_that_lets_tasks_wait_is_rejected(field: str, name: str) -> None:
    result = device(latencies(field, 1.5)).run()
    assert result.verdict is Verdict.REJECT
    assert name in result.reason
    assert result.ratio == pytest.approx(1.1)
    assert device(latencies(field, 1.1)).run().verdict is Verdict.COMMIT


def test_a_gain_that_may_cost_latency_waits_until_that_is_sure() -> None:
    """p99 is a quarter worse on average and spreads widely: too little to reject, too much to commit."""

    def figure(side: Side, window: int) -> WindowFigures:
        if side is Side.CONTROL:
            return figures()
        return figures(busy_s=0.05, p99_s=0.0125 * math.exp(-2.0 if window // 2 % 2 else 2.0))

    result = device(figure).run()
    assert result.verdict is Verdict.NO_GAIN
    assert result.reason.startswith("better by more than 2%, but p99 latency grew by 25% (allowed: 20%) over")


def test_a_task_that_waits_for_the_candidate_ends_the_trial_at_once() -> None:
    trial = device(speeds(1.1))
    trial.until(MeasureSide, Side.CANDIDATE)
    core = trial.core
    assert core.tick(trial.now, 0.9) == []
    activate, decide = core.tick(trial.now, 1.1)
    assert activate == Activate(Side.CONTROL)
    assert isinstance(decide, Decide)
    assert decide.result.verdict is Verdict.REJECT
    assert "waited 1.10 s" in decide.result.reason


def test_ages_that_the_control_had_too_do_not_stop_the_candidate() -> None:
    trial = device(speeds(1.1), oldest_age_s=2.0)
    trial.until(MeasureSide, Side.CANDIDATE)
    assert trial.core.tick(trial.now, 3.9) == []
    assert trial.core.tick(trial.now, 4.1) != []


def test_an_old_task_under_the_control_is_not_held_against_the_candidate() -> None:
    """Neither while the control runs nor, until it is twice as old, after the candidate took over."""
    trial = device(speeds(1.1), CONTROL_FIRST)
    trial.until(MeasureSide, Side.CONTROL)
    assert trial.core.tick(trial.now, 50.0) == []
    trial.until(MeasureSide, Side.CANDIDATE)
    assert trial.core.tick(trial.now, 99.0) == []
    assert trial.core.tick(trial.now, 101.0) != []


def aged(ages_s: dict[int, float]) -> Figure:
    """Plans of equal speed; the oldest task's age by window."""
    return lambda side, window: figures(0.008, oldest_age_s=ages_s.get(window, 0.0))


def brake_of(trial: Device, windows: int) -> float:
    """How old a task may become in the candidate's window that follows so many."""
    for _ in range(windows):
        trial.until(MeasureSide)
        trial.step()
    trial.until(MeasureSide, Side.CANDIDATE)
    return trial.core.brake_age_s


def test_a_backlog_that_the_candidate_left_does_not_raise_its_brake() -> None:
    """1. Its second window ends with a task of 0.9 s. 2. The control finds that one and serves it.
    3. In its third window a task waits for 1.5 s: less than twice the 0.9, which were its own."""
    result = device(aged({2: 0.9, 3: 0.9, 4: 1.5}), CONTROL_FIRST).run()
    assert result.verdict is Verdict.REJECT
    assert result.reason == "a task had waited 1.50 s, longer than 1.00 s"


def test_a_wait_since_the_control_took_over_counts_for_it() -> None:
    trial = device(aged({3: 1.2}), CONTROL_FIRST, instance_s=(0.1,))
    assert trial.core.window_s == 2.0
    assert brake_of(trial, 4) == 2.4
    assert brake_of(device(aged({3: 50.0}), CONTROL_FIRST, instance_s=(0.1,)), 4) == pytest.approx(2 * 2.01)


def test_a_backlog_that_outlasts_a_window_of_the_control_counts_for_it() -> None:
    """Where neither plan keeps up both have it: windows 5 and 6 are the control's."""
    assert brake_of(device(aged({5: 0.9}), CONTROL_FIRST), 7) == 1.0
    assert brake_of(device(aged({5: 0.9, 6: 0.9}), CONTROL_FIRST), 7) == 1.8


def test_an_age_that_is_told_before_the_control_took_over_is_the_candidates() -> None:
    trial = device(speeds(1.0), CONTROL_FIRST)
    trial.until(Activate, Side.CANDIDATE)
    trial.step()
    trial.until(Activate, Side.CONTROL)
    assert trial.core.tick(trial.now, 50.0) == []
    assert brake_of(trial, 1) == 1.0


def test_a_candidate_that_fails_tasks_is_rejected_and_one_that_shares_the_fault_is_not() -> None:
    alone = device(lambda side, _: figures(busy_s=0.05, failed=4 if side is Side.CANDIDATE else 0))
    result = alone.run()
    assert result.verdict is Verdict.REJECT
    assert result.reason == "4 of 24 tasks failed"
    assert result.seconds_s == pytest.approx(0.5, abs=0.021)
    both = device(lambda side, _: figures(busy_s=0.05 if side is Side.CANDIDATE else 0.1, failed=4))
    assert both.run().verdict is Verdict.COMMIT


# Crashes and interruptions


def test_a_crash_under_the_candidate_rejects_it() -> None:
    trial = device(speeds(1.1))
    trial.until(MeasureSide, Side.CANDIDATE)
    activate, decide = trial.core.crashed("signal 11", trial.now)
    assert activate == Activate(Side.CONTROL)
    assert isinstance(decide, Decide)
    assert decide.result.verdict is Verdict.REJECT
    assert decide.result.reason == "the candidate crashed: signal 11"


def test_a_crash_under_the_control_condemns_nobody() -> None:
    trial = device(speeds(1.1))
    trial.until(MeasureSide, Side.CONTROL)
    *_, decide = trial.core.crashed("signal 9", trial.now)
    assert isinstance(decide, Decide)
    assert decide.result.verdict is Verdict.ABANDONED


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("running", Side)
def test_a_crash_as_the_plans_change_is_the_newcomers_fault(running: Side, told: bool) -> None:
    """Also where the engine process has not told yet that it launches into the other plan: it may have moved
    instances over."""
    trial = device(speeds(1.1))
    trial.until(Activate, Side.CANDIDATE)
    if running is Side.CONTROL:
        trial.step()
        trial.until(Activate, running)
    if told:
        trial.core.activated(trial.now)
    assert trial.core.settling
    *_, decide = trial.core.crashed("signal 11", trial.now)
    assert isinstance(decide, Decide)
    assert decide.result.verdict is Verdict.REJECT
    assert decide.result.reason == "the engine crashed as the plans changed: signal 11"


def test_a_control_that_never_runs_empty_condemns_nobody() -> None:
    trial = device(speeds(1.1))
    trial.until(Activate, Side.CANDIDATE)
    trial.core.activated(trial.now)
    overdue_s = trial.core.next_wakeup
    assert overdue_s is not None
    *_, decide = trial.core.tick(overdue_s)
    assert isinstance(decide, Decide)
    assert decide.result.verdict is Verdict.ABANDONED
    assert trial.core.stalled


@pytest.mark.parametrize("phase", ["activating", "its steps", "measuring"])
def test_what_never_ends_is_the_fault_of_the_plan_that_it_is_of(phase: str) -> None:
    """The candidate's activation, its steps after its window, its window."""
    trial = device(speeds(1.1))
    trial.until(Activate, Side.CANDIDATE)
    if phase != "activating":
        trial.until(MeasureSide, Side.CANDIDATE)
    if phase == "its steps":
        trial.until(Activate, Side.CONTROL)
        trial.core.activated(trial.now)
    overdue_s = trial.core.next_wakeup
    assert overdue_s is not None
    assert trial.core.tick(overdue_s - 0.001) == []
    *_, decide = trial.core.tick(overdue_s)
    assert isinstance(decide, Decide)
    assert decide.result.verdict is Verdict.REJECT
    assert decide.result.reason == f"the candidate did not end {phase} in time"
    assert trial.core.stalled


def test_an_interrupted_trial_judges_nothing_and_leaves_the_control_running() -> None:
    trial = device(speeds(1.1))
    trial.until(MeasureSide, Side.CANDIDATE)
    activate, decide = trial.core.abandon("generation 8 is desired", trial.now)
    assert activate == Activate(Side.CONTROL)
    assert isinstance(decide, Decide)
    assert (decide.result.verdict, decide.result.reason) == (Verdict.ABANDONED, "generation 8 is desired")


def test_a_record_that_cannot_be_written_ends_the_trial_before_anything_is_touched() -> None:
    core = TrialCore(setup(), Random(0))
    core.begin(0.0)
    (decide,) = core.abandon("the disk is full", 0.1)
    assert isinstance(decide, Decide)
    assert decide.result.verdict is Verdict.ABANDONED


# Arrivals that move


class Moving:
    """A candidate whose speed depends on what arrives."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def figure(self, side: Side, window: int) -> WindowFigures:
        return speeds(self.ratio)(side, window)


def after(moving: Moving, windows: int) -> Device:
    """A trial of which so many windows are over, and nothing is decided."""
    trial = device(moving.figure)
    for _ in range(windows):
        trial.until(MeasureSide)
        trial.step()
    assert trial.core.result is None
    return trial


@pytest.mark.parametrize(("before", "now", "verdict"), [(0.9, 1.2, "commit"), (1.15, 0.85, "reject")])
def test_what_was_found_under_other_arrivals_does_not_count(before: float, now: float, verdict: str) -> None:
    moving = Moving(before)
    trial = after(moving, 14)
    assert trial.core.pairs == 7
    moving.ratio = now
    trial.core.arrivals_moved(trial.now)
    assert trial.core.pairs == 0
    result = trial.run()
    assert result.verdict.value == verdict
    assert result.ratio == pytest.approx(now, rel=0.03)


def test_a_pair_that_began_before_arrivals_moved_does_not_count() -> None:
    moving = Moving(10.0)
    trial = after(moving, 1)
    moving.ratio = 1.1
    trial.core.arrivals_moved(trial.now)
    result = trial.run()
    assert result.ratio == pytest.approx(1.1, rel=0.03)


def test_pairs_since_arrivals_moved_count_although_that_is_told_later() -> None:
    moving = Moving(1.0)
    trial = after(moving, 12)
    since_s, moving.ratio = trial.now, 1.2
    for _ in range(14):
        trial.until(MeasureSide)
        trial.step()
    assert trial.core.pairs == 13
    trial.core.arrivals_moved(since_s)
    assert trial.core.pairs == 7
    assert trial.core.ratio == pytest.approx(1.2, rel=0.03)
    result = trial.run()
    assert (result.verdict, result.pairs) == (Verdict.COMMIT, 8)


def test_too_few_pairs_since_arrivals_moved_are_no_verdict_and_the_end_is_when_it_was_announced() -> None:
    moving = Moving(1.0)
    trial = device(moving.figure)
    while trial.now < trial.core.ends_s - 2.0:
        trial.step()
    moving.ratio = 1.1
    trial.core.arrivals_moved(trial.now)
    result = trial.run()
    assert result.verdict is Verdict.ABANDONED
    assert result.reason.startswith("arrivals moved meanwhile: only ")
    assert trial.now <= trial.core.ends_s


def test_a_record_found_at_boot_means_rejected() -> None:
    result = found_at_boot(RECORD)
    assert result.verdict is Verdict.REJECT
    assert "stopped during the trial" in result.reason


@pytest.mark.parametrize("seed", range(200))
def test_any_events_in_any_order_end_in_one_decision(seed: int) -> None:
    """Invariants: the candidate runs only after the record, one decision, nothing after it, always an end."""
    rng = Random(seed)
    core = TrialCore(setup(), Random(seed))
    now, window, done = 0.0, 0, list(core.begin(0.0))
    while core.result is None:
        now += rng.choice((0.0, 0.01, 0.1, 1.0))
        event = rng.randrange(60)
        if event == 0:
            actions = core.crashed("at random", now)
        elif event == 1:
            actions = core.abandon("at random", now)
        elif event == 2:
            core.arrivals_moved(now - rng.choice((0.0, 5.0)))
            continue
        elif event < 10:
            actions = core.window_ended(
                rng.choice((window, window, 0)), figures(failed=rng.randrange(2)), now
            )
        elif event < 20:
            actions = core.settled(now)
        elif event < 30:
            actions = core.activated(now)
        elif event < 40:
            actions = core.recorded(now)
        else:
            actions = core.tick(now, rng.random() * 1.01)
        done += actions
        window = max([window, *(a.window for a in actions if isinstance(a, MeasureSide))])
    assert done[0] == SaveRecord(RECORD)
    assert [type(a) for a in done].count(Decide) == 1
    assert done[-1] == Decide(core.result)
    assert now <= 60.0 + 1.0
    if any(isinstance(a, MeasureSide | Activate) for a in done):
        wanted = Side.CANDIDATE if core.result.verdict is Verdict.COMMIT else Side.CONTROL
        assert done[-2] == Activate(wanted)

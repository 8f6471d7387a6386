"""What the pairs of a trial decide: latency and busy seconds, tasks per second, guards, and the words."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import ValidationError, convert

from stageloom.shared.engine.evidence import Evidence, Figure
from stageloom.shared.engine.trial import TrialConfig
from tests.engine.trials import figures


def evidence(config: TrialConfig | None = None) -> Evidence:
    """Of one model, with the settings of a trial."""
    config = config or TrialConfig()
    return Evidence(
        (0.005,),
        min_pairs=config.min_pairs,
        confidence=config.confidence,
        gain=config.gain,
        worth=config.worth,
        guard=config.guard,
        age_floor_s=config.age_floor_s,
        early_pairs=config.early_pairs,
        gross=config.gross,
        spared=config.spared,
    )


def seen(
    latency: float, busy: float, *, pairs: int = 8, spread: float = 0.0, **candidate: object
) -> Evidence:
    """Pairs in which the candidate has so much of the control's latency and of its busy seconds."""
    found, rng = evidence(), Random(1)
    for _ in range(pairs):
        noise = math.exp(rng.gauss(0.0, spread))
        control = figures(0.008, busy_s=0.1)
        found.take(control, figures(0.008 * latency * noise, busy_s=0.1 * busy, **candidate))
    return found


@pytest.mark.parametrize("most", [0.999, 1.0, 10.0])
@pytest.mark.parametrize("setting", ["gain", "gross"])
def test_a_setting_that_is_taken_never_stops_a_trial(setting: str, most: float) -> None:
    """Nothing is worse by all of it: 1.0 is refused, not found out when a trial first looks."""
    try:
        config = convert({setting: most}, TrialConfig)
    except ValidationError:
        assert most >= 1.0
        return
    for candidate in (figures(0.008), figures(0.8), figures(0.008, saturated=True)):
        found = evidence(config)
        for _ in range(config.min_pairs):
            found.take(figures(0.008), candidate)
            found.decision()


@pytest.mark.parametrize(
    ("latency", "busy", "better", "figure"),
    [
        (0.66, 1.0, True, Figure.LATENCY),
        (0.97, 1.0, True, Figure.LATENCY),
        (1.0, 0.9, True, Figure.BUSY),
        (0.9, 0.9, True, Figure.LATENCY),
        (0.66, 1.3, True, Figure.LATENCY),  # paid for with busy seconds
        (0.97, 1.03, False, Figure.BUSY),  # 3 % is not worth it
        (1.1, 0.5, False, Figure.LATENCY),  # users see it, whatever it saves
        (1.0, 1.1, False, Figure.BUSY),
        (1.05, 1.05, False, Figure.LATENCY),
    ],
)
def test_two_figures_decide_together(latency: float, busy: float, better: bool, figure: Figure) -> None:
    found = seen(latency, busy)
    decision = found.decision()
    assert decision is not None
    assert (decision[0], found.figure) == (better, figure)


@pytest.mark.parametrize(("latency", "busy"), [(1.0, 1.0), (0.985, 1.0), (1.015, 0.985), (1.0, 1.015)])
def test_differences_below_two_percent_decide_nothing(latency: float, busy: float) -> None:
    assert seen(latency, busy).decision() is None


def test_busy_seconds_do_not_commit_while_latency_looks_worse() -> None:
    """1. Latency is a fifth worse on average, but too widely spread to be sure. 2. Nothing is decided."""
    found = seen(1.2, 0.8, spread=0.3)
    assert found.decision() is None
    assert "latency may have paid for it" in found.undecided()


def test_a_small_latency_gain_waits_while_busy_seconds_look_worse() -> None:
    found = evidence()
    for pair in range(8):
        busy_s = 0.1 * (0.7 if pair % 2 else 1.6)
        found.take(figures(), figures(0.008 * 0.95, busy_s=busy_s))
    assert found.decision() is None
    assert "not by the 10%" in found.undecided()


def test_saturated_pairs_are_judged_by_tasks_per_second_alone() -> None:
    found = evidence()
    for _ in range(8):
        found.take(figures(saturated=True), figures(0.02, saturated=True, completed=(22,), busy_s=0.3))
    assert found.decision() == (True, "better by more than 2%: 1.10 times as many tasks per second")
    assert found.figure is Figure.RATE
    assert found.logs.count == found.pairs == 8


def test_what_most_pairs_were_decides_which_figure_is_looked_at() -> None:
    found = seen(1.0, 1.0, pairs=9)
    for _ in range(8):
        found.take(figures(saturated=True), figures(saturated=True, completed=(30,)))
    assert found.figure is Figure.LATENCY
    assert found.decision() is None
    for _ in range(2):
        found.take(figures(saturated=True), figures(saturated=True, completed=(30,)))
    assert found.decision() == (True, "better by more than 2%: 1.50 times as many tasks per second")


def test_a_pair_without_a_task_on_one_side_is_silent() -> None:
    found = evidence()
    found.take(figures(judged=(0,), log_latency=(0.0,)), figures())
    assert (found.pairs, found.silent) == (0, 1)


def test_fewer_tasks_in_time_reject_whatever_the_figures_say() -> None:
    found = seen(0.5, 0.5, in_time=18)
    assert found.decision() == (False, "90% of tasks in time instead of 100% over 8 pairs")
    assert seen(0.5, 0.5, pairs=7, in_time=18).decision() is None
    assert seen(0.5, 0.5, due=1000, in_time=990).decision() is None, "one in a hundred is no harm, nor a gain"
    decision = seen(0.5, 0.5, due=1000, in_time=996).decision()
    assert decision is not None
    assert decision[0], "four in a thousand are no difference"


@pytest.mark.parametrize(
    ("latency", "in_time", "decision"),
    [
        (0.5, 20, (True, "better by more than 25%: latency 0.50 of before")),
        (0.79, 20, (True, "better by more than 25%: latency 0.79 of before")),
        (0.81, 20, None),
        (1.3, 20, None),
        (1.4, 20, (False, "worse by more than 25%: latency 1.40 of before")),
        (0.5, 14, (False, "70% of tasks in time instead of 100% over 4 pairs")),
        (0.5, 16, None),  # a harm, but none that cannot wait for the eighth pair
    ],
)
def test_what_nobody_could_overlook_is_decided_after_four_pairs(
    latency: float, in_time: int, decision: tuple[bool, str] | None
) -> None:
    assert seen(latency, 1.0, pairs=4, in_time=in_time).decision() == decision
    assert seen(latency, 1.0, pairs=3, in_time=in_time).decision() is None


def test_a_gross_difference_that_spreads_as_widely_waits() -> None:
    found = evidence()
    for pair in range(4):
        found.take(figures(), figures(0.008 * (0.1 if pair % 2 else 0.9)))
    assert found.decision() is None


def test_tasks_per_second_are_looked_at_early_too() -> None:
    found = evidence()
    for _ in range(4):
        found.take(figures(saturated=True), figures(saturated=True, completed=(30,)))
    assert found.decision() == (True, "better by more than 25%: 1.50 times as many tasks per second")


def test_tasks_in_time_are_told_where_they_differ() -> None:
    found = evidence()
    for _ in range(8):
        found.take(figures(due=100, in_time=84), figures(0.008 * 0.66, due=100, in_time=93))
    decision = (
        True,
        "better by more than 2%: latency 0.66 of before, 93% of tasks in time instead of 84%",
    )
    assert found.decision() == decision


@pytest.mark.parametrize(
    ("latency", "busy", "in_time", "better", "figure"),
    [
        (1.0, 1.0, 99, True, Figure.IN_TIME),  # short tasks, which hardly count by their work
        (1.05, 1.05, 99, True, Figure.IN_TIME),  # paid for with less than it is worth
        (1.0, 0.9, 99, True, Figure.BUSY),
        (1.15, 1.0, 99, False, Figure.LATENCY),  # a tenth more tasks do not pay for that
        (1.0, 1.15, 99, False, Figure.BUSY),
        (1.05, 1.0, 91, False, Figure.LATENCY),
    ],
)
def test_tasks_in_time_are_a_gain_by_themselves_that_others_pay_less_for(
    latency: float, busy: float, in_time: int, better: bool, figure: Figure
) -> None:
    found = evidence()
    for _ in range(8):
        control = figures(busy_s=0.1, due=100, in_time=90)
        found.take(control, figures(0.008 * latency, busy_s=0.1 * busy, due=100, in_time=in_time))
    decision = found.decision()
    assert decision is not None
    assert (decision[0], found.figure) == (better, figure)
    if figure is Figure.IN_TIME:
        assert found.said(
            figure
        ) == f"99% of tasks in time instead of 90%, latency {latency:.2f} of before" + (
            f" for {busy:.2f} of the busy time per task" if busy > 1.0 else ""
        )
        assert found.ratio_of(figure) == pytest.approx(100 / 91)


def test_tasks_in_time_count_where_tasks_wait_all_the_time_too() -> None:
    found = evidence()
    for _ in range(8):
        control = figures(saturated=True, due=100, in_time=50)
        found.take(control, figures(saturated=True, completed=(19,), due=100, in_time=60))
    assert found.decision() == (
        True,
        "better by more than 2%: 60% of tasks in time instead of 50%, 0.95 times as many tasks per second",
    )


def test_a_loss_is_not_sure_while_tasks_in_time_may_pay_for_it() -> None:
    found = evidence()
    for pair in range(8):
        in_time = 99 if pair % 2 else 88  # widely spread: by 5 % more on average
        found.take(figures(due=100, in_time=89), figures(0.008 * 1.06, due=100, in_time=in_time))
    assert found.decision() is None
    assert "latency 1.06 of before, 94% of tasks in time instead of 89%" in found.undecided()


def test_a_longer_tail_is_no_harm_where_it_has_what_was_given_up_before() -> None:
    found = evidence()
    for _ in range(8):
        found.take(figures(due=100, in_time=80), figures(p99_s=0.03, due=100, in_time=95))
    assert found.decision() == (
        True,
        "better by more than 2%: 95% of tasks in time instead of 80%, latency 1.00 of before",
    )
    found = evidence()
    for _ in range(8):
        found.take(figures(due=100, in_time=80), figures(p99_s=0.03, due=100, in_time=80))
    assert found.decision() == (False, "p99 latency is 200% worse over 8 pairs")


def test_windows_without_a_task_in_time_say_little_of_them() -> None:
    found = evidence()
    for _ in range(8):
        found.take(figures(due=2, in_time=0), figures(due=2, in_time=0))
    assert found.ratio_of(Figure.IN_TIME) == 1.0
    found.take(figures(due=0, in_time=0), figures(due=2, in_time=2))
    assert found.ratio_of(Figure.IN_TIME) == 1.0


def test_the_reason_says_what_a_gain_was_paid_with() -> None:
    decision = seen(0.66, 1.12).decision()
    assert decision == (
        True,
        "better by more than 2%: latency 0.66 of before for 1.12 of the busy time per task",
    )
    decision = seen(1.0, 0.9).decision()
    assert decision == (True, "better by more than 2%: busy time per task 0.90 of before, latency 1.00")


_FACTORS = st.floats(0.3, 3.0)


@given(_FACTORS, _FACTORS, st.floats(0.0, 0.5), st.integers(2, 60), st.integers(0, 20))
def test_what_takes_over_is_never_worse_in_what_was_measured(
    latency: float, busy: float, spread: float, pairs: int, in_time: int
) -> None:
    """A commit: one figure is better on average and none worse by as much; a rejection: one is worse."""
    found, rng = evidence(), Random(1)
    for _ in range(pairs):
        noise = math.exp(rng.gauss(0.0, spread))
        control = figures(0.008, busy_s=0.1, due=20, in_time=10)
        candidate = figures(0.008 * latency * noise, busy_s=0.1 * busy, due=20, in_time=in_time)
        found.take(control, candidate)
    decision = found.decision()
    if decision is None:
        return
    assert pairs >= 4
    ratios = [found.ratio_of(figure) or 1.0 for figure in (Figure.LATENCY, Figure.BUSY)]
    more = found.ratio_of(Figure.IN_TIME) or 1.0
    if pairs < 8:
        assert max(ratios[0], 1 / ratios[0], more, 1 / more) > 1.25, "nobody could overlook it"
    if found.figure is Figure.IN_TIME:
        assert decision[0]
        assert more > 1.02
        assert min(ratios) * more >= 1.0 - 1e-9
        return
    if more < 0.98:
        return  # what that may cost is said elsewhere
    if decision[0]:
        assert max(ratios) > 1.02
        assert ratios[0] >= 0.98
        assert ratios[1] >= 0.98 or ratios[0] > 1.1
    else:
        assert min(ratios) < 0.98

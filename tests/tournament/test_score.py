"""Figures of windows, and which of two plans is better."""

from dataclasses import replace
from itertools import permutations

import pytest

from stageloom.planner.tournament.score import (
    Score,
    best_first,
    best_of,
    better,
    figures_of,
    improves,
    score_of,
    surely_better,
)
from stageloom.planner.twin.arrivals import Periodic
from stageloom.planner.twin.reference import Twin
from tests.engine.plans import chains
from tests.twin.cases import measured

SOME = Score(
    throughput_per_s=100.0,
    throughput_spread=1.0,
    p99_s=0.1,
    p99_spread=0.01,
    utilisation=0.5,
    utilisation_spread=0.0,
    queue_variance=0.0,
    queue_variance_spread=0.0,
    variance_growth=0.0,
    met=1.0,
)


@pytest.mark.promise("rival-takes-part-comparison")
@pytest.mark.parametrize(
    ("changed", "wins"),
    [
        ({"throughput_per_s": 101.5}, True),
        ({"throughput_per_s": 98.5, "p99_s": 0.01}, False),
        ({"throughput_per_s": 100.9, "p99_s": 0.11}, False),
        ({"throughput_per_s": 99.1, "p99_s": 0.09}, True),
        ({"throughput_per_s": 102.0, "throughput_spread": 3.0, "p99_s": 0.11}, False),
    ],
)
def test_throughput_decides_and_p99_where_it_is_equal_within_spread(
    changed: dict[str, float], wins: bool
) -> None:
    assert better(replace(SOME, **changed), SOME) is wins


def test_a_tiny_difference_is_none_even_where_all_seeds_agree() -> None:
    exact = replace(SOME, throughput_spread=0.0)
    assert not better(replace(exact, throughput_per_s=100.4, p99_s=0.2), exact)


@pytest.mark.parametrize(
    ("gain", "p99_s", "wins"),
    [
        (1.6, 0.2, True),
        (1.4, 0.2, False),  # better by these arrivals, worse by others that bring half a spread less
        (1.4, 0.09, True),
        (-0.4, 0.09, True),
        (-0.6, 0.09, False),
        (0.0, 0.11, False),
    ],
)
def test_what_is_surely_better_would_be_with_half_a_spread_more_or_less(
    gain: float, p99_s: float, wins: bool
) -> None:
    one = replace(SOME, throughput_per_s=100.0 + gain, p99_s=p99_s)
    assert surely_better(one, SOME) is wins
    assert better(one, SOME) or not wins


def test_throughput_does_not_fall_along_plans_that_are_each_level_with_the_one_before() -> None:
    """0.9 less is within the spread and 1.8 less is not, however much shorter the p99."""
    held = replace(SOME, throughput_per_s=99.1, p99_s=0.09)
    third = replace(SOME, throughput_per_s=98.2, p99_s=0.08)
    assert better(held, SOME) and better(third, held)
    assert improves(held, SOME, SOME) and not improves(third, held, SOME)
    assert improves(replace(third, throughput_per_s=99.0), held, SOME)


def test_the_best_of_some_is_the_same_in_any_order_and_level_with_the_most_throughput() -> None:
    """Each is level with the one before and shorter in p99, and the third is not level with the first."""
    second = replace(SOME, throughput_per_s=99.1, p99_s=0.09)
    third = replace(SOME, throughput_per_s=98.2, p99_s=0.08)
    for order in permutations([SOME, second, third]):
        assert order[best_of(order)] == second
        assert [order[place] for place in best_first(order)] == [second, SOME, third]


def test_figures_of_a_saturated_model_are_those_of_its_queue() -> None:
    """Two models of which one is overloaded: service 0.5 s, a task every 0.25 s; the other idles."""
    bound = chains(1, 1)
    arrivals = {"a": Periodic(rate_per_s=4.0), "b": Periodic(rate_per_s=0.001, offset_s=1e6)}
    twin = Twin(measured(bound, {"a": 0.5, "b": 0.5}), arrivals)
    twin.deploy(bound)
    windows = [twin.run(1.0) for _ in range(8)]
    found = figures_of(windows, [0.5, 0.5])
    assert found.throughput_per_s == pytest.approx(15 / 8)  # the first ends after 0.5 s
    assert found.utilisation == pytest.approx(1.0)
    assert found.met == pytest.approx(15 / 32)
    assert found.variance_growth > 0.0
    # Two tasks a second are left over; the one that runs and the one that is next are not in the queue.
    waiting = [max(2 * (at / 10) - 2, 0.0) for at in range(80)]
    assert found.queue_variance == pytest.approx(
        sum((tasks * 0.5 / 2) ** 2 for tasks in waiting) / 80, rel=0.05
    )


def test_nothing_that_came_is_nothing_missed() -> None:
    bound = chains(1)
    twin = Twin(measured(bound, {"a": 0.5}), {"a": Periodic(rate_per_s=0.1, offset_s=1e6)})
    twin.deploy(bound)
    found = figures_of([twin.run(1.0)], [0.5])
    assert (found.throughput_per_s, found.p99_s, found.met) == (0.0, 0.0, 1.0)


def test_seconds_in_which_nothing_ran_served_nothing() -> None:
    bound = chains(1)
    twin = Twin(measured(bound, {"a": 0.5}), {"a": Periodic(rate_per_s=4.0)})
    twin.deploy(bound)
    window = twin.run(2.0)
    ran, halted = figures_of([window], [0.5]), figures_of([window], [0.5], idle_s=2.0)
    assert (halted.throughput_per_s, halted.utilisation) == (ran.throughput_per_s / 2, ran.utilisation / 2)
    assert figures_of([], [0.5], idle_s=2.0).throughput_per_s == 0.0


def test_spreads_are_half_of_the_range_over_seeds() -> None:
    one = Score(
        throughput_per_s=10.0, p99_s=0.1, utilisation=0.5, queue_variance=1.0, variance_growth=0.0, met=1.0
    )
    other = replace(one, throughput_per_s=14.0, p99_s=0.3)
    score = score_of([one, other])
    assert (score.throughput_per_s, score.throughput_spread) == (12.0, 2.0)
    assert [score.p99_s, score.p99_spread] == pytest.approx([0.2, 0.1])
    assert score.queue_variance_spread == 0.0

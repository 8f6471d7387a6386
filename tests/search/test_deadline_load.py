"""The load that lanes carry within deadlines."""

import math
from itertools import accumulate
from random import Random

import pytest

from stageloom.shared.search.deadline_load import load_within_deadlines, shares_in_time
from stageloom.shared.search.lane_load import ServedModel


def served(blocks_s: tuple[float, ...], deadline_s: float, weight: float = 1.0) -> ServedModel:
    return ServedModel(blocks_s=blocks_s, deadline_s=deadline_s, weight=weight)


def erlang_b(load: float, lanes: int) -> float:
    """The share of calls that find every one of the lanes busy."""
    terms = [load**n / math.factorial(n) for n in range(lanes + 1)]
    return terms[-1] / math.fsum(terms)


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("load", [0.2, 0.8, 2.0])
def test_tasks_that_cannot_wait_are_lost_as_often_as_erlang_says(lanes: int, load: float) -> None:
    random = Random(1)
    instants = accumulate(random.expovariate(load) for _ in range(100_000))
    (share,) = shares_in_time([served((1.0,), 1.0 + 1e-9)], lanes, [(at, 0) for at in instants])
    assert share == pytest.approx(1.0 - erlang_b(load, lanes), abs=0.005)


def test_the_load_of_tasks_that_cannot_wait_follows_from_erlang_s_formula() -> None:
    model = served((0.010,), 0.010 + 1e-9)
    for lanes in (1, 2, 8):
        found = load_within_deadlines([model], lanes, tasks=40_000)
        assert erlang_b(found * 0.010, lanes) == pytest.approx(0.05, abs=0.01)


def test_the_earliest_deadline_goes_first_and_no_step_is_interrupted() -> None:
    long, short = (
        served((10.0,), 100.0),
        served((1.0,), 3.0),
    )
    # One lane. The long one began; of what waits the short ones go first, and those too late are given up.
    arrivals = [(0.0, 0), (1.0, 0), (8.0, 1), (8.5, 1), (9.9, 1)]
    assert shares_in_time([long, short], 1, arrivals) == [1.0, pytest.approx(2 / 3)]


def test_a_task_that_is_due_sooner_goes_between_the_blocks_of_a_long_one() -> None:
    arrivals = [(0.0, 0), (1.0, 1)]
    short = served((1.0,), 6.5)
    assert shares_in_time([served((10.0,), 12.0), short], 1, arrivals) == [1.0, 0.0]
    assert shares_in_time([served((5.0, 5.0), 12.0), short], 1, arrivals) == [
        1.0,
        1.0,
    ]
    assert shares_in_time([served((5.0, 5.0), 10.5), short], 1, arrivals) == [
        0.0,
        1.0,
    ]


def test_a_model_without_tasks_is_in_time() -> None:
    assert shares_in_time([served((1.0,), 1.0)], 1, []) == [1.0]


def test_twice_the_speed_carries_twice_the_load() -> None:
    models = [
        served((0.04, 0.04), 0.4),
        served((0.01,), 0.05, weight=3.0),
    ]
    twice = [
        served((0.02, 0.02), 0.2),
        served((0.005,), 0.025, weight=3.0),
    ]
    assert load_within_deadlines(twice, 2) == pytest.approx(2.0 * load_within_deadlines(models, 2))


def test_a_load_below_what_is_asked_for_is_not_worked_out() -> None:
    models = [served((0.05,), 0.25), served((0.01,), 0.05)]
    carried = load_within_deadlines(models, 2)
    assert load_within_deadlines(models, 2, at_least=0.9 * carried) == carried
    assert load_within_deadlines(models, 2, at_least=1.1 * carried) == 0.0
    assert load_within_deadlines(models, 2, at_least=100.0 * carried) == 0.0


def test_more_lanes_carry_more_and_never_more_than_all_of_them_have_time_for() -> None:
    models = [served((0.05,), 0.25), served((0.01,), 0.05)]
    carried = [load_within_deadlines(models, lanes) for lanes in (1, 2, 4)]
    assert carried == sorted(carried)
    assert all(load * 0.03 < lanes / 0.94 for load, lanes in zip(carried, (1, 2, 4), strict=True))

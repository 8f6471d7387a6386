"""Gaps to the bound and to the optimum, against closed forms and against listing every schedule."""

from random import Random

import pytest

from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.baselines import sequential
from stageloom.shared.search.comparison import bound_s, gap, judged, optimum_s, shape, standing, subject
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.ios import brute
from stageloom.shared.search.registry import schedulers
from tests.search.graphs import CHAIN, DIAMOND, union

FREE = Limits()
MUCH = Budget(expansions=10**9)


@pytest.mark.promise("gaps-those-closed-forms")
def test_a_chain_in_turn_is_proven_optimal_and_a_diamond_in_turn_is_a_third_above() -> None:
    """Without contention a diamond of four seconds takes three, which is its bound and its optimum."""
    chain, diamond = union(CHAIN), union(DIAMOND)
    blocks = [(one, StageCosts((1.0,) * one.size, contention=0.0)) for one in (chain, diamond)]
    of = [subject(name, [block], FREE, MUCH) for name, block in zip("cd", blocks, strict=True)]
    found = [standing(one, "sequential", FREE, MUCH, lambda: 0.0) for one in of]
    assert (found[0].over_bound, found[0].over_optimum) == (0.0, 0.0)
    assert found[1].over_bound == found[1].over_optimum == pytest.approx(1.0 / 3.0)
    assert standing(of[1], "ios", FREE, MUCH, lambda: 0.0).over_bound == 0.0


def test_a_subject_of_several_blocks_is_their_sum_and_takes_the_time_that_the_clock_says() -> None:
    block = union(DIAMOND), StageCosts((1.0,) * 4, contention=0.0)
    clock = iter([10.0, 10.5])
    of = subject("two", [block, block], FREE, MUCH)
    found = standing(of, "greedy", FREE, MUCH, lambda: next(clock))
    assert (found.predicted_s, found.bound_s, found.optimum_s, found.search_s) == (6.0, 6.0, 6.0, 0.5)
    assert found.shape == shape(found.schedules) and found.shape.stages == 6 and found.shape.groups_max == 2
    streams = standing(subject("two", [block], FREE, MUCH), "nimble", FREE, MUCH, lambda: 0.0)
    assert (streams.shape.stages, streams.shape.streams_max) == (None, 2)


@pytest.mark.promise("gaps-those-closed-forms")
def test_the_optimum_is_the_cheapest_of_all_schedules_listed_and_no_scheduler_of_stages_is_below_it() -> None:
    for number in range(30):
        rng = Random(number)
        rows = [[before for before in range(op) if rng.random() < 0.3] for op in range(rng.randint(1, 6))]
        graph = union(rows)
        times = tuple(rng.uniform(0.1, 1.0) for _ in rows)
        costs = StageCosts(times, contention=rng.random(), barrier_s=0.05)
        limits = Limits(r=rng.choice((None, 2)), s=rng.choice((None, 2)))
        best_s = optimum_s([(graph, costs)], limits, MUCH)
        assert best_s == pytest.approx(costs.schedule_s(brute(graph, costs, limits, MUCH)))
        of = subject("drawn", [(graph, costs)], limits, MUCH)
        for name in schedulers():
            found = standing(of, name, limits, Budget(expansions=500), lambda: 0.0)
            assert found.over_bound >= -1e-9
            assert found.shape.stages is None or (found.over_optimum or 0.0) >= -1e-9


def test_an_optimum_beyond_the_budget_is_not_known_and_no_gap_is_claimed() -> None:
    graph = union([[] for _ in range(9)])
    of = subject("wide", [(graph, StageCosts((1.0,) * 9))], FREE, Budget(expansions=3))
    assert of.optimum_s is None
    found = judged(of, "sequential", (sequential(graph, of.blocks[0][1], FREE, MUCH),), FREE, 0.0)
    assert found.over_optimum is None


def test_nothing_is_above_a_bound_of_no_seconds() -> None:
    assert gap(0.0, 0.0) == 0.0 and gap(1.0, 0.0) == 0.0 and gap(3.0, 2.0) == 0.5


def test_groups_on_a_resource_each_are_not_below_the_bound_of_their_schedule() -> None:
    """Two operators of a second, each of which would need the whole of one resource."""
    graph, apart = union([[], []]), StageSchedule((Stage(((0,), (1,)), False, (0, 1)),))
    for costs in (StageCosts((1.0, 1.0)), StageCosts((1.0, 1.0), contention=0.0, work_s=(1.0, 1.0))):
        assert costs.schedule_s(apart) == bound_s(apart, (graph, costs), FREE) == 1.0
        assert bound_s(sequential(graph, costs, FREE, MUCH), (graph, costs), FREE) == 2.0

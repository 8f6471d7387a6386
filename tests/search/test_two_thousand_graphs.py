"""What the search promises, on 2,000 random graphs each; `make test` looks at a few of them.

A graph is drawn from its number, so the same 2,000 are looked at every time.
"""

from collections.abc import Iterable
from itertools import pairwise
from random import Random

import pytest

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import StageSchedule, StreamSchedule
from stageloom.shared.search.conformance import schedule_faults
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import Endings, GroupRule
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.ios import brute, ios
from stageloom.shared.search.makespan import lower_bounds, schedule_s
from stageloom.shared.search.ranking import RankedEndings
from stageloom.shared.search.registry import schedulers, searches
from tests.search import brute as definition
from tests.search.graphs import union

FEW, ALL = 40, 2000
BATCH = 250
MUCH = Budget(expansions=10**9)


def drawn(number: int, most: int) -> tuple[CombinedGraph, StageCosts, Limits]:
    """One to three members with `most` operators at most in all, costs and limits."""
    rng = Random(number)
    size = rng.randint(1, most)
    borders = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 2)))})
    density = rng.choice((0.1, 0.2, 0.35, 0.6))
    members = [
        [[before for before in range(op) if rng.random() < density] for op in range(stop - start)]
        for start, stop in pairwise(borders)
    ]
    graph = union(*members)
    costs = StageCosts(
        tuple(rng.uniform(0.01, 1.0) for _ in range(size)),
        contention=rng.random(),
        barrier_s=rng.choice((0.0, 0.05, 0.2)),
    )
    return graph, costs, Limits(r=rng.choice((None, 1, 2, 3)), s=rng.choice((None, 1, 2, 3)))


def batches() -> Iterable[object]:
    yield pytest.param(range(FEW), id="few")
    for first in range(FEW, ALL, BATCH):
        numbers = range(first, min(first + BATCH, ALL))
        marks = [pytest.mark.full, pytest.mark.timeout(1800)]
        yield pytest.param(numbers, id=f"{first}-{numbers[-1]}", marks=marks)


every_graph = pytest.mark.parametrize("numbers", list(batches()))


@every_graph
@pytest.mark.parametrize("rule", GroupRule)
def test_enumeration_equals_the_definition_and_unrank_numbers_every_ending_once(
    numbers: range, rule: GroupRule
) -> None:
    for number in numbers:
        graph, _, limits = drawn(number, 10)
        endings = Endings(graph, rule=rule, r=limits.r, s=limits.s)
        for state in definition.states(graph):
            listed = endings.endings(state)
            wanted = definition.endings(graph, state, rule, limits.r, limits.s)
            assert len(listed) == len(wanted)
            assert set(listed) == wanted
            ranked = RankedEndings(endings, state)
            numbered = [ranked.unrank(index) for index in range(ranked.count)]
            assert len(numbered) == len(wanted)
            assert set(numbered) == wanted
            assert all(ranked.rank(ending) == index for index, ending in enumerate(numbered))


@pytest.mark.promise("ios-optimum-over-schedules")
@every_graph
@pytest.mark.parametrize("rule", GroupRule)
def test_ios_is_the_cheapest_of_all_schedules_listed(numbers: range, rule: GroupRule) -> None:
    for number in numbers:
        graph, costs, limits = drawn(number, 7)
        found = ios(graph, costs, limits, Budget(), rule=rule)
        listed = brute(graph, costs, limits, MUCH, rule=rule)
        assert costs.schedule_s(found) == pytest.approx(costs.schedule_s(listed), rel=1e-9)


@pytest.mark.promise("ios-optimum-over-schedules")
@every_graph
def test_every_scheduler_is_legal_and_no_search_is_worse_than_sequential(numbers: range) -> None:
    for number in numbers:
        graph, costs, limits = drawn(number, 10)
        for name, scheduler in schedulers().items():
            found = scheduler(graph, costs, limits, Budget(expansions=1000))
            assert schedule_faults(found, graph, limits) == []
            seconds = schedule_s(found, graph, costs)
            if searches(name):
                assert isinstance(found, StageSchedule)
                assert seconds <= sum(costs.operators_s) * (1 + 1e-12)
            allowed = Limits() if isinstance(found, StreamSchedule) else limits
            assert seconds >= max(lower_bounds(graph, costs, allowed)) * (1 - 1e-9)


def test_brute_force_is_the_optimum_of_the_definition() -> None:
    for number in range(FEW):
        for rule in GroupRule:
            graph, costs, limits = drawn(number, 6)
            listed = costs.schedule_s(brute(graph, costs, limits, MUCH, rule=rule))
            best_s = definition.optimum_s(graph, costs, rule, limits.r, limits.s)
            assert listed == pytest.approx(best_s, rel=1e-9)

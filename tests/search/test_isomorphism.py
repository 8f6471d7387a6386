"""Blocks that differ in nothing but numbering: one form, one search, schedules that carry over."""

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.algorithms import networks
from stageloom.shared.bitmask import bits, mask_of
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.legality import violations
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.ios import ios
from stageloom.shared.search.isomorphism import Shared, form, translated
from tests.search.graphs import CHAIN, DIAMOND, union, unions

SECONDS = (1.0, 2.0, 3.0)


@st.composite
def twins(draw: st.DrawFn) -> tuple[tuple[CombinedGraph, StageCosts], tuple[CombinedGraph, StageCosts]]:
    """A block, and the same with its operators in another topological order within each member."""
    graph = draw(unions(max_ops=6))
    seconds = draw(st.lists(st.sampled_from(SECONDS), min_size=graph.size, max_size=graph.size))
    costs = StageCosts(tuple(seconds), contention=0.25, barrier_s=0.125)
    choose = draw(st.randoms(use_true_random=False)).choice
    return (graph, costs), renumbered(graph, costs, shuffled(graph, choose))


def shuffled(graph: CombinedGraph, choose: Callable[[list[int]], int]) -> list[int]:
    """A topological order, member by member."""
    order: list[int] = []
    for member in range(graph.num_members):
        left = list(bits(graph.member_mask(member)))
        while left:
            ready = [op for op in left if not any(one in left for one in bits(graph.predecessors[op]))]
            order.append(choose(ready))
            left.remove(order[-1])
    return order


def renumbered(
    graph: CombinedGraph, costs: StageCosts, order: Sequence[int]
) -> tuple[CombinedGraph, StageCosts]:
    place = {op: index for index, op in enumerate(order)}
    rows = tuple(mask_of(place[one] for one in bits(graph.predecessors[op])) for op in order)
    return CombinedGraph(graph.offsets, graph.starts, rows), StageCosts(
        tuple(costs.operators_s[op] for op in order), costs.contention, costs.barrier_s
    )


@settings(deadline=None)
@given(twins())
def test_schedule_of_a_block_carries_over_to_one_of_an_equal_form(
    both: tuple[tuple[CombinedGraph, StageCosts], tuple[CombinedGraph, StageCosts]],
) -> None:
    (graph, costs), (other, other_costs) = both
    one, two = form(graph, costs), form(other, other_costs)
    assume(one.key == two.key)
    schedule = ios(graph, costs, Limits(r=2, s=3), Budget(expansions=2000))
    carried = translated(schedule, one, two)
    assert violations(carried, other, r=2, s=3) == []
    assert abs(other_costs.schedule_s(carried) - costs.schedule_s(schedule)) < 1e-9
    assert isinstance(carried, StageSchedule)


@settings(deadline=None)
@given(graph=unions(max_ops=6), seed=st.randoms(use_true_random=False))
def test_blocks_whose_operators_differ_have_one_form_however_they_are_numbered(
    graph: CombinedGraph, seed: Random
) -> None:
    # With a length of its own no operator looks like another, so that refinement cannot miss.
    costs = StageCosts(tuple(1.0 + op for op in range(graph.size)))
    order = shuffled(graph, seed.choice)
    assert form(graph, costs).key == form(*renumbered(graph, costs, order)).key


@pytest.mark.promise("opara-s-appendix-example")
def test_isomorphic_blocks_are_searched_once() -> None:
    asked: list[CombinedGraph] = []

    def counting(graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget) -> StageSchedule:
        asked.append(graph)
        return ios(graph, costs, limits, budget)

    shared = Shared(counting)
    costs = StageCosts((1.0, 1.0, 2.0), contention=0.0)
    for graph in (union([[], [], [0]]), union([[], [], [1]])):
        found = shared(graph, costs, Limits(), Budget())
        assert found == ios(graph, costs, Limits(), Budget())
    assert len(asked) == 1
    shared(union([[], [], [1]]), costs, Limits(s=1), Budget())
    assert len(asked) == 2


def test_blocks_that_differ_in_an_edge_or_a_length_have_different_forms() -> None:
    even = StageCosts((1.0,) * 4)
    keys = {
        form(union(DIAMOND), even).key,
        form(union([[], [0], [1], [2]]), even).key,
        form(union(DIAMOND), StageCosts((1.0, 1.0, 1.0, 2.0))).key,
        form(union(DIAMOND), StageCosts((1.0,) * 4, contention=0.5)).key,
        form(union(DIAMOND), StageCosts((1.0,) * 4, merges=(((1, 2), 0.5),))).key,
    }
    assert len(keys) == 5


def test_costs_of_another_kind_keep_the_numbering() -> None:
    class Whole(StageCosts):
        """Says something of stages as a whole."""

    mirrored = union([[], [], [0]]), union([[], [], [1]])
    seconds = (1.0,) * 3
    plain, whole, measured = (
        [form(graph, costs).key for graph in mirrored]
        for costs in (StageCosts(seconds), Whole(seconds), StageCosts(seconds, measured=((((0,),), 1.0),)))
    )
    assert plain[0] == plain[1]
    assert whole[0] != whole[1]
    assert measured[0] != measured[1]


def test_members_are_not_exchanged() -> None:
    one, two = union(CHAIN, DIAMOND), union(DIAMOND, CHAIN)
    costs = StageCosts((1.0,) * 7)
    assert form(one, costs).key != form(two, costs).key


def test_nasnet_has_seven_blocks_up_to_numbering() -> None:
    keys = set()
    for block in networks()["nasnet"]:
        graph = union(block)
        for order in (shuffled(graph, min), shuffled(graph, max)):
            keys.add(form(*renumbered(graph, StageCosts((1.0,) * graph.size), order)).key)
    assert len(keys) == 7

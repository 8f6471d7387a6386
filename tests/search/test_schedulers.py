"""Schedulers against closed forms and against the definition of legality."""

from collections.abc import Callable
from itertools import permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.errors import SettingError
from stageloom.shared.schedule import StageSchedule, stage_schedule
from stageloom.shared.search.baselines import greedy, sequential
from stageloom.shared.search.conformance import Case, try_case
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits, Scheduler
from stageloom.shared.search.registry import help_line, reads_costs, scheduler, schedulers, searches
from tests.search.graphs import CHAIN, DIAMOND, union, unions


def run(chosen: Scheduler, graph: CombinedGraph, limits: Limits | None = None) -> StageSchedule:
    costs = StageCosts((1e-3,) * graph.size, contention=0.5)
    found = chosen(graph, costs, limits or Limits(), Budget())
    assert isinstance(found, StageSchedule)
    return found


def levels(graph: CombinedGraph) -> list[int]:
    """Per operator the number of operators on the longest path that ends before it."""
    depth: list[int] = []
    for before in graph.predecessors:
        depth.append(max((depth[op] + 1 for op in bits(before)), default=0))
    return depth


def test_sequential_is_one_operator_per_stage_in_the_graphs_order() -> None:
    assert run(sequential, union(DIAMOND, CHAIN)) == stage_schedule([[[op]] for op in range(7)])


def test_greedy_runs_a_diamond_in_three_stages() -> None:
    assert run(greedy, union(DIAMOND)) == stage_schedule([[[0]], [[1], [2]], [[3]]])


@pytest.mark.promise("scheduler-legal-canonical-deterministic")
def test_greedy_postpones_the_successor_as_in_figure_2_of_ios() -> None:
    # Input feeds a, c, d; b follows a; all meet in a concat. Published: {a, c, d}, then {b}, then the concat.
    a, b, c, d, concat = range(5)
    graph = union([[], [a], [], [], [b, c, d]])
    assert run(greedy, graph) == stage_schedule([[[a], [c], [d]], [[b]], [[concat]]])


def test_greedy_takes_the_members_of_a_combined_block_side_by_side() -> None:
    assert run(greedy, union(CHAIN, CHAIN)) == stage_schedule([[[0], [3]], [[1], [4]], [[2], [5]]])


@given(unions())
def test_greedy_stage_is_the_depth_of_the_operator(graph: CombinedGraph) -> None:
    depth = levels(graph)
    stages = run(greedy, graph).stages
    assert [sorted(stage.operators) for stage in stages] == [
        [op for op in range(graph.size) if depth[op] == level] for level in range(max(depth) + 1)
    ]


@pytest.mark.promise("scheduler-legal-canonical-deterministic")
@given(unions(max_ops=3))
def test_no_legal_schedule_of_single_operators_has_fewer_stages_than_greedy(graph: CombinedGraph) -> None:
    assume(graph.size <= 6)
    best = graph.size
    for order in permutations(range(graph.size)):
        stages, current, done = 1, 0, 0
        for op in order:
            if graph.predecessors[op] & ~(done | current):
                break
            if graph.predecessors[op] & current:
                stages, done, current = stages + 1, done | current, 0
            current |= 1 << op
        else:
            best = min(best, stages)
    assert len(run(greedy, graph).stages) == best


@pytest.mark.promise("scheduler-legal-canonical-deterministic")
@pytest.mark.parametrize("name", sorted(schedulers()))
@settings(deadline=None, max_examples=40)
@given(graph=unions(), s=st.none() | st.integers(1, 4), r=st.none() | st.integers(1, 4))
def test_every_scheduler_is_legal_deterministic_and_canonical(
    name: str, graph: CombinedGraph, s: int | None, r: int | None
) -> None:
    case = Case(
        name="drawn",
        graph=graph,
        costs=StageCosts((1e-3,) * graph.size, contention=0.5),
        limits=Limits(r=r, s=s),
        budget=Budget(expansions=1000),
    )
    assert try_case(scheduler(name), case).faults == ()


def test_greedy_under_a_group_limit_keeps_the_rest_for_the_next_stage() -> None:
    graph = union([[], [], [], [0, 1, 2]])
    assert run(greedy, graph, Limits(s=2)) == stage_schedule([[[0], [1]], [[2]], [[3]]])


def test_only_schedulers_that_read_costs_say_so() -> None:
    # Three chains: side by side gains or does not, and which of them is the longest changes.
    graph = union(CHAIN, CHAIN, CHAIN)
    even, uneven = (1.0,) * 9, (3.0,) * 3 + (1.0,) * 6
    for name in schedulers():
        found = {
            scheduler(name)(graph, costs, Limits(s=2), Budget())
            for costs in (StageCosts(even, 0.0), StageCosts(even, 1.0, barrier_s=0.1), StageCosts(uneven))
        }
        merging = {
            scheduler(name)(
                union(DIAMOND), StageCosts((1.0,) * 4, merges=(((1, 2), seconds),)), Limits(), Budget()
            )
            for seconds in (0.5, 9.0)
        }
        assert (len(found) > 1 or len(merging) > 1) == reads_costs(name)


@pytest.mark.parametrize("ask", [scheduler, reads_costs, searches, help_line])
def test_every_question_about_an_unknown_scheduler_is_refused(ask: Callable[[str], object]) -> None:
    with pytest.raises(SettingError):
        ask("gredy")


def test_every_scheduler_has_one_line_of_help() -> None:
    for name in schedulers():
        assert 10 < len(help_line(name)) < 80
        assert "\n" not in help_line(name)


def test_unknown_scheduler_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(SettingError, match=r"'gredy'; choose one of beam, brute, gpg, greedy, ios"):
        scheduler("gredy")


def test_limit_that_allows_no_stage_is_refused() -> None:
    with pytest.raises(SettingError, match="the limit s = 0"):
        Limits(s=0)

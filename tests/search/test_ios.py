"""IOS against the cheapest of all listed schedules, its budget, and its three strategies."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageloom.shared.bitmask import bits, mask_of
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.legality import violations
from stageloom.shared.schedule import Stage, StageSchedule, stage_schedule
from stageloom.shared.search.baselines import sequential
from stageloom.shared.search.beam import best_endings
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.endings import GroupRule
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.ios import exact, ios
from stageloom.shared.search.isomorphism import exchangeable, images
from stageloom.shared.search.stages import Stages, Strategy
from tests.search import brute
from tests.search.graphs import CHAIN, DIAMOND, union, unions

RULES = st.sampled_from(GroupRule)
LIMIT = st.none() | st.integers(1, 4)
OPEN = Limits()


@st.composite
def problems(draw: st.DrawFn, max_size: int) -> tuple[CombinedGraph, StageCosts]:
    graph = draw(unions(max_ops=max_size).filter(lambda graph: graph.size <= max_size))
    seconds = st.floats(0.001, 1.0)
    return graph, StageCosts(
        tuple(draw(seconds) for _ in range(graph.size)),
        contention=draw(st.floats(0.0, 1.0)),
        barrier_s=draw(st.floats(0.0, 0.2)),
    )


def siblings(graph: CombinedGraph) -> list[tuple[int, ...]]:
    """Operators of one member that depend on the same ones, two or more together."""
    found: dict[tuple[int, int], list[int]] = {}
    for op in range(graph.size):
        found.setdefault((graph.member_of[op], graph.predecessors[op]), []).append(op)
    return [tuple(ops) for ops in found.values() if len(ops) > 1]


@pytest.mark.promise("ios-optimum-over-schedules")
@settings(max_examples=60, deadline=None)
@given(problem=problems(6), rule=RULES, r=LIMIT, s=LIMIT)
def test_ios_is_the_optimum_over_all_schedules(
    problem: tuple[CombinedGraph, StageCosts], rule: GroupRule, r: int | None, s: int | None
) -> None:
    graph, costs = problem
    found = ios(graph, costs, Limits(r=r, s=s), Budget(), rule=rule)
    assert violations(found, graph, r=r, s=s) == []
    assert costs.schedule_s(found) == pytest.approx(brute.optimum_s(graph, costs, rule, r, s), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(problem=problems(5), gain=st.floats(0.1, 2.0), s=LIMIT)
def test_ios_with_merges_is_the_optimum_over_all_schedules_with_merges(
    problem: tuple[CombinedGraph, StageCosts], gain: float, s: int | None
) -> None:
    graph, plain = problem
    groups = [ops for ops in siblings(graph) if s is None or len(ops) <= s]
    costs = StageCosts(
        plain.operators_s,
        plain.contention,
        plain.barrier_s,
        merges=tuple((ops, gain * sum(plain.operators_s[op] for op in ops)) for ops in groups),
    )
    merges = frozenset(mask_of(ops) for ops in groups)
    found = ios(graph, costs, Limits(s=s), Budget())
    assert violations(found, graph, s=s) == []
    best = brute.optimum_s(graph, costs, GroupRule.CONNECTED, None, s, merges)
    assert costs.schedule_s(found) == pytest.approx(best, rel=1e-9)


@pytest.mark.promise("ios-optimum-over-schedules")
@pytest.mark.parametrize("expansions", [1, 50, 100_000])
@settings(max_examples=40, deadline=None)
@given(
    problem=problems(14),
    rule=RULES,
    strategy=st.sampled_from(Strategy),
    r=LIMIT,
    s=LIMIT,
)
def test_any_budget_gives_a_legal_schedule_never_worse_than_sequential(
    expansions: int,
    problem: tuple[CombinedGraph, StageCosts],
    rule: GroupRule,
    strategy: Strategy,
    r: int | None,
    s: int | None,
) -> None:
    graph, costs = problem
    limits, budget = Limits(r=r, s=s), Budget(expansions=expansions)
    found = ios(graph, costs, limits, budget, rule=rule, strategy=strategy)
    assert violations(found, graph, r=r, s=s) == []
    assert costs.schedule_s(found) <= costs.schedule_s(sequential(graph, costs, limits, budget))
    assert ios(graph, costs, limits, budget, rule=rule, strategy=strategy) == found


def test_wide_graph_without_limits_ends_within_its_budget() -> None:
    # 4^24 states, and more endings in the first than memory holds.
    graph = union(*[CHAIN] * 24)
    costs = StageCosts(tuple(0.1 + op % 7 for op in range(graph.size)), contention=0.2)
    found = ios(graph, costs, OPEN, Budget(expansions=2000))
    assert violations(found, graph) == []
    assert costs.schedule_s(found) < costs.schedule_s(sequential(graph, costs, OPEN, Budget()))


@settings(max_examples=30, deadline=None)
@given(problem=problems(7))
def test_beam_that_may_look_at_everything_finds_the_optimum(
    problem: tuple[CombinedGraph, StageCosts],
) -> None:
    graph, costs = problem
    stages = Stages(graph, costs, OPEN, GroupRule.CONNECTED, Strategy.PARALLEL)
    by_beam, by_dp = (
        costs.schedule_s(stages.schedule(endings))
        for endings in (best_endings(stages, 1_000_000), exact(stages))
    )
    assert by_beam == pytest.approx(by_dp, rel=1e-9)


def test_groups_that_never_slow_each_other_down_run_side_by_side() -> None:
    costs = StageCosts((1.0, 2.0, 2.0, 1.0), contention=0.0)
    assert ios(union(DIAMOND), costs, OPEN, Budget()) == stage_schedule([[[0]], [[1], [2]], [[3]]])


def test_groups_that_run_as_if_one_after_another_are_left_in_one() -> None:
    costs = StageCosts((1.0,) * 4, contention=1.0, barrier_s=0.1)
    assert ios(union(DIAMOND), costs, OPEN, Budget()) == stage_schedule([[[0, 1, 2, 3]]])


def test_chain_beside_a_long_operator_shares_its_stage_where_greedy_would_not() -> None:
    # Figure 2 of IOS: b follows a; beside c they cost what c costs alone.
    graph = union([[], [0], []])
    costs = StageCosts((1.0, 1.0, 2.0), contention=0.0)
    found = ios(graph, costs, OPEN, Budget())
    assert found == stage_schedule([[[0, 1], [2]]])
    assert costs.schedule_s(found) == 2.0


def test_siblings_become_one_launch_where_that_is_cheaper() -> None:
    costs = StageCosts((1.0,) * 4, contention=1.0, merges=(((1, 2), 1.5),))
    merged = StageSchedule((Stage(((0,),)), Stage(((1,), (2,)), merge=True), Stage(((3,),))))
    assert ios(union(DIAMOND), costs, OPEN, Budget()) == merged
    assert ios(union(DIAMOND), costs, OPEN, Budget(), strategy=Strategy.MERGE) == merged
    alone = ios(union(DIAMOND), costs, OPEN, Budget(), strategy=Strategy.PARALLEL)
    assert alone == stage_schedule([[[0, 1, 2, 3]]])


def test_operators_that_are_no_siblings_are_never_merged() -> None:
    graph = union([[], [0], []])
    costs = StageCosts((1.0,) * 3, merges=(((1, 2), 0.1), ((0,), 0.1)))
    for strategy in (Strategy.MERGE, Strategy.BOTH):
        found = ios(graph, costs, OPEN, Budget(), strategy=strategy)
        assert not any(stage.merge for stage in found.stages)


def test_rooted_groups_cost_more_where_only_a_group_with_two_entries_fits() -> None:
    # Two long operators feed a third, beside one that is as long as all three: only in one group they hide.
    graph = union([[], [], [0, 1], []])
    costs = StageCosts((1.0, 1.0, 1.0, 3.0), contention=0.0, barrier_s=0.25)
    both = {rule: costs.schedule_s(ios(graph, costs, Limits(s=2), Budget(), rule=rule)) for rule in GroupRule}
    assert both == {GroupRule.CONNECTED: 3.25, GroupRule.ROOTED: 4.25}


def test_blocks_of_inception_v3_are_searched_to_the_end_within_the_default_budget() -> None:
    blocks = json.loads((Path(__file__).parents[1] / "data/ios_blocks.json").read_text())
    for block in blocks["inception_v3"]["blocks"]:
        rows: list[list[int]] = [[] for _ in block["ops"]]
        for before, after in block["edges"]:
            rows[after].append(before)
        graph = union(rows)
        costs = StageCosts(tuple(1.0 + op % 3 for op in range(graph.size)), contention=0.3, barrier_s=0.05)
        stages = Stages(graph, costs, OPEN, GroupRule.CONNECTED, Strategy.BOTH)
        assert exact(stages, Budget().expansions) == exact(stages)


@settings(max_examples=40, deadline=None)
@given(problem=problems(4), copies=st.integers(2, 3), rule=RULES, r=LIMIT, s=LIMIT)
def test_equal_members_are_exchanged_without_losing_the_optimum(
    problem: tuple[CombinedGraph, StageCosts], copies: int, rule: GroupRule, r: int | None, s: int | None
) -> None:
    class Each(StageCosts):
        """The same costs, of which it is not said that operators alone decide: nothing is exchanged."""

    graph, costs = problem
    if graph.size * copies > 9:
        copies = 2
    rows = [list(bits(before)) for before in graph.predecessors]
    many = union(*[rows] * copies)
    same = StageCosts(costs.operators_s * copies, costs.contention, costs.barrier_s)
    apart = Each(costs.operators_s * copies, costs.contention, costs.barrier_s)
    one, all_ = (Stages(many, found, Limits(r=r, s=s), rule, Strategy.BOTH) for found in (same, apart))
    exchanged = one.schedule(exact(one))
    assert violations(exchanged, many, r=r, s=s) == []
    assert same.schedule_s(exchanged) == pytest.approx(same.schedule_s(all_.schedule(exact(all_))), rel=1e-9)


def test_states_of_equal_chains_are_searched_once_however_they_are_exchanged() -> None:
    searched: list[int] = []

    class Watched(Stages):
        def endings(self, state: int, limit: int | None = None) -> list[int]:
            searched.append(state)
            return super().endings(state, limit)

    graph = union(CHAIN, CHAIN, CHAIN)
    costs = StageCosts((1.0,) * 9, contention=0.0)
    walked = len(exact(Watched(graph, costs, OPEN, GroupRule.CONNECTED, Strategy.PARALLEL)))
    # Multisets of three out of the four states of a chain, less the empty one; then the way back.
    assert len(searched) == 20 - 1 + walked


def test_members_are_exchangeable_only_if_operators_costs_and_merges_are_equal() -> None:
    graph = union(DIAMOND, DIAMOND, DIAMOND, CHAIN)
    seconds = (1.0,) * 8 + (2.0,) * 4 + (1.0,) * 3
    assert exchangeable(graph, StageCosts(seconds)) == [[0, 1]]
    assert exchangeable(graph, StageCosts(seconds, merges=(((1, 2), 1.0),))) == []
    assert exchangeable(graph, StageCosts(seconds, merges=(((1, 2), 1.0), ((5, 6), 1.0)))) == [[0, 1]]
    assert sorted(images(graph, [[0, 1]], 0b1_0011_0001)) == [0b1_0001_0011, 0b1_0011_0001]


def test_many_equal_members_are_exchanged_without_a_look_at_all_their_orders() -> None:
    """14 members have 87 thousand million orders; a state that one of them has left has 14 images."""
    graph = union(*[[[]]] * 14)
    costs = StageCosts((1.0,) * 14, contention=0.0)
    assert sorted(images(graph, exchangeable(graph, costs), 1)) == [1 << op for op in range(14)]
    together = stage_schedule([[[op] for op in range(14)]])
    for expansions in (1000, 1_000_000):  # too few for all states, and enough
        assert ios(graph, costs, OPEN, Budget(expansions=expansions)) == together

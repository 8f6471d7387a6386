"""Seconds of stages and streams on the same costs, and what none of them can beat."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Launch, StreamSchedule, stage_schedule
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.makespan import lower_bounds, schedule_s
from stageloom.shared.search.registry import schedulers
from tests.search.graphs import CHAIN, DIAMOND, union, unions

LENGTHS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6)
CONTENTION = st.floats(0.0, 1.5)


@given(lengths=LENGTHS, contention=CONTENTION)
def test_streams_that_start_together_cost_what_the_groups_of_a_stage_cost(
    lengths: list[float], contention: float
) -> None:
    graph = union([[] for _ in lengths])
    costs = StageCosts(tuple(lengths), contention, barrier_s=0.125)
    streams = StreamSchedule(tuple(Launch(op, op) for op in range(len(lengths))))
    stages = stage_schedule([[[op] for op in range(len(lengths))]])
    assert schedule_s(streams, graph, costs) == pytest.approx(schedule_s(stages, graph, costs))


@pytest.mark.parametrize("name", sorted(schedulers()))
@settings(max_examples=25, deadline=None)
@given(graph=unions())
def test_device_that_does_one_thing_at_a_time_takes_the_sum(name: str, graph: CombinedGraph) -> None:
    costs = StageCosts(tuple(0.5 + op % 4 for op in range(graph.size)), contention=1.0)
    found = schedulers()[name](graph, costs, Limits(), Budget(expansions=500))
    assert schedule_s(found, graph, costs) == pytest.approx(sum(costs.operators_s))
    assert max(lower_bounds(graph, costs, Limits())) == pytest.approx(sum(costs.operators_s))


def test_one_stream_takes_the_sum_and_no_barrier() -> None:
    costs = StageCosts((1.0, 2.0, 3.0), contention=0.0, barrier_s=1.0)
    one = StreamSchedule(tuple(Launch(op, 0) for op in range(3)))
    assert schedule_s(one, union(CHAIN), costs) == 6.0


def test_operator_that_waits_for_another_stream_pays_a_barrier() -> None:
    # 0 and 1 on stream 0, 2 on stream 1 after 0, 3 after both; a barrier each for 2, for 3 and for the end.
    costs = StageCosts((1.0, 2.0, 4.0, 1.0), contention=0.0, barrier_s=0.25)
    streams = StreamSchedule((Launch(0, 0), Launch(1, 0), Launch(2, 1), Launch(3, 0)))
    assert schedule_s(streams, union(DIAMOND), costs) == pytest.approx(1.0 + 0.25 + 4.0 + 0.25 + 1.0 + 0.25)


@pytest.mark.promise("opara-s-appendix-example")
@pytest.mark.parametrize("name", sorted(schedulers()))
@settings(max_examples=25, deadline=None)
@given(graph=unions(), contention=CONTENTION, s=st.none() | st.integers(1, 4), data=st.data())
def test_no_schedule_is_below_the_bounds(
    name: str, graph: CombinedGraph, contention: float, s: int | None, data: st.DataObject
) -> None:
    seconds = data.draw(st.lists(st.floats(0.01, 1.0), min_size=graph.size, max_size=graph.size))
    siblings: dict[tuple[int, int], list[int]] = {}
    for op in range(graph.size):
        siblings.setdefault((graph.member_of[op], graph.predecessors[op]), []).append(op)
    merges = tuple((tuple(ops), 0.05) for ops in siblings.values() if len(ops) > 1)
    costs = StageCosts(tuple(seconds), contention, merges=merges)
    limits = Limits(s=s)
    found = schedulers()[name](graph, costs, limits, Budget(expansions=500))
    # Streams know no limit on groups.
    allowed = Limits() if isinstance(found, StreamSchedule) else limits
    assert schedule_s(found, graph, costs) >= max(lower_bounds(graph, costs, allowed)) * (1 - 1e-9)


def test_stage_measured_below_its_formula_lowers_the_bounds() -> None:
    graph = union([[], []])
    costs = StageCosts((1.0, 1.0), contention=1.0, measured=((((0,), (1,)), 0.5),))
    assert lower_bounds(graph, costs, Limits()) == (0.25, 0.5)
    found = schedulers()["ios"](graph, costs, Limits(), Budget())
    assert schedule_s(found, graph, costs) == 0.5


def test_bounds_of_two_chains_have_closed_forms() -> None:
    graph = union(CHAIN, CHAIN)
    costs = StageCosts((1.0, 2.0, 3.0, 1.0, 1.0, 1.0), contention=0.0)
    assert lower_bounds(graph, costs, Limits()) == (6.0, 4.5)
    assert lower_bounds(graph, costs, Limits(s=1))[1] == 9.0
    half = StageCosts(costs.operators_s, contention=0.5)
    assert lower_bounds(graph, half, Limits())[1] == pytest.approx(6.75)  # two do 4/3 of one's work

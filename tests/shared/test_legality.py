"""Legality against an independent checker on all schedules of small graphs; each rule alone."""

from dataclasses import replace
from itertools import combinations, permutations
from random import Random

import pytest

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.legality import violations
from stageloom.shared.schedule import Launch, Schedule, Stage, StageSchedule, StreamSchedule, stage_schedule
from tests.shared.randoms import all_stage_schedules, components, dag, random_dag, random_schedule

PAIRS = list(combinations(range(4), 2))


def edges_of(graph: CombinedGraph) -> list[tuple[int, int]]:
    return [(before, op) for op in range(graph.size) for before in bits(graph.predecessors[op])]


def broken_rules(
    schedule: StageSchedule, edges: list[tuple[int, int]], graph: CombinedGraph, r: int, s: int
) -> set[str]:
    """What a legal schedule is, from where each operator stands: (stage, group, place in the group)."""
    place = {
        op: (i, j, k)
        for i, stage in enumerate(schedule.stages)
        for j, group in enumerate(stage.groups)
        for k, op in enumerate(group)
    }
    rules = set()
    for before, after in edges:
        (stage_a, group_a, k_a), (stage_b, group_b, k_b) = place[before], place[after]
        if stage_a > stage_b or ((stage_a, group_a) == (stage_b, group_b) and k_a > k_b):
            rules.add("order")
        if stage_a == stage_b and group_a != group_b:
            rules.add("dependent")
    for stage in schedule.stages:
        if len(stage.groups) > s:
            rules.add("groups")
        for group in stage.groups:
            if len(group) > r:
                rules.add("operators")
            if len(components(group, graph)) > 1:
                rules.add("connected")
    return rules


def check_all(graph: CombinedGraph) -> int:
    edges = edges_of(graph)
    legal = 0
    for schedule in all_stage_schedules(graph.size):
        wanted = broken_rules(schedule, edges, graph, r=2, s=2)
        assert {v.rule for v in violations(schedule, graph, r=2, s=2)} == wanted
        assert {v.rule for v in violations(schedule, graph)} == wanted - {"operators", "groups"}
        legal += not violations(schedule, graph)
    return legal


@pytest.mark.promise("legality-equals-independent-brute")
@pytest.mark.parametrize("width", range(len(PAIRS) + 1))
def test_legality_agrees_with_brute_force_on_all_stage_schedules_of_all_graphs_of_four_operators(
    width: int,
) -> None:
    for edges in combinations(PAIRS, width):
        graph = dag(4, edges)
        assert check_all(graph) > 0


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_legality_agrees_with_brute_force_on_graphs_of_five_operators(seed: int) -> None:
    assert check_all(random_dag(Random(seed), [3, 2] if seed % 2 else [5])) > 0


def test_three_independent_operators_have_as_many_schedules_as_ordered_set_partitions() -> None:
    assert check_all(dag(3, [])) == 13  # the Fubini number of 3


def test_a_chain_of_three_has_as_many_schedules_as_ways_to_cut_it() -> None:
    assert check_all(dag(3, [(0, 1), (1, 2)])) == 4


@pytest.mark.parametrize("width", range(len(PAIRS) + 1))
def test_stream_schedules_are_legal_exactly_in_topological_order(width: int) -> None:
    for edges in combinations(PAIRS, width):
        graph = dag(4, edges)
        for order in permutations(range(4)):
            schedule = StreamSchedule(tuple(Launch(op, op % 2) for op in order))
            topological = all(order.index(a) < order.index(b) for a, b in edges)
            assert {v.rule for v in violations(schedule, graph)} == (set() if topological else {"order"})


def stages(*rows: list[list[int]]) -> StageSchedule:
    return stage_schedule(list(rows))


def merge(*groups: tuple[int, ...]) -> StageSchedule:
    return StageSchedule((Stage(((0,),)), Stage(groups, merge=True)))


FORK = dag(3, [(0, 1), (0, 2)])
TWO_CHAINS = dag(4, [(0, 1), (2, 3)], sizes=[2, 2])
ALONE: list[tuple[str, Schedule, CombinedGraph]] = [
    ("unknown", stages([[0]], [[1, 9], [2]]), FORK),
    ("unknown", StreamSchedule((Launch(0, 0), Launch(1, 0), Launch(2, 1), Launch(-1, 1))), FORK),
    ("repeated", stages([[0]], [[1], [2]], [[2]]), FORK),
    ("repeated", StreamSchedule((Launch(0, 0), Launch(1, 0), Launch(2, 1), Launch(2, 0))), FORK),
    ("repeated", stages([[0, 1], [0, 1, 2]]), FORK),
    ("missing", stages([[0]], [[1]]), FORK),
    ("missing", StreamSchedule((Launch(0, 0), Launch(2, 0))), FORK),
    ("empty", StageSchedule((Stage(((0,),)), Stage(()), Stage(((1,), (2,))))), FORK),
    ("empty", StageSchedule((Stage(((0,),)), Stage(((),)), Stage(((1,), (2,))))), FORK),
    ("order", stages([[1], [2]], [[0]]), FORK),
    ("order", stages([[1, 0, 2]]), FORK),
    ("order", StreamSchedule((Launch(1, 0), Launch(0, 0), Launch(2, 0))), FORK),
    ("dependent", stages([[0], [1]], [[2]]), FORK),
    ("connected", stages([[0]], [[1, 2]]), FORK),
    ("connected", stages([[0, 1, 2, 3]]), TWO_CHAINS),
    ("groups", stages([[0]], [[1], [2]]), FORK),
    ("operators", stages([[0, 1]], [[2]]), FORK),
    ("merge", merge((1,), (2, 3)), dag(4, [(0, 1), (0, 2), (2, 3)])),
    ("merge", merge((1,), (2,)), dag(3, [(0, 1)])),
    ("merge", merge((1,), (2,)), dag(3, [], sizes=[2, 1])),
    ("merge", merge((1,), (2,)), replace(FORK, merge_class=(-1, -1, -1))),
    ("merge", merge((1,), (2,)), replace(FORK, merge_class=(0, 0, 1))),
    ("merge", merge((1,), (2,)), replace(FORK, merge_class=())),
    ("merge", StageSchedule((Stage(((0,),), merge=True), Stage(((1,), (2,))))), FORK),
]


@pytest.mark.promise("legality-equals-independent-brute")
@pytest.mark.parametrize(("rule", "schedule", "graph"), ALONE)
def test_each_rule_is_broken_alone(rule: str, schedule: Schedule, graph: CombinedGraph) -> None:
    r = 1 if rule == "operators" else None
    s = 1 if rule == "groups" else None
    assert {v.rule for v in violations(schedule, graph, r=r, s=s)} == {rule}
    if rule in ("operators", "groups"):
        assert violations(schedule, graph) == []


def test_a_stage_of_many_groups_is_judged_without_comparing_each_with_each() -> None:
    """As many groups as a plan can name; comparing pairs would take minutes and run into the time limit."""
    many = StageSchedule((Stage(tuple((op,) for op in range(30_000))),))
    found = violations(many, FORK)
    assert [v.rule for v in found if v.rule != "unknown"] == ["dependent", "dependent"]


def test_every_violation_is_listed_not_only_the_first() -> None:
    found = violations(stages([[1], [1]], [[9]]), FORK)
    assert [v.rule for v in found].count("missing") == 2
    assert {v.rule for v in found} == {"missing", "repeated", "unknown", "order"}


def test_operators_of_one_class_may_merge() -> None:
    assert violations(merge((1,), (2,)), FORK) == []


@pytest.mark.parametrize("seed", range(100))
def test_the_random_schedules_that_other_tests_use_are_legal(seed: int) -> None:
    random = Random(seed)
    graph = random_dag(random, [random.randint(1, 8) for _ in range(random.randint(1, 3))])
    assert violations(random_schedule(random, graph), graph) == []

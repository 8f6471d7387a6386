"""Stream schedulers against what their papers say of examples, and against all assignments, listed."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.schedule import Launch, StreamSchedule
from stageloom.shared.search.baselines import wavefront, waves_of
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.makespan import schedule_s
from stageloom.shared.search.streams import (
    OperatorProfile,
    allocate_streams,
    assign_streams,
    launch_order,
    nimble,
    opara,
    transitive_reduction,
)
from tests.search.graphs import CHAIN, DIAMOND, union, unions

# Opara's figure 10 as its appendix tells it, operators 1..13: 1 has three successors; 2, 3, 4 are followed by
# 5, 6, 7; 8 has several predecessors and so has 13; 9, 10 are one operator's successors and 11, 12 another's.
APPENDIX = {
    "8 joins 5 and 6": {2: [1], 3: [1], 4: [1], 5: [2], 6: [3], 7: [4], 8: [5, 6], 9: [8], 10: [8],
                        11: [7], 12: [7], 13: [9, 10, 11, 12]},
    "8 joins 5, 6 and 7": {2: [1], 3: [1], 4: [1], 5: [2], 6: [3], 7: [4], 8: [5, 6, 7], 9: [8], 10: [8],
                           11: [10], 12: [10], 13: [9, 11, 12]},
}  # fmt: skip


def googlenet() -> list[list[int]]:
    """57 convolutions, 14 pools and 9 concats, no classifier: branches of 1, 2, 2 and 2 operators."""
    rows: list[list[int]] = [[]]

    def op(*before: int) -> int:
        rows.append(list(before))
        return len(rows) - 1

    last = op(op(op(0)))
    last = op(last)
    for cell in range(9):
        if cell in (2, 7):
            last = op(last)
        last = op(op(last), op(op(last)), op(op(last)), op(op(last)))
    op(last)
    return rows


def small(max_ops: int) -> st.SearchStrategy[CombinedGraph]:
    return unions(max_ops=max_ops).filter(lambda graph: graph.size <= max_ops)


def independent(graph: CombinedGraph) -> list[tuple[int, int]]:
    return [(a, b) for b in range(graph.size) for a in range(b) if not graph.ancestors[b] >> a & 1]


def waits(graph: CombinedGraph, streams: Sequence[int]) -> int:
    """Edges of the reduced graph that neither a stream's order nor anything else gives."""
    return sum(
        streams[before] != streams[op]
        for op, rest in enumerate(transitive_reduction(graph))
        for before in bits(rest)
    )


@pytest.mark.promise("opara-s-appendix-example")
@pytest.mark.parametrize("edges", APPENDIX.values(), ids=APPENDIX)
def test_opara_places_the_operators_of_its_appendix_as_told(edges: dict[int, list[int]]) -> None:
    graph = union([[before - 1 for before in edges.get(op, [])] for op in range(1, 14)])
    found = dict(enumerate(allocate_streams(graph), 1))
    for op in (2, 9, 11, 5, 6, 7):  # a first successor, or a predecessor's only one
        assert found[op] == found[edges[op][0]]
    new = [1, 3, 4, 10, 12]  # no predecessor, or one whose stream another has taken on
    assert len({found[op] for op in new}) == 5 == max(found.values()) + 1
    for op in (3, 4, 10, 12):
        assert found[op] != found[edges[op][0]]
    taken = {before for op in (2, 5, 6, 7, 8, 9, 11) for before in edges[op][:1]}
    for op in (8, 13):  # the first predecessor whose flag is not set
        (first, *_) = [before for before in edges[op] if op == 8 or before not in taken]
        assert found[op] == found[first]


def test_opara_gives_googlenet_28_streams_and_nimble_4() -> None:
    graph = union(googlenet())
    assert max(allocate_streams(graph)) + 1 == 28
    assert max(assign_streams(graph)) + 1 == 4


@given(unions())
def test_opara_passes_a_stream_on_once_and_opens_one_only_if_it_must(graph: CombinedGraph) -> None:
    streams = allocate_streams(graph)
    passed: set[int] = set()
    for op, before in enumerate(graph.predecessors):
        free = [one for one in bits(before) if one not in passed]
        if free:
            assert streams[op] == streams[free[0]]
            passed.add(free[0])
        else:
            assert streams[op] not in streams[:op]


def test_opara_launches_by_turns_and_the_least_demanding_first() -> None:
    # Four operators ready at once, then one of each kind.
    graph = union([[], [], [], [], [0], [1]])
    demand = [0.5, 0.25, 0.5, 0.125, 0.0, 1.0]
    kinds = [False, False, True, True, False, True]
    profiles = [
        OperatorProfile(shared_memory=share / 2, threads=share, memory_intensive=kind)
        for share, kind in zip(demand, kinds, strict=True)
    ]
    # compute: 1 before 0; memory: 3 before 2, and 5, which needs 1 and demands most, last.
    assert launch_order(graph, profiles) == [1, 3, 0, 2, 4, 5]


@given(graph=unions(), seed=st.randoms(use_true_random=False))
def test_opara_takes_from_the_other_kind_only_if_its_turns_list_is_empty(
    graph: CombinedGraph, seed: object
) -> None:
    draw = seed.random  # type: ignore[attr-defined]
    profiles = [
        OperatorProfile(registers=round(draw(), 1), memory_intensive=draw() < 0.5) for _ in range(graph.size)
    ]
    done = 0
    for turn, op in enumerate(launch_order(graph, profiles)):
        ready = [
            one for one in range(graph.size) if not done >> one & 1 and not graph.predecessors[one] & ~done
        ]
        wanted = [one for one in ready if profiles[one].memory_intensive == bool(turn & 1)]
        assert op in (wanted or ready)
        assert profiles[op].demand == min(profiles[one].demand for one in wanted or ready)
        done |= 1 << op


def test_opara_without_profiles_launches_in_the_order_of_readiness() -> None:
    found = opara(union(DIAMOND, CHAIN), StageCosts((1.0,) * 7), Limits(), Budget())
    assert [launch.op for launch in found.launches] == [0, 4, 1, 2, 5, 3, 6]


@given(unions())
def test_nimble_keeps_independent_operators_on_different_streams(graph: CombinedGraph) -> None:
    streams = assign_streams(graph)
    assert all(streams[a] != streams[b] for a, b in independent(graph))


@pytest.mark.promise("opara-s-appendix-example")
@settings(max_examples=60, deadline=None)
@given(small(6))
def test_nimble_needs_the_fewest_streams_and_waits_of_all_such_assignments(graph: CombinedGraph) -> None:
    found = assign_streams(graph)
    apart = independent(graph)
    legal = [streams for streams in partitions(graph.size) if all(streams[a] != streams[b] for a, b in apart)]
    assert waits(graph, found) == min(waits(graph, streams) for streams in legal)
    assert max(found) == min(map(max, legal))


def partitions(size: int) -> Iterator[tuple[int, ...]]:
    """Every way to put operators on streams, streams numbered by first use."""
    found: list[tuple[int, ...]] = [()]
    for _ in range(size):
        found = [(*row, stream) for row in found for stream in range(max(row, default=-1) + 2)]
    yield from found


@given(unions())
def test_nimble_with_nothing_in_the_way_takes_the_critical_path(graph: CombinedGraph) -> None:
    seconds = tuple(1.0 + op % 3 for op in range(graph.size))
    ends: list[float] = []
    for op, before in enumerate(graph.predecessors):
        ends.append(seconds[op] + max((ends[one] for one in bits(before)), default=0.0))
    costs = StageCosts(seconds, contention=0.0)
    found = nimble(graph, costs, Limits(), Budget())
    assert schedule_s(found, graph, costs) == pytest.approx(max(ends))


@given(small(7))
def test_reduction_keeps_what_depends_on_what_and_no_edge_less_would(graph: CombinedGraph) -> None:
    def reached(rows: Sequence[int]) -> list[int]:
        found: list[int] = []
        for before in rows:
            for one in bits(before):
                before |= found[one]
            found.append(before)
        return found

    reduced = transitive_reduction(graph)
    assert reached(reduced) == list(graph.ancestors)
    for op, before in enumerate(reduced):
        for one in bits(before):
            fewer = [*reduced[:op], before ^ 1 << one, *reduced[op + 1 :]]
            assert reached(fewer) != list(graph.ancestors)


def test_wavefront_gives_each_operator_to_the_unit_that_can_start_it_first() -> None:
    # Entries of 3, 1 and 1 seconds on two units; then a follower of the second, and one of the first.
    graph = union([[], [], [], [1], [0]])
    found = wavefront(graph, StageCosts((3.0, 1.0, 1.0, 5.0, 1.0)), Limits(s=2), Budget())
    assert found == StreamSchedule((Launch(0, 0), Launch(1, 1), Launch(2, 1), Launch(3, 1), Launch(4, 0)))


@given(graph=unions(), s=st.none() | st.integers(1, 4))
def test_wavefront_launches_wave_by_wave_on_as_many_units_as_allowed(
    graph: CombinedGraph, s: int | None
) -> None:
    found = wavefront(graph, StageCosts((1.0,) * graph.size), Limits(s=s), Budget())
    waves = waves_of(graph)
    assert [launch.op for launch in found.launches] == [op for wave in waves for op in wave]
    assert max(launch.stream for launch in found.launches) < (s or max(map(len, waves)))
    for earlier, later in pairwise(waves):
        assert all(any(graph.predecessors[op] >> one & 1 for one in earlier) for op in later)


@given(unions())
def test_wavefront_with_a_unit_for_every_operator_of_a_wave_is_as_fast_as_any(graph: CombinedGraph) -> None:
    # Operators of one length: a wave starts as soon as the wave before it ends.
    costs = StageCosts((1.0,) * graph.size, contention=0.0)
    found = wavefront(graph, costs, Limits(), Budget())
    assert schedule_s(found, graph, costs) == pytest.approx(len(waves_of(graph)))


def test_order_of_permuted_profiles_is_permuted_too() -> None:
    # Four independent operators of one kind: their order is that of their demands.
    graph = union([[], [], [], []])
    for demands in permutations((0.1, 0.2, 0.3, 0.4)):
        order = launch_order(graph, [OperatorProfile(threads=demand) for demand in demands])
        assert [demands[op] for op in order] == [0.1, 0.2, 0.3, 0.4]

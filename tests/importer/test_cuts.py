"""Base cuts by their own rule, against brute force."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageloom.shared.graph import Graph, Operator, Tensor
from stageloom.shared.ids import TensorId
from stageloom.shared.importer.cuts import BLOCK_SHARE, base_cuts, choose_cuts, crossing_bytes


def _brute_force(crossing: list[int], cost: list[int], required: set[int], share: int) -> tuple[int, int]:
    """Bytes and number of cuts of the best set, over all subsets of positions."""
    bound = max(sum(cost) // share, *cost)
    best = None
    positions = range(1, len(cost))
    for size in range(len(cost)):
        for cuts in combinations(positions, size):
            blocks = [sum(cost[a:b]) for a, b in pairwise((0, *cuts, len(cost)))]
            if required <= set(cuts) and max(blocks) <= bound:
                key = (sum(crossing[c] for c in cuts), len(cuts))
                best = key if best is None else min(best, key)
    assert best is not None
    return best


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=2, max_size=9),
    st.sets(st.integers(1, 8)),
    st.integers(1, 6),
)
def test_no_set_of_cuts_crosses_fewer_bytes(
    rows: list[tuple[int, int]], wanted: set[int], share: int
) -> None:
    crossing, cost = [c for c, _ in rows] + [0], [w for _, w in rows]
    required = {cut for cut in wanted if cut < len(cost)}
    cuts = choose_cuts(crossing, cost, required=required, share=share)
    blocks = [sum(cost[a:b]) for a, b in pairwise((0, *cuts, len(cost)))]
    assert required <= set(cuts) and list(cuts) == sorted(set(cuts))
    assert max(blocks) <= max(sum(cost) // share, *cost)
    assert (sum(crossing[c] for c in cuts), len(cuts)) == _brute_force(crossing, cost, required, share)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 10**6)), min_size=1, max_size=300))
def test_the_number_of_blocks_is_bounded(rows: list[tuple[int, int]]) -> None:
    crossing, cost = [c for c, _ in rows] + [0], [w for _, w in rows]
    assert len(choose_cuts(crossing, cost)) + 1 <= 2 * BLOCK_SHARE - 1


def test_narrow_places_are_chosen_and_wide_ones_avoided() -> None:
    crossing = [9, 9, 1, 9, 9, 1, 9, 9, 0]
    assert choose_cuts(crossing, [1] * 8, share=2) == (2, 5)
    assert choose_cuts(crossing, [1] * 8, share=8) == (1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("cost", [[], [7]])
def test_nothing_to_cut_gives_no_cuts(cost: list[int]) -> None:
    assert choose_cuts([0] * (len(cost) + 1), cost) == ()


def _graph(reads: list[list[int]], sizes: list[int], outputs: list[int]) -> Graph:
    """Tensor 0 is the input; operator i makes tensor i + 1."""
    return Graph(
        name="g",
        tensors=tuple(Tensor(f"t{i}", "uint8", (size,)) for i, size in enumerate(sizes)),
        operators=tuple(
            Operator("Op", f"o{i}", (i,), tuple(map(TensorId, r)), (TensorId(i + 1),), 0, 0, i)
            for i, r in enumerate(reads)
        ),
        inputs=(TensorId(0),),
        outputs=tuple(map(TensorId, outputs)),
    )


@settings(deadline=None)
@given(st.data())
def test_crossing_bytes_are_the_bytes_of_the_live_tensors(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    reads = [sorted(data.draw(st.sets(st.integers(0, i), min_size=1, max_size=3))) for i in range(count)]
    sizes = data.draw(st.lists(st.integers(0, 50), min_size=count + 1, max_size=count + 1))
    outputs = sorted(data.draw(st.sets(st.integers(1, count), min_size=1)))
    graph = _graph(reads, sizes, outputs)
    live = crossing_bytes(graph)
    for cut in range(1, count):
        assert live[cut] == sum(graph.tensors[t].nbytes for t in graph.live_at(cut))


def test_borders_of_the_file_are_among_the_base_cuts() -> None:
    graph = _graph([[i] for i in range(40)], [100] * 41, [40])
    assert {3, 17} <= set(base_cuts(graph, (3, 17)))

"""Endings against the published counts, against all subsets of small graphs, and their numbering."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.algorithms import SpaceSize, measure_space
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.search.endings import Endings, GroupRule, TooManyError
from stageloom.shared.search.ranking import RankedEndings
from stageloom.shared.search.states import states_by_size, width
from tests.search import brute
from tests.search.graphs import CHAIN, DIAMOND, union, unions

ORACLE = json.loads((Path(__file__).parents[1] / "data/ios_blocks.json").read_text())
BLOCKS = [
    pytest.param(block, id=f"{network}-{index}")
    for network, found in ORACLE.items()
    for index, block in enumerate(found["blocks"])
]
RULES = st.sampled_from(GroupRule)
R = st.none() | st.integers(1, 4)
S = st.none() | st.integers(1, 4)


def small() -> st.SearchStrategy[CombinedGraph]:
    return unions(max_ops=10).filter(lambda graph: graph.size <= 10)


def block_graph(block: dict[str, Any]) -> CombinedGraph:
    predecessors: list[list[int]] = [[] for _ in block["ops"]]
    for before, after in block["edges"]:
        predecessors[after].append(before)
    return union(predecessors)


@pytest.mark.promise("endings-counted-exactly-block")
@pytest.mark.parametrize("block", BLOCKS)
def test_counts_of_the_blocks_of_ios_are_equal_exactly(block: dict[str, Any]) -> None:
    graph = block_graph(block)
    assert width(graph) == block["width"]
    for key, r, s in (("r3_s8", 3, 8), ("unpruned", None, None)):
        found = measure_space(Endings(graph, rule=GroupRule.ROOTED, r=r, s=s))
        assert found == SpaceSize(**block["rooted"][key])


def test_counts_of_chains_side_by_side_have_a_closed_form() -> None:
    # Appendix A of IOS: d chains of c operators have ((c + 1)(c + 2) / 2)^d pairs, here less those with an
    # empty ending, of which there is one per state, the empty state among them.
    found = measure_space(Endings(union(CHAIN, CHAIN, CHAIN)))
    assert found.states == 4**3 - 1
    assert found.transitions == 10**3 - 4**3


def test_a_group_with_two_entries_is_connected_and_not_rooted() -> None:
    graph = union([[], [], [0, 1]])
    assert 0b111 in Endings(graph).endings(0b111)
    assert 0b111 not in Endings(graph, rule=GroupRule.ROOTED).endings(0b111)


@pytest.mark.promise("endings-counted-exactly-block")
@settings(max_examples=150, deadline=None)
@given(graph=small(), rule=RULES, r=R, s=S)
def test_enumeration_equals_all_subsets_that_fit_the_definition(
    graph: CombinedGraph, rule: GroupRule, r: int | None, s: int | None
) -> None:
    endings = Endings(graph, rule=rule, r=r, s=s)
    for level in states_by_size(graph):
        for state in level[:4]:
            found = endings.endings(state)
            assert len(found) == len(set(found))
            assert set(found) == brute.endings(graph, state, rule, r, s)


@settings(deadline=None)
@given(graph=small())
def test_states_are_the_sets_that_hold_what_they_depend_on(graph: CombinedGraph) -> None:
    levels = list(states_by_size(graph))
    assert [state.bit_count() for level in levels for state in level] == [
        size + 1 for size, level in enumerate(levels) for _ in level
    ]
    found = [state for level in levels for state in level]
    assert len(found) == len(set(found))
    assert set(found) == brute.states(graph)


@settings(deadline=None)
@given(graph=small())
def test_width_is_the_largest_set_without_a_dependency(graph: CombinedGraph) -> None:
    assert width(graph) == max(
        mask.bit_count()
        for mask in range(1 << graph.size)
        if not any(mask >> op & 1 and graph.ancestors[op] & mask for op in range(graph.size))
    )


@given(graph=unions(max_ops=4).filter(lambda graph: graph.size <= 6), rule=RULES, r=R, s=S)
@settings(max_examples=40, deadline=None)
def test_number_of_schedules_equals_their_listing(
    graph: CombinedGraph, rule: GroupRule, r: int | None, s: int | None
) -> None:
    listed = sum(1 for _ in brute.schedules(graph, rule, r, s))
    assert measure_space(Endings(graph, rule=rule, r=r, s=s)).schedules == listed


@settings(deadline=None)
@given(graph=small(), rule=RULES, r=R, s=S)
def test_groups_of_an_ending_are_its_connected_components(
    graph: CombinedGraph, rule: GroupRule, r: int | None, s: int | None
) -> None:
    endings = Endings(graph, rule=rule, r=r, s=s)
    for ending in endings.endings((1 << graph.size) - 1):
        assert endings.components(ending) == brute.components(graph, ending)


@pytest.mark.promise("endings-counted-exactly-block")
@settings(deadline=None)
@given(graph=unions(max_ops=8), rule=RULES, r=R, s=S)
@pytest.mark.more
def test_ranking_numbers_every_ending_once(
    graph: CombinedGraph, rule: GroupRule, r: int | None, s: int | None
) -> None:
    endings = Endings(graph, rule=rule, r=r or 3, s=s)
    everything = (1 << graph.size) - 1
    ranked = RankedEndings(endings, everything)
    listed = [ranked.unrank(index) for index in range(ranked.count)]
    assert sorted(listed) == sorted(endings.endings(everything))
    assert [ranked.rank(ending) for ending in listed] == list(range(ranked.count))


def test_ranking_refuses_what_is_no_number_or_no_ending() -> None:
    ranked = RankedEndings(Endings(union(DIAMOND), r=2), 0b1111)
    for index in (-1, ranked.count):
        with pytest.raises(IndexError):
            ranked.unrank(index)
    for mask in (0, 0b0001, 0b0100, 0b1111):
        with pytest.raises(ValueError, match=r"\w"):
            ranked.rank(mask)


def test_endings_of_four_inception_blocks_are_counted_without_listing_them() -> None:
    (block,) = {str(b): b for b in ORACLE["inception_v3"]["blocks"] if len(b["ops"]) == 12}.values()
    graph = union(*[rows_of(block)] * 4)
    state = (1 << graph.size) - 1 & ~sum(1 << 12 * member + 11 for member in range(4))  # the concats are done
    ranked = RankedEndings(Endings(graph, r=3, s=8), state)
    # Every block has chains of 1, 3, 5 and 2 operators, of which an ending takes 0 to 3 each: factors 2, 4, 4
    # and 3. By number of groups a block has (1 + z)(1 + 3z)(1 + 3z)(1 + 2z); four of them, up to z^8.
    product = [1]
    for factor in (1, 3, 3, 2) * 4:
        product = [a + factor * b for a, b in zip([*product, 0], [0, *product], strict=True)]
    assert ranked.count == sum(product[:9]) - 1
    assert ranked.rank(ranked.unrank(ranked.count // 3)) == ranked.count // 3


def rows_of(block: dict[str, Any]) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in block["ops"]]
    for before, after in block["edges"]:
        rows[after].append(before)
    return rows


def test_more_endings_than_wanted_are_not_listed() -> None:
    graph = union(*[[[]]] * 20)
    for endings in (Endings(graph), Endings(graph, r=2, s=8)):
        with pytest.raises(TooManyError):
            endings.endings((1 << 20) - 1, limit=1000)

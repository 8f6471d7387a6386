"""`benchmarks.algorithms`: published networks and streams; nothing is computed before the clock starts."""

from dataclasses import fields

import pytest

from benchmarks.algorithms import (
    distinct,
    graph_of,
    measure_space,
    median_ms,
    networks,
    search,
    whole_graph,
)
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.search.endings import Endings, GroupRule
from stageloom.shared.search.states import width
from stageloom.shared.search.streams import allocate_streams, assign_streams


@pytest.mark.parametrize(
    ("name", "operators", "size", "row"),
    # IOS, tables 1 and 2: the network's operators; n, d, pairs and schedules of its largest block.
    [
        ("randwire", 120, (33, 8), ("1.2e+06", "9.2e+22")),
        ("nasnet", 374, (18, 8), ("3.1e+05", "7.2e+12")),
    ],
    ids=["randwire", "nasnet"],
)
def test_networks_are_those_of_the_tables_of_ios(
    name: str, operators: int, size: tuple[int, int], row: tuple[str, str]
) -> None:
    network = networks()[name]
    assert sum(map(len, network)) == operators
    found = set()
    for block in distinct(network):
        graph = graph_of(block)
        if (graph.size, width(graph)) == size:
            counts = measure_space(Endings(graph, rule=GroupRule.ROOTED))
            found.add((f"{counts.transitions:.1e}", f"{counts.schedules:.1e}"))
    assert row in found


def test_search_of_a_network_is_the_same_in_one_process_and_in_two() -> None:
    network = networks()["nasnet"][:2]
    found = [search(network, GroupRule.CONNECTED, processes=processes) for processes in (1, 2)]
    assert found[0] == found[1]
    assert list(map(sum, found[0])) == [(1 << len(block)) - 1 for block in network[::-1]]


def test_imported_googlenet_has_the_streams_that_opara_reports() -> None:
    graph = whole_graph("googlenet")
    assert max(allocate_streams(graph)) + 1 == 28
    assert max(assign_streams(graph)) + 1 == 4


def test_every_measurement_begins_with_a_graph_of_which_nothing_is_known() -> None:
    seen: list[frozenset[str]] = []

    def work(graph: CombinedGraph) -> None:
        seen.append(frozenset(vars(graph)))
        assign_streams(graph)

    graph = CombinedGraph((0, 2), (0,), (0, 1))
    assert len(median_ms(graph, (work, work), 3)) == 2
    assert len(seen) == 6
    assert set(seen) == {frozenset(one.name for one in fields(CombinedGraph))}

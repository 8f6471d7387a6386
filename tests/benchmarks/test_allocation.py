"""`benchmarks.allocation`: the graphs it measures, and that nothing is computed before the clock starts."""

from dataclasses import fields

from benchmarks.allocation import median_ms, whole_graph
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.search.streams import allocate_streams, assign_streams


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

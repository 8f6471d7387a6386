"""`benchmarks.endings`: the published counts for any graph, however it is numbered, and of networks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.endings import NASNET, RANDWIRE, Network, distinct, graph_of, main, measure_space, search
from stageloom.shared.search.endings import Endings, GroupRule
from stageloom.shared.search.states import width

ORACLE = json.loads((Path(__file__).parents[1] / "data/ios_blocks.json").read_text())
BLOCK = ORACLE["inception_v3"]["blocks"][5]


@pytest.mark.parametrize("renumber", [lambda op: op, lambda op: 11 - op])
def test_counts_do_not_depend_on_the_numbering(
    renumber: Callable[[int], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph.json"
    edges = [[renumber(u), renumber(v)] for u, v in BLOCK["edges"]]
    path.write_text(json.dumps({"ops": BLOCK["ops"], "edges": edges}))
    assert main(["--graph", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"width", "rooted", "connected"}
    assert found["width"] == BLOCK["width"]
    assert found["rooted"] == BLOCK["rooted"]
    for key, rooted in found["rooted"].items():
        assert found["connected"][key]["states"] == rooted["states"]
        assert found["connected"][key]["schedules"] >= rooted["schedules"]


@pytest.mark.parametrize(
    ("network", "operators", "size", "row"),
    # IOS, tables 1 and 2: the network's operators; n, d, pairs and schedules of its largest block.
    [
        (RANDWIRE, 120, (33, 8), ("1.2e+06", "9.2e+22")),
        (NASNET, 374, (18, 8), ("3.1e+05", "7.2e+12")),
    ],
    ids=["randwire", "nasnet"],
)
def test_networks_are_those_of_the_tables_of_ios(
    network: Network, operators: int, size: tuple[int, int], row: tuple[str, str]
) -> None:
    assert sum(map(len, network)) == operators
    found = set()
    for block in distinct(network):
        graph = graph_of(block)
        if (graph.size, width(graph)) == size:
            counts = measure_space(Endings(graph, rule=GroupRule.ROOTED))
            found.add((f"{counts.transitions:.1e}", f"{counts.schedules:.1e}"))
    assert row in found


def test_search_of_a_network_is_the_same_in_one_process_and_in_two() -> None:
    network = NASNET[:2]
    found = [search(network, GroupRule.CONNECTED, processes=processes) for processes in (1, 2)]
    assert found[0] == found[1]
    assert list(map(sum, found[0])) == [(1 << len(block)) - 1 for block in network[::-1]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"ops": ["a"]}',
        '{"ops": ["a"], "edges": [[0, 1]]}',
        '{"ops": ["a", "b"], "edges": [[0, 1], [1, 0]]}',
    ],
)
def test_a_file_that_is_no_graph_is_refused_in_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text)
    assert main(["--graph", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1

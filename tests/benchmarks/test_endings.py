"""`benchmarks.endings --graph`: the published counts for any graph, however it is numbered."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.endings import main

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

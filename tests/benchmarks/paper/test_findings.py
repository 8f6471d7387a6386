"""What runs again, what a verdict is, and what pages say of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paper.__main__ import chosen, reproduced, write_pages
from benchmarks.paper.catalogue import CATALOGUE
from benchmarks.paper.code_digest import ROOT, digest_of_code, imported
from benchmarks.paper.finding import (
    Finding,
    Inputs,
    Line,
    Panel,
    PaperClaim,
    Reproduction,
    finding_of,
    near,
    near_gain,
    not_run,
)
from benchmarks.paper.graphs import KeptGraphs, with_batch
from benchmarks.paper.kept_findings import FAILED, FindingsFolder, KeptFinding
from benchmarks.paper.pages import PAPERS, index_page, paper_page
from benchmarks.paper.plots import drawn
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from tests.search.graphs import CHAIN, DIAMOND, model

HELD = PaperClaim("it is fast", "1.5 times", True)
REFUTED = PaperClaim("it is small", "3 | 4 MiB", False)
UNTRIED = not_run("it is cheap", "nobody sells it")
PANEL = Panel("speed", "batch", "times", (Line("ours", ((1, 1.0), (2, 1.5))),))
FINDING = Finding((HELD, REFUTED, UNTRIED), ({"batch": 1, "speed": 1.25, "same": True},), (PANEL,), "A note.")
INPUTS = Inputs(lambda name: model(name, CHAIN)[1], Path("nowhere"))


def entry(id: str = "top-figure-1", **fields: object) -> Reproduction:
    one = Reproduction(id, "top", "Figure 1", "TOP is fast.", "twin", lambda inputs: FINDING)
    return replace(one, **fields)  # type: ignore[arg-type]


# What runs again


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Modules of which `figure` imports `costs`, which imports `rates` inside a function."""
    files = {
        "benchmarks/__init__.py": "",
        "benchmarks/figure.py": "from benchmarks import costs\n",
        "benchmarks/costs.py": "def cost():\n    from stageloom.rates import RATE\n    return RATE\n",
        "benchmarks/other.py": "ELSE = 1\n",
        "stageloom/__init__.py": "",
        "stageloom/rates.py": "import numpy\nRATE = 1.0\n",
        "data/device.toml": "launch_s = 1.0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def digests(tree: Path, changes: Sequence[tuple[str, str]]) -> list[str]:
    """The digest before and after each change; each in a copy, as sources are read once."""
    found = [digest_of_code("benchmarks.figure", ["data"], root=tree)]
    for number, (name, text) in enumerate(changes):
        copy = tree.with_name(f"{tree.name}-{number}")
        for file in tree.rglob("*"):
            if file.is_file():
                (copy / file.relative_to(tree)).parent.mkdir(parents=True, exist_ok=True)
                (copy / file.relative_to(tree)).write_text(file.read_text())
        (copy / name).write_text(text)
        found.append(digest_of_code("benchmarks.figure", ["data"], root=copy))
    return found


def test_a_digest_is_of_everything_that_is_imported_and_of_the_files(tree: Path) -> None:
    before, *after = digests(
        tree,
        [
            ("stageloom/rates.py", "import numpy\nRATE = 2.0\n"),
            ("data/device.toml", "launch_s = 2.0\n"),
            ("data/another.toml", ""),
        ],
    )
    assert len({before, *after}) == 4


def test_a_digest_is_not_of_comments_and_of_modules_that_are_not_imported(tree: Path) -> None:
    changes = [
        ("stageloom/rates.py", "import numpy  # why\n\nRATE = 1.0\n"),
        ("benchmarks/other.py", "ELSE = 2\n"),
    ]
    assert len(set(digests(tree, changes))) == 1


def test_a_pattern_stands_for_what_there_is(tree: Path) -> None:
    nothing = digest_of_code("benchmarks.figure", ["data/*.json"], root=tree)
    assert nothing == digest_of_code("benchmarks.figure", [], root=tree)
    (tree / "data" / "kept.json").write_text("{}")
    assert digest_of_code("benchmarks.figure", ["data/*.json"], root=tree) != nothing


def test_a_file_that_is_not_there_has_no_digest(tree: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest_of_code("benchmarks.figure", ["data/absent.toml"], root=tree)


def test_a_module_of_the_product_is_found_through_its_links() -> None:
    found = imported("benchmarks.paper.contestants")
    assert {"benchmarks.paper.contestants", "stageloom.shared.search.ios"} <= found
    assert not any(name.startswith("stageloom.edge_agent") for name in found)


def test_only_what_is_of_other_code_is_due(tmp_path: Path) -> None:
    folder = FindingsFolder(tmp_path)
    one = entry()
    assert folder.due([one]) == [one]
    folder.write(KeptFinding(one.id, FINDING, folder.digest_of(one), "2026-11-28", 1.0))
    assert folder.due([one]) == []
    assert folder.due([replace(one, files=("benchmarks/ios_networks.json",))]) != []
    folder.write(KeptFinding(one.id, FINDING, FAILED, "2026-11-28", 1.0))
    assert folder.due([one]) == [one]


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    folder = FindingsFolder(tmp_path)
    kept = KeptFinding("top-figure-1", FINDING, "0123456789abcdef", "2026-11-28", 1.0)
    folder.write(kept)
    assert folder.read("top-figure-1") == kept
    assert folder.read("top-figure-2") is None
    assert finding_of(FINDING.plain) == FINDING


# Verdicts


@pytest.mark.parametrize(
    ("claims", "verdict"),
    [
        ([HELD], "holds"),
        ([HELD, UNTRIED], "holds, as far as run"),
        ([REFUTED], "does not hold"),
        ([REFUTED, UNTRIED], "does not hold, as far as run"),
        ([HELD, REFUTED, HELD], "in part (2 of 3)"),
        ([UNTRIED], "not run"),
    ],
)
def test_a_verdict_is_of_the_claims_that_were_tried(claims: list[PaperClaim], verdict: str) -> None:
    assert Finding(tuple(claims)).verdict == verdict


def test_a_reproduction_that_fails_is_not_run_with_the_reason() -> None:
    def fails(inputs: Inputs) -> Finding:
        raise InputError("no such device", remedy="name another")

    finding, cpu_s, ended = reproduced(entry(reproduce=fails), INPUTS, clock=iter([1.0, 3.5]).__next__)
    assert not ended
    assert finding.verdict == "not run"
    assert "no such device" in finding.claims[0].ours
    assert cpu_s == 2.5


def test_ids_are_chosen_by_name_by_paper_and_by_beginning() -> None:
    known = [entry("top-figure-1"), entry("top-table-1"), entry("ios-table-1", paper="ios")]
    assert chosen([], known) == known
    assert chosen(["top-table-1"], known) == known[1:2]
    assert chosen(["ios", "top-figure-"], known) == [known[0], known[2]]
    with pytest.raises(InputError):
        chosen(["top-figure-9"], known)


def test_a_loss_is_not_near_a_small_gain() -> None:
    assert near(0.95, 1.14)
    assert not near_gain(0.95, 1.14)
    assert [near_gain(one, 1.14) for one in (1.06, 1.08, 1.14, 1.27, 1.29)] == [
        False,
        True,
        True,
        True,
        False,
    ]


# Pages

GOLDEN = """\
# TOP, reproduced

<!-- Written by `python -m benchmarks.paper`; edit benchmarks/paper instead. -->

Lin, Chen, Zhang and Liu 2025, “TOP: Task-Based Operator Parallelism for Asynchronous Deep Learning
Inference on GPU” (IEEE TPDS 36). [All papers](README.md) says how to read this page.

## Figure 1 {: #top-figure-1 }

*The paper:* TOP is fast.

**In part (1 of 2).** Ours: twin; 2026-11-28, digest `01234567`.
`python -m benchmarks.paper --only top-figure-1`

A note.

| claim | ours | holds |
| --- | --- | --- |
| it is fast | 1.5 times | yes |
| it is small | 3 \\| 4 MiB | **no** |
| it is cheap | not run: nobody sells it |  |

![Figure 1](top-figure-1.svg)

| batch | speed | same |
| --- | --- | --- |
| 1 | 1.25 | yes |

## Figure 2 {: #top-figure-2 }

*The paper:* TOP is fast.

Not run yet: `python -m benchmarks.paper --only top-figure-2`.
"""


def test_a_page_says_what_holds_what_does_not_and_what_was_not_run() -> None:
    known = [entry(), entry("top-figure-2", title="Figure 2"), entry("ios-table-1", paper="ios")]
    kept = {"top-figure-1": KeptFinding("top-figure-1", FINDING, "0123456789abcdef", "2026-11-28", 1.0)}
    assert paper_page("top", known, kept) == GOLDEN


def test_what_has_no_place_names_none() -> None:
    known = [entry(where="")]
    kept = {"top-figure-1": KeptFinding("top-figure-1", FINDING, "0123456789abcdef", "2026-11-28", 1.0)}
    assert "**In part (1 of 2).** 2026-11-28, digest `01234567`." in paper_page("top", known, kept)


def test_a_kept_finding_has_a_line_for_each_claim_row_and_panel(tmp_path: Path) -> None:
    folder = FindingsFolder(tmp_path)
    folder.write(KeptFinding("top-figure-1", FINDING, "0123456789abcdef", "2026-11-28", 1.0))
    lines = (tmp_path / "top-figure-1.json").read_text().splitlines()
    assert '   {"claim": "it is fast", "ours": "1.5 times", "holds": true},' in lines
    assert '   {"batch": 1, "speed": 1.25, "same": true}' in lines
    assert len([line for line in lines if '"lines"' in line]) == 1


def test_the_index_has_a_verdict_a_date_and_a_digest_for_every_id() -> None:
    known = [entry(), entry("top-figure-2")]
    kept = {"top-figure-1": KeptFinding("top-figure-1", FINDING, "0123456789abcdef", "2026-11-28", 1.0)}
    page = index_page(known, kept)
    first = (
        "| [top-figure-1](top.md#top-figure-1) | TOP is fast. | twin | in part (1 of 2) | 2026-11-28 | "
        "`01234567` |"
    )
    assert first in page
    assert "| [top-figure-2](top.md#top-figure-2) | TOP is fast. | twin | not run yet |  |  |" in page
    assert "3 claims in 2 tables and figures: 1 hold, 1 do not, 1 were not run" in page


def test_equal_panels_are_equal_bytes_with_their_words() -> None:
    bars = Panel("bars", "", "tasks/s", (Line("a", (("x", 1.0),)), Line("b", (("y", 2.0),))))
    picture = drawn([PANEL, bars, replace(PANEL, logarithmic=True), bars, bars])
    assert picture == drawn([PANEL, bars, replace(PANEL, logarithmic=True), bars, bars])
    assert all(word in picture for word in ("speed", "tasks/s"))


def test_pages_and_pictures_are_written(tmp_path: Path) -> None:
    kept = {"top-figure-1": KeptFinding("top-figure-1", FINDING, "0123456789abcdef", "2026-11-28", 1.0)}
    write_pages(tmp_path, [entry()], kept, [])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"README.md", "top-figure-1.svg", *(f"{paper}.md" for paper in PAPERS)}


def test_pages_in_docs_are_what_is_kept_there() -> None:
    docs = ROOT / "docs" / "papers"
    folder = FindingsFolder(docs / "results")
    kept = {one.id: found for one in CATALOGUE if (found := folder.read(one.id)) is not None}
    assert (docs / "README.md").read_text() == index_page(CATALOGUE, kept)
    for paper in PAPERS:
        assert (docs / f"{paper}.md").read_text() == paper_page(paper, CATALOGUE, kept)
    pictures = {path.stem for path in docs.glob("*.svg")}
    assert pictures == {id for id, found in kept.items() if found.finding.panels}


# Graphs


def test_a_graph_is_made_once_for_the_same_code(tmp_path: Path) -> None:
    made: list[str] = []

    def make(names: Sequence[str]) -> dict[str, Graph]:
        made.extend(names)
        return {name: model(name, DIAMOND, cuts=[1])[1] for name in names}

    first = KeptGraphs(tmp_path, make, "a")("net")
    assert KeptGraphs(tmp_path, make, "a")("net").digest == first.digest
    assert made == ["net"]
    KeptGraphs(tmp_path, make, "b")("net")
    assert made == ["net", "net"]


def test_a_batch_is_the_same_graph_with_more_rows_and_more_work() -> None:
    graph = model("net", DIAMOND)[1]
    of_four = with_batch(graph, 4)
    assert with_batch(graph, 1) is graph
    assert [one.flop for one in of_four.operators] == [4 * one.flop for one in graph.operators]
    assert [one.nbytes for one in of_four.tensors] == [4 * one.nbytes for one in graph.tensors]
    assert [one.weight_bytes for one in of_four.operators] == [one.weight_bytes for one in graph.operators]

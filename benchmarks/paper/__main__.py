"""The tables and figures of five papers: TOP, IOS, Opara, StarONNX and EOP, reproduced or refuted.

    python -m benchmarks.paper [--only ID]... [--all] [--list] [--quick] [--json]

Runs what changed since it was last run, keeps what it found in DOCS/results, and writes DOCS: a page per
paper, a picture per figure and an index of every claim with its verdict. An id that ends in `-` or a paper's
name stands for all that begin with it. --quick tries the code on small inputs and keeps nothing.

With --json a row per claim: what the paper says, what is found, whether it holds (null: not run, `ours` says
why).
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.one_thread import in_one_thread
from benchmarks.paper.catalogue import CATALOGUE
from benchmarks.paper.code_digest import ROOT
from benchmarks.paper.finding import Finding, Inputs, PaperClaim, Reproduction
from benchmarks.paper.graphs import KeptGraphs
from benchmarks.paper.kept_findings import FAILED, FindingsFolder, KeptFinding
from benchmarks.paper.pages import PAPERS, index_page, paper_page
from benchmarks.runner import Report, progress, run
from stageloom.shared.errors import InputError, StageloomError


def _known(text: str) -> str:
    """An id that stands for something; a type for argparse."""
    try:
        chosen([text], CATALOGUE)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--only": {
        "action": "append",
        "type": _known,
        "metavar": "ID",
        "help": "this table or figure; repeat for more",
    },
    "--all": {"action": "store_true", "help": "run again what did not change, too"},
    "--list": {"action": "store_true", "help": "say what would run, and run nothing"},
    "--docs": {
        "type": Path,
        "default": ROOT / "docs" / "papers",
        "metavar": "DIR",
        "help": "default %(default)s",
    },
    "--cache": {"type": Path, "default": ROOT / "var" / "paper", "metavar": "DIR", "help": "imported graphs"},
}


def chosen(only: Sequence[str], reproductions: Sequence[Reproduction]) -> list[Reproduction]:
    """Those that are asked for, all without an id.

    Raises:
        InputError: an id stands for none.
    """
    for wanted in only:
        if not any(_is(one, wanted) for one in reproductions):
            raise InputError(f"no table or figure is called {wanted!r}", remedy="see --list")
    return [one for one in reproductions if not only or any(_is(one, wanted) for wanted in only)]


def _is(one: Reproduction, wanted: str) -> bool:
    return wanted in (one.id, one.paper) or (wanted.endswith("-") and one.id.startswith(wanted))


def reproduced(
    one: Reproduction, inputs: Inputs, clock: Callable[[], float] = time.process_time
) -> tuple[Finding, float, bool]:
    """What it found, the processor seconds that it took, and whether it came to its end.

    One that fails says so in place of its claims.
    """
    began_s = clock()
    try:
        finding = one.reproduce(inputs)
    except StageloomError as error:
        failed = PaperClaim(one.says, f"not run: it failed: {error}", None)
        return Finding((failed,)), clock() - began_s, False
    return finding, clock() - began_s, True


def write_pages(
    docs: Path, reproductions: Sequence[Reproduction], kept: Mapping[str, KeptFinding], draw: Sequence[str]
) -> None:
    """The index and all papers' pages; the pictures of `draw` and those that are missing."""
    from benchmarks.paper.plots import drawn  # matplotlib only where something is drawn

    docs.mkdir(parents=True, exist_ok=True)
    (docs / "README.md").write_text(index_page(reproductions, kept), encoding="utf-8")
    for paper in PAPERS:
        (docs / f"{paper}.md").write_text(paper_page(paper, reproductions, kept), encoding="utf-8")
    for id, found in kept.items():
        file = docs / f"{id}.svg"
        if found.finding.panels and (id in draw or not file.exists()):
            file.write_text(drawn(found.finding.panels), encoding="utf-8")


def measure(report: Report, options: argparse.Namespace) -> int:
    wanted = chosen(options.only or (), CATALOGUE)
    folder = FindingsFolder(options.docs / "results")
    due = wanted if options.all or options.quick else folder.due(wanted)
    if options.list:
        for one in wanted:
            print(f"{one.id:22} {'due ' if one in due else 'kept'} {one.says}")
        return 0
    in_one_thread("benchmarks.paper")
    inputs = Inputs(KeptGraphs(options.cache / "graphs"), ROOT / "docs" / "results", small=options.quick)
    found: dict[str, Finding] = {}
    digests = {one.id: folder.digest_of(one) for one in due}  # of the code that runs, not of later edits
    for one in due:
        progress(f"{one.id}: {one.says}")
        finding, cpu_s, ended = reproduced(one, inputs)
        progress(f"{one.id}: {finding.verdict}, {cpu_s:.0f} s of processor time")
        found[one.id] = finding
        if not options.quick:
            day = datetime.now(UTC).date().isoformat()
            folder.write(KeptFinding(one.id, finding, digests[one.id] if ended else FAILED, day, cpu_s))
    if not options.quick:
        kept = {one.id: read for one in CATALOGUE if (read := folder.read(one.id)) is not None}
        write_pages(options.docs, CATALOGUE, kept, list(found))
        found = {one.id: kept[one.id].finding for one in wanted}
    _tell(report, wanted, found)
    return 0


def _tell(report: Report, wanted: Sequence[Reproduction], found: Mapping[str, Finding]) -> None:
    rows = [
        {"id": one.id, "where": one.where, "claim": claim.claim, "ours": claim.ours, "holds": claim.holds}
        for one in wanted
        for claim in found[one.id].claims
    ]
    truths = [row["holds"] for row in rows]
    report.add(
        {
            "claims": len(rows),
            "held": truths.count(True),
            "refuted": truths.count(False),
            "not_run": truths.count(None),
        },
        rows,
    )


if __name__ == "__main__":
    sys.exit(run(measure, ("numpy", "numba", "onnx", "onnxruntime", "matplotlib"), options=_OPTIONS))

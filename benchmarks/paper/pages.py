"""The pages of what was found: one per paper, and an index of all claims. Markdown; pure."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, Final

from benchmarks.paper.finding import PaperClaim, Reproduction, Row
from benchmarks.paper.kept_findings import KeptFinding

PAPERS: Final[Mapping[str, str]] = {
    "top": "Lin, Chen, Zhang and Liu 2025, “TOP: Task-Based Operator Parallelism for Asynchronous Deep "
    "Learning Inference on GPU” (IEEE TPDS 36)",
    "ios": "Ding, Zhu, Jia, Pekhimenko and Han 2021, “IOS: Inter-Operator Scheduler for CNN Acceleration” "
    "(MLSys)",
    "opara": "Chen, Xu, Han, Dong, Chen, Zhou and Liu 2023, “Opara: Exploiting Operator Parallelism for "
    "Expediting DNN Inference on GPUs” (arXiv)",
    "staronnx": "Beaumont, David, Eyraud-Dubois and Thibault 2024, “StarONNX: a Dynamic Scheduler for Low "
    "Latency and High Throughput Inference on Heterogeneous Resources” (HeteroPar)",
    "eop": "Xu, Zhang, Wu and Hu 2022, “EOP: Efficient Operator Partition for Deep Learning Inference over "
    "Edge Servers” (VEE)",
}
"""Papers by the first part of an id."""

_NAMES: Final = {"top": "TOP", "ios": "IOS", "opara": "Opara", "staronnx": "StarONNX", "eop": "EOP"}
_MADE: Final = "<!-- Written by `python -m benchmarks.paper`; edit benchmarks/paper instead. -->"
_COLUMNS: Final = 108

_INTRODUCTION: Final = """\
What five papers say in their tables and figures, and what is found here when the same is tried with this
repository's searches, engine and twin. One command runs all that changed and writes these pages:

    python -m benchmarks.paper

`--only ID` runs one, `--all` runs again what did not change, `--json` prints every claim as a row. A finding
is kept with a digest of the code and files that made it; it is due again when that digest changes.

*Where* says what our figures are of:

- **twin**: the agent's engine core on a virtual clock, on a device file made of published ceilings. It ranks
  plans and shows shapes; its absolute times are those of kernels that reach the roofline.
- **cost model**: the searches' own costs; nothing runs.
- **CPU**: measured where the command ran, in processor seconds.
- **kept**: read from a result in `docs/results`, measured there before, on the device that stands beside it.

A claim *holds* if the shape is there, by a rule that the code states beside it. A factor ("1.6 times") holds
if ours is within a quarter of it, a gain in per cent if ours is between half and twice of it. *In part* says
how many of the claims that were tried do.
"""


def index_page(reproductions: Sequence[Reproduction], kept: Mapping[str, KeptFinding]) -> str:
    """The table of all tables and figures; those without a finding say so."""
    lines = ["# The papers, reproduced", "", _MADE, "", _INTRODUCTION]
    lines += [_tally(reproductions, kept), ""]
    lines += [
        "| id | what the paper says | where | verdict | date | digest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in reproductions:
        found = kept.get(one.id)
        verdict = "not run yet" if found is None else found.finding.verdict
        day, digest = ("", "") if found is None else (found.day, f"`{found.digest[:8]}`")
        link = f"[{one.id}]({one.paper}.md#{one.id})"
        lines.append(f"| {link} | {_cell(one.says)} | {one.where} | {verdict} | {day} | {digest} |")
    return "\n".join(lines) + "\n"


def _tally(reproductions: Sequence[Reproduction], kept: Mapping[str, KeptFinding]) -> str:
    claims = [claim for one in reproductions if one.id in kept for claim in kept[one.id].finding.claims]
    held, failed = (sum(claim.holds is truth for claim in claims) for truth in (True, False))
    untried = len(claims) - held - failed
    return (
        f"{len(claims)} claims in {len(reproductions)} tables and figures: {held} hold, {failed} do not, "
        f"{untried} were not run, each with the reason."
    )


def paper_page(paper: str, reproductions: Sequence[Reproduction], kept: Mapping[str, KeptFinding]) -> str:
    """All tables and figures of one paper."""
    lines = [f"# {_NAMES[paper]}, reproduced", "", _MADE, ""]
    lines += _wrapped(f"{PAPERS[paper]}. [All papers](README.md) says how to read this page.")
    for one in reproductions:
        if one.paper == paper:
            lines += ["", *_section(one, kept.get(one.id))]
    return "\n".join(lines) + "\n"


def _section(one: Reproduction, kept: KeptFinding | None) -> list[str]:
    lines = [f"## {one.title} {{: #{one.id} }}", "", *_wrapped(f"*The paper:* {one.says}"), ""]
    if kept is None:
        return [*lines, f"Not run yet: `python -m benchmarks.paper --only {one.id}`."]
    finding = kept.finding
    ours = f"Ours: {one.where}; " if one.where else ""
    lines += [f"**{_capital(finding.verdict)}.** {ours}{kept.day}, digest `{kept.digest[:8]}`."]
    lines += [f"`python -m benchmarks.paper --only {one.id}`", ""]
    if finding.note:
        lines += [*_wrapped(finding.note), ""]
    lines += ["| claim | ours | holds |", "| --- | --- | --- |"]
    lines += [f"| {_cell(claim.claim)} | {_cell(claim.ours)} | {_truth(claim)} |" for claim in finding.claims]
    if finding.panels:
        lines += ["", f"![{one.title}]({one.id}.svg)"]
    for columns, rows in tables(finding.rows):
        lines += ["", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        lines += [f"| {' | '.join(_text(row[column]) for column in columns)} |" for row in rows]
    return lines


def tables(rows: Sequence[Row]) -> list[tuple[tuple[str, ...], list[Row]]]:
    """Rows with the same columns, in order of appearance."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row), []).append(row)
    return list(found.items())


def _truth(claim: PaperClaim) -> str:
    return "" if claim.holds is None else "yes" if claim.holds else "**no**"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else _cell(str(value))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _wrapped(text: str) -> list[str]:
    return wrap(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)

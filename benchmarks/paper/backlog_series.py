"""The variance of a real agent's queues over time under every contestant's plan, from a kept result of
`benchmarks.backlog`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.paper.finding import Line, Panel, PaperClaim, Row, not_run
from benchmarks.paper.pays_series import AgentSeries

BACKLOG: Final = "docs/results/*-backlog.json"
"""Kept results, from the repository's root; the newest counts."""

_CLAIM: Final = "on the real agent TOP's combination keeps it lower than every rival, at each load"


def backlog_series(results: Path, column: str) -> tuple[AgentSeries, tuple[Row, ...]]:
    """What figure 17 shows of an agent, and rows with the variance at the end under `column`.

    Without a result the claim says that there is none.
    """
    files = sorted(results.glob(Path(BACKLOG).name))
    if not files:
        return AgentSeries(not_run(_CLAIM, "no result of benchmarks.backlog is kept"), ()), ()
    found = [row for row in json.loads(files[-1].read_text("utf-8"))["rows"] if row["part"] == "backlog"]
    shares = sorted({row["share"] for row in found})
    panels = tuple(
        Panel(
            f"agent, {share:g} of auto's capacity",
            "s",
            "variance of the queues, tasks^2 + 1",
            tuple(_line(row) for row in found if row["share"] == share),
            logarithmic=True,
        )
        for share in shares
    )
    rows = tuple(
        {
            "device": f"agent, at {row['share']:g}",
            "plan": row["plan"],
            column: float(f"{row['variance_end']:.4g}"),
        }
        for row in found
    )
    return AgentSeries(_claim(found, shares), panels), rows


def _claim(found: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> PaperClaim:
    said, holds = [], True
    for share in shares:
        ends = {row["plan"]: row["variance_end"] for row in found if row["share"] == share}
        said.append(f"at {share:g}: " + ", ".join(f"{plan} {end:.3g}" for plan, end in ends.items()))
        holds &= all(ends["top"] < end for plan, end in ends.items() if plan not in ("top", "auto"))
    return PaperClaim(_CLAIM, "; ".join(said), holds)


def _line(row: Mapping[str, Any]) -> Line:
    points = zip(row["at_s"], row["variance_tasks2"], strict=True)
    return Line(row["plan"], tuple((at_s, 1.0 + one) for at_s, one in points))

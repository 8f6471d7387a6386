"""The variance of a real agent's queues over time, from a kept result of `benchmarks.pays`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.paper.finding import Line, Panel, PaperClaim, not_run

PAYS: Final = "docs/results/*-pays*.json"
"""Kept results, from the repository's root."""

_CLAIM: Final = "on the real agent re-planning keeps the variance lower than the plan it began with"


class AgentSeries(NamedTuple):
    """What figure 17 shows of an agent."""

    claim: PaperClaim
    panels: tuple[Panel, ...]


def agent_series(results: Path) -> AgentSeries:
    """Of the newest kept result that has series; without one the claim says that there is none."""
    for file in sorted(results.glob(Path(PAYS).name), reverse=True):
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        series = [row for row in rows if row.get("part") == "series" and row.get("at_s")]
        if series:
            return _compared(file.name, series)
    return AgentSeries(not_run(_CLAIM, "no result of benchmarks.pays with series is kept"), ())


def _compared(file: str, series: list[Mapping[str, Any]]) -> AgentSeries:
    """A panel per mix and scenario: the phases of its first seed, one after another, with and without."""
    panels, ratios = [], []
    for mix, scenario in dict.fromkeys((str(row.get("mix", "")), str(row["scenario"])) for row in series):
        own = [row for row in series if (str(row.get("mix", "")), str(row["scenario"])) == (mix, scenario)]
        lines = {on: _line(on, [row for row in own if row["replanning"] is on]) for on in (True, False)}
        panels.append(
            Panel(
                f"agent: {mix} {scenario}".replace("  ", " "),
                "s",
                "variance of queued work, s^2",
                tuple(line for line in lines.values() if line.points),
            )
        )
        means = {on: _mean(line) for on, line in lines.items()}
        if all(line.points for line in lines.values()) and means[False] > 0.0:
            ratios.append(means[True] / means[False])
    if not ratios:
        return AgentSeries(
            not_run(_CLAIM, f"{file} has no scenario with re-planning on and off"), tuple(panels)
        )
    ours = f"{', '.join(f'{ratio:.2f}' for ratio in ratios)} times the variance ({file})"
    return AgentSeries(PaperClaim(_CLAIM, ours, max(ratios) < 1.0), tuple(panels))


def _line(replanning: bool, rows: list[Mapping[str, Any]]) -> Line:
    """Phases in the order in which they ran, each begins where the one before ended."""
    seed = min((row["seed"] for row in rows), default=None)
    points: list[tuple[float, float]] = []
    began_s = 0.0
    for row in rows:
        if row["seed"] == seed:
            points += [(began_s + at_s, v) for at_s, v in zip(row["at_s"], row["variance_s2"], strict=True)]
            began_s = points[-1][0]
    return Line("re-planning" if replanning else "fixed plan", tuple(points))


def _mean(line: Line) -> float:
    return sum(y for _, y in line.points) / len(line.points) if line.points else 0.0

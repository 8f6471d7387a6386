"""The variance of a real agent's queues over time, from kept results of `benchmarks.pays`."""

import json
from collections.abc import Iterator, Mapping, Sequence
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


class _Scenario(NamedTuple):
    """One scenario of one mix in one file."""

    title: str
    fixed: Line
    replanned: Line

    @property
    def ratio(self) -> float | None:
        """Mean variance with re-planning over that without; None where there is none to compare with."""
        means = [_mean(line) for line in (self.replanned, self.fixed)]
        return means[0] / means[1] if all(line.points for line in self[1:]) and means[1] > 0.0 else None


def agent_series(results: Path) -> AgentSeries:
    """Of all kept results with series; without one the claim says that there is none."""
    found = [
        scenario
        for file in sorted(results.glob(Path(PAYS).name))
        for scenario in _scenarios(file.stem, json.loads(file.read_text(encoding="utf-8")))
    ]
    panels = tuple(
        Panel(one.title, "s", "variance of queued work, s^2", tuple(line for line in one[1:] if line.points))
        for one in found
    )
    ratios = {one.title: one.ratio for one in found if one.ratio is not None}
    if not ratios:
        return AgentSeries(not_run(_CLAIM, "no result of benchmarks.pays with such series is kept"), panels)
    ours = ", ".join(f"{title}: {ratio:.2f} times" for title, ratio in ratios.items())
    return AgentSeries(PaperClaim(_CLAIM, f"mean variance, {ours}", max(ratios.values()) < 1.0), panels)


def _scenarios(name: str, result: Mapping[str, Any]) -> Iterator[_Scenario]:
    processor = result["machine"]["processor"]
    series = [row for row in result["rows"] if row.get("part") == "series" and row.get("at_s")]
    for mix, scenario in dict.fromkeys((row["mix"], row["scenario"]) for row in series):
        own = [row for row in series if (row["mix"], row["scenario"]) == (mix, scenario)]
        fixed, replanned = ([row for row in own if row["replanning"] is on] for on in (False, True))
        title = f"agent on {processor}, {mix}, {scenario.replace('_', ' ')} ({name})"
        yield _Scenario(title, _line("fixed plan", fixed), _line("re-planning", replanned))


def _line(label: str, rows: Sequence[Mapping[str, Any]]) -> Line:
    """The phases of the first seed in the order in which they ran, each after the one before."""
    points: list[tuple[float, float]] = []
    began_s = 0.0
    for row in rows:
        if row["seed"] == rows[0]["seed"]:
            points += [(began_s + at_s, v) for at_s, v in zip(row["at_s"], row["variance_s2"], strict=True)]
            began_s = points[-1][0]
    return Line(label, tuple(points))


def _mean(line: Line) -> float:
    return sum(y for _, y in line.points) / len(line.points) if line.points else 0.0

"""Plans beside each other and beside the naive way, under one load at a time, in windows that take turns."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.pays.intervals import Tasks, in_time, mean_log_s, p50_s, p99_s, ratio
from benchmarks.pays.load import core_taken
from benchmarks.pays.scenarios import BESIDE, DAY, NIGHT
from benchmarks.runner import Report, progress
from stageloom.edge_agent.bench.contest import Contest, ContestLoad
from stageloom.edge_agent.bench.model_files import ModelUnderTest
from stageloom.edge_agent.bench.rival_settings import NAIVE
from stageloom.edge_agent.bench.stageloom_contestant import AgentSetting

WINDOW_S: Final = 2.5
STATISTICS: Final = {"p50": p50_s, "p99": p99_s, "latency": mean_log_s, "in_time": in_time}


@dataclass(frozen=True)
class Regime:
    """A load, and which plan was made for it against which one."""

    name: str
    share: float
    over: str
    under: str
    taken: bool = False


REGIMES: Final = (
    Regime("night", NIGHT, "night", "day"),
    Regime("day", DAY, "day", "night"),
    Regime("day", DAY, "day", "whole"),
    Regime("taken", BESIDE, "taken", "before", taken=True),
)
"""The plans for each regime by name: `night`, `day`, `whole`, `taken`, `before`; naive runs beside all."""


def figure_of(regime: Regime, statistic: str, mix: str) -> str:
    """What the ratio of a regime's plan over the other one is called."""
    if regime.taken:
        return f"core_taken_{statistic}_over_before.{mix}"
    return f"{regime.over}_{statistic}_over_{regime.under}_plan.{mix}"


def measure_gain(
    report: Report,
    mix: str,
    models: Sequence[ModelUnderTest],
    load: ContestLoad,
    plans: Mapping[str, bytes],
    capacity_per_s: float,
    pairs: int,
) -> None:
    """Into the report, regime by regime; one that lacks a plan is left out. `plans`: bytes by name.

    Raises:
        ContestantError: the agent of one of `plans` does not serve it, or died.
    """
    with Contest(models, load, progress, needed=tuple(plans)) as contest:
        contest.enter([*(AgentSetting(name, wire) for name, wire in plans.items()), NAIVE])
        try:
            for regime in REGIMES:
                names = [one for one in (regime.over, regime.under, NAIVE.name) if one in contest.names]
                if regime.over not in names or regime.under not in names:
                    continue
                progress(f"  {mix} at {regime.share:g} of capacity, {pairs} windows of {', '.join(names)}")
                with core_taken(regime.taken):
                    results = contest.windows_at(names, regime.share * capacity_per_s, pairs)
                windows = {
                    name: [Tasks.of(one, load.deadlines_s) for one in results[name]] for name in results
                }
                report.add({}, _alone(mix, regime, windows))
                for row in _ratios(mix, regime, windows):
                    report.add({row["figure"]: row["value"]}, [row])
        finally:
            absent = {"part": "absent", "mix": mix}
            report.add({}, ({**absent, "contestant": n, "reason": r} for n, r in contest.absent.items()))


def _alone(mix: str, regime: Regime, windows: Mapping[str, Sequence[Tasks]]) -> Iterator[dict[str, Any]]:
    for name, parts in windows.items():
        tasks = Tasks.together(parts)
        yield {
            "part": "gain",
            "mix": mix,
            "load": regime.name,
            "contestant": name,
            "windows": len(parts),
            "tasks": len(tasks.in_time),
            "in_time_per_s": in_time(tasks) / (WINDOW_S * len(parts)),
            "given_up": float(np.mean(~tasks.answered)),
            "p50_ms": 1e3 * p50_s(tasks),
            "p99_ms": 1e3 * p99_s(tasks),
            "latency_ms": 1e3 * mean_log_s(tasks),
        }


def _ratios(mix: str, regime: Regime, windows: Mapping[str, Sequence[Tasks]]) -> Iterator[dict[str, Any]]:
    """No row where the ratio, or an end of its interval, falls on tasks without a result."""
    for statistic, function in STATISTICS.items():
        compared = {figure_of(regime, statistic, mix): (regime.over, regime.under)}
        if NAIVE.name in windows and regime.under != "whole":
            compared[f"{statistic}_over_naive.{mix}.{regime.name}"] = (regime.over, NAIVE.name)
        for figure, (over, under) in compared.items():
            value, low, high = ratio(function, windows[over], windows[under])
            if all(map(math.isfinite, (value, low, high))):
                row = {"part": "ratio", "figure": figure, "value": value, "low": low, "high": high}
                yield {**row, "windows": len(windows[over])}

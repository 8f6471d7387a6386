"""What windows under one plan say against windows under another, with intervals. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stageloom.edge_agent.bench.load import Array, WindowResult

RESAMPLES: Final = 1000


@dataclass(frozen=True)
class Tasks:
    """What became of some tasks: latencies [tasks] float64 in seconds, and who was in time [tasks] bool.

    One without a result counts as twice its deadline, as it does in a trial.
    """

    latency_s: Array
    in_time: Array

    @classmethod
    def of(cls, result: WindowResult, deadlines_s: Sequence[float]) -> "Tasks":
        """`deadlines_s`: by model."""
        missing = 2.0 * np.asarray(deadlines_s, np.float64)[result.model]
        latency_s = np.where(np.isnan(result.latency_s), missing, result.latency_s)
        return cls(latency_s, np.asarray(result.in_time))

    @classmethod
    def together(cls, parts: Sequence["Tasks"]) -> "Tasks":
        """All tasks of some windows."""
        return cls(
            np.concatenate([part.latency_s for part in parts]),
            np.concatenate([part.in_time for part in parts]),
        )


Statistic = Callable[[Tasks], float]


def p50_s(tasks: Tasks) -> float:
    """Half of the tasks took no longer."""
    return _percentile_s(tasks, 50)


def p99_s(tasks: Tasks) -> float:
    """99 of 100 tasks took no longer."""
    return _percentile_s(tasks, 99)


def _percentile_s(tasks: Tasks, percent: int) -> float:
    """`np.percentile(..., method="higher")` in a thirtieth of its time: a bootstrap asks a thousand times."""
    if not len(tasks.latency_s):
        return float("nan")
    at = int(np.ceil((len(tasks.latency_s) - 1) * (percent / 100)))
    return float(np.partition(tasks.latency_s, at)[at])


def in_time(tasks: Tasks) -> float:
    """Tasks in time."""
    return float(np.count_nonzero(tasks.in_time))


def mean_log_s(tasks: Tasks) -> float:
    """The geometric mean of latencies: each halving counts alike, whoever is halved."""
    return float(np.exp(np.mean(np.log(tasks.latency_s)))) if len(tasks.latency_s) else np.nan


def interval(statistic: Statistic, windows: Sequence[Tasks], seed: int = 0) -> tuple[float, float]:
    """Ends of a statistic's 95 % interval by bootstrap over windows.

    Raises:
        ValueError: there are no windows.
    """
    if not windows:
        raise ValueError("no windows")
    rng = np.random.default_rng(seed)
    drawn = [
        statistic(Tasks.together([windows[n] for n in rng.integers(0, len(windows), len(windows))]))
        for _ in range(RESAMPLES)
    ]
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def ratio(
    statistic: Statistic, over: Sequence[Tasks], under: Sequence[Tasks], seed: int = 0
) -> tuple[float, float, float]:
    """A statistic's ratio, and the ends of its 95 % interval by bootstrap.

    `over` and `under` are windows that took turns: the n-th of both had the same arrivals, so pairs are
    drawn.

    Raises:
        ValueError: not as many windows of either, or none.
    """
    if len(over) != len(under) or not over:
        raise ValueError(f"{len(over)} and {len(under)} windows are no pairs")
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(RESAMPLES):
        chosen = rng.integers(0, len(over), len(over))
        drawn.append(_ratio(statistic, [over[n] for n in chosen], [under[n] for n in chosen]))
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return _ratio(statistic, over, under), float(low), float(high)


def _ratio(statistic: Statistic, over: Sequence[Tasks], under: Sequence[Tasks]) -> float:
    below = statistic(Tasks.together(under))
    return statistic(Tasks.together(over)) / below if below else float("nan")

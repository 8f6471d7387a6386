"""What windows under one plan say against windows under another, with intervals. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stageloom.edge_agent.bench.capacity import LEAST_WINDOWS
from stageloom.edge_agent.bench.load import Array, WindowResult

RESAMPLES: Final = 1000


@dataclass(frozen=True)
class Tasks:
    """What became of some tasks, by task: latencies, float64 in seconds; bools for in time and with a result.

    A latency without a result is twice the deadline, as in a trial.
    """

    latency_s: Array
    in_time: Array
    answered: Array

    @classmethod
    def of(cls, result: WindowResult, deadlines_s: Sequence[float]) -> "Tasks":
        """`deadlines_s`: by model."""
        answered = ~np.isnan(result.latency_s)
        missing = 2.0 * np.asarray(deadlines_s, np.float64)[result.model]
        return cls(np.where(answered, result.latency_s, missing), np.asarray(result.in_time), answered)

    @classmethod
    def together(cls, parts: Sequence["Tasks"]) -> "Tasks":
        """All tasks of some windows."""
        return cls(
            np.concatenate([part.latency_s for part in parts]),
            np.concatenate([part.in_time for part in parts]),
            np.concatenate([part.answered for part in parts]),
        )


Statistic = Callable[[Tasks], float]


def p50_s(tasks: Tasks) -> float:
    """Half of the tasks had a result after no longer; nan where fewer had one."""
    return percentile_s(np.where(tasks.answered, tasks.latency_s, np.nan), 50)


def p99_s(tasks: Tasks) -> float:
    """99 of 100 tasks had a result after no longer; nan where fewer had one."""
    return percentile_s(np.where(tasks.answered, tasks.latency_s, np.nan), 99)


def percentile_s(latency_s: Array, percent: int) -> float:
    """`np.percentile(..., method="higher")` in a thirtieth of its time: a bootstrap asks a thousand times.

    nan, the largest of all, where it falls on nan or there are no tasks.
    """
    if not len(latency_s):
        return float("nan")
    at = int(np.ceil((len(latency_s) - 1) * (percent / 100)))
    return float(np.partition(latency_s, at)[at])


def in_time(tasks: Tasks) -> float:
    """Tasks in time."""
    return float(np.count_nonzero(tasks.in_time))


def mean_log_s(tasks: Tasks) -> float:
    """The geometric mean of latencies: each halving counts alike, whoever is halved."""
    return float(np.exp(np.mean(np.log(tasks.latency_s)))) if len(tasks.latency_s) else np.nan


def interval(statistic: Statistic, windows: Sequence[Tasks], seed: int = 0) -> tuple[float, float]:
    """Ends of a statistic's 95 % interval by bootstrap over windows; nan of fewer than four.

    Raises:
        ValueError: there are no windows.
    """
    if not windows:
        raise ValueError("no windows")
    count = len(windows)
    return _bootstrap(lambda chosen: statistic(Tasks.together([windows[n] for n in chosen])), count, seed)


def ratio(
    statistic: Statistic, over: Sequence[Tasks], under: Sequence[Tasks], seed: int = 0
) -> tuple[float, float, float]:
    """A statistic's ratio, and the ends of its 95 % interval by bootstrap: nan where one that is drawn is,
    and of fewer than four pairs.

    `over` and `under` are windows that took turns: the n-th of both had the same arrivals, so pairs are
    drawn.

    Raises:
        ValueError: not as many windows of either, or none.
    """
    if len(over) != len(under) or not over:
        raise ValueError(f"{len(over)} and {len(under)} windows are no pairs")

    def ratio_of(chosen: Iterable[int]) -> float:
        below = statistic(Tasks.together([under[n] for n in chosen]))
        return statistic(Tasks.together([over[n] for n in chosen])) / below if below else float("nan")

    return ratio_of(range(len(over))), *_bootstrap(ratio_of, len(over), seed)


def _bootstrap(statistic: Callable[[Iterable[int]], float], windows: int, seed: int) -> tuple[float, float]:
    if windows < LEAST_WINDOWS:
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    drawn = [statistic(rng.integers(0, windows, windows)) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)

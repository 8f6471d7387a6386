"""What learning gains in a cell: the learned answer over the best unlearned one, with its interval. Pure.

Values are compared as plans are (`stageloom.planner.tournament.score`): by throughput, or where that is level
within spread, by p99. A seed's ratio is that of two methods on the same arrivals; the interval is over seeds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import exp, factorial, fsum, log, prod

from stageloom.planner.tournament.score import Score, improves, score_of, spread_of

ByMethod = Mapping[str, Sequence[Score]]
"""Scores by method, one per seed, of the same seeds in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """A geometric mean of ratios above 1 favours the first; `by` is what was compared."""

    ratio: float
    low: float
    high: float
    by: str  # "throughput", or "p99": the second's over the first's


def bootstrap_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The percentile bootstrap of the mean (Efron 1979), over all n^n resamples and not a drawn few.

    Resamples that hold the same values equally often have one mean, so C(2n - 1, n) sums suffice: 126 for 5.
    """
    count = len(values)
    means: list[tuple[float, float]] = []
    for resample in combinations_with_replacement(range(count), count):
        ways = factorial(count) / prod(factorial(often) for often in Counter(resample).values())
        means.append((fsum(values[place] for place in resample) / count, ways / count**count))
    means.sort()
    tail = (1.0 - confidence) / 2.0
    return _quantile(means, tail), -_quantile([(-mean, weight) for mean, weight in reversed(means)], tail)


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """The first value up to which more than `share` of the weight lies."""
    below = 0.0
    for value, weight in weighted:
        below += weight
        if below > share:
            return value
    return weighted[-1][0]


def margin(over: Sequence[Score], under: Sequence[Score]) -> Margin:
    """One method over another, a score of each per seed."""
    first, second = score_of(over), score_of(under)
    level = abs(first.throughput_per_s - second.throughput_per_s) <= spread_of(first, second)
    pairs = list(zip(over, under, strict=True))
    if level and all(one.p99_s > 0.0 and other.p99_s > 0.0 for one, other in pairs):
        logs, by = [log(other.p99_s / one.p99_s) for one, other in pairs], "p99"
    else:
        logs, by = [log(one.throughput_per_s / other.throughput_per_s) for one, other in pairs], "throughput"
    low, high = bootstrap_interval(logs)
    return Margin(ratio=exp(fsum(logs) / len(logs)), low=exp(low), high=exp(high), by=by)


def best_of_methods(scores: ByMethod) -> str:
    """The method whose mean over the seeds is best: of those level with the most throughput, by p99."""
    means = {name: score_of(found) for name, found in scores.items()}
    top = max(means.values(), key=lambda score: score.throughput_per_s)
    held = next(name for name, score in means.items() if score is top)
    for name, score in means.items():
        if improves(score, means[held], top):
            held = name
    return held

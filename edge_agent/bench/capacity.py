"""The largest rate at which each model's tasks meet their deadlines: which rate to try next, and how sure it
is. Pure.

A sample is a window's tasks and those in time, per model. Samples are kept by their rate's place on the
grid. A rate holds where, over all its samples, the share in time is at least 95 % for each model. The search
doubles its stride until one rate holds and one does not, halves what is between them, and then measures the
two neighbours at the border until both have enough samples; where more samples move the border it follows.

Of a model with few tasks a single late one decides: of 18 one is 94 %. So a rate is judged on 20 tasks of
every model; one that failed by chance would bound the search from above ever after. To know about how much
each of many carries, fewer do.

A rate at which no task came says nothing. It does not hold, or what meets no deadline would carry that rate.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from stageloom.edge_agent.bench.load import GRID_STEP, IN_TIME_SHARE, Array, WindowResult, rate_per_s

_FIRST_STRIDE: Final = 4
_CLEARLY_LATE: Final = 0.8
_SURELY_LATE_TASKS: Final = 4  # of 19 at 5 % each: once in 70 times by chance
_JUDGED_WINDOWS: Final = 8  # at most, where a model has hardly any
_RESAMPLES: Final = 1000
LEAST_WINDOWS: Final = 4  # at one rate: of fewer the bootstrap knows no spread, and any number seems sure

Estimate = tuple[float, float, float]
"""A number with the ends of its 95 % interval: the median, the 2.5th and the 97.5th percentile of a
bootstrap."""


@dataclass(frozen=True)
class WindowCounts:
    """One window: arrays [models] of integers."""

    tasks: Array
    in_time: Array

    @classmethod
    def of(cls, result: WindowResult, models: int) -> "WindowCounts":
        """Of what became of a window's tasks."""
        return cls(*result.counts(models))


Samples = Mapping[int, Sequence[WindowCounts]]
"""By place on the grid."""


def least_share(samples: Sequence[WindowCounts]) -> float:
    """The smallest share in time over the models that had tasks; 1 where none had."""
    tasks = np.sum([sample.tasks for sample in samples], axis=0)
    in_time = np.sum([sample.in_time for sample in samples], axis=0)
    return float(np.min(_shares(tasks, in_time)))


def holds(samples: Sequence[WindowCounts]) -> bool:
    """Tasks came, and each model's meet their deadlines."""
    return _had_tasks(samples) and least_share(samples) >= IN_TIME_SHARE


def _had_tasks(samples: Sequence[WindowCounts]) -> bool:
    return any(np.any(sample.tasks) for sample in samples)


def lowest_index(window_s: float) -> int:
    """The lowest place on the grid at which a window is expected to have a task."""
    return math.ceil(-math.log(window_s) / math.log1p(GRID_STEP) - 1e-9)


ROUGHLY: Final = 6
"""Tasks of each model on which a rate is judged where many contestants are looked at for the best of them."""


@dataclass(frozen=True)
class CapacitySearch:
    """How many windows a rate gets: at least `few` to look for the border, `many` at its two sides."""

    few: int = 2
    many: int = 20
    judged_tasks: int = 20  # of each model; of fewer not a single one may be late
    lowest: int = -120  # places on the grid: 0.003 and 34,000 tasks a second
    highest: int = 214

    def next_index(self, samples: Samples, first: int) -> int | None:
        """The rate to measure next, as a place on the grid; None once both sides of the border have `many`.

        `first` is where to begin.
        """
        begun = [place for place, found in samples.items() if found and not self._judged(found)]
        if begun or not samples:
            return begun[0] if begun else self._bounded(first)
        below = max((place for place, found in samples.items() if holds(found)), default=None)
        above = min(
            (place for place in samples if below is None or place > below),
            default=None,
        )
        if below is None or above is None:
            return self._outwards(samples, below)
        if above - below > 1:
            return (below + above) // 2
        left = [place for place in (below, above) if len(samples[place]) < self.many]
        return min(left, key=lambda place: len(samples[place])) if left else None

    def most_per_s(self, samples: Samples) -> float:
        """What the capacity may still come to, in tasks a second, were `many` 1: itself once the search has
        ended, till then the lowest rate above it that does not hold; inf where none is known."""
        held_per_s = capacity_per_s(samples)
        if replace(self, many=1).next_index(samples, 0) is None:
            return held_per_s
        rates = (rate_per_s(place) for place, found in samples.items() if found)
        return min((rate for rate in rates if rate > held_per_s), default=math.inf)

    def _judged(self, found: Sequence[WindowCounts]) -> bool:
        """Enough windows and tasks of each model, or so many late ones that more would not help."""
        tasks = np.sum([sample.tasks for sample in found], axis=0)
        in_time = np.sum([sample.in_time for sample in found], axis=0)
        if np.any((tasks - in_time >= _SURELY_LATE_TASKS) & (in_time < _CLEARLY_LATE * tasks)):
            return True
        enough = np.min(tasks) >= self.judged_tasks or len(found) >= _JUDGED_WINDOWS
        return len(found) >= self.few and bool(enough)

    def _outwards(self, samples: Samples, below: int | None) -> int | None:
        """Past the highest rate where all hold, past the lowest where none does, each time twice as far."""
        edge = min(samples) if below is None else max(samples)
        stride = max(_FIRST_STRIDE, max(samples) - min(samples))
        place = self._bounded(edge - stride if below is None else edge + stride)
        return None if place in samples else place

    def _bounded(self, place: int) -> int:
        return min(max(place, self.lowest), self.highest)


def capacity_per_s(samples: Samples) -> float:
    """The largest rate that holds, in tasks a second; 0 where none does."""
    held = [place for place, found in samples.items() if found and holds(found)]
    return rate_per_s(max(held)) if held else 0.0


def capacity_estimate(samples: Samples, seed: int = 0, *, resamples: int = _RESAMPLES) -> Estimate | None:
    """The capacity in tasks a second between the rates of the grid; None from too few windows, and where no
    rate holds.

    Windows of one number have the same arrivals at every rate, so a bootstrap weights numbers and not
    windows: a hard one is hard at all rates at once. Each model's shares are then made to fall with the rate
    (isotonic regression, weighted by tasks), as chance at a rate with two windows would else decide, and the
    capacity is where the smallest of them crosses 95 % on a straight line between neighbouring rates.
    """
    if _too_few(samples) or not capacity_per_s(samples):
        return None
    return _estimate(_capacities(samples, _window_weights((samples,), seed, resamples)))


def _too_few(samples: Samples) -> bool:
    return max(map(len, filter(_had_tasks, samples.values())), default=0) < LEAST_WINDOWS


def _estimate(drawn: Array) -> Estimate:
    low, middle, high = np.percentile(drawn, [2.5, 50.0, 97.5])
    return float(middle), float(low), float(high)


def _window_weights(sides: Iterable[Samples], seed: int, resamples: int) -> Array:
    """How much windows of each number count in each bootstrap [resamples, numbers] float64.

    Lists of windows differ in length, and each has the first numbers. Drawn with replacement, a number would
    come as often at two rates only where they have as many; a weight is the same wherever the number is. The
    weights spread as far as if the longest list were drawn from.
    """
    numbers = max(len(found) for samples in sides for found in samples.values() if _had_tasks(found))
    return np.random.default_rng(seed).gamma(1.0 - 1.0 / numbers, size=(resamples, numbers))


def _capacities(samples: Samples, weights: Array) -> Array:
    """Capacities of weighted windows [resamples] float64, in tasks a second; see `capacity_estimate`."""
    places = sorted(place for place, found in samples.items() if _had_tasks(found))
    tasks, in_time = [], []
    for place in places:
        found = samples[place]  # in the order of their numbers
        own = weights[:, : len(found)]
        tasks.append(own @ np.array([sample.tasks for sample in found]))
        in_time.append(own @ np.array([sample.in_time for sample in found]))
    rates = np.array([rate_per_s(place) for place in places])
    # [resamples, rates, models]
    return np.array(
        [
            _crossing(rates, t, i)
            for t, i in zip(np.stack(tasks, axis=1), np.stack(in_time, axis=1), strict=True)
        ]
    )


def _crossing(rates: Array, tasks: Array, in_time: Array) -> float:
    """Where the smallest share crosses 95 %; tasks and in_time are [rates, models]."""
    shares = _shares(tasks, in_time)
    smooth = np.stack([_falling(shares[:, m], tasks[:, m]) for m in range(tasks.shape[1])], axis=1)
    least = smooth.min(axis=1)
    late = np.flatnonzero(least < IN_TIME_SHARE - 1e-9)  # weights are no whole numbers
    if not len(late):
        return float(rates[-1])
    first = int(late[0])
    if first == 0:  # no rate below it was measured
        return float(rates[0] / (1.0 + GRID_STEP))
    part = (least[first - 1] - IN_TIME_SHARE) / (least[first - 1] - least[first])
    return float(rates[first - 1] + part * (rates[first] - rates[first - 1]))


def _shares(tasks: Array, in_time: Array) -> Array:
    return np.divide(in_time, tasks, out=np.ones(np.shape(tasks)), where=np.asarray(tasks) > 0)


def _falling(values: Array, weights: Array) -> Array:
    """The nearest sequence that never rises: neighbours that do share their weighted mean."""
    pools: list[list[float]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        pools.append([float(value), float(weight) or 1e-9, 1])
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            mean, own, length = pools.pop()
            total = pools[-1][1] + own
            pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * own) / total, total, pools[-1][2] + length]
    return np.repeat([pool[0] for pool in pools], [int(pool[2]) for pool in pools])


def ratio_of(over: Samples, under: Samples, seed: int = 0, *, resamples: int = _RESAMPLES) -> Estimate | None:
    """The ratio of two capacities; None where one is not known.

    Windows of one number have the same arrivals on both sides, too, and count as much.
    """
    few = _too_few(over) or _too_few(under)
    if few or not capacity_per_s(over) or not capacity_per_s(under):
        return None
    weights = _window_weights((over, under), seed, resamples)
    return _estimate(_capacities(over, weights) / _capacities(under, weights))

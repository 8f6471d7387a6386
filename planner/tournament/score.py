"""The score of a plan: the figures that plans are compared by, with their spreads over arrivals. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, fsum
from typing import Any, Final

from stageloom.planner.twin.window import Window
from stageloom.shared.policy.queues import variance

LEAST_SPREAD: Final = 0.005
"""Share of the throughput: a smaller difference counts as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one device did with one seed's arrivals, or the means over several seeds.

    A spread is half of the highest less the lowest over the seeds.
    """

    throughput_per_s: float
    throughput_spread: float = 0.0
    p99_s: float  # 0 where nothing completed
    p99_spread: float = 0.0
    utilisation: float
    utilisation_spread: float = 0.0
    queue_variance: float  # of queued work in s^2, mean over the glances
    queue_variance_spread: float = 0.0
    variance_growth: float  # s^2 per second: the second half's mean less the first's, over half the time
    met: float  # share of the tasks that came that were completed

    def plain(self) -> dict[str, Any]:
        """Plain values by field name, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def better(one: Score, other: Score) -> bool:
    """More throughput, or, where that is equal within spread, a shorter p99; not transitive."""
    return _better(one, other, 0.0)


def improves(one: Score, held: Score, top: Score) -> bool:
    """Better than what is held, and level with `top`, the most throughput met so far, or above it.

    `better` is not transitive: along a chain of plans, each level in throughput with the one before and
    shorter in p99, throughput would fall without end.
    """
    return better(one, held) and one.throughput_per_s >= top.throughput_per_s - spread_of(one, top)


def best_of(scores: Sequence[Score]) -> int:
    """The place of the shortest p99 among those that are level with the most throughput.

    Whom a row of pairwise comparisons with `better` ends at depends on their order, see `improves`.
    """
    top = max(scores, key=lambda one: one.throughput_per_s)
    level = [
        place
        for place, one in enumerate(scores)
        if one.throughput_per_s >= top.throughput_per_s - spread_of(one, top)
    ]
    return min(level, key=lambda place: scores[place].p99_s)


def best_first(scores: Sequence[Score]) -> list[int]:
    """All places: the best one, then the best of the rest, and so on."""
    left, order = list(range(len(scores))), []
    while left:
        order.append(left.pop(best_of([scores[place] for place in left])))
    return order


def surely_better(one: Score, other: Score) -> bool:
    """Better, also if half a spread of the difference in throughput came by chance, either way.

    For what takes the place of something simpler: near the border where throughput ceases to be equal,
    `better` says one thing by these arrivals and another thing by those.
    """
    chance = spread_of(one, other) / 2.0
    return _better(one, other, chance) and _better(one, other, -chance)


def _better(one: Score, other: Score, chance_per_s: float) -> bool:
    gain = one.throughput_per_s - other.throughput_per_s - chance_per_s
    if abs(gain) > spread_of(one, other):
        return gain > 0.0
    return one.p99_s < other.p99_s


def spread_of(one: Score, other: Score) -> float:
    """A difference in throughput up to this is none."""
    return max(one.throughput_spread, other.throughput_spread, LEAST_SPREAD * other.throughput_per_s)


def figures_of(windows: Sequence[Window], service_s: Sequence[float], *, idle_s: float = 0.0) -> Score:
    """The score of consecutive windows of one device; `idle_s` between them nothing ran.

    `service_s`: device seconds of a task, per model. They are the same for all plans, so that a faster plan
    does not make its queued work count less.
    """
    seconds = fsum(window.seconds for window in windows) + idle_s
    work = [
        variance([queue.queued * one_s for queue, one_s in zip(glance.queues, service_s, strict=True)])
        for window in windows
        for glance in window.glances
    ]
    latencies = sorted(one for window in windows for model in window.models for one in model.latencies_s)
    came = sum(model.submitted for window in windows for model in window.models)
    completed = sum(window.completed for window in windows)
    return Score(
        throughput_per_s=completed / seconds,
        p99_s=latencies[max(ceil(0.99 * len(latencies)) - 1, 0)] if latencies else 0.0,
        utilisation=fsum(window.utilisation * window.seconds for window in windows) / seconds,
        queue_variance=fsum(work) / len(work) if work else 0.0,
        variance_growth=_growth(work) / (seconds / 2),
        met=completed / came if came else 1.0,
    )


_SPREADS: Final = {
    "throughput_spread": "throughput_per_s",
    "p99_spread": "p99_s",
    "utilisation_spread": "utilisation",
    "queue_variance_spread": "queue_variance",
}


def score_of(seeds: Sequence[Score]) -> Score:
    """Means and half ranges over the scores of single seeds."""
    figures = {name: [getattr(one, name) for one in seeds] for name in Score.__slots__}
    means = {name: fsum(row) / len(row) for name, row in figures.items()}
    spreads = {spread: (max(figures[name]) - min(figures[name])) / 2 for spread, name in _SPREADS.items()}
    return Score(**{**means, **spreads})


def _growth(work: Sequence[float]) -> float:
    """Mean of the later half less mean of the earlier one."""
    half = len(work) // 2
    if not half:
        return 0.0
    return fsum(work[-half:]) / half - fsum(work[:half]) / half

"""Windows of a trial: how long, in which order, what is measured in one, what pairs of them say.

Order: quads of two pairs, A B B A or B A A B at random. What drifts evenly (heat, a filling queue) adds as
much to one plan as to the other in every quad, and no rhythm of the load can side with a plan.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Protocol

_HALVINGS = 60  # of [0, pi / 2]: to the last bit of a float


def student_cdf(t: float, degrees: int) -> float:
    """The chance that a variable with Student's distribution is below `t`. O(degrees)."""
    return _cdf_at(math.atan(t / math.sqrt(degrees)), degrees)


@lru_cache(maxsize=4096)
def student_quantile(probability: float, degrees: int) -> float:
    """The value that a variable with Student's distribution is below with this chance.

    Raises:
        ValueError: a probability outside [0.5, 1), or less than one degree of freedom.
    """
    if not 0.5 <= probability < 1.0 or degrees < 1:
        raise ValueError(f"no quantile of {probability} with {degrees} degrees of freedom")
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _cdf_at(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _cdf_at(theta: float, degrees: int) -> float:
    """The distribution function where tan(theta) = t / sqrt(degrees)."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1, degrees // 2 + 1):
        total += term
        term *= cosine * cosine * (2 * k - 1 + odd) / (2 * k + odd)
    within = 2.0 / math.pi * (theta + sine * total) if odd else sine * total  # the chance of |T| < t
    return (1.0 + within) / 2.0


class PairedLogs:
    """Log ratios of pairs as they come, with Student bounds on their mean (Welford's running variance)."""

    __slots__ = ("_squares", "count", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0  # of the distances from the mean, summed

    def add(self, log_ratio: float) -> None:
        """Take in one pair.

        Raises:
            ValueError: not a finite number.
        """
        if not math.isfinite(log_ratio):
            raise ValueError(f"{log_ratio} is no log ratio")
        self.count += 1
        step = log_ratio - self.mean
        self.mean += step / self.count
        self._squares += step * (log_ratio - self.mean)

    @property
    def spread(self) -> float:
        """Standard deviation of one pair, infinite while there are fewer than two."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else math.inf

    def bounds(self, confidence: float) -> tuple[float, float]:
        """Lower and upper bound on the mean; each holds by itself with this confidence (one-sided)."""
        if self.count < 2:
            return -math.inf, math.inf
        reach = student_quantile(confidence, self.count - 1) * self.spread / math.sqrt(self.count)
        return self.mean - reach, self.mean + reach


class Side(str, Enum):
    """The two plans of a trial."""

    CONTROL = "control"  # the plan that ran when the trial began
    CANDIDATE = "candidate"

    @property
    def other(self) -> "Side":
        """The one it is compared with."""
        return Side.CANDIDATE if self is Side.CONTROL else Side.CONTROL


class Rng(Protocol):
    """The part of `random.Random` that a trial uses."""

    def random(self) -> float:
        """A number of [0, 1)."""
        ...


def abba(rng: Rng) -> Iterator[Side]:
    """Sides of all windows, without end; windows 2k and 2k + 1 are a pair."""
    while True:
        first = Side.CONTROL if rng.random() < 0.5 else Side.CANDIDATE
        yield from (first, first.other, first.other, first)


def window_length_s(
    instance_s: Sequence[float], *, shortest_s: float = 0.25, instance_times: float = 20.0
) -> float:
    """How long a window is: long against an instance, so that those cut off at its ends do not matter.

    `instance_s` are the times that one instance of each model takes, under the slower of the two plans.
    """
    return max(shortest_s, instance_times * max(instance_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFigures:
    """What one plan did between the two instants of a `Measure`; counts are of tasks that ended then."""

    completed: tuple[int, ...]  # per model, in the order of `TrialSetup.models` [num_models]
    failed: int
    measured_s: float  # the real distance between the two instants
    busy_s: float  # of them, with at least one step in flight on the device
    saturated: bool  # tasks were waiting all the time, so the plan set the throughput and not the arrivals
    p99_s: float  # latency from arrival to answer; 0 only where nothing completed
    oldest_age_s: float  # the greatest that any queue's oldest task had

    def __post_init__(self) -> None:
        numbers = (self.measured_s, self.busy_s, self.p99_s, self.oldest_age_s)
        counts = (*self.completed, self.failed)
        possible = all(0.0 <= n < math.inf for n in numbers) and min(counts) >= 0 and self.measured_s > 0
        if not possible or (any(self.completed) and not self.p99_s):
            raise ValueError(f"no figures of a window: {self}")

    def work_s(self, service_s: Sequence[float]) -> float:
        """Completed tasks, each weighed by its model's fixed service time. `service_s`: [num_models]

        The same weights on both sides make the comparison one at the same mix: a window that happened to
        see more of the cheap model's tasks looks no better for it.
        """
        return sum(n * weight for n, weight in zip(self.completed, service_s, strict=True))


def log_speedup(control: WindowFigures, candidate: WindowFigures, service_s: Sequence[float]) -> float | None:
    """How much better the candidate was in one pair, as a natural logarithm; None if the pair says nothing.

    Where tasks waited all the time in both windows: tasks per second. Otherwise, since every plan that keeps
    up completes what arrives, busy device seconds per completed task.
    """
    ours, theirs = candidate.work_s(service_s), control.work_s(service_s)
    if not ours or not theirs:
        return None
    if control.saturated and candidate.saturated:
        return math.log((ours / candidate.measured_s) / (theirs / control.measured_s))
    if not control.busy_s or not candidate.busy_s:
        return None
    return math.log((control.busy_s / theirs) / (candidate.busy_s / ours))


def log_growth(control: float, candidate: float, floor: float) -> float:
    """How much greater a time is under the candidate; differences well below `floor` do not count."""
    return math.log((candidate + floor) / (control + floor))

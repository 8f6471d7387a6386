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
    instance_s: Sequence[float],
    *,
    arrivals_per_s: Sequence[float] = (),
    weights_s: Sequence[float] = (),
    tasks: float = 10.0,
    model_tasks: float = 2.0,
    shortest_s: float = 0.25,
    instance_times: float = 20.0,
) -> float:
    """How long a window is: long against an instance, so that those cut off at its ends do not matter, and
    long enough to see `tasks` of the mix and `model_tasks` of every model that makes a tenth of the work.

    `instance_s`: what one instance of each model takes, under the slower of the two plans; `weights_s`: the
    device time of one task; `arrivals_per_s`: what comes, none where that is not known. [num_models]
    """
    length_s = max(shortest_s, instance_times * max(instance_s))
    total_per_s = sum(arrivals_per_s)
    if total_per_s <= 0.0:
        return length_s
    length_s = max(length_s, tasks / total_per_s)
    work = [rate * weight for rate, weight in zip(arrivals_per_s, weights_s, strict=True)]
    heavy = (rate for rate, share in zip(arrivals_per_s, work, strict=True) if share >= sum(work) / 10)
    return max([length_s, *(model_tasks / rate for rate in heavy)])  # none: many models share the work


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFigures:
    """What one plan did between the two instants of a `MeasureSide`; counts are of tasks that ended then.

    Latencies are of other tasks: of those that *arrived* in the window, but not in its last tenth, so that
    each speaks of the plan that it met. One that has not ended counts with its age; see
    `stageloom.edge_agent.worker.accounting`.
    """

    completed: tuple[int, ...]  # per model, in the order of `TrialSetup.models` [num_models]
    failed: int
    measured_s: float  # the real distance between the two instants
    busy_s: float  # of them, with at least one step in flight on the device
    saturated: bool  # tasks were waiting all the time, so the plan set the throughput and not the arrivals
    p99_s: float  # of these, where the task completed or waits, by its age; 0 without one
    oldest_age_s: float  # the greatest that a task had which waited, in a queue or an instance
    judged: tuple[int, ...]  # tasks whose latency counts, per model [num_models]
    log_latency: tuple[float, ...]  # their natural logarithms of seconds, summed [num_models]
    due: int = 0  # of the tasks that arrived, those that have ended
    in_time: int = 0  # of these, completed, and so before their deadlines

    def __post_init__(self) -> None:
        numbers = (self.measured_s, self.busy_s, self.p99_s, self.oldest_age_s)
        counts = (*self.completed, *self.judged, self.failed, self.in_time, self.due - self.in_time)
        possible = all(0.0 <= n < math.inf for n in numbers) and min(counts) >= 0 and self.measured_s > 0
        possible = possible and all(map(math.isfinite, self.log_latency))
        if not possible:
            raise ValueError(f"no figures of a window: {self}")

    def work_s(self, service_s: Sequence[float]) -> float:
        """Completed tasks, each weighed by its model's fixed service time. `service_s`: [num_models]

        The same weights on both sides make the comparison one at the same mix: a window that happened to
        see more of the cheap model's tasks looks no better for it.
        """
        return sum(n * weight for n, weight in zip(self.completed, service_s, strict=True))

    @property
    def in_time_share(self) -> float | None:
        """Completed tasks over those that ended, of the window's arrivals; None where none has ended."""
        return self.in_time / self.due if self.due else None


# What a pair says: natural logarithms, above 0 where the candidate is better; None where it says nothing.


def log_rate_gain(
    control: WindowFigures, candidate: WindowFigures, service_s: Sequence[float]
) -> float | None:
    """Tasks per second, of two windows in which tasks waited all the time: the plans set the throughput."""
    ours, theirs = candidate.work_s(service_s), control.work_s(service_s)
    if not ours or not theirs or not (control.saturated and candidate.saturated):
        return None
    return math.log((ours / candidate.measured_s) / (theirs / control.measured_s))


def log_busy_gain(
    control: WindowFigures, candidate: WindowFigures, service_s: Sequence[float]
) -> float | None:
    """Busy device seconds per completed task, since every plan that keeps up completes what arrives."""
    ours, theirs = candidate.work_s(service_s), control.work_s(service_s)
    if not ours or not theirs or not control.busy_s or not candidate.busy_s:
        return None
    return math.log((control.busy_s / theirs) / (candidate.busy_s / ours))


def log_latency_gain(
    control: WindowFigures, candidate: WindowFigures, service_s: Sequence[float]
) -> float | None:
    """The mean over the models of how far the mean log latency of their tasks fell.

    A model weighs as much as its work: its tasks' fixed service time, times the harmonic mean of how many it
    had on the two sides. That is its share of the mix where both sides saw as many; a model of which one side
    saw no task says nothing, and one of which it saw a single one says little. The weight is the same if the
    sides change places, so what happened to arrive favours neither.
    """
    gain = total = 0.0
    sides = zip(control.judged, control.log_latency, candidate.judged, candidate.log_latency, strict=True)
    for (ours, our_log, theirs, their_log), service in zip(sides, service_s, strict=True):
        if ours and theirs:
            weight = service * 2 * ours * theirs / (ours + theirs)
            gain += weight * (our_log / ours - their_log / theirs)
            total += weight
    return gain / total if total else None


def log_in_time_gain(control: WindowFigures, candidate: WindowFigures) -> float:
    """The share of tasks in time, each task counting as one; so as if one more had been in time on each side.

    That one bounds what windows say in which few tasks or none were in time.
    """
    ours, theirs = ((one.in_time + 1) / (one.due + 1) for one in (candidate, control))
    return math.log(ours / theirs)


def log_growth(control: float, candidate: float, floor: float) -> float:
    """How much greater a time is under the candidate; differences well below `floor` do not count."""
    return math.log((candidate + floor) / (control + floor))

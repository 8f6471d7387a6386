"""Windows of a trial: how long, in which order, what is measured in one, what a pair of them says.

Order: quads of two pairs, A B B A or B A A B by the toss of a coin. What drifts evenly (heat, a filling
queue) adds as much to one plan as to the other in every quad, and no rhythm of the load can side with a plan.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Side(str, Enum):
    """The two plans of a trial."""

    CONTROL = "control"  # the plan that ran when the trial began
    CANDIDATE = "candidate"

    @property
    def other(self) -> "Side":
        """The one it is compared with."""
        return Side.CANDIDATE if self is Side.CONTROL else Side.CONTROL


class Coin(Protocol):
    """The part of `random.Random` that a trial uses."""

    def random(self) -> float:
        """A number of [0, 1)."""
        ...


def abba(coin: Coin) -> Iterator[Side]:
    """Sides of all windows, without end; windows 2k and 2k + 1 are a pair."""
    while True:
        first = Side.CONTROL if coin.random() < 0.5 else Side.CANDIDATE
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

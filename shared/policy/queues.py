"""How far the queues of a device have diverged (TOP, section IV: variance of the number of queued tasks).

Deviation from the paper: a queue counts with its *queued work*, length times measured service time, in
seconds. Ten tasks of a heavy model and ten of a light one are not the same backlog. The paper's task counts
remain as `Measure.TASKS`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

TOP_THRESHOLD: Final = 2e5
"""The paper's T, in tasks squared. Three bounded queues of depth D reach at most 2 D^2 / 9, so it needs
queues of at least 949 tasks."""

DEADLINE_WITHOUT_ONE_S: Final = 1.0
"""Stands for the tightest deadline where no task has one."""


class Measure(str, Enum):
    """What a queue counts with."""

    WORK = "work"  # seconds
    TASKS = "tasks"  # as in the paper


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """One model's queue at one instant."""

    tasks: int
    service_s: float  # measured device time of one task
    oldest_age_s: float = 0.0  # 0 where it is empty

    def __post_init__(self) -> None:
        times = (self.service_s, self.oldest_age_s)
        if self.tasks < 0 or not all(0.0 <= seconds < math.inf for seconds in times):
            raise ValueError(f"no state of a queue: {self}")


def values(queues: Iterable[QueueState], measure: Measure) -> list[float]:
    """What every queue counts with: seconds of work, or tasks. [num_queues]"""
    if measure is Measure.TASKS:
        return [float(queue.tasks) for queue in queues]
    return [queue.tasks * queue.service_s for queue in queues]


def deviations(counted: Sequence[float]) -> tuple[float, ...]:
    """Each queue's value less the mean, in the same unit. [num_queues]"""
    mean = math.fsum(counted) / len(counted) if counted else 0.0
    return tuple(value - mean for value in counted)


def variance(counted: Sequence[float]) -> float:
    """Population variance over the queues at one instant, in the unit squared; 0 for one queue."""
    if len(counted) < 2:
        return 0.0
    return math.fsum(deviation * deviation for deviation in deviations(counted)) / len(counted)


def tightest_s(deadlines_s: Iterable[float]) -> float:
    """The shortest deadline, counted from a task's arrival.

    Raises:
        ValueError: a deadline that is not above 0.
    """
    tightest = min(deadlines_s, default=DEADLINE_WITHOUT_ONE_S)
    if not tightest > 0:
        raise ValueError(f"no deadline of {tightest} s")
    return tightest


def variance_threshold_s2(deadlines_s: Iterable[float]) -> float:
    """T for `Measure.WORK`: the square of a quarter of the tightest deadline, (0.25 s)^2 without one."""
    return (tightest_s(deadlines_s) / 4) ** 2


def age_threshold_s(deadlines_s: Iterable[float]) -> float:
    """The age at which a queued task asks for another plan: half the tightest deadline, 0.5 s without one.

    From that age on a task is overdue in step choice too.
    """
    return tightest_s(deadlines_s) / 2

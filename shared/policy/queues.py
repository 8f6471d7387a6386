"""What a trigger and a policy see of a device's queues: how far they have diverged, and the newest samples.

TOP measures the variance of the number of queued tasks (section IV) and stacks n samples of progress and
deviation (equation 1). Deviations from the paper:

- A queue counts with its *queued work*, length times measured service time, in seconds. Ten tasks of a heavy
  model and ten of a light one are not the same backlog. The paper's counts remain as `QueueMeasure.TASKS`.
- Where models' deadlines differ, a trigger weighs each queue by `urgency`: what may wait a second does not
  diverge as soon as what may wait a tenth of that.
- The paper samples n times after the trigger; here the ring fills all the time, so the samples are there when
  the trigger fires and show what led to it.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from stageloom.shared.engine.patience import PATIENCE_S
from stageloom.shared.policy.plain import Load

TOP_THRESHOLD: Final = 2e5
"""The paper's T, in tasks squared. Three bounded queues of depth D reach at most 2 D^2 / 9, so it needs
queues of at least 949 tasks."""

DEADLINE_WITHOUT_ONE_S: Final = PATIENCE_S
"""Stands for the tightest deadline where no task has one."""


class QueueMeasure(str, Enum):
    """What a queue counts with."""

    WORK = "work"  # seconds
    TASKS = "tasks"  # as in the paper


def values(loads: Iterable[Load], measure: QueueMeasure) -> list[float]:
    """What every queue counts with: seconds of work, or tasks. [num_queues]"""
    if measure is QueueMeasure.TASKS:
        return [float(load.queued) for load in loads]
    return [load.queued_work_s for load in loads]


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


def urgency(load: Load, tightest: float) -> float:
    """By how much a second of a model's waiting counts where tasks of the `tightest` deadline wait, too.

    At most 1. TOP's tasks have no deadlines; where all have the same, every queue counts alike, as in the
    paper.
    """
    return min(tightest / (load.deadline_s or DEADLINE_WITHOUT_ONE_S), 1.0)


def variance_threshold_s2(deadlines_s: Iterable[float]) -> float:
    """T for `QueueMeasure.WORK`: the square of a quarter of the tightest deadline, (0.25 s)^2 without one."""
    return (tightest_s(deadlines_s) / 4) ** 2


def age_threshold_s(deadlines_s: Iterable[float]) -> float:
    """The age at which a queued task asks for another plan: half the tightest deadline, 0.5 s without one.

    From that age on a task is overdue in step choice too.
    """
    return tightest_s(deadlines_s) / 2


@dataclass(frozen=True, slots=True)
class PolicySample:
    """One instant."""

    progress: tuple[tuple[int, ...], ...]  # per model and block 1 where an instance is, else 0 [W][B_w]
    deviation: tuple[float, ...]  # per queue, seconds of work or tasks [W]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.progress))


def progress_bits(masks: Sequence[int], blocks: int) -> tuple[int, ...]:
    """One model's progress from its replicas' masks: 1 where any has an instance. [blocks]"""
    union = 0
    for mask in masks:
        union |= mask
    return tuple(union >> block & 1 for block in range(blocks))


class SampleRing:
    """The newest samples, all of one shape: a plan that cuts a model elsewhere starts the ring anew.

    Raises:
        ValueError: room for less than one sample.
    """

    def __init__(self, length: int = 10) -> None:
        if length < 1:
            raise ValueError(f"a ring of {length} samples")
        self.length = length
        self._samples: deque[PolicySample] = deque(maxlen=length)

    def push(self, sample: PolicySample) -> None:
        """Append one sample; the oldest leaves a full ring."""
        if self._samples and self._samples[-1].shape != sample.shape:
            self._samples.clear()
        self._samples.append(sample)

    @property
    def full(self) -> bool:
        """Whether there are as many as a policy reads."""
        return len(self._samples) == self.length

    @property
    def samples(self) -> tuple[PolicySample, ...]:
        """Oldest first."""
        return tuple(self._samples)

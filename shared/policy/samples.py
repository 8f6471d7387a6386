"""What a policy sees when it is asked: the n newest samples of progress and deviation (TOP, equation 1).

Deviation from the paper, which samples n times after the trigger: the ring fills all the time, so the samples
are there when the trigger fires and show what led to it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One instant."""

    progress: tuple[tuple[int, ...], ...]  # per model and block 1 where an instance is, else 0 [W][B_w]
    deviation: tuple[float, ...]  # per queue, seconds of work or tasks [W]

    @property
    def shape(self) -> tuple[int, ...]:
        """Blocks per model."""
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
        self._samples: deque[Sample] = deque(maxlen=length)

    def push(self, sample: Sample) -> None:
        """Take in one sample; the oldest leaves when the ring is full."""
        if self._samples and self._samples[-1].shape != sample.shape:
            self._samples.clear()
        self._samples.append(sample)

    @property
    def full(self) -> bool:
        """Whether there are as many as a policy reads."""
        return len(self._samples) == self.length

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Oldest first."""
        return tuple(self._samples)

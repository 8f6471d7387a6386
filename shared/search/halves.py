"""Where to cut a model in two, so that a slow resource takes tails off a fast one.

The paper's cut leaves 5 to 15 % of the fast resource's compute in the tail (Beaumont et al. 2024, StarONNX,
section 5.1); the balanced cut leaves as much as lets both resources work all the time. Both ask for measured
times of the two parts: a border undoes the blocked layout in which kernels pass tensors on, so that a sum of
operators' times says little of a part's.

The known answer, with g1 and g2 the times of head and tail on the fast resource, c2 that of the tail on a
slow one, n slow ones, batches of b evenly spaced, transfers overlapped with compute:

    f* = min(1, (g1 + g2) / (g2 + c2 / n))          the share of tails that is sent away
    highest rate = b / (g1 + g2 - f* g2)

since f* makes both resources end together. With a tail of 5 to 15 % that is at most 1 / 0.85 = 1.18 times the
fast resource's own rate. It is the highest rate of plans that keep heads on the fast resource.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from stageloom.shared.errors import InputError

PAPER_SHARES: Final = (0.05, 0.15)
"""The least and the largest share of the fast resource's compute in the tail of the paper's cut."""

RATE_TOLERANCE: Final = 0.01
"""A rate lower by this share is as good, and the cut of lower latency is taken."""


class PartTimes(Struct, frozen=True, kw_only=True):
    """What the two parts of a cut model take, in seconds a batch, each measured as a part."""

    head_s: float  # on the fast resource: g1
    tail_s: float  # on the fast resource: g2
    slow_tail_s: float  # on a slow resource: c2
    transfer_s: float = 0.0  # of the border's tensors, from the fast to a slow resource

    def __post_init__(self) -> None:
        """Raises:
        InputError: a part that takes no time, or no number.
        """
        parts = (self.head_s, self.tail_s, self.slow_tail_s)
        if not all(0.0 < one < math.inf for one in parts) or not 0.0 <= self.transfer_s < math.inf:
            raise InputError(f"no times of two parts: {self}")

    @property
    def tail_share(self) -> float:
        """The tail's share of the fast resource's compute."""
        return self.tail_s / (self.head_s + self.tail_s)

    def share_away(self, slow_resources: int = 1) -> float:
        """The share of tails f* that slow resources run at the highest rate."""
        whole_s = self.head_s + self.tail_s
        return min(1.0, whole_s / (self.tail_s + self.slow_tail_s / slow_resources))

    def highest_rate_per_s(self, *, batch: int = 1, slow_resources: int = 1) -> float:
        """The highest rate, items a second."""
        away_s = self.share_away(slow_resources) * self.tail_s
        return batch / (self.head_s + self.tail_s - away_s)

    @property
    def latency_away_s(self) -> float:
        """From the start of a head to the end of its tail on an idle slow resource."""
        return self.head_s + self.transfer_s + self.slow_tail_s


MeasureParts: TypeAlias = Callable[[int], PartTimes]
"""The times of the parts before and after a cut; asked at most once per cut."""


class _Cuts:
    """Cuts in order, each measured when it is first looked at."""

    def __init__(self, cuts: Sequence[int], measure: MeasureParts) -> None:
        self.cuts = cuts
        self._measure = measure
        self._known: dict[int, PartTimes] = {}

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, index: int) -> PartTimes:
        if index not in self._known:
            self._known[index] = self._measure(self.cuts[index])
        return self._known[index]


def paper_cut(cuts: Sequence[int], measure: MeasureParts) -> int | None:
    """Of the cuts with 5 to 15 % in the tail the one whose tail exceeds its border's transfer the most.

    `cuts` ascend, so that tails shrink; equal ones go to the later cut, whose tail is shorter. None where no
    base cut leaves such a tail. The paper says that transfers are taken into account, not how. Measures
    O(log cuts) cuts and those in the range.
    """
    parts = _Cuts(cuts, measure)
    least, most = PAPER_SHARES
    first = bisect_left(range(len(parts)), True, key=lambda index: parts[index].tail_share <= most)
    best: int | None = None
    for index in range(first, len(parts)):
        if parts[index].tail_share < least:
            break
        if best is None or _set_free_s(parts[index]) >= _set_free_s(parts[best]):
            best = index
    return None if best is None else cuts[best]


def _set_free_s(parts: PartTimes) -> float:
    return parts.tail_s - parts.transfer_s


def balanced_cut(
    cuts: Sequence[int],
    measure: MeasureParts,
    *,
    slow_resources: int = 1,
    tolerance: float = RATE_TOLERANCE,
) -> int | None:
    """The cut with the highest rate; of rates within `tolerance` the one of the least latency with the tail
    away.

    `cuts` ascend, so that tails shrink. As long as the slow resources cannot take all tails, the rate hangs
    on how much slower they are and hardly on the cut; from there on it falls with the tail. So the cut lies
    where all tails can just be sent away: a quarter in the tail where one resource is three times slower. Of
    the larger tails only the next one is looked at, as if the slow factor were the same for every tail. None
    without cuts. Measures O(log cuts) cuts and those within `tolerance` of the best.
    """
    parts = _Cuts(cuts, measure)
    if not cuts:
        return None

    def rate(index: int) -> float:
        return parts[index].highest_rate_per_s(slow_resources=slow_resources)

    first = bisect_left(
        range(len(parts)), True, key=lambda index: parts[index].share_away(slow_resources) >= 1.0
    )
    around = range(max(first - 1, 0), min(first + 1, len(parts)))
    best = max(around, key=rate)
    enough = (1 - tolerance) * rate(best)
    last = best
    while last + 1 < len(parts) and rate(last + 1) >= enough:
        last += 1
    return cuts[min(range(best, last + 1), key=lambda index: parts[index].latency_away_s)]

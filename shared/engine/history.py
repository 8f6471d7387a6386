"""How long a computation took on a resource, from measured durations, per (footprint, resource kind).

Two rules answer what the next run will take:

- `median`, the default: the median of the recent samples, usable from a few on. An outlier moves it by one
  rank, and a resource that slows down for good is believed after half a window.
- `starpu`, the rule of StarPU 1.4 (`src/core/perfmodel/perfmodel_history.c`): the mean of all samples. The
  first one is dropped, 10 make it usable. A sample above 1.5 times the mean, or below the mean over 1.5, is
  an error and is not added; once there are as many errors as samples, all are dropped. So the more samples
  there are, the longer a real change goes unseen.

Memory is bounded: of more than `max_entries` pairs the one that was used least recently is forgotten.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import ClassVar, Final, NewType, Protocol, TypeAlias

from msgspec import Struct

from stageloom.shared.errors import StateError

Footprint = NewType("Footprint", str)
"""What is computed, as far as its time depends on it: artifacts, operators, batch, precision."""

_Key: TypeAlias = tuple[Footprint, str]

RECENT: Final = 7
"""Samples that a median is taken over."""

ENOUGH: Final = 3
"""Samples that a median is believed from."""

STARPU_ENOUGH: Final = 10
"""StarPU's `STARPU_CALIBRATE_MINIMUM`."""

STARPU_ERROR_RATIO: Final = 1.5
"""StarPU's `STARPU_HISTORY_MAX_ERROR` of 50 %: of sample over mean, or of mean over sample."""

MAX_ENTRIES: Final = 4096


class HistoryRule(Enum):
    """What is made of the samples of one footprint on one kind of resource."""

    MEDIAN = "median"
    STARPU = "starpu"


class HistoryRow(Struct, frozen=True, array_like=True, gc=False):
    """What is known of one footprint on one kind of resource, as it is saved.

    `numbers` are, under `median`, the recent samples in seconds, oldest first [at most 7]; under `starpu` the
    count of samples, their sum in seconds, and the count of errors [3].
    """

    footprint: str
    kind: str
    numbers: tuple[float, ...]


class _Samples(Protocol):
    """What one footprint took on one kind of resource."""

    def add(self, seconds: float) -> None:
        """Learn of one run."""

    @property
    def expected_s(self) -> float | None:
        """What the next run will take; None before there are enough samples."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """As in `HistoryRow`."""


class _RecentSamples:
    """The rule `median`."""

    __slots__ = ("_median", "_samples")

    def __init__(self, numbers: Sequence[float] = ()) -> None:
        self._samples = deque(numbers, maxlen=RECENT)
        self._median: float | None = None

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)
        self._median = None

    @property
    def expected_s(self) -> float | None:
        count = len(self._samples)
        if count < ENOUGH:
            return None
        if self._median is None:  # asked for more often than samples come
            ordered = sorted(self._samples)
            self._median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
        return self._median

    @property
    def numbers(self) -> tuple[float, ...]:
        return tuple(self._samples)


class _MeanWithErrors:
    """The rule `starpu`: `count` is -1 until the first sample has been dropped."""

    __slots__ = ("_count", "_errors", "_sum_s")

    def __init__(self, numbers: Sequence[float] = (-1, 0.0, 0)) -> None:
        count, self._sum_s, errors = numbers
        self._count, self._errors = int(count), int(errors)

    def add(self, seconds: float) -> None:
        if self._count < 0:
            self._count = 0
        elif self._count and self._is_error(seconds):
            self._errors += 1
            if self._errors >= self._count:
                self._count, self._sum_s, self._errors = 0, 0.0, 0
        else:
            self._count += 1
            self._sum_s += seconds

    def _is_error(self, seconds: float) -> bool:
        mean = self._sum_s / self._count
        return seconds > STARPU_ERROR_RATIO * mean or mean > STARPU_ERROR_RATIO * seconds

    @property
    def expected_s(self) -> float | None:
        return self._sum_s / self._count if self._count >= STARPU_ENOUGH else None

    @property
    def numbers(self) -> tuple[float, ...]:
        return (self._count, self._sum_s, self._errors)


class DurationHistory:
    """Measured durations of one device, under one rule."""

    _SAMPLES: ClassVar[dict[HistoryRule, type[_RecentSamples] | type[_MeanWithErrors]]] = {
        HistoryRule.MEDIAN: _RecentSamples,
        HistoryRule.STARPU: _MeanWithErrors,
    }

    def __init__(self, rule: HistoryRule = HistoryRule.MEDIAN, *, max_entries: int = MAX_ENTRIES) -> None:
        self.rule = rule
        self._max_entries = max_entries
        self._entries: dict[_Key, _Samples] = {}  # the least recently used first

    def __len__(self) -> int:
        """Pairs of footprint and kind of which something is known."""
        return len(self._entries)

    def add(self, footprint: Footprint, kind: str, seconds: float) -> None:
        """Learn that a run took so long.

        Raises:
            ValueError: no duration: negative, infinite or not a number.
        """
        if not 0.0 <= seconds < math.inf:
            raise ValueError(f"no run of {footprint!r} on {kind!r} takes {seconds} s")
        samples = self._touch((footprint, kind)) or self._SAMPLES[self.rule]()
        samples.add(seconds)
        self._keep((footprint, kind), samples)

    def expected_s(self, footprint: Footprint, kind: str) -> float | None:
        """What the next run will take, in seconds; None where too little is known: not calibrated."""
        samples = self._touch((footprint, kind))
        return None if samples is None else samples.expected_s

    def rows(self) -> tuple[HistoryRow, ...]:
        """All that is known, to be saved, the least recently used first."""
        return tuple(HistoryRow(*key, entry.numbers) for key, entry in self._entries.items())

    def restore(self, rows: Iterable[HistoryRow]) -> None:
        """Take over what `rows` of the same rule saved, in place of what is known of the same pairs.

        Raises:
            StateError: numbers that this rule could not have saved; nothing is taken over then.
        """
        rows = tuple(rows)
        for row in rows:
            if not self._could_have_saved(row.numbers):
                raise StateError(
                    f"no history of {row.footprint[:64]!r} under {self.rule.value}", remedy="delete it"
                )
        for row in rows:
            key = (Footprint(row.footprint), row.kind)
            self._touch(key)
            self._keep(key, self._SAMPLES[self.rule](row.numbers))

    def _could_have_saved(self, numbers: Sequence[float]) -> bool:
        if self.rule is HistoryRule.MEDIAN:
            return len(numbers) <= RECENT and all(0.0 <= one < math.inf for one in numbers)
        if len(numbers) != 3 or not all(math.isfinite(one) for one in numbers):
            return False
        count, sum_s, errors = numbers
        whole = count == int(count) and errors == int(errors)
        return whole and count >= -1 and sum_s >= 0.0 and 0 <= errors <= max(count - 1, 0)

    def _touch(self, key: _Key) -> _Samples | None:
        """The entry, which is now the most recently used one."""
        samples = self._entries.pop(key, None)
        if samples is not None:
            self._entries[key] = samples
        return samples

    def _keep(self, key: _Key, samples: _Samples) -> None:
        self._entries[key] = samples
        while len(self._entries) > self._max_entries:
            del self._entries[next(iter(self._entries))]

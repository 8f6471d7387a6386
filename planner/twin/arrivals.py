"""When tasks of one model arrive: processes as plain values, and their times from a seeded generator.

| process | mean rate per second |
| --- | --- |
| `Periodic` | rate; a sensor that samples at a fixed frequency (TOP, section VI-B) |
| `Poisson` | rate; gaps are independent and exponential |
| `Bursty` | (on_rate T_on + off_rate T_off) / (T_on + T_off) |
| `Recorded` | as recorded; with `repeat_s` from the start again and again |

`Bursty` is Poisson at one of two rates, in turn, each for an exponential time of mean T_on or T_off: a
Markov-modulated Poisson process of two states. Times are seconds since the start, ascending. What a stream
hands out does not depend on the spans in which it is asked.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shared.errors import InputError

Times: TypeAlias = npt.NDArray[np.float64]
"""Seconds, ascending. [num_arrivals]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Periodic:
    """Every 1 / rate seconds, the first after `offset_s`; each late by up to `jitter_s`, evenly spread.

    The jitter is less than the period, so that arrivals keep their order.
    """

    rate_per_s: float
    offset_s: float = 0.0
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        _positive("the rate", self.rate_per_s)
        _not_negative("the offset", self.offset_s)
        _not_negative("the jitter", self.jitter_s)
        if self.jitter_s * self.rate_per_s >= 1.0:
            raise InputError(f"a jitter of {self.jitter_s} s reaches the next arrival", remedy="lower it")

    @property
    def mean_per_s(self) -> float:
        """Arrivals a second."""
        return self.rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Independent exponential gaps."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive("the rate", self.rate_per_s)

    @property
    def mean_per_s(self) -> float:
        """Arrivals a second."""
        return self.rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursty:
    """Poisson at `on_rate_per_s` for a while, then at `off_rate_per_s`, and so on; it begins on.

    How long either lasts is exponential with mean `mean_on_s` and `mean_off_s`.
    """

    on_rate_per_s: float
    mean_on_s: float
    mean_off_s: float
    off_rate_per_s: float = 0.0

    def __post_init__(self) -> None:
        _positive("the rate while on", self.on_rate_per_s)
        _positive("the mean time on", self.mean_on_s)
        _positive("the mean time off", self.mean_off_s)
        _not_negative("the rate while off", self.off_rate_per_s)

    @property
    def mean_per_s(self) -> float:
        """Arrivals a second, in the long run."""
        tasks = self.on_rate_per_s * self.mean_on_s + self.off_rate_per_s * self.mean_off_s
        return tasks / (self.mean_on_s + self.mean_off_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """As they were recorded; with `repeat_s` again from the start after so many seconds, for ever."""

    times_s: tuple[float, ...]
    repeat_s: float | None = None

    def __post_init__(self) -> None:
        before = 0.0
        for at_s in self.times_s:
            if not before <= at_s < math.inf:  # false for NaN too
                raise InputError(f"an arrival at {at_s} s follows one at {before} s", remedy="sort them")
            before = at_s
        if self.repeat_s is not None:
            _positive("the length of a recording", self.repeat_s)
            if self.times_s and self.times_s[-1] >= self.repeat_s:
                raise InputError(f"an arrival at {self.times_s[-1]} s lies behind {self.repeat_s} s")

    @property
    def mean_per_s(self) -> float:
        """Arrivals a second over the recording, which ends with its last arrival unless it repeats."""
        length_s = self.repeat_s or (self.times_s[-1] if self.times_s else 0.0)
        return len(self.times_s) / length_s if length_s else 0.0


Process: TypeAlias = Periodic | Poisson | Bursty | Recorded


class ArrivalStream:
    """The arrivals of one process, handed out span by span. The generator belongs to the stream."""

    def __init__(self, process: Process, rng: np.random.Generator) -> None:
        self.process = process
        self._chunks = _chunks(process, rng)
        self._waiting: Times = np.empty(0)

    def until(self, until_s: float) -> Times:
        """The arrivals before `until_s` that were not handed out yet."""
        chunks, last_s = [self._waiting], self._waiting[-1] if self._waiting.size else -math.inf
        while last_s < until_s and (chunk := next(self._chunks, None)) is not None:
            chunks.append(chunk)
            last_s = chunk[-1] if chunk.size else last_s
        if len(chunks) > 1:
            self._waiting = np.concatenate(chunks)
        count = int(np.searchsorted(self._waiting, until_s, side="left"))
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


def arrivals(process: Process, until_s: float, rng: np.random.Generator) -> Times:
    """All arrivals before `until_s`."""
    return ArrivalStream(process, rng).until(until_s)


_CHUNK = 256  # arrivals drawn at once; a stream must not depend on how far it is asked


def _chunks(process: Process, rng: np.random.Generator) -> Iterator[Times]:
    """Consecutive arrivals, many at a time; ends where there are no more."""
    if isinstance(process, Periodic):
        return _periodic(process, rng)
    if isinstance(process, Poisson):
        return _poisson(process.rate_per_s, rng)
    if isinstance(process, Bursty):
        return _bursty(process, rng)
    return _recorded(process)


def _periodic(process: Periodic, rng: np.random.Generator) -> Iterator[Times]:
    first = 0
    while True:
        late_s = process.jitter_s * rng.random(_CHUNK) if process.jitter_s else 0.0
        yield process.offset_s + np.arange(first, first + _CHUNK) / process.rate_per_s + late_s
        first += _CHUNK


def _poisson(rate_per_s: float, rng: np.random.Generator) -> Iterator[Times]:
    last_s = 0.0
    while True:
        times = last_s + np.cumsum(rng.exponential(1.0 / rate_per_s, _CHUNK))
        last_s = float(times[-1])
        yield times


def _bursty(process: Bursty, rng: np.random.Generator) -> Iterator[Times]:
    """Per phase the number of arrivals is Poisson and they lie evenly spread, which is the same process."""
    begin_s, on = 0.0, True
    while True:
        length_s = rng.exponential(process.mean_on_s if on else process.mean_off_s)
        rate_per_s = process.on_rate_per_s if on else process.off_rate_per_s
        count = rng.poisson(rate_per_s * length_s)
        yield begin_s + np.sort(rng.random(count)) * length_s
        begin_s, on = begin_s + length_s, not on


def _recorded(process: Recorded) -> Iterator[Times]:
    times = np.asarray(process.times_s, dtype=np.float64)
    yield times
    if process.repeat_s is None or not times.size:
        return
    turn = 1
    while True:
        yield times + turn * process.repeat_s
        turn += 1


def _positive(what: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise InputError(f"{what} is {value}", remedy="use a number above 0")


def _not_negative(what: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise InputError(f"{what} is {value}", remedy="use 0 or more")

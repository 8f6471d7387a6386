"""When tasks of one model arrive: processes as plain values, and their times from a seeded generator.

| process | mean rate per second |
| --- | --- |
| `Periodic` | rate; a sensor that samples at a fixed frequency (TOP, section VI-B) |
| `Poisson` | rate; gaps are independent and exponential |
| `Bursty` | (on_rate T_on + off_rate T_off) / (T_on + T_off) |
| `Recorded` | as recorded; with `repeat_s` from the start again and again |
| `Counted` | as counted by a device, again and again |

`Bursty` is Poisson at one of two rates, in turn, each for an exponential time of mean T_on or T_off: a
Markov-modulated Poisson process of two states. Times are seconds since the start, ascending. What a stream
hands out does not depend on the spans in which it is asked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stageloom.shared.errors import InputError

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
        return self.rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Independent exponential gaps."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive("the rate", self.rate_per_s)

    @property
    def mean_per_s(self) -> float:
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


CountedSpan: TypeAlias = tuple[float, float, int]
"""Begin and end in a recording, seconds, and how many arrived between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """As many as were counted, each drawn anew within its span, as the exact moment is not known.

    The recording lasts `length_s`; it is entered at `begin_s` and comes again and again.
    """

    spans: tuple[CountedSpan, ...]
    length_s: float
    begin_s: float = 0.0

    def __post_init__(self) -> None:
        _positive("the length of a recording", self.length_s)
        _not_negative("the place where a recording is entered", self.begin_s)
        for begin_s, end_s, arrived in self.spans:
            if not 0.0 <= begin_s <= end_s <= self.length_s or arrived < 0:
                span = f"{arrived} arrivals from {begin_s} to {end_s} s"
                raise InputError(f"a recording of {self.length_s} s counts no {span}")

    @property
    def mean_per_s(self) -> float:
        return sum(arrived for _, _, arrived in self.spans) / self.length_s


Process: TypeAlias = Periodic | Poisson | Bursty | Recorded | Counted


def entered_anywhere(arrivals: Mapping[str, Process], seed: int) -> dict[str, Process]:
    """The same arrivals, with recordings that were counted entered where the seed says, all at one place.

    So each seed sees another part of a recording, and bursts of several models stay beside each other.
    """
    share = float(np.random.default_rng([seed, len(arrivals)]).random())  # streams have the lower numbers
    return {
        name: replace(one, begin_s=share * one.length_s) if isinstance(one, Counted) else one
        for name, one in arrivals.items()
    }


def require_known(arrivals: Mapping[str, Process], names: Sequence[str]) -> None:
    """Tasks arrive for these models alone.

    Raises:
        InputError: for another one, too.
    """
    for name in arrivals:
        if name not in names:
            raise InputError(f"the plan has no model {name!r}", remedy=f"it has {', '.join(names)}")


def require_all(arrivals: Mapping[str, Process], names: Sequence[str], remedy: str = "") -> None:
    """Tasks arrive for each of these models, and for no other. `remedy`: where there is no --rate.

    Raises:
        InputError: they do not.
    """
    require_known(arrivals, names)
    for name in names:
        if name not in arrivals or not arrivals[name].mean_per_s > 0.0:
            raise InputError(
                f"nothing says how often tasks of {name} arrive",
                remedy=remedy or f"give --rate {name}=PER_S for it, and for each other model",
            )


class ArrivalStream:
    """The arrivals of one process, handed out span by span. The generator belongs to the stream.

    A stream pickles: its copy draws anew what was drawn, and goes on from there.
    """

    def __init__(self, process: Process, rng: np.random.Generator) -> None:
        self.process = process
        self._begin = rng.bit_generator.state
        self._chunks = _chunks(process, rng)
        self._drawn = 0  # chunks
        self._waiting: Times = np.empty(0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_chunks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        rng = np.random.default_rng()
        rng.bit_generator.state = self._begin
        self._chunks = _chunks(self.process, rng)
        for _ in range(self._drawn):
            next(self._chunks)

    def until(self, until_s: float) -> Times:
        """The arrivals before `until_s` that were not handed out yet."""
        chunks, last_s = [self._waiting], self._waiting[-1] if self._waiting.size else -math.inf
        while last_s < until_s and (chunk := next(self._chunks, None)) is not None:
            chunks.append(chunk)
            self._drawn += 1
            last_s = chunk[-1] if chunk.size else last_s
        if len(chunks) > 1:
            self._waiting = np.concatenate(chunks)
        count = int(np.searchsorted(self._waiting, until_s, side="left"))
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


class Tape:
    """Times and sources of all tasks, ascending; of equal times the first source's come first."""

    def __init__(self, sources: Sequence[Process], seed: int) -> None:
        self._streams = [
            ArrivalStream(process, np.random.default_rng([seed, index]))
            for index, process in enumerate(sources)
        ]
        self._times: Times = np.empty(0)
        self._sources: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._first = 0  # number of the first task that is not forgotten
        self._drawn = 0
        self._until_s = 0.0

    def between(self, first: int, until_s: float) -> tuple[Times, npt.NDArray[np.int64]]:
        """Times and sources of the tasks from number `first` on that come before `until_s`."""
        if until_s > self._until_s:
            self._draw(until_s)
        last = int(np.searchsorted(self._times[: self._drawn], until_s, side="left"))
        begin = first - self._first
        return self._times[begin:last], self._sources[begin:last]

    def forget(self, before: int) -> None:
        """Drop the tasks of lower numbers, for which nobody asks again."""
        kept = slice(before - self._first, self._drawn)
        self._times, self._sources = self._times[kept], self._sources[kept]
        self._first, self._drawn = before, len(self._times)

    def _draw(self, until_s: float) -> None:
        drawn = [stream.until(until_s) for stream in self._streams]
        times = np.concatenate([*drawn, np.empty(0)])
        sources = np.repeat(np.arange(len(drawn)), [len(one) for one in drawn])
        order = np.argsort(times, kind="stable")
        self._keep(times[order], sources[order])
        self._until_s = until_s

    def _keep(self, times: Times, sources: npt.NDArray[np.int64]) -> None:
        """Append; room doubles, so that a long run copies each arrival a few times at most."""
        total = self._drawn + len(times)
        if total > len(self._times):
            room = max(2 * len(self._times), total, 1024)
            self._times = np.concatenate((self._times[: self._drawn], np.empty(room - self._drawn)))
            self._sources = np.concatenate(
                (self._sources[: self._drawn], np.empty(room - self._drawn, np.int64))
            )
        self._times[self._drawn : total] = times
        self._sources[self._drawn : total] = sources
        self._drawn = total


def arrivals(process: Process, until_s: float, rng: np.random.Generator) -> Times:
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
    if isinstance(process, Counted):
        return _counted(process, rng)
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


def _counted(process: Counted, rng: np.random.Generator) -> Iterator[Times]:
    """A turn of the recording at a time."""
    arrived = [count for _, _, count in process.spans]
    begins_s = np.repeat([begin_s for begin_s, _, _ in process.spans], arrived)
    lengths_s = np.repeat([end_s - begin_s for begin_s, end_s, _ in process.spans], arrived)
    turn = 0
    while begins_s.size:
        drawn = begins_s + lengths_s * rng.random(begins_s.size) - process.begin_s
        yield np.sort(drawn % process.length_s) + turn * process.length_s
        turn += 1


def _positive(what: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise InputError(f"{what} is {value}", remedy="use a number above 0")


def _not_negative(what: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise InputError(f"{what} is {value}", remedy="use 0 or more")

"""What a part of an operator takes, by its extent, from a few measured extents.

EOP (Xu et al. 2022, section 3.2, algorithm 1) fits three patterns and keeps the one with the least error:

    linear      t(x) = a + b x
    staircase   t(x) = a + c ceil(x / q)        kernels work in tiles of q: 2..64
    constant    t(x) = a

Deviation: the error is that of *leave-one-out* prediction, the staircase's q being chosen anew without the
sample that is left out. By the error at its own samples a staircase, which may choose among 63 tile sizes,
beats a line on any noise. A pattern with more parameters must be better by one standard error.

Errors are relative, so that short parts count as much as long ones; a and the slopes are not negative.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from statistics import fmean, median, stdev
from typing import Final

from stageloom.shared.errors import InputError

QUANTA: Final = range(2, 65)
"""Tile sizes of a staircase."""

POINTS: Final = 12
"""Extents that are measured per axis."""


class PatternKind(Enum):
    """The three patterns, the one with the fewest parameters first."""

    CONSTANT = "constant"
    LINEAR = "linear"
    STAIRCASE = "staircase"


@dataclass(frozen=True, slots=True)
class Pattern:
    """t(x) = base_s + step_s ceil(x / quantum), in seconds. A line has quantum 1, a constant no step."""

    base_s: float
    step_s: float = 0.0
    quantum: int = 1

    def __call__(self, extent: int) -> float:
        """Seconds of a part of that extent; 0 for an empty one."""
        return self.base_s + self.step_s * -(-extent // self.quantum) if extent else 0.0

    @property
    def kind(self) -> PatternKind:
        if self.step_s == 0.0:
            return PatternKind.CONSTANT
        return PatternKind.LINEAR if self.quantum == 1 else PatternKind.STAIRCASE


Samples = Sequence[tuple[int, float]]
"""(extent, seconds), ascending."""


def fitted_pattern(measured_s: Mapping[int, float]) -> Pattern:
    """The pattern that predicts a sample best from all others; of two or three the line, of one the constant.

    `measured_s`: seconds by extent. O(samples^2 + samples * quanta); what was fitted once is kept, since
    operators that are alike have the same samples.

    Raises:
        InputError: no sample, or one that is no time of a part.
    """
    return _fitted(tuple(_checked(measured_s)))


@lru_cache(maxsize=4096)
def _fitted(samples: tuple[tuple[int, float], ...]) -> Pattern:
    if 1 < len(samples) < _LEAST[PatternKind.LINEAR]:
        # Too few to leave one out. A constant would have every part cost as much as the whole.
        return fit(samples, PatternKind.LINEAR)
    best = errors = None
    for kind in PatternKind:
        own = left_out_errors(samples, kind)
        if own is None:
            continue
        if errors is None or fmean(own) + _doubt(own, errors) < fmean(errors):
            best, errors = kind, own
    return fit(samples, best or PatternKind.CONSTANT)


def _doubt(own: Sequence[float], others: Sequence[float]) -> float:
    """The standard error of what one gains over the other, sample by sample."""
    gains = [theirs - ours for ours, theirs in zip(own, others, strict=True)]
    return stdev(gains) / math.sqrt(len(gains))


def left_out_errors(samples: Samples, kind: PatternKind) -> list[float] | None:
    """Per sample how far, relatively, the pattern of all the others misses it.

    None where so few samples are left that a pattern of this kind passes through all of them.
    """
    if len(samples) < _LEAST[kind]:
        return None
    errors = []
    for place, (extent, seconds) in enumerate(samples):
        others = [*samples[:place], *samples[place + 1 :]]
        errors.append(abs(fit(others, kind)(extent) - seconds) / seconds)
    return errors


_LEAST: Final = {PatternKind.CONSTANT: 2, PatternKind.LINEAR: 4, PatternKind.STAIRCASE: 6}


def fit(samples: Samples, kind: PatternKind) -> Pattern:
    """The pattern of this kind with the least squares of relative errors at the samples themselves.

    Of tile sizes that do equally well the smallest is taken.
    """
    if kind is PatternKind.CONSTANT:
        weight = math.fsum(1 / seconds**2 for _, seconds in samples)
        return Pattern(math.fsum(1 / seconds for _, seconds in samples) / weight)
    quanta: Iterable[int] = (1,) if kind is PatternKind.LINEAR else QUANTA
    least, best = math.inf, Pattern(0.0)
    for quantum in quanta:
        pattern, squares = _steps(samples, quantum)
        if squares < least - _SAME_SQUARES:
            least, best = squares, pattern
    return best


_SAME_SQUARES: Final = 1e-10
"""Sums of squares of relative errors that are as good as equal."""


def _steps(samples: Samples, quantum: int) -> tuple[Pattern, float]:
    """Least squares with weights 1 / t^2, a >= 0 and c >= 0: the pattern, its sum of squares."""
    w = wx = wt = wxx = wxt = 0.0
    for extent, seconds in samples:
        tiles, weight = -(-extent // quantum), 1 / (seconds * seconds)
        w += weight
        wx += weight * tiles
        wt += weight * seconds
        wxx += weight * tiles * tiles
        wxt += weight * tiles * seconds
    spread = w * wxx - wx * wx
    step_s = (w * wxt - wx * wt) / spread if spread > 1e-12 * w * wxx else 0.0
    base_s = (wt - step_s * wx) / w
    if step_s < 0.0:
        step_s, base_s = 0.0, wt / w
    elif base_s < 0.0:
        step_s, base_s = wxt / wxx, 0.0
    squares = len(samples) - 2 * (base_s * wt + step_s * wxt)
    squares += base_s * base_s * w + 2 * base_s * step_s * wx + step_s * step_s * wxx
    return Pattern(base_s, step_s, quantum), squares


def held_out_error(part_s: Callable[[int], float], measured_s: Mapping[int, float]) -> float:
    """The median relative error at samples that were kept from the fit.

    Raises:
        InputError: no sample, or one that is no time of a part.
    """
    return median(abs(part_s(x) - seconds) / seconds for x, seconds in _checked(measured_s))


def extents_to_measure(extent: int, granule: int = 1, points: int = POINTS) -> tuple[int, ...]:
    """Ascending extents of parts to measure, multiples of `granule` (groups, tiles), up to the whole.

    They are spread evenly, each second one moved on by a granule: at even spaces alone a staircase whose
    tiles divide them is a line.
    """
    most = extent // granule
    if most <= points:
        return tuple(granule * place for place in range(1, most + 1))
    found = {1, most}
    for place in range(1, points):
        found.add(min(most * place // (points - 1) + place % 2, most))
    return tuple(granule * place for place in sorted(found - {0}))


def _checked(measured_s: Mapping[int, float]) -> Samples:
    if not measured_s or min(measured_s) < 1 or not all(0.0 < one < math.inf for one in measured_s.values()):
        raise InputError(f"no times of parts: {dict(measured_s)}")
    return sorted(measured_s.items())

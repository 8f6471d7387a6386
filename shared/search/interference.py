"""Seconds of a stage whose groups run side by side: a linear model fitted to measured stages, and its doubt.

Ours. IOS (Ding et al. 2021, section 3) measures every stage that it meets and TOP keeps those measurements;
here a measured stage also teaches what others of its device class take. A stage's seconds are a sum of terms
that are seconds themselves, each with a coefficient that has a meaning (`TERMS`): the longest group, what
runs beside it, what two or four executors side by side could not hide, meeting at a barrier, bytes that
groups hand over or keep to themselves. Coefficients start from the plain formula (`PRIOR`) and move as
measurements tell: Bayesian linear regression (Bishop 2006, section 3.3) with errors that are relative, of
unknown size, and now and then large (Huber's weights, reweighted until they stay).

The doubt about a stage has two parts: what stages like those measured scatter by, and how little the measured
ones say of this one. The first is scaled so that nine of ten measured stages lie within their own doubt when
their whole network is left out of the fit (`stageloom.shared.search.calibration`). The second grows where no
measured stage was: more groups, or other proportions. A stage with more groups or operators than any measured
one, or far longer or shorter than all, is never sure.

A prediction never leaves what was seen: its ratio to the longest group is never below, its ratio to all
groups in turn never above those of the measured stages, but for the outermost fiftieth of them. So it is
never negative, and with nothing measured it is the plain formula's.

O(networks * stages * terms^2) to fit, O(terms) to predict.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from operator import mul
from typing import TYPE_CHECKING, Final, NamedTuple

from stageloom.shared.search.calibration import (
    LEAST_SAMPLES,
    NORMAL,
    PRIOR_SCATTER,
    Lessons,
    Regression,
    calibrated,
)

if TYPE_CHECKING:
    import numpy as np

SURE_WITHIN: Final = 0.25
"""Doubt up to which a prediction counts as sure: two equal groups gain a half side by side at most, and an
error of less than half of that cannot turn the better choice around."""

_OUTERMOST: Final = 0.02


class Terms(NamedTuple):
    """What a stage's seconds are made of; all in seconds but the two counts."""

    longest: float  # the longest group, or all groups' work for the whole device where that is more
    rest: float  # all groups less that
    two: float  # of it, what two executors side by side cannot hide at best
    four: float  # and four
    stage: float  # one launch
    meet: float  # one launch where groups meet, else 0
    fused: float  # a launch per operator that follows another one in its group
    inner: float  # bytes that stay within a group, at the device's bandwidth
    border: float  # bytes that groups read and leave for others
    beside: float  # bytes moved by all groups but the one that moves most: the bus is shared
    groups: int
    operators: int


TERMS: Final = Terms._fields[:-2]

PRIOR_MEANS: Final = {"longest": 1.0}
"""Coefficients as long as nothing is measured; those of `rest` and `meet` come from the formula."""

PRIOR_SPREADS: Final = {"longest": 0.15, "rest": 0.5, "two": 0.5, "four": 0.5, "stage": 3.0, "meet": 3.0}
"""Their standard deviations; 1 where none is named."""


class GroupTerms(NamedTuple):
    """One group's part in a stage's terms, seconds."""

    seconds: float
    work: float  # the seconds that the whole device would need for it; 0: unknown
    inner: float
    border: float
    moved: float
    operators: int


class Sample(NamedTuple):
    """A measured stage."""

    terms: Terms
    seconds: float
    networks: tuple[str, ...] = ()
    """Those that have part in it, by any name. What stages of one network err by they share in part."""


def stage_terms(groups: Sequence[GroupTerms], launch_s: float) -> Terms:
    """The terms of a stage of one or more groups, whatever their order."""
    total = longest = work = inner = border = moved = most_moved = 0.0
    operators = 0
    for group in groups:
        total += group.seconds
        longest = max(longest, group.seconds)
        work += group.work
        inner += group.inner
        border += group.border
        moved += group.moved
        most_moved = max(most_moved, group.moved)
        operators += group.operators
    least = max(longest, work)
    count = len(groups)
    return Terms(
        least,
        max(total - least, 0.0),
        max(total / 2.0 - least, 0.0),
        max(total / 4.0 - least, 0.0),
        launch_s,
        launch_s if count > 1 else 0.0,
        launch_s * (operators - count),
        inner,
        border,
        moved - most_moved,
        count,
        operators,
    )


@dataclass(frozen=True, kw_only=True)
class Interference:
    """What was learned of one device class; `fit` makes it."""

    coefficients: tuple[float, ...]  # [num_terms]
    covariance: tuple[tuple[float, ...], ...]  # of the coefficients [num_terms, num_terms]
    scatter: float  # relative standard deviation of stages about their prediction
    jitter_s: float  # and beyond it, as if so many seconds more of the same share
    width: float  # half-width of CONFIDENCE where the coefficients are certain, in scatters
    least: float  # of a prediction over the longest group; at most 1
    most: float  # of a prediction over all groups in turn; at least 1, inf where nothing was measured
    groups: int  # the most that a measured stage has
    operators: int  # likewise
    span_s: tuple[float, float]  # shortest and longest measured stage
    samples: int

    def seconds(self, terms: Terms) -> float:
        """The prediction; never negative."""
        found: float = sum(map(mul, self.coefficients, terms))  # the counts at the end have no coefficient
        floor, ceiling = self.least * terms.longest, self.most * (terms.longest + terms.rest)
        return floor if found < floor else ceiling if found > ceiling else found

    def doubt(self, terms: Terms) -> float:
        """Half-width of the interval that holds CONFIDENCE of such stages, over the prediction; may be inf.

        An operator alone was measured as such: there is no doubt about it until stages say otherwise.
        """
        if terms.operators == 1 and self.samples < LEAST_SAMPLES:
            return 0.0
        seconds = self.seconds(terms)
        if seconds <= 0.0 or terms.groups > self.groups or terms.operators > self.operators:
            return inf
        unknown = self._unknown(terms) / seconds**2
        return sqrt((self.width * self._scatter(seconds)) ** 2 + NORMAL**2 * unknown)

    def sure(self, terms: Terms) -> bool:
        """Whether the prediction is good enough to choose by without measuring."""
        if self.samples < LEAST_SAMPLES:
            return False
        seconds, (shortest_s, longest_s) = self.seconds(terms), self.span_s
        return shortest_s / 2.0 <= seconds <= 2.0 * longest_s and self.doubt(terms) <= SURE_WITHIN

    def of(self, term: str) -> float:
        """One coefficient."""
        return self.coefficients[TERMS.index(term)]

    def _scatter(self, seconds: float) -> float:
        return self.scatter * (1.0 + self.jitter_s / seconds)

    def _unknown(self, terms: Terms) -> float:
        """Variance of the prediction that the coefficients' own spread makes, seconds squared."""
        values = terms[:-2]
        return sum(
            one * sum(entry * other for entry, other in zip(row, values, strict=True))
            for one, row in zip(values, self.covariance, strict=True)
        )


def fit(
    samples: Sequence[Sample], *, contention: float = 1.0, barrier_s: float = 0.0, launch_s: float = 2e-5
) -> Interference:
    """The model of a device class from its measured stages; with none of them it says what the formula says.

    `contention` and `barrier_s` are those of the formula, `launch_s` an operator's fixed cost, which must be
    that of the samples' terms.
    """
    import numpy as np

    meet = barrier_s / launch_s if launch_s else 0.0
    prior = np.array([_prior_mean(name, contention, meet) for name in TERMS])
    precision = np.diag([PRIOR_SPREADS.get(name, 1.0) ** -2 for name in TERMS])
    known = [sample for sample in samples if sample.seconds > 0.0 and sample.terms.longest > 0.0]
    if not known:
        return Interference(
            coefficients=tuple(map(float, prior)),
            covariance=_rows(np.linalg.inv(precision)),
            scatter=PRIOR_SCATTER,
            jitter_s=0.0,
            width=NORMAL,
            least=1.0,
            most=inf,
            groups=1,
            operators=1,
            span_s=(0.0, 0.0),
            samples=0,
        )
    seconds = np.array([sample.seconds for sample in known])
    terms = np.array([sample.terms[:-2] for sample in known])  # [num_samples, num_terms]
    found = Regression(terms, seconds, prior, precision)
    lessons = Lessons(terms, seconds, [sample.networks for sample in known], prior, precision)
    jitter_s, width = calibrated(found, lessons, launch_s)
    longest, total = terms[:, 0], terms[:, 0] + terms[:, 1]
    return Interference(
        coefficients=tuple(map(float, found.coefficients)),
        covariance=_rows(found.covariance),
        scatter=found.scatter / (1.0 + jitter_s / float(np.median(seconds))),
        jitter_s=jitter_s,
        width=width,
        least=min(float(np.quantile(seconds / longest, _OUTERMOST)), 1.0),
        most=max(float(np.quantile(seconds / total, 1.0 - _OUTERMOST)), 1.0),
        groups=max(sample.terms.groups for sample in known),
        operators=max(sample.terms.operators for sample in known),
        span_s=(float(seconds.min()), float(seconds.max())),
        samples=len(known),
    )


def _prior_mean(name: str, contention: float, meet: float) -> float:
    return {"rest": contention, "meet": meet, **PRIOR_MEANS}.get(name, 0.0)


def _rows(matrix: "np.ndarray[tuple[int, ...], np.dtype[np.floating]]") -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, row)) for row in matrix)

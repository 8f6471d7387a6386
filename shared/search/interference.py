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
their whole network is left out of the fit (`stageloom.shared.search.interference`). The second grows where no
measured stage was: more groups, or other proportions. A stage with more groups or operators than any measured
one, or far longer or shorter than all, is never sure.

A prediction never leaves what was seen: its ratio to the longest group is never below, its ratio to all
groups in turn never above those of the measured stages, but for the outermost fiftieth of them. So it is
never negative, and with nothing measured it is the plain formula's.

O(networks * stages * terms^2) to fit, O(terms) to predict.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from operator import mul
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from stageloom.shared.matmul import matmul

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Floats: TypeAlias = "NDArray[np.float64]"
"""A string at run time: numpy is imported only where arrays are used."""

CONFIDENCE: Final = 0.9
"""Share of stages within their doubt."""

NORMAL: Final = 1.645
"""Half-width of a normal distribution's inner 90 %, in standard deviations."""

LEAST_SAMPLES: Final = 20
"""With fewer measured stages no prediction is sure: a tenth of them would be less than two."""

LEAST_OF_NETWORK: Final = 5
"""Fewest stages of a network that is left out."""

PRIOR_SCATTER: Final = 0.3
"""Assumed scatter of stages as long as little is measured."""

_PRIOR_COUNT: Final = 4  # as if so many stages had said so
_HUBER: Final = 1.5  # residuals beyond so many standard deviations count less
_ROUNDS: Final = 20
_SETTLED: Final = 1e-2  # the coefficients moved by no more of a standard deviation of theirs
_PRIOR_BETWEEN: Final = 0.5  # share of the variance that whole networks make, as if one had said so:
# two that happen to agree must not look like a rule
_LEAST_OF_LONGEST: Final = 0.2  # no stage is weighted as if it were predicted to take less,
_LEAST_OF_MEASURED: Final = 0.05  # and none judged as if
_JITTERS: Final = (0.0, 1.0, 3.0, 10.0)  # tried, in launches: small stages scatter more


class Regression:
    """Coefficients of the terms of stages, all of whose errors are shares of what is predicted.

    Bayesian linear regression (Bishop 2006, section 3.3) with Huber's weights, and each stage weighted by its
    prediction, which is renewed until it stays (quasi-likelihood; Wedderburn 1974). Over the measured seconds
    instead, those that came out short by chance would count most, and all predictions come out too short.
    terms: [num_samples, num_terms], seconds: [num_samples]
    """

    def __init__(
        self,
        terms: Floats,
        seconds: Floats,
        prior: Floats,
        precision: Floats,
        near: "Regression | None" = None,
    ) -> None:
        """`near`: one that will differ little; it saves rounds."""
        import numpy as np

        self.scatter: float = PRIOR_SCATTER if near is None else near.scatter
        self.coefficients: Floats = prior if near is None else near.coefficients
        rows, measured = self._over_predicted(terms, seconds)
        weights = (
            np.ones(len(terms))
            if near is None
            else self._trust(np.abs(measured - matmul(rows, near.coefficients)))
        )
        for _ in range(_ROUNDS):
            weighted = rows * weights[:, None] / self.scatter**2
            certainty = matmul(weighted.T, rows) + precision
            self.covariance = np.linalg.inv(certainty)
            renewed = prior + matmul(self.covariance, matmul(weighted.T, measured - matmul(rows, prior)))
            moved, self.coefficients = renewed - self.coefficients, renewed
            errors = np.abs(measured - matmul(rows, renewed))
            spread = 1.4826 * float(np.median(errors))  # of normal errors the standard deviation
            self.scatter = sqrt(
                (_PRIOR_COUNT * PRIOR_SCATTER**2 + len(rows) * spread**2) / (_PRIOR_COUNT + len(rows))
            )
            weights = self._trust(errors)
            if float(matmul(matmul(moved, certainty), moved)) <= _SETTLED**2:
                break
            rows, measured = self._over_predicted(terms, seconds)
        self._weights = weights * (rows[:, 0] / terms[:, 0]) ** 2

    def _over_predicted(self, terms: Floats, seconds: Floats) -> tuple[Floats, Floats]:
        import numpy as np

        predicted = np.maximum(matmul(terms, self.coefficients), _LEAST_OF_LONGEST * terms[:, 0])
        return terms / predicted[:, None], seconds / predicted

    def _trust(self, errors: Floats) -> Floats:
        import numpy as np

        found: Floats = np.minimum(1.0, _HUBER * self.scatter / np.maximum(errors, 1e-12))
        return found

    def unseen(self, terms: Floats) -> "Unseen":
        """Return predictions of stages that it was not fitted to."""
        import numpy as np

        return Unseen(
            matmul(terms, self.coefficients), np.einsum("ij,ij->i", matmul(terms, self.covariance), terms)
        )

    def left_out(self, terms: Floats, seconds: Floats) -> "Unseen":
        """Return predictions of each stage that it was fitted to, from all others."""
        import numpy as np

        predicted, unknown = self.unseen(terms)
        kept = 1.0 - np.minimum(self._weights * unknown / self.scatter**2, 0.99)
        return Unseen(seconds - (seconds - predicted) / kept, unknown / kept)


class Unseen(NamedTuple):
    """Predictions of stages that are not in the fit, and their known variance."""

    seconds: Floats  # [num_samples]
    unknown: Floats  # that the coefficients' own spread makes, seconds squared [num_samples]


class Lessons(NamedTuple):
    """The data of a fit."""

    terms: Floats  # [num_samples, num_terms]
    seconds: Floats  # [num_samples]
    networks: Sequence[tuple[str, ...]]  # those that have part in a stage [num_samples]
    prior: Floats  # [num_terms]
    precision: Floats  # [num_terms, num_terms]


def calibrated(regression: Regression, lessons: Lessons, launch_s: float) -> tuple[float, float]:
    """How wide the doubt about a stage must be: what a regression errs by on stages and networks never seen.

    Stages of one network share its operators' errors of measurement and whatever its kernels have in common.
    Leaving out one stage at a time leaves its sisters in the fit and hides that: what holds for nine of ten
    stages of known networks then holds for far fewer of a new one. So whole networks are left out, each in
    turn, and the width is taken from the errors on those:

    - every network counts the same, however many stages it has;
    - what whole networks err by shows in as many errors as there are networks, however many stages those
    have.
      That part of the spread is widened as Student's t widens for so few (random effects; Searle, Casella,
      McCulloch 1992, chapter 3, estimated by medians), the part within networks is not;
    - it is never narrower than leaving out single stages says.

    Where fewer than two networks can be left out it is single stages alone (closed form by leverage; Vovk et
    al. 2005 for the rank): that holds for further stages of the same networks, not for others.

    O(networks * stages * terms^2).

    (jitter_s, width) that cover CONFIDENCE of stages never seen, with the narrowest typical interval.
    """
    terms, seconds = lessons.terms, lessons.seconds
    if len(terms) < LEAST_SAMPLES:
        return 0.0, NORMAL
    import numpy as np

    single = regression.left_out(terms, seconds)
    without = _without(lessons, regression)
    middle_s = float(np.median(seconds))
    rank = min(ceil(CONFIDENCE * (len(terms) + 1)), len(terms))  # exchangeable stages are covered
    best = (inf, 0.0, NORMAL)
    for launches in _JITTERS:
        jitter_s = launches * launch_s
        scatter = regression.scatter / (1.0 + jitter_s / middle_s)
        _, beyond, spread = _errors(single, seconds, scatter, jitter_s)
        width = float(np.sort(beyond)[rank - 1])
        if len(without) > 1:
            apart = [_errors(unseen, seconds[at], scatter, jitter_s)[:2] for at, unseen in without]
            width = max(width, _width_of_networks(*zip(*apart, strict=True)))
        best = min(best, (width * float(np.median(spread)), jitter_s, width))
    return best[1], best[2]


def _without(lessons: Lessons, regression: Regression) -> list[tuple["NDArray[np.int64]", Unseen]]:
    """Per network that can be left out the places of its stages, and those predicted without it."""
    import numpy as np

    apart = []
    for network in sorted({name for names in lessons.networks for name in names}):
        part = np.array([network in names for names in lessons.networks])
        if min(part.sum(), (~part).sum()) < LEAST_OF_NETWORK:
            continue
        terms, seconds = lessons.terms[~part], lessons.seconds[~part]
        others = Regression(terms, seconds, lessons.prior, lessons.precision, regression)
        apart.append((np.flatnonzero(part), others.unseen(lessons.terms[part])))
    return apart


def _errors(
    unseen: Unseen, seconds: Floats, scatter: float, jitter_s: float
) -> tuple[Floats, Floats, Floats]:
    """Errors over the prediction, in units of the spread; their sizes beyond what is unknown; the spread."""
    import numpy as np

    predicted = np.maximum(unseen.seconds, _LEAST_OF_MEASURED * seconds)
    spread = scatter * (1.0 + jitter_s / predicted)
    errors = seconds / predicted - 1.0
    beyond = np.sqrt(np.maximum(errors**2 - NORMAL**2 * unseen.unknown / predicted**2, 0.0))
    return errors / spread, beyond / spread, spread


def _width_of_networks(errors: Sequence[Floats], beyond: Sequence[Floats]) -> float:
    """The width that covers CONFIDENCE of the stages of one more network. [num_networks][its stages]"""
    import numpy as np

    weights = np.concatenate([np.full(len(one), 1.0 / len(one)) for one in errors])
    total = _quantile(np.abs(np.concatenate(errors)), weights, 0.5)
    within = _quantile(np.concatenate([np.abs(one - np.median(one)) for one in errors]), weights, 0.5)
    between = max(1.0 - (within / total) ** 2, 0.0) if total > 0.0 else 0.0  # share of the variance
    between += (_PRIOR_BETWEEN - between) / len(errors)
    few = student(len(errors) - 1) / NORMAL
    width = _quantile(np.concatenate(beyond), weights, CONFIDENCE)
    return width * sqrt(1.0 + between * (few**2 - 1.0))


def _quantile(values: Floats, weights: Floats, level: float) -> float:
    """Return the least value with at least this share of the weight at or below it."""
    import numpy as np

    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    at = int(np.searchsorted(reached, level * reached[-1] * (1.0 - 1e-12)))
    return float(values[order[at]])


def student(freedom: int) -> float:
    """Half-width of the inner 90 % of Student's t: the normal's, expanded in 1 / freedom (Fisher 1925).

    Too small by an eighth at one degree of freedom, by a hundredth at two, and exact to 0.1 % from four on.
    """
    z = NORMAL
    return (
        z
        + (z**3 + z) / (4.0 * freedom)
        + (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (96.0 * freedom**2)
        + (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / (384.0 * freedom**3)
    )


SURE_WITHIN: Final = 0.25
"""Doubt up to which a prediction counts as sure: two equal groups gain a half side by side at most, and an
error of less than half of that cannot turn the better choice around."""

_OUTERMOST: Final = 0.02


class Terms(NamedTuple):
    """The terms of a stage's seconds; all in seconds but the two counts."""

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
    """A group's part in a stage's terms, seconds."""

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
    """The networks that have part in it, by any name: stages of one network share part of their error."""


def stage_terms(groups: Sequence[GroupTerms], launch_s: float) -> Terms:
    """Return the terms of a stage of one or more groups, in any order."""
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
    """The fitted model of one device class."""

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
        """Return the prediction; never negative."""
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
        """Return whether the prediction is good enough to choose without measuring."""
        if self.samples < LEAST_SAMPLES:
            return False
        seconds, (shortest_s, longest_s) = self.seconds(terms), self.span_s
        return shortest_s / 2.0 <= seconds <= 2.0 * longest_s and self.doubt(terms) <= SURE_WITHIN

    def of(self, term: str) -> float:
        """Return the coefficient of a term."""
        return self.coefficients[TERMS.index(term)]

    def _scatter(self, seconds: float) -> float:
        return self.scatter * (1.0 + self.jitter_s / seconds)

    def _unknown(self, terms: Terms) -> float:
        """Return the variance of the prediction that comes from the coefficients, seconds squared."""
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
    regression = Regression(terms, seconds, prior, precision)
    lessons = Lessons(terms, seconds, [sample.networks for sample in known], prior, precision)
    jitter_s, width = calibrated(regression, lessons, launch_s)
    longest, total = terms[:, 0], terms[:, 0] + terms[:, 1]
    return Interference(
        coefficients=tuple(map(float, regression.coefficients)),
        covariance=_rows(regression.covariance),
        scatter=regression.scatter / (1.0 + jitter_s / float(np.median(seconds))),
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

"""How wide the doubt about a stage must be: what a regression errs by on stages and networks never seen.

Stages of one network share its operators' errors of measurement and whatever its kernels have in common.
Leaving out one stage at a time leaves its sisters in the fit and hides that: what holds for nine of ten
stages of known networks then holds for far fewer of a new one. So whole networks are left out, each in turn,
and the width is taken from the errors on those:

- every network counts the same, however many stages it has;
- what whole networks err by shows in as many errors as there are networks, however many stages those have.
  That part of the spread is widened as Student's t widens for so few (random effects; Searle, Casella,
  McCulloch 1992, chapter 3, estimated by medians), the part within networks is not;
- it is never narrower than leaving out single stages says.

Where fewer than two networks can be left out it is single stages alone (closed form by leverage; Vovk et al.
2005 for the rank): that holds for further stages of the same networks, not for others.

O(networks * stages * terms^2).
"""

from collections.abc import Sequence
from math import ceil, inf, sqrt
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from stageloom.shared.matmul import matmul

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"
"""Text at run time: numpy is imported only where arrays are touched."""

CONFIDENCE: Final = 0.9
"""Share of stages that lie within their doubt."""

NORMAL: Final = 1.645
"""Half-width of a normal distribution's inner 90 %, in standard deviations."""

LEAST_SAMPLES: Final = 20
"""Below so many measured stages nothing is sure: a tenth of them would be less than two."""

LEAST_OF_NETWORK: Final = 5
"""A network with fewer stages tells nothing of what networks have in common."""

PRIOR_SCATTER: Final = 0.3
"""What stages scatter by as long as little is measured."""

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
        """Of stages that it was not fitted to."""
        import numpy as np

        return Unseen(
            matmul(terms, self.coefficients), np.einsum("ij,ij->i", matmul(terms, self.covariance), terms)
        )

    def left_out(self, terms: Floats, seconds: Floats) -> "Unseen":
        """Each of the stages that it was fitted to, by all others."""
        import numpy as np

        predicted, unknown = self.unseen(terms)
        kept = 1.0 - np.minimum(self._weights * unknown / self.scatter**2, 0.99)
        return Unseen(seconds - (seconds - predicted) / kept, unknown / kept)


class Unseen(NamedTuple):
    """Predictions of stages that had no part in the fit, and the variance that is known of them."""

    seconds: Floats  # [num_samples]
    unknown: Floats  # that the coefficients' own spread makes, seconds squared [num_samples]


class Lessons(NamedTuple):
    """What a fit is made of."""

    terms: Floats  # [num_samples, num_terms]
    seconds: Floats  # [num_samples]
    networks: Sequence[tuple[str, ...]]  # those that have part in a stage [num_samples]
    prior: Floats  # [num_terms]
    precision: Floats  # [num_terms, num_terms]


def calibrated(found: Regression, lessons: Lessons, launch_s: float) -> tuple[float, float]:
    """(jitter_s, width) that cover CONFIDENCE of stages never seen, with the narrowest typical interval."""
    terms, seconds = lessons.terms, lessons.seconds
    if len(terms) < LEAST_SAMPLES:
        return 0.0, NORMAL
    import numpy as np

    single = found.left_out(terms, seconds)
    without = _without(lessons, found)
    middle_s = float(np.median(seconds))
    rank = min(ceil(CONFIDENCE * (len(terms) + 1)), len(terms))  # exchangeable stages are covered
    best = (inf, 0.0, NORMAL)
    for launches in _JITTERS:
        jitter_s = launches * launch_s
        scatter = found.scatter / (1.0 + jitter_s / middle_s)
        _, beyond, spread = _errors(single, seconds, scatter, jitter_s)
        width = float(np.sort(beyond)[rank - 1])
        if len(without) > 1:
            apart = [_errors(unseen, seconds[at], scatter, jitter_s)[:2] for at, unseen in without]
            width = max(width, _width_of_networks(*zip(*apart, strict=True)))
        best = min(best, (width * float(np.median(spread)), jitter_s, width))
    return best[1], best[2]


def _without(lessons: Lessons, found: Regression) -> list[tuple["NDArray[np.int64]", Unseen]]:
    """Per network that can be left out the places of its stages, and those predicted without it."""
    import numpy as np

    apart = []
    for network in sorted({name for names in lessons.networks for name in names}):
        part = np.array([network in names for names in lessons.networks])
        if min(part.sum(), (~part).sum()) < LEAST_OF_NETWORK:
            continue
        terms, seconds = lessons.terms[~part], lessons.seconds[~part]
        others = Regression(terms, seconds, lessons.prior, lessons.precision, found)
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
    """The least value with so much of the weight at or below it."""
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

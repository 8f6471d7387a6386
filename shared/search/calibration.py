"""How wide the doubt about a stage must be: a regression's errors on stages, and on networks, that it never saw.

Stages of one network share its operators' errors of measurement and whatever its kernels have in common.
Leaving out one stage at a time leaves its sisters in the fit and hides that: what holds for nine of ten stages
of known networks then holds for far fewer of a new one. So whole networks are left out, each in turn, and the
width is taken from the errors on those:

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
_SETTLED: Final = 1e-4  # the coefficients moved by no more of a standard deviation of theirs
_JITTERS: Final = (0.0, 1.0, 3.0, 10.0)  # tried, in launches: small stages scatter more


class Regression:
    """Coefficients under which the rows come to 1: terms over measured seconds, so errors are relative.

    Bayesian linear regression (Bishop 2006, section 3.3) with Huber's weights. rows: [num_samples, num_terms]
    """

    def __init__(self, rows: Floats, prior: Floats, precision: Floats) -> None:
        import numpy as np

        weights = np.ones(len(rows))
        self.scatter = PRIOR_SCATTER
        self.coefficients = prior
        for _ in range(_ROUNDS):
            weighted = rows * weights[:, None] / self.scatter**2
            certainty = weighted.T @ rows + precision
            self.covariance = np.linalg.inv(certainty)
            moved = self.coefficients
            self.coefficients = prior + self.covariance @ (weighted.T @ (1.0 - rows @ prior))
            errors = np.abs(1.0 - rows @ self.coefficients)
            spread = 1.4826 * float(np.median(errors))  # of normal errors the standard deviation
            self.scatter = sqrt(
                (_PRIOR_COUNT * PRIOR_SCATTER**2 + len(rows) * spread**2) / (_PRIOR_COUNT + len(rows))
            )
            weights = np.minimum(1.0, _HUBER * self.scatter / np.maximum(errors, 1e-12))
            moved = self.coefficients - moved
            if float(moved @ certainty @ moved) <= _SETTLED**2:
                break
        self._weights = weights

    def unknown(self, rows: Floats) -> Floats:
        """Variance of each row's prediction that the coefficients' own spread makes. [num_samples]"""
        import numpy as np

        found: Floats = np.einsum("ij,ij->i", rows @ self.covariance, rows)
        return found

    def left_out(self, rows: Floats) -> "Unseen":
        """Each of the rows that it was fitted to, predicted by all others."""
        import numpy as np

        unknown = self.unknown(rows)
        kept = 1.0 - np.minimum(self._weights * unknown / self.scatter**2, 0.99)
        return Unseen(1.0 - (1.0 - rows @ self.coefficients) / kept, unknown / kept)


class Unseen(NamedTuple):
    """Predictions of stages that had no part in the fit, and the variance that is known of them.

    Both over the measured seconds [num_samples].
    """

    predicted: Floats
    unknown: Floats


def calibrated(
    found: Regression,
    rows: Floats,
    seconds: Floats,
    networks: Sequence[tuple[str, ...]],
    prior: tuple[Floats, Floats],
    launch_s: float,
) -> tuple[float, float]:
    """(jitter_s, width) that cover CONFIDENCE of stages never seen, with the narrowest typical interval.

    `networks`: those that have part in a stage [num_samples]; `prior`: as `Regression` takes it.
    """
    if len(rows) < LEAST_SAMPLES:
        return 0.0, NORMAL
    import numpy as np

    single = found.left_out(rows)
    without = _without(rows, networks, prior)
    middle_s = float(np.median(seconds))
    rank = min(ceil(CONFIDENCE * (len(rows) + 1)), len(rows))  # exchangeable stages are covered
    best = (inf, 0.0, NORMAL)
    for launches in _JITTERS:
        jitter_s = launches * launch_s
        scatter = found.scatter / (1.0 + jitter_s / middle_s)
        errors, beyond, spread = _errors(single, seconds, scatter, jitter_s)
        width = float(np.sort(beyond)[rank - 1])
        if len(without) > 1:
            apart = [_errors(unseen, seconds[at], scatter, jitter_s)[:2] for at, unseen in without]
            width = max(width, _width_of_networks(*zip(*apart, strict=True)))
        best = min(best, (width * float(np.median(spread)), jitter_s, width))
    return best[1], best[2]


def _without(
    rows: Floats, networks: Sequence[tuple[str, ...]], prior: tuple[Floats, Floats]
) -> list[tuple["NDArray[np.int64]", Unseen]]:
    """Per network that can be left out the places of its stages, and those predicted without it."""
    import numpy as np

    found = []
    for network in sorted({name for names in networks for name in names}):
        part = np.array([network in names for names in networks])
        if part.sum() < LEAST_OF_NETWORK or (~part).sum() < LEAST_SAMPLES:
            continue
        others = Regression(rows[~part], *prior)
        unseen = Unseen(rows[part] @ others.coefficients, others.unknown(rows[part]))
        found.append((np.flatnonzero(part), unseen))
    return found


def _errors(
    unseen: Unseen, seconds: Floats, scatter: float, jitter_s: float
) -> tuple[Floats, Floats, Floats]:
    """Errors over the prediction, in units of the spread; their sizes beyond what is unknown; the spread."""
    import numpy as np

    predicted = np.maximum(unseen.predicted, 0.05)
    spread = scatter * (1.0 + jitter_s / (predicted * seconds))
    errors = (1.0 - predicted) / predicted
    beyond = np.sqrt(np.maximum(errors**2 - NORMAL**2 * unseen.unknown / predicted**2, 0.0))
    return errors / spread, beyond / spread, spread


def _width_of_networks(errors: Sequence[Floats], beyond: Sequence[Floats]) -> float:
    """The width that covers CONFIDENCE of the stages of one more network. [num_networks][its stages]"""
    import numpy as np

    weights = np.concatenate([np.full(len(one), 1.0 / len(one)) for one in errors])
    total = _quantile(np.abs(np.concatenate(errors)), weights, 0.5)
    within = _quantile(np.concatenate([np.abs(one - np.median(one)) for one in errors]), weights, 0.5)
    between = max(1.0 - (within / total) ** 2, 0.0) if total > 0.0 else 0.0  # share of the variance
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

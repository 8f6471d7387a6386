"""Student's t for the paired test of a trial; nothing at the edge brings it, and scipy weighs 100 MiB.

The distribution function has a finite closed form for whole degrees of freedom: Abramowitz and Stegun,
Handbook of Mathematical Functions, 26.7.3 and 26.7.4. The quantile is its inverse, by bisection.
"""

import math
from functools import lru_cache

_HALVINGS = 60  # of [0, pi / 2]: to the last bit of a float


def student_cdf(t: float, degrees: int) -> float:
    """The chance that a variable with Student's distribution is below `t`. O(degrees)."""
    return _cdf_at(math.atan(t / math.sqrt(degrees)), degrees)


@lru_cache(maxsize=4096)
def student_quantile(probability: float, degrees: int) -> float:
    """The value that a variable with Student's distribution is below with this chance.

    Raises:
        ValueError: a probability outside [0.5, 1), or less than one degree of freedom.
    """
    if not 0.5 <= probability < 1.0 or degrees < 1:
        raise ValueError(f"no quantile of {probability} with {degrees} degrees of freedom")
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _cdf_at(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _cdf_at(theta: float, degrees: int) -> float:
    """The distribution function where tan(theta) = t / sqrt(degrees)."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1, degrees // 2 + 1):
        total += term
        term *= cosine * cosine * (2 * k - 1 + odd) / (2 * k + odd)
    within = 2.0 / math.pi * (theta + sine * total) if odd else sine * total  # the chance of |T| < t
    return (1.0 + within) / 2.0


class PairedLogs:
    """Log ratios of pairs as they come, with Student bounds on their mean (Welford's running variance)."""

    __slots__ = ("_squares", "count", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0  # of the distances from the mean, summed

    def add(self, log_ratio: float) -> None:
        """Take in one pair.

        Raises:
            ValueError: not a finite number.
        """
        if not math.isfinite(log_ratio):
            raise ValueError(f"{log_ratio} is no log ratio")
        self.count += 1
        step = log_ratio - self.mean
        self.mean += step / self.count
        self._squares += step * (log_ratio - self.mean)

    @property
    def spread(self) -> float:
        """Standard deviation of one pair, infinite while there are fewer than two."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else math.inf

    def bounds(self, confidence: float) -> tuple[float, float]:
        """Lower and upper bound on the mean; each holds by itself with this confidence (one-sided)."""
        if self.count < 2:
            return -math.inf, math.inf
        reach = student_quantile(confidence, self.count - 1) * self.spread / math.sqrt(self.count)
        return self.mean - reach, self.mean + reach

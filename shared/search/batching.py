"""The batch for an arrival rate.

Items arrive every 1 / rho seconds and wait until their batch of b is full; the first one waits longest. It is
answered (b - 1) / rho + T(b) after it came, and the resource keeps up if T(b) <= b / rho. StarONNX compares
batch sizes by this latency and takes the best for every rate (Beaumont et al. 2024, section 4.2, figure 2b).

T(b) is fitted to a few measured sizes: a line where it comes close to all of them, else lines between the
measured points: small batches may fit a cache, and kernels may go by fours.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from stageloom.shared.errors import InputError

BatchSeconds: TypeAlias = Callable[[int], float]
"""Seconds that a batch of that size takes: T(b)."""

CLOSE: Final = 0.05
"""A line that misses no measured time by more than this share of it is the rule behind them."""


def first_item_s(batch: int, rate_per_s: float, batch_s: BatchSeconds) -> float | None:
    """Latency of a batch's first item, evenly spaced; None where the resource does not keep up."""
    compute_s = batch_s(batch)
    return (batch - 1) / rate_per_s + compute_s if compute_s * rate_per_s <= batch else None


def batch_for_rate(rate_per_s: float, batch_s: BatchSeconds, *, largest: int) -> int | None:
    """The batch b* that answers its first item soonest, the smaller of equal ones; None if none keeps up.

    O(largest) evaluations of `batch_s`.

    Raises:
        InputError: a rate that is not above 0 and finite.
    """
    if not 0.0 < rate_per_s < math.inf:
        raise InputError(f"no rate of arrivals: {rate_per_s} a second")
    best: tuple[float, int] | None = None
    for batch in range(1, largest + 1):
        latency_s = first_item_s(batch, rate_per_s, batch_s)
        if latency_s is not None and (best is None or latency_s < best[0]):
            best = (latency_s, batch)
    return None if best is None else best[1]


def fitted(measured_s: Mapping[int, float]) -> BatchSeconds:
    """T(b) from measured times by batch size: `affine` if it is within 5 % of each, else `interpolated`.

    Raises:
        InputError: no measurement, or one that is no time of a batch.
    """
    if not measured_s or min(measured_s) < 1 or not all(0.0 < one < math.inf for one in measured_s.values()):
        raise InputError(f"no times of batches: {dict(measured_s)}")
    line = affine(measured_s)
    close = all(abs(line(size) - seconds) <= CLOSE * seconds for size, seconds in measured_s.items())
    return line if close else interpolated(measured_s)


def affine(measured_s: Mapping[int, float]) -> BatchSeconds:
    """The line a + c b with the least squares of relative errors and a, c >= 0; one point: proportional."""
    weights = {size: 1 / seconds**2 for size, seconds in measured_s.items()}
    total = math.fsum(weights.values())
    mean_size = math.fsum(weights[size] * size for size in measured_s) / total
    mean_s = math.fsum(weights[size] * seconds for size, seconds in measured_s.items()) / total
    spread = math.fsum(weights[size] * (size - mean_size) ** 2 for size in measured_s)
    joint = math.fsum(
        weights[size] * (size - mean_size) * (seconds - mean_s) for size, seconds in measured_s.items()
    )
    slope = joint / spread if spread else mean_s / mean_size
    intercept_s = mean_s - slope * mean_size
    if slope < 0.0:
        slope, intercept_s = 0.0, mean_s
    elif intercept_s < 0.0:
        ratios = {size: weights[size] * size for size in measured_s}
        slope = math.fsum(ratios[size] * measured_s[size] for size in measured_s)
        slope /= math.fsum(ratios[size] * size for size in measured_s)
        intercept_s = 0.0
    return lambda batch: intercept_s + slope * batch


def interpolated(measured_s: Mapping[int, float]) -> BatchSeconds:
    """Lines between the measured points; the first and the last go on, one point: proportional."""
    sizes = sorted(measured_s)
    if len(sizes) == 1:
        (size,) = sizes
        return lambda batch: measured_s[size] * batch / size

    def seconds(batch: int) -> float:
        right = min(max(bisect_left(sizes, batch), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        slope = (measured_s[high] - measured_s[low]) / (high - low)
        line = measured_s[low] + slope * (batch - low)
        if batch < low:
            return max(line, measured_s[low] * batch / low)
        return line if batch <= high else max(line, measured_s[high])

    return seconds

"""Student's t against tables, closed forms and the integral of its density; the paired bounds."""

import math
from random import Random
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.engine.windows import PairedLogs, student_cdf, student_quantile

# Abramowitz and Stegun, table 26.10 (one-sided probabilities), three decimals as printed.
TABLE = {
    0.95: {
        1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833, 10: 1.812,
        15: 1.753, 20: 1.725, 25: 1.708, 30: 1.697, 40: 1.684, 60: 1.671, 120: 1.658,
    },
    0.975: {1: 12.706, 2: 4.303, 5: 2.571, 7: 2.365, 10: 2.228, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980},
    0.995: {1: 63.657, 2: 9.925, 5: 4.032, 10: 3.169, 30: 2.750, 120: 2.617},
}  # fmt: skip


@pytest.mark.parametrize("probability", TABLE)
def test_quantiles_are_the_tabulated_ones(probability: float) -> None:
    for degrees, value in TABLE[probability].items():
        assert student_quantile(probability, degrees) == pytest.approx(value, abs=6e-4), degrees


@given(st.floats(0.5, 0.999))
def test_quantiles_of_one_and_two_degrees_have_closed_forms(probability: float) -> None:
    assert student_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)))
    expected = (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    assert student_quantile(probability, 2) == pytest.approx(expected)


@given(st.floats(0.5, 0.9999), st.integers(1, 400))
def test_the_quantile_inverts_the_distribution(probability: float, degrees: int) -> None:
    assert student_cdf(student_quantile(probability, degrees), degrees) == pytest.approx(probability)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 8, 29, 30, 119])
def test_the_distribution_is_the_integral_of_the_density(degrees: int) -> None:
    """Simpson's rule over the density, with its constant from the gamma function."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    scale /= math.sqrt(degrees * math.pi)
    for t in (-1.5, 0.0, 0.3, 1.0, 2.5):
        steps = 400
        points = [t * i / steps for i in range(steps + 1)]
        density = [scale * (1 + x * x / degrees) ** (-(degrees + 1) / 2) for x in points]
        area = (
            (density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2])) * t / steps / 3
        )
        assert student_cdf(t, degrees) == pytest.approx(0.5 + area, abs=1e-9)


@pytest.mark.parametrize(("probability", "degrees"), [(0.4, 5), (1.0, 5), (0.95, 0), (math.nan, 5)])
def test_impossible_quantiles_are_refused(probability: float, degrees: int) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        student_quantile(probability, degrees)


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=60))
def test_running_mean_and_spread_are_those_of_all_pairs(logs: list[float]) -> None:
    pairs = PairedLogs()
    for log in logs:
        pairs.add(log)
    assert pairs.count == len(logs)
    assert pairs.mean == pytest.approx(fmean(logs), abs=1e-12)
    assert pairs.spread == pytest.approx(stdev(logs), abs=1e-9)


def test_bounds_of_four_pairs_by_hand() -> None:
    pairs = PairedLogs()
    for log in (0.01, 0.03, 0.05, 0.07):
        pairs.add(log)
    reach = 2.353363 * math.sqrt(0.002 / 3) / 2  # variance (9 + 1 + 1 + 9) / 3 of 1e-4, four pairs
    assert pairs.bounds(0.95) == pytest.approx((0.04 - reach, 0.04 + reach))


def test_one_pair_bounds_nothing() -> None:
    pairs = PairedLogs()
    pairs.add(0.5)
    assert pairs.bounds(0.95) == (-math.inf, math.inf)


def test_a_bound_is_exceeded_as_often_as_it_says() -> None:
    rng = Random(7)
    above = 0
    for _ in range(4000):
        pairs = PairedLogs()
        for _ in range(8):
            pairs.add(rng.gauss(0.0, 0.055))
        above += pairs.bounds(0.95)[0] > 0.0
    assert 0.04 < above / 4000 < 0.06


@pytest.mark.parametrize("log", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(log: float) -> None:
    with pytest.raises(ValueError, match="no log ratio"):
        PairedLogs().add(log)

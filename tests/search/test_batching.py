"""The batch for a rate: against all sizes listed, and T(b) from a few measured sizes."""

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.errors import InputError
from stageloom.shared.search.batching import (
    BatchSeconds,
    affine,
    batch_for_rate,
    first_item_s,
    fitted,
    interpolated,
)

SIZES = range(1, 33)


def listed(rate_per_s: float, batch_s: BatchSeconds) -> int | None:
    """By brute force over {1..32}."""
    latencies = {b: (b - 1) / rate_per_s + batch_s(b) for b in SIZES if batch_s(b) * rate_per_s <= b}
    return min(latencies, key=lambda b: (latencies[b], b)) if latencies else None


def shapes(seed: int) -> BatchSeconds:
    """A line, a staircase, or times that follow no law."""
    random = Random(seed)
    fixed_s, each_s = random.uniform(0.0, 20.0), random.uniform(0.1, 5.0)
    quantum = random.choice([1, 2, 4, 8])
    spread = random.choice([0.0, 0.3])
    noise = [random.uniform(1 - spread, 1 + spread) for _ in range(33)]
    return lambda b: (fixed_s + each_s * quantum * math.ceil(b / quantum)) * noise[b]


@given(st.integers(0, 100_000), st.floats(0.01, 3.0))
def test_the_batch_is_the_best_of_all_sizes(seed: int, rate_per_s: float) -> None:
    batch_s = shapes(seed)
    assert batch_for_rate(rate_per_s, batch_s, largest=32) == listed(rate_per_s, batch_s)


def test_one_at_a_time_answers_soonest_until_it_no_longer_keeps_up() -> None:
    """T(b) = 8 + 2 b: batch 1 to a rate of 1/10; then the smallest that keeps up, b / (8 + 2 b)."""

    def batch_s(b: int) -> float:
        return 8.0 + 2.0 * b

    assert batch_for_rate(0.1, batch_s, largest=32) == 1
    assert batch_for_rate(0.1001, batch_s, largest=32) == 2
    assert batch_for_rate(0.25, batch_s, largest=32) == 4
    assert batch_for_rate(32 / 72, batch_s, largest=32) == 32
    assert batch_for_rate(0.45, batch_s, largest=32) is None
    assert first_item_s(4, 0.25, batch_s) == 3 / 0.25 + 16.0
    assert first_item_s(3, 0.25, batch_s) is None


@pytest.mark.parametrize("rate_per_s", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_rate_is_refused(rate_per_s: float) -> None:
    with pytest.raises(InputError, match="no rate of arrivals"):
        batch_for_rate(rate_per_s, float, largest=4)


# T(b) from measurements


@given(st.floats(0.0, 10.0), st.floats(0.01, 5.0), st.sets(st.sampled_from(SIZES), min_size=2, max_size=6))
def test_a_line_is_found_again(fixed_s: float, each_s: float, sizes: set[int]) -> None:
    fits: list[Callable[[dict[int, float]], BatchSeconds]] = [affine, fitted, interpolated]
    for fit in fits:
        batch_s = fit({b: fixed_s + each_s * b for b in sizes})
        inside = range(min(sizes), 33)
        assert [batch_s(b) for b in inside] == pytest.approx([fixed_s + each_s * b for b in inside])


def test_a_staircase_is_interpolated_and_a_noisy_line_is_not() -> None:
    stairs = {b: float(math.ceil(b / 16)) + b / 1000 for b in (1, 8, 15, 16, 17, 24, 31, 32)}
    assert fitted(stairs)(24) == stairs[24]
    random = Random(3)
    noisy = {b: (5.0 + b) * random.uniform(0.97, 1.03) for b in (1, 2, 4, 8, 16, 32)}
    line = affine(noisy)
    assert [fitted(noisy)(b) for b in SIZES] == [line(b) for b in SIZES]
    assert all(abs(line(b) / (5.0 + b) - 1) < 0.05 for b in SIZES)


@given(st.dictionaries(st.sampled_from(SIZES), st.floats(1e-4, 100.0), min_size=1, max_size=8))
def test_every_fit_gives_positive_times_that_rise_beyond_the_measured_sizes(
    measured_s: dict[int, float],
) -> None:
    for fit in (affine, interpolated, fitted):
        batch_s = fit(measured_s)
        assert all(0.0 < batch_s(b) < math.inf for b in SIZES)
        last = max(measured_s)
        assert batch_s(last + 10) >= batch_s(last) * (1 - 1e-9)


@given(st.dictionaries(st.sampled_from(SIZES), st.floats(1e-3, 100.0), min_size=1, max_size=8))
def test_interpolation_goes_through_every_measured_point(measured_s: dict[int, float]) -> None:
    batch_s = interpolated(measured_s)
    assert {b: batch_s(b) for b in measured_s} == pytest.approx(measured_s)


def test_a_single_measurement_counts_in_proportion() -> None:
    for fit in (affine, interpolated, fitted):
        assert [fit({4: 2.0})(b) for b in (1, 4, 8)] == pytest.approx([0.5, 2.0, 4.0])


@given(st.integers(0, 10_000))
def test_no_line_of_relative_errors_is_better(seed: int) -> None:
    """Against lines around it."""
    random = Random(seed)
    measured_s = {b: random.uniform(0.5, 2.0) * (2.0 + b) for b in random.sample(SIZES, 5)}

    def error(line: BatchSeconds) -> float:
        return sum((line(b) / seconds - 1) ** 2 for b, seconds in measured_s.items())

    best = affine(measured_s)
    fixed_s, each_s = best(0), best(1) - best(0)
    for _ in range(20):
        a, c = fixed_s + random.uniform(-0.3, 0.3), each_s + random.uniform(-0.1, 0.1)
        if a >= 0.0 and c >= 0.0:
            assert error(best) <= error(lambda b, a=a, c=c: a + c * b) + 1e-9  # type: ignore[misc]


@pytest.mark.parametrize("measured_s", [{}, {0: 1.0}, {1: 0.0}, {1: math.nan}, {1: -1.0}, {2: math.inf}])
def test_what_is_no_measurement_is_refused(measured_s: dict[int, float]) -> None:
    with pytest.raises(InputError, match="no times of batches"):
        fitted(measured_s)


@pytest.mark.parametrize("quantum", [1, 4, 16])
def test_a_batch_chosen_by_the_fit_is_nearly_the_best_at_rates_not_measured(quantum: int) -> None:
    """Thirteen sizes are measured; at 90 % of the rates the choice is within 5 % of the best of {1..32}."""

    def truth(b: int) -> float:
        return 0.02 + 0.004 * quantum * math.ceil(b / quantum) + 0.0005 * b

    batch_s = fitted({b: truth(b) for b in (1, 2, 3, 4, 5, 8, 12, 16, 17, 20, 24, 28, 32)})
    good, feasible = 0, 0
    for rate in (5.0 * 1.05**step for step in range(80)):
        best, chosen = listed(rate, truth), batch_for_rate(rate, batch_s, largest=32)
        if best is None:
            continue
        feasible += 1
        got = None if chosen is None else first_item_s(chosen, rate, truth)
        wanted = first_item_s(best, rate, truth)
        good += got is not None and wanted is not None and got <= 1.05 * wanted
    assert good >= 0.9 * feasible

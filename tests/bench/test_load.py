import math

import numpy as np
import pytest

from stageloom.edge_agent.bench.load import (
    ArrivalWindow,
    deadlines_s,
    judge,
    mixed_models,
    poisson_window,
    rate_index,
    rate_per_s,
)


def test_arrivals_have_the_rate_the_weights_and_the_spread_of_a_poisson_process() -> None:
    window = poisson_window((1.0, 3.0), 1000.0, 50.0, (1.0, 1.0), seed=1)
    assert window.tasks == pytest.approx(50_000, rel=0.03)
    assert np.mean(window.model) == pytest.approx(0.75, abs=0.01)
    gaps = np.diff(window.at_s)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.03)  # as an exponential's
    assert window.at_s[-1] < 50.0


def test_a_seed_gives_the_same_models_at_every_rate_and_gaps_scaled_by_it() -> None:
    slow = poisson_window((1.0, 3.0), 10.0, 4.0, (1.0, 1.0), seed=2)
    fast = poisson_window((1.0, 3.0), 20.0, 2.0, (1.0, 1.0), seed=2)
    assert np.array_equal(slow.model, fast.model)
    assert np.allclose(slow.at_s, 2.0 * fast.at_s)


def test_a_window_ends_with_its_last_deadline_or_its_last_arrival() -> None:
    at_s, models = np.array([0.0, 0.5]), np.array([0, 1])
    assert ArrivalWindow(at_s, models, np.array([30.0, 1.0])).last_s == 30.0
    assert ArrivalWindow(at_s, models, np.array([math.inf, math.inf])).last_s == 0.5
    assert ArrivalWindow(at_s[:0], models[:0], np.array([1.0, 1.0])).last_s == 0.0


def test_deadlines_are_five_service_times_and_at_least_twenty_milliseconds_or_as_given() -> None:
    found = deadlines_s({"slow": 0.1, "quick": 0.001, "given": 0.1}, given_s={"given": 0.2})
    assert found == pytest.approx({"slow": 0.5, "quick": 0.02, "given": 0.2})


def test_neighbours_on_the_grid_differ_by_five_percent() -> None:
    assert rate_per_s(1) / rate_per_s(0) == pytest.approx(1.05)
    assert all(rate_index(rate_per_s(place)) == place for place in (-20, 0, 7, 150))


def test_a_result_at_its_deadline_or_none_at_all_is_late() -> None:
    window = poisson_window((1.0,), 100.0, 1.0, (0.5,), seed=3)
    ended = window.at_s + 0.25
    ended[0] = window.at_s[0] + 0.5
    ended[1] = math.nan
    result = judge(window, ended)
    assert list(result.in_time[:3]) == [False, False, True]
    tasks, in_time = result.counts(1)
    assert tasks[0] - in_time[0] == 2


@pytest.mark.parametrize("weights", [(1.0, 10.0), (1.0, 2.0, 4.0), (0.0, 3.0)])
def test_any_part_of_a_sequence_of_models_has_the_mix(weights: tuple[float, ...]) -> None:
    models = np.array(mixed_models(weights, seed=3))
    share = np.array(weights) / sum(weights)
    came = np.cumsum(models[:, None] == np.arange(len(weights)), axis=0)  # [tasks, models]
    assert np.max(np.abs(came - share * np.arange(1, len(models) + 1)[:, None])) < 2.0
    assert len(models) == 512

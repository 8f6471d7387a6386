"""Windows of a trial: order, length, and what a pair of them says."""

import math
from itertools import islice, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.engine.windows import (
    Side,
    WindowFigures,
    abba,
    log_busy_gain,
    log_growth,
    log_latency_gain,
    log_rate_gain,
    window_length_s,
)
from tests.engine.trials import figures

A, B = Side.CONTROL, Side.CANDIDATE


@given(st.integers())
def test_every_quad_is_abba_or_baab(seed: int) -> None:
    order = list(islice(abba(Random(seed)), 400))
    quads = {tuple(order[i : i + 4]) for i in range(0, 400, 4)}
    assert quads == {(A, B, B, A), (B, A, A, B)}


def test_one_seed_gives_one_order() -> None:
    assert list(islice(abba(Random(3)), 100)) == list(islice(abba(Random(3)), 100))


@given(st.integers(), st.floats(-0.01, 0.01))
def test_even_drift_cancels_in_every_quad(seed: int, drift: float) -> None:
    order = list(islice(abba(Random(seed)), 80))
    total = sum(drift * i * (1 if side is B else -1) for i, side in enumerate(order))
    assert total == pytest.approx(0.0, abs=1e-12)


def test_windows_are_long_against_an_instance() -> None:
    assert window_length_s([0.001, 0.0125]) == 0.25
    assert window_length_s([0.001, 0.02]) == pytest.approx(0.4)


def test_windows_stretch_to_slow_arrivals() -> None:
    """Ten tasks of the mix, and two of each model that makes a tenth of the work."""

    def length_s(*arrivals_per_s: float, weights_s: tuple[float, ...] = (0.005, 0.005)) -> float:
        return window_length_s([0.005], arrivals_per_s=arrivals_per_s, weights_s=weights_s)

    assert length_s(100.0, 50.0) == 0.25
    assert length_s(10.0, 10.0) == pytest.approx(0.5)
    assert length_s(10.0, 1.0) == pytest.approx(10 / 11), "a tenth of the tasks, but not of the work"
    assert length_s(10.0, 1.0, weights_s=(0.005, 0.05)) == pytest.approx(2.0)
    assert length_s(0.1, 0.0) == pytest.approx(100.0)
    assert length_s(0.0, 0.0) == 0.25, "not known"


def test_windows_have_a_length_where_no_model_makes_a_tenth_of_the_work() -> None:
    even = window_length_s([0.005] * 12, arrivals_per_s=[1.0] * 12, weights_s=[0.005] * 12)
    assert even == pytest.approx(10 / 12), "ten tasks of the mix"


def test_busy_seconds_are_compared_per_completed_task() -> None:
    """The candidate spent 0.08 s on 20 tasks, the control 0.1 s on 25: the same per task."""
    assert log_busy_gain(figures(completed=(25,)), figures(busy_s=0.08), (1.0,)) == pytest.approx(0.0)
    assert log_busy_gain(figures(), figures(busy_s=0.05), (1.0,)) == pytest.approx(math.log(2))


def test_open_load_does_not_reward_tasks_that_happened_to_arrive() -> None:
    many = figures(completed=(40,), busy_s=0.2)
    assert log_busy_gain(figures(), many, (1.0,)) == pytest.approx(0.0)
    assert log_rate_gain(figures(), many, (1.0,)) is None


def test_saturated_windows_compare_tasks_per_second() -> None:
    control = figures(completed=(20,), measured_s=0.2, saturated=True)
    candidate = figures(completed=(33,), measured_s=0.3, saturated=True)
    assert log_rate_gain(control, candidate, (1.0,)) == pytest.approx(math.log(1.1))


def test_one_saturated_window_of_two_says_nothing_of_tasks_per_second() -> None:
    """A plan that cannot keep up is not flattered by the idle seconds of the one that can."""
    control = figures(completed=(20,), busy_s=0.1)
    candidate = figures(completed=(20,), busy_s=0.2, measured_s=0.225, saturated=True)
    assert log_rate_gain(control, candidate, (1.0,)) is None
    assert log_busy_gain(control, candidate, (1.0,)) == pytest.approx(-math.log(2))


@given(st.integers(1, 99), st.integers(1, 99))
def test_both_figures_agree_on_a_device_that_is_busy_all_the_time(control: int, candidate: int) -> None:
    windows = [figures(completed=(n,), busy_s=0.225, saturated=True) for n in (control, candidate)]
    at_open_load = log_busy_gain(windows[0], windows[1], (1.0,))
    assert at_open_load is not None
    assert log_rate_gain(windows[0], windows[1], (1.0,)) == pytest.approx(at_open_load)


@given(st.tuples(*[st.integers(1, 50)] * 4), st.floats(0.5, 2.0))
def test_a_window_that_saw_more_cheap_tasks_looks_no_better(
    counts: tuple[int, int, int, int], speed: float
) -> None:
    """Device time is 1 ms for a task of the first model, 10 ms for one of the second."""
    service_s = (0.001, 0.010)

    def window(first: int, second: int, speed: float) -> WindowFigures:
        busy_s = (first * service_s[0] + second * service_s[1]) / speed
        log_latency = tuple(
            n * math.log(latency_s / speed) for n, latency_s in ((first, 0.003), (second, 0.02))
        )
        return figures(
            completed=(first, second), busy_s=busy_s, judged=(first, second), log_latency=log_latency
        )

    slow, fast = window(*counts[:2], 1.0), window(*counts[2:], speed)
    assert log_busy_gain(slow, fast, service_s) == pytest.approx(math.log(speed), abs=1e-9)
    assert log_latency_gain(slow, fast, service_s) == pytest.approx(math.log(speed), abs=1e-9)


@pytest.mark.parametrize("empty", [{"completed": (0,), "p99_s": 0.0}, {"busy_s": 0.0}])
def test_a_pair_with_an_empty_window_says_nothing_of_busy_seconds(empty: dict[str, object]) -> None:
    assert log_busy_gain(figures(**empty), figures(), (1.0,)) is None
    assert log_busy_gain(figures(), figures(**empty), (1.0,)) is None


_COUNTS = st.tuples(st.integers(0, 9), st.integers(0, 9))
_LOGS = st.tuples(st.floats(-9, 9), st.floats(-9, 9))


@given(_COUNTS, _COUNTS, _LOGS, _LOGS)
def test_the_latency_figure_is_the_mean_over_models_by_hand(
    before: tuple[int, int], after: tuple[int, int], old: tuple[float, float], new: tuple[float, float]
) -> None:
    """Models that a side did not see are left out, and the sides may change places."""
    service_s = (0.002, 0.006)
    control, candidate = (
        figures(judged=n, log_latency=tuple(c * x for c, x in zip(n, logs, strict=True)))
        for n, logs in ((before, old), (after, new))
    )
    weights = [
        s / (1 / a + 1 / b) if a and b else 0.0 for s, a, b in zip(service_s, before, after, strict=True)
    ]
    found = log_latency_gain(control, candidate, service_s)
    if not any(weights):
        assert found is None
        return
    gains = [x - y for x, y in zip(old, new, strict=True)]
    wanted = sum(w * gain for w, gain in zip(weights, gains, strict=True)) / sum(weights)
    assert found == pytest.approx(wanted, abs=1e-9)
    assert log_latency_gain(candidate, control, service_s) == pytest.approx(-wanted, abs=1e-9)


@given(st.integers(0, 2**32))
def test_few_tasks_of_two_models_favour_neither_of_two_equal_plans(seed: int) -> None:
    """Over all ways in which four tasks of two models may fall into two windows the figure's mean is 0."""
    rng = Random(seed)
    tasks = [(rng.randrange(2), rng.gauss(0.0, 1.0)) for _ in range(4)]
    total = 0.0
    for sides in product((0, 1), repeat=4):
        seen = []
        for side in (0, 1):
            mine = [
                [x for (m, x), s in zip(tasks, sides, strict=True) if (m, s) == (model, side)]
                for model in (0, 1)
            ]
            seen.append(figures(judged=tuple(map(len, mine)), log_latency=tuple(map(sum, mine))))
        total += log_latency_gain(seen[0], seen[1], (0.001, 0.01)) or 0.0
    assert total == pytest.approx(0.0, abs=1e-9)


def test_ages_near_nothing_do_not_differ() -> None:
    assert log_growth(0.0001, 0.001, 0.01) < math.log(1.2) < log_growth(0.1, 0.2, 0.01)
    assert log_growth(0.0, 0.0, 0.01) == 0.0


@pytest.mark.parametrize(
    "broken",
    [
        {"busy_s": math.nan},
        {"busy_s": -1.0},
        {"measured_s": 0.0},
        {"completed": (-1,)},
        {"failed": -1},
        {"oldest_age_s": math.inf},
        {"p99_s": -0.1},
        {"judged": (-1,)},
        {"log_latency": (math.nan,)},
        {"due": 3, "in_time": 4},
    ],
)
def test_impossible_figures_are_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no figures"):
        figures(**broken)

"""Windows of a trial: order, length, and what a pair of them says."""

import math
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.engine.windows import (
    Side,
    WindowFigures,
    abba,
    log_growth,
    log_speedup,
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


def test_open_load_compares_busy_seconds_per_task() -> None:
    """The candidate spent 0.08 s on 20 tasks, the control 0.1 s on 25: the same per task."""
    assert log_speedup(figures(completed=(25,)), figures(busy_s=0.08), (1.0,)) == pytest.approx(0.0)
    assert log_speedup(figures(), figures(busy_s=0.05), (1.0,)) == pytest.approx(math.log(2))


def test_open_load_does_not_reward_tasks_that_happened_to_arrive() -> None:
    many = figures(completed=(40,), busy_s=0.2)
    assert log_speedup(figures(), many, (1.0,)) == pytest.approx(0.0)


def test_saturated_windows_compare_tasks_per_second() -> None:
    control = figures(completed=(20,), measured_s=0.2, saturated=True)
    candidate = figures(completed=(33,), measured_s=0.3, saturated=True)
    assert log_speedup(control, candidate, (1.0,)) == pytest.approx(math.log(1.1))


def test_one_saturated_window_of_two_compares_busy_seconds() -> None:
    """A plan that cannot keep up is not flattered by the idle seconds of the one that can."""
    control = figures(completed=(20,), busy_s=0.1)
    candidate = figures(completed=(20,), busy_s=0.2, measured_s=0.225, saturated=True)
    assert log_speedup(control, candidate, (1.0,)) == pytest.approx(-math.log(2))


@given(st.integers(1, 99), st.integers(1, 99))
def test_both_figures_agree_on_a_device_that_is_busy_all_the_time(control: int, candidate: int) -> None:
    def window(completed: int, saturated: bool) -> WindowFigures:
        return figures(completed=(completed,), busy_s=0.225, saturated=saturated)

    at_open_load = log_speedup(window(control, False), window(candidate, False), (1.0,))
    assert at_open_load is not None
    assert log_speedup(window(control, True), window(candidate, True), (1.0,)) == pytest.approx(at_open_load)


@given(st.tuples(*[st.integers(1, 50)] * 4), st.floats(0.5, 2.0))
def test_a_window_that_saw_more_cheap_tasks_looks_no_better(
    counts: tuple[int, int, int, int], speed: float
) -> None:
    """Device time is 1 ms for a task of the first model, 10 ms for one of the second."""
    service_s = (0.001, 0.010)

    def window(first: int, second: int, speed: float) -> WindowFigures:
        busy_s = (first * service_s[0] + second * service_s[1]) / speed
        return figures(completed=(first, second), busy_s=busy_s)

    found = log_speedup(window(*counts[:2], 1.0), window(*counts[2:], speed), service_s)
    assert found == pytest.approx(math.log(speed), abs=1e-9)


@pytest.mark.parametrize("empty", [{"completed": (0,), "p99_s": 0.0}, {"busy_s": 0.0}])
def test_a_pair_with_an_empty_window_says_nothing(empty: dict[str, object]) -> None:
    assert log_speedup(figures(**empty), figures(), (1.0,)) is None
    assert log_speedup(figures(), figures(**empty), (1.0,)) is None


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
        {"p99_s": 0.0},
    ],
)
def test_impossible_figures_are_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no figures"):
        figures(**broken)

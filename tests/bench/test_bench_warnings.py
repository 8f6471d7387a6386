"""How long windows of `stageloom-agent bench` last, and what it says of figures that are worth less."""

import numpy as np
import pytest

from stageloom.edge_agent.bench import MOST_SECONDS
from stageloom.edge_agent.bench.capacity import WindowCounts
from stageloom.edge_agent.bench.contest import CapacityFound
from stageloom.edge_agent.bench.own_models import hopeless_deadlines, short_windows, why_no_naive, window_s
from stageloom.edge_agent.bench.runtime_options import RuntimeName
from stageloom.edge_agent.bench.times_alone import TimesAlone

ONNXRUNTIME, OPENVINO = RuntimeName.ONNXRUNTIME, RuntimeName.OPENVINO
TIMES = TimesAlone(
    {
        (ONNXRUNTIME, 1, "fp32"): {"heavy": 0.080, "light": 0.002, "odd": "no such operator"},
        (ONNXRUNTIME, 2, "fp32"): {"heavy": 0.050, "light": 0.002, "odd": "no such operator"},
        (OPENVINO, 1, "fp32"): {"heavy": 0.060, "light": "no such operator", "odd": "no such operator"},
    }
)


def test_a_window_lasts_ten_of_the_longest_deadlines_as_far_as_the_time_affords_it() -> None:
    assert window_s([0.02, 0.1], 200.0, 6) == 1.5
    assert window_s([0.02, 0.25], 200.0, 6) == 2.5
    assert window_s([2.0], 5.0, 6) == 1.5
    assert window_s([2.0], 200.0, 6) == pytest.approx(200.0 / 72)


def test_windows_that_are_short_beside_the_longest_deadline_are_told_with_the_time_that_it_takes() -> None:
    assert short_windows(window_s([0.25], 200.0, 6), [0.25], 6) == []
    lasts_s = window_s([0.02, 2.0], 200.0, 6)
    (warning,) = short_windows(lasts_s, [0.02, 2.0], 6)
    assert warning == (
        "windows of 2.78 s are short beside a deadline of 2 s, and flatter every contestant; "
        "--seconds 1440 affords windows of 20 s"
    )
    assert short_windows(window_s([2.0], 1440.0, 6), [2.0], 6) == []


def test_no_more_seconds_are_advised_than_a_comparison_takes() -> None:
    (warning,) = short_windows(window_s([52.0], 200.0, 6), [52.0], 6)
    assert warning.endswith(
        "contestant; a --deadline of 50000 ms is the longest that --seconds 36000 affords"
    )
    assert short_windows(window_s([50.0], MOST_SECONDS, 6), [50.0], 6) == []
    (warning,) = short_windows(window_s([50.0], 200.0, 6), [50.0], 6)
    assert warning.endswith(f"--seconds {MOST_SECONDS} affords windows of 500 s")


def test_a_deadline_below_every_run_of_its_model_is_told() -> None:
    deadlines_s = {"heavy": 0.040, "light": 0.020, "odd": 0.001}
    (warning,) = hopeless_deadlines(deadlines_s, TIMES)
    assert "'heavy', 40 ms" in warning and "50 ms" in warning
    assert hopeless_deadlines({"heavy": 0.055}, TIMES) == []  # two threads can do it


def test_why_there_is_no_ratio_to_a_default_session_per_model_has_three_answers() -> None:
    late = WindowCounts(np.array([20]), np.array([0]))
    answers = [
        why_no_naive(None, -8),
        why_no_naive(CapacityFound({-8: [late], 10: [late]}), -8),
        why_no_naive(CapacityFound({10: [late]}), -8),  # time was up before it had looked lower
        why_no_naive(CapacityFound({10: [WindowCounts(np.array([20]), np.array([20]))]}), -8),
    ]
    words = ["is absent", "no load was found", "too few windows", "too few windows"]
    assert all(word in answer for word, answer in zip(words, answers, strict=True))

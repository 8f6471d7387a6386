"""Distances, goals, gaps: everything of the GPU benchmark that is arithmetic."""

import pytest

from benchmarks.gpu.bench import Ceilings
from benchmarks.gpu.judging import GOALS, judge, judge_switch, work_of
from benchmarks.gpu.networks import MODELS
from benchmarks.gpu.rounds import Ratio
from benchmarks.gpu.serving import longest_gap
from tests.benchmarks.gpu.tiny import graph_of

GOAL = {goal.name: goal for goal in GOALS}


@pytest.mark.parametrize(
    ("name", "units", "critical"),
    [("inception_v3", 120, 62), ("resnet50", 56, 52), ("squeezenet", 38, 30)],
)
def test_fused_units_and_critical_paths_are_the_published_counts(
    name: str, units: int, critical: int
) -> None:
    assert name in MODELS
    work = work_of(graph_of(name), "fp16")
    assert (work.units, work.critical_units) == (units, critical)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "gflop", "weight_mb", "activation_mb"),
    [("inception_v3", 5.68, 47.6, 36.3), ("resnet50", 8.18, 51.1, 56.8), ("squeezenet", 1.64, 2.5, 31.4)],
)
def test_work_at_full_size_agrees_with_the_published_figures(
    name: str, gflop: float, weight_mb: float, activation_mb: float
) -> None:
    work = work_of(graph_of(name, width=1.0, size=224), "fp16")
    assert work.flop / 1e9 == pytest.approx(gflop, rel=0.01)
    assert work.weight_bytes / 1e6 == pytest.approx(weight_mb, rel=0.01)
    assert work.activation_bytes / 1e6 == pytest.approx(activation_mb, rel=0.01)


def test_distances_are_the_lower_bounds_of_flop_bytes_and_path() -> None:
    work = work_of(graph_of("squeezenet"), "fp16")
    moving = work.bounds_us(Ceilings(1e15, 1e9, 1e-5, 2e-6))
    assert moving == pytest.approx({"roofline": work.moved_bytes / 1e3, "path": 60.0})
    computing = work.bounds_us(Ceilings(1e9, 1e15, 1e-5, 2e-6))
    assert computing["roofline"] == pytest.approx(work.flop / 1e3)
    assert work_of(graph_of("squeezenet"), "tf32").moved_bytes == pytest.approx(
        2 * work.moved_bytes, rel=1e-3
    )


def test_a_goal_is_judged_by_its_median_and_says_the_spread() -> None:
    goal = GOAL["ours_over_sequential.inception_v3"]
    itself = Ratio(1.0, 0.99, 1.01, 30)
    assert judge(goal, Ratio(1.31, 1.25, 1.4, 30), itself)[0] is True
    reached, text = judge(goal, Ratio(1.29, 1.25, 1.4, 30), itself)
    assert reached is False and "1.290 [1.250, 1.400]" in text and "0.990" in text
    assert judge(goal, None, itself)[0] is None


def test_never_slower_means_within_the_spread_of_the_baseline_itself() -> None:
    goal = GOAL["ours_over_sequential.resnet50"]
    assert judge(goal, Ratio(0.995, 0.99, 1.0, 30), Ratio(1.0, 0.99, 1.01, 30))[0] is True
    assert judge(goal, Ratio(0.985, 0.98, 0.99, 30), Ratio(1.0, 0.99, 1.01, 30))[0] is False
    assert judge(goal, Ratio(0.995, 0.99, 1.0, 30), None)[0] is False


@pytest.mark.parametrize(
    ("p99_ms", "lost", "reached"), [(49.0, 0, True), (51.0, 0, False), (1.0, 1, False), (None, None, None)]
)
def test_a_switch_must_be_quick_and_lose_nothing(
    p99_ms: float | None, lost: int | None, reached: bool | None
) -> None:
    assert judge_switch(p99_ms, lost)[0] is reached


def test_the_longest_gap_is_looked_for_around_the_window_only() -> None:
    times_s = [0.0, 3.0, 3.1, 3.2, 4.0, 4.1]
    assert longest_gap(times_s, 3.05, 3.9) == pytest.approx(0.8)
    assert longest_gap(times_s, 0.5, 3.05) == pytest.approx(3.0)
    assert longest_gap([1.0], 0.0, 2.0) == 0.0

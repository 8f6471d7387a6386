"""The comparison of the twin with the engine: which plans are drawn, and what the figures mean."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.runner import Report, rank_correlation
from benchmarks.twin import __main__ as twin
from benchmarks.twin.__main__ import figures
from benchmarks.twin.calibration import calibration, sample
from benchmarks.twin.engine_device import _union_s
from stageloom.shared.artifact import Artifact
from tests.search.graphs import model

FORKS = [[], [0], [0], [1, 2], [3], [3], [4, 5], [6]]


def workload() -> dict[str, Artifact]:
    found = {name: model(name, FORKS, cuts=(1, 4, 7)) for name in ("a", "b", "c")}
    return {name: Artifact(digest, graph, Path(), 0, 0) for name, (digest, graph) in found.items()}


ALONE_S = {"a": 0.002, "b": 0.004, "c": 0.001}


def test_sampled_plans_are_distinct_seeded_and_not_those_of_the_calibration() -> None:
    models = workload()
    trials = sample(models, ALONE_S, 25, seed=6)
    structures = {trial.bound.plan.structure for trial in trials}
    assert len(structures) == 25
    assert structures.isdisjoint(bound.plan.structure for _, bound in calibration(models))
    assert [trial.name for trial in sample(models, ALONE_S, 25, seed=6)] == [trial.name for trial in trials]
    assert [trial.name for trial in sample(models, ALONE_S, 25, seed=7)] != [trial.name for trial in trials]
    for trial in trials:
        assert set(trial.arrivals) == {model.plan.name for model in trial.bound.models}


def test_the_sampler_draws_lanes_replicas_combinations_and_every_kind_of_load() -> None:
    trials = sample(workload(), ALONE_S, 40, seed=1)
    plans = [trial.bound.plan for trial in trials]
    assert {plan.lanes for plan in plans} == {1, 2}
    assert {model.replicas for plan in plans for model in plan.models} == {1, 2}
    assert {len(plan.models) for plan in plans} == {1, 2, 3}
    assert max(len(block.members) for plan in plans for block in plan.combined) > 1
    kinds = {type(process).__name__ for trial in trials for process in trial.arrivals.values()}
    assert kinds == {"Periodic", "Poisson", "Bursty"}


def test_figures_compare_a_column_with_what_was_measured() -> None:
    rows: list[dict[str, object]] = [
        {
            "measured_throughput_per_s": measured,
            "predicted_throughput_per_s": predicted,
            "measured_p99_ms": 10.0 * measured,
            "predicted_p99_ms": 11.0 * measured,
            "measured_busy_ms_per_task": 1.0,
            "predicted_busy_ms_per_task": 1.0 + number,
        }
        for number, (measured, predicted) in enumerate([(10.0, 10.5), (20.0, 18.0), (40.0, 41.0)])
    ]
    found = figures(rows, "predicted", "measured", "")
    assert found["throughput_median_relative_error"] == pytest.approx(0.05)
    assert found["p99_median_relative_error"] == pytest.approx(0.1)
    assert found["busy_median_relative_error"] == pytest.approx(1.0)
    assert found["rank_correlation"] == pytest.approx(1.0)


@pytest.mark.parametrize(("stops_in", "told"), [(1, []), (2, [{"a": 2, "b": 2}])])
def test_turns_that_were_whole_before_an_interruption_are_compared(
    stops_in: int, told: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    found: list[dict[str, int]] = []

    def serve(trial: object, artifacts: object, seconds: float, turn: int) -> None:
        asked.append(turn)
        if asked.count(stops_in) == 2:
            raise KeyboardInterrupt

    def compare(*given: Any) -> None:
        served: dict[str, Sequence[object]] = given[4]
        found.append({name: len(windows) for name, windows in served.items()})

    collected = SimpleNamespace(round=lambda seconds: None)
    patched: dict[str, Any] = {name: lambda *_: {} for name in ("operator_times", "service_times")}
    patched |= {"calibration": lambda _: {"one": None}, "Collected": lambda *_: collected}
    patched |= {"sample": lambda *_: [SimpleNamespace(name="a"), SimpleNamespace(name="b")]}
    patched |= {"serve": serve, "compare": compare}
    for name, function in patched.items():
        monkeypatch.setattr(twin, name, function)
    with pytest.raises(KeyboardInterrupt):
        twin.accuracy(Report("twin"), {}, quick=False)
    assert found == told


def test_equal_values_share_their_rank() -> None:
    assert rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert rank_correlation([1.0, 1.0], [1.0, 2.0]) == 0.0
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert rank_correlation([1.0, 2.0, 2.0, 4.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx(4.5 / 22.5**0.5)


def test_busy_time_counts_overlapping_steps_once() -> None:
    assert _union_s([(0.0, 1.0), (0.5, 2.0), (3.0, 4.0), (3.2, 3.4)]) == pytest.approx(3.0)
    assert _union_s([]) == 0.0

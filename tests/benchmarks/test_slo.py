"""The benchmark on two tiny models, and its figures."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real_models.fetching import NoRegistryError
from benchmarks.runner import Report
from benchmarks.slo import __main__ as slo
from benchmarks.slo.__main__ import NO_REGISTRY, Shares, figure_of, geometric_means
from benchmarks.slo.mixes import MIXES
from benchmarks.slo.one_mix import QUICK, MixMeasurement, MixResult, best_of, finalists, saturated_rivals
from benchmarks.zoo import ZOO
from stageloom.edge_agent.bench.capacity import WindowCounts
from stageloom.edge_agent.bench.contest import CapacityFound
from stageloom.edge_agent.bench.load import rate_index, rate_per_s
from stageloom.edge_agent.bench.model_files import prepare
from stageloom.edge_agent.bench.rival_settings import Family
from tests.agent.models import write_tiny

FAMILIES = {
    "naive": Family.NAIVE,
    "slow": Family.ONNXRUNTIME,
    "quick": Family.ONNXRUNTIME,
    "ov": Family.OPENVINO,
    "ov_bf16": Family.REDUCED,
    "by_deadline": Family.BY_DEADLINE,
}


def carries(per_s: float) -> CapacityFound:
    """Its search has ended: the next rate does not hold."""
    place = rate_index(per_s)
    return CapacityFound({place: [WindowCounts(np.array([9]), np.array([9]))], place + 1: [NONE_IN_TIME]})


NONE_IN_TIME = WindowCounts(np.array([9]), np.array([0]))


FOUND = {
    name: carries(per_s)
    for name, per_s in {
        "naive": 5.0,
        "slow": 10.0,
        "quick": 20.0,
        "ov": 15.0,
        "ov_bf16": 40.0,
        "by_deadline": 50.0,
        "stageloom": 30.0,
        "stageloom_unpinned": 29.0,
    }.items()
}


def test_the_best_of_each_runtime_and_precision_is_measured_closely() -> None:
    best = ["naive", "quick", "ov", "ov_bf16", "by_deadline", "stageloom"]
    assert finalists(FOUND, FAMILIES, QUICK.rough_search) == best


def test_a_setting_that_no_rate_was_found_for_yet_is_measured_closely_where_it_may_carry_most() -> None:
    """At 18 a second it failed, and below it nothing was tried when time was up; `slow` carries 10."""
    unknown = CapacityFound({rate_index(18.0): [NONE_IN_TIME]})
    found = {"slow": carries(10.0), "quick": unknown, "stageloom": carries(30.0)}
    assert finalists(found, FAMILIES, QUICK.rough_search) == ["quick", "stageloom"]
    assert best_of(found, FAMILIES, [Family.ONNXRUNTIME]) == "slow"


def test_the_best_of_some_families_is_the_one_that_carries_most() -> None:
    assert best_of(FOUND, FAMILIES, set(Family) - {Family.BY_DEADLINE}) == "ov_bf16"
    assert best_of(FOUND, FAMILIES, [Family.OPENVINO_DEFAULT]) == ""


def test_saturated_the_loop_written_by_hand_is_no_setting_and_is_compared_with_beside_the_best() -> None:
    looked = {"naive": [4.0], "quick": [8.0, 9.0], "by_deadline": [20.0], "stageloom": [30.0]}
    assert saturated_rivals(looked, FAMILIES) == {"best_setting": "quick", "by_deadline": "by_deadline"}
    assert saturated_rivals({"naive": [4.0], "stageloom": [3.0]}, FAMILIES) == {"best_setting": "naive"}


class SaturatedContest:
    """What each carries while eight tasks are open; some are absent."""

    def __init__(self) -> None:
        self.absent = {"ov": "no such operator"}
        self.carried = {"naive": 4.0, "quick": 10.0, "by_deadline": 20.0, "stageloom": 8.0}

    def saturated(
        self, names: Iterable[str], weights: object, seconds: float, rounds: int
    ) -> dict[str, list[float]]:
        return {name: [self.carried[name]] * rounds for name in names}


def told() -> MixMeasurement:
    """One that has started nothing."""
    one = object.__new__(MixMeasurement)
    one.name, one.result, one._effort = "tiny", MixResult(), QUICK
    return one


def test_saturated_figures_are_over_the_best_setting_and_over_the_loop() -> None:
    one, contest = told(), SaturatedContest()
    one._saturated(contest, "mix", list(contest.carried), FAMILIES, "stageloom", [1.0])  # type: ignore[arg-type]
    figures = {"auto_over_best_setting.mix": 0.8, "auto_over_by_deadline.mix": 0.4}
    assert one.result.figures == pytest.approx(figures)


def test_rows_of_capacities_say_whether_the_search_was_over() -> None:
    one, lowest = told(), QUICK.rough_search.lowest
    found = {
        "quick": carries(10.0),
        "slow": CapacityFound({30: [NONE_IN_TIME]}),
        "naive": CapacityFound({30: [WindowCounts(np.array([9]), np.array([9]))]}),
        "ov_bf16": CapacityFound({lowest: [NONE_IN_TIME]}),
    }
    one._tell(SaturatedContest(), found, FAMILIES)  # type: ignore[arg-type]
    rows = {row["contestant"]: row for row in one.result.rows if row["part"] == "capacity"}
    columns = ("grid_per_s", "open", "above_per_s")
    assert [rows["quick"][name] for name in columns] == [pytest.approx(10.0, rel=0.05), False, None]
    assert [rows["slow"][name] for name in columns] == [None, True, rate_per_s(30)]
    assert [rows["naive"][name] for name in columns] == [rate_per_s(30), True, None]
    assert [rows["ov_bf16"][name] for name in columns] == [0.0, False, None]
    json.dumps(one.result.rows, allow_nan=False)


def test_what_mixes_take_beyond_their_time_is_taken_from_those_that_follow() -> None:
    """Each lasts 4 s longer than it is given: all but the first end when their share is over."""
    shares, now_s = Shares(60.0, 4), 0.0
    given = []
    for _ in range(4):
        given.append(shares.next_s(now_s))
        now_s += given[-1] + 4.0
    assert given == pytest.approx([15.0, 41.0 / 3 - 4.0, 41.0 / 3 - 4.0, 41.0 / 3 - 4.0])
    assert now_s == pytest.approx(60.0)


def test_figures_are_named_by_mix_and_by_model_and_ratios_have_a_mean() -> None:
    assert figure_of("over_best", "zoo") == "over_best.zoo"
    assert figure_of("auto_over_best_setting.mix", "zoo") == "auto_over_best_setting.zoo"
    assert figure_of("auto_over_best_setting.resnet50", "zoo") == "auto_over_best_setting.zoo.resnet50"
    means = geometric_means({"over_best.a": 2.0, "over_best.b": 8.0, "p99_best_ms.a": 3.0}, ["a", "b"])
    assert means == {"over_best_geomean": pytest.approx(4.0)}


def test_there_is_no_mean_of_a_ratio_that_one_mix_lacks() -> None:
    figures = {"over_best.a": 2.0, "over_naive.a": 3.0, "over_naive.b": 3.0}
    assert geometric_means(figures, ["a", "b"]) == {"over_naive_geomean": pytest.approx(3.0)}


class MixThat:
    """Carries twice what the rival does; it dies after that where it is called so."""

    def __init__(self, name: str, *_: object, **how: object) -> None:
        self.result = MixResult({"over_best": 2.0}, [{"part": "ratio", "mix": name}])
        self._name = name

    def run(self) -> None:
        if self._name == "ocr":
            raise RuntimeError("a contestant died")


def measured(monkeypatch: pytest.MonkeyPatch, cache: Path, *mixes: str) -> tuple[Report, int | str]:
    """What is reported of these mixes, and how it ended; no registry has `small`."""

    def load(name: str, *_: object) -> list[object]:
        if name == "small":
            raise NoRegistryError("it is away")
        return []

    monkeypatch.setattr(slo, "load_mix", load)
    monkeypatch.setattr(slo, "MixMeasurement", MixThat)
    report = Report("slo")
    options = argparse.Namespace(mix=mixes, quick=False, cache=cache, minutes=1.0, only=None)
    try:
        return report, slo.measure(report, options)
    except RuntimeError as error:
        return report, str(error)


def test_a_mix_that_fails_leaves_what_is_known_of_it_and_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, ended = measured(monkeypatch, tmp_path, "zoo", "ocr")
    assert ended == "a contestant died"
    assert report.figures == {"over_best.zoo": 2.0, "over_best.ocr": 2.0}
    assert [row["mix"] for row in report.rows] == ["zoo", "ocr"]


def test_a_mix_whose_registry_is_away_is_a_row_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, ended = measured(monkeypatch, tmp_path, "zoo", "small")
    assert ended == NO_REGISTRY
    assert report.figures == {"over_best.zoo": 2.0}
    assert [(row["part"], row["mix"]) for row in report.rows] == [("ratio", "zoo"), ("absent", "small")]


def test_every_mix_names_models_that_there_are() -> None:
    for mix in MIXES.values():
        assert len({one.name for one in mix}) == len(mix)
        assert all(one.package or one.name in ZOO for one in mix)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_mix_is_measured_from_its_models_to_its_figures(tmp_path: Path) -> None:
    models = [
        prepare(f"tiny{n}", write_tiny(tmp_path / f"source{n}.onnx", n), {}, tmp_path) for n in range(2)
    ]
    effort = replace(QUICK, window_s=0.05, saturated_s=0.05, beside_s=0.05, highest_per_s=200.0)
    one = MixMeasurement("tiny", models, (1.0, 2.0), effort, times_folder=str(tmp_path))
    assert set(one.best) == {"tiny0", "tiny1"}
    found = one.run()
    assert {
        "given_up_stageloom",
        "auto_over_best_setting.mix",
        "auto_over_by_deadline.mix",
    } <= found.figures.keys()
    assert (tmp_path / "executor_times").exists()
    ratios = {row["figure"]: row for row in found.rows if row["part"] == "ratio"}
    assert {"over_naive", "over_best", "over_by_deadline"} <= ratios.keys()
    for figure, row in ratios.items():  # too few windows at a rate, and there is none
        assert row["value"] == found.figures.get(figure)
        assert row["value"] is None or row["low"] <= row["value"] <= row["high"]
    parts = {row["part"] for row in found.rows}
    assert {
        "service",
        "plan",
        "capacity",
        "ratio",
        "latency",
        "saturated",
        "saturated_over_best_setting",
    } <= parts
    measured = {row["contestant"] for row in found.rows if row["part"] == "capacity"}
    assert {"naive", "stageloom", "stageloom_unpinned", "stageloom_arrival_order"} <= measured
    json.dumps(found.rows, allow_nan=False)

"""The benchmark on two tiny models, and its figures."""

import argparse
import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.real_models.fetching import NoRegistryError
from benchmarks.runner import Report
from benchmarks.slo import __main__ as slo
from benchmarks.slo import one_mix
from benchmarks.slo.__main__ import NO_REGISTRY, Shares, figure_of, geometric_means
from benchmarks.slo.mixes import MIXES
from benchmarks.slo.one_mix import (
    QUICK,
    MixEffort,
    MixMeasurement,
    MixResult,
    best_of,
    finalists,
    saturated_rivals,
    still_open,
)
from benchmarks.zoo import ZOO
from stageloom.edge_agent.bench.capacity import CapacitySearch, WindowCounts
from stageloom.edge_agent.bench.contest import CapacityFound
from stageloom.edge_agent.bench.contestant_process import ContestantError
from stageloom.edge_agent.bench.load import rate_index, rate_per_s
from stageloom.edge_agent.bench.model_files import prepare
from stageloom.edge_agent.bench.rival_settings import Family, RivalSetting
from stageloom.edge_agent.bench.runtime_options import RuntimeName, RuntimeOptions
from stageloom.edge_agent.bench.stageloom_contestant import AgentSetting
from stageloom.edge_agent.bench.times_alone import TimesAlone
from stageloom.edge_agent.machine import control_groups
from stageloom.shared.plan import StepChoice
from tests.agent.models import write_tiny
from tests.bench.not_starting import NotStarting
from tests.engine.plans import chains

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


def test_a_setting_that_another_one_of_its_kind_has_passed_is_not_looked_at_further() -> None:
    bounded = CapacityFound({rate_index(18.0): [NONE_IN_TIME]})  # `quick` holds 20
    holding = CapacityFound({rate_index(2.0): [WindowCounts(np.array([9]), np.array([9]))]})
    found = {**FOUND, "slow": bounded, "ov": holding}
    left = still_open(found, FAMILIES, QUICK.rough_search)
    assert set(left) == FOUND.keys() - {"slow"}
    assert "slow" in still_open({"slow": bounded}, FAMILIES, QUICK.rough_search), "nothing holds yet"
    unseen = {"quick": FOUND["quick"], "slow": CapacityFound()}
    assert "slow" in still_open(unseen, FAMILIES, QUICK.rough_search)


def test_the_best_of_some_families_is_the_one_that_carries_most() -> None:
    assert best_of(FOUND, FAMILIES, set(Family) - {Family.BY_DEADLINE}) == "ov_bf16"
    assert best_of(FOUND, FAMILIES, [Family.OPENVINO_DEFAULT]) == ""


def test_saturated_the_loop_written_by_hand_is_no_setting_and_is_compared_with_beside_the_best() -> None:
    looked = {"naive": [4.0], "quick": [8.0, 9.0], "by_deadline": [20.0], "stageloom": [30.0]}
    assert saturated_rivals(looked, FAMILIES) == {"best_setting": "quick", "by_deadline": "by_deadline"}
    assert saturated_rivals({"naive": [4.0], "stageloom": [3.0]}, FAMILIES) == {"best_setting": "naive"}


class SaturatedContest:
    """What each carries while eight tasks are open; `dies` does so where few are compared."""

    def __init__(self, dies: str = "") -> None:
        self.absent, self.plans = {"ov": "no such operator"}, {"stageloom": "served"}
        self.carried = {"naive": 4.0, "quick": 10.0, "by_deadline": 20.0, "stageloom": 8.0}
        self.names = list(self.carried)
        self._dies = dies

    def enter(self, settings: Iterable[AgentSetting]) -> None:
        self.names += [one.name for one in settings if one.name not in self.names]
        self.carried = dict.fromkeys(self.names, 8.0) | self.carried

    def leave(self, names: Iterable[str]) -> None:
        self.names = [name for name in self.names if name not in [*names]]

    def saturated(
        self, names: Sequence[str], weights: object, seconds: float, rounds: int, until_s: float
    ) -> dict[str, list[float]]:
        self.leave([self._dies] if len(names) < 4 else [])
        return {name: [self.carried[name]] * rounds for name in names if name in self.names}


def told() -> MixMeasurement:
    """One that has started nothing."""
    one = object.__new__(MixMeasurement)
    one.name, one.result, one._effort = "tiny", MixResult(), QUICK
    one._models, one._weights, one._times_folder = [SimpleNamespace(name="tiny0")], [1.0], ""  # type: ignore[list-item]
    one._bfloat16, one._began_s, one._families = False, 0.0, FAMILIES
    one._services, one._deadlines = TimesAlone({}), {"tiny0": 0.02}
    return one


def test_saturated_figures_are_over_the_best_setting_and_over_the_loop() -> None:
    one, contest = told(), SaturatedContest()
    one._saturated(contest, "mix", "stageloom", [1.0], math.inf)  # type: ignore[arg-type]
    figures = {"auto_over_best_setting.mix": 0.8, "auto_over_by_deadline.mix": 0.4}
    assert one.result.figures == pytest.approx(figures)


def left_out(one: MixMeasurement) -> list[tuple[str, str | None]]:
    return [(row["load"], row.get("rival")) for row in one.result.rows if row["part"] == "left_out"]


def test_of_a_rival_that_dies_while_it_is_compared_there_is_no_figure_and_the_others_stay() -> None:
    one = told()
    one._saturated(SaturatedContest("quick"), "mix", "stageloom", [1.0], math.inf)  # type: ignore[arg-type]
    assert one.result.figures == pytest.approx({"auto_over_by_deadline.mix": 0.4})
    assert left_out(one) == [("mix", "quick")]


class StumblingContest(SaturatedContest):
    """Where few are compared, `quick` comes to no rate in its first rounds."""

    def __init__(self, without: int) -> None:
        super().__init__()
        self._without = without

    def saturated(
        self, names: Sequence[str], weights: object, seconds: float, rounds: int, until_s: float
    ) -> dict[str, list[float]]:
        found = super().saturated(names, weights, seconds, rounds, until_s)
        if len(names) < 4:
            found["quick"][: self._without] = [0.0] * self._without
        return found


@pytest.mark.parametrize("without", [1, 2])
def test_a_round_without_a_rate_is_in_no_pair_and_of_fewer_than_two_pairs_there_is_no_figure(
    without: int,
) -> None:
    one = told()
    one._effort = replace(QUICK, beside_rounds=3)
    one._saturated(StumblingContest(without), "mix", "stageloom", [1.0], math.inf)  # type: ignore[arg-type]
    compared = {"auto_over_best_setting.mix": 0.8} if without == 1 else {}
    assert one.result.figures == pytest.approx({"auto_over_by_deadline.mix": 0.4, **compared})
    assert left_out(one) == ([("mix", "quick")] if without == 2 else [])


def test_whoever_fails_at_tasks_is_no_rival_for_what_it_carries_of_the_others_and_rows_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, contest = told(), SaturatedContest()
    contest.carried["quick"] = 0.0  # what a contest makes of such rounds
    one._saturated(contest, "mix", "stageloom", [1.0], math.inf)  # type: ignore[arg-type]
    assert one.result.figures["auto_over_best_setting.mix"] == pytest.approx(2.0)
    (row,) = (row for row in one.result.rows if row["part"] == "left_out")
    assert (row["contestant"], row["reason"]) == ("quick", "1 of 1 rounds came to no rate")

    failing = SimpleNamespace(absent={}, problems={"quick": "MemoryError: no room"})
    monkeypatch.setattr(one_mix, "Contest", lambda *_, **options: nullcontext(failing))
    monkeypatch.setattr(one, "_measure", lambda contest: None)
    one._services, one._deadlines = SimpleNamespace(taken={}), {"tiny0": 1.0}  # type: ignore[assignment]
    told_last = {"part": "problem", "mix": "tiny", "contestant": "quick", "error": "MemoryError: no room"}
    assert one.run().rows[-1] == told_last


@pytest.mark.parametrize("late", [False, True])
def test_no_load_begins_once_the_mix_s_time_is_over(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([0.0, 100.0 if late else 1.0])
    monkeypatch.setattr(one_mix, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    one, contest = told(), SaturatedContest()
    one._saturate(contest)  # type: ignore[arg-type]
    assert left_out(one) == ([("tiny0", None)] if late else [])
    assert ("auto_over_best_setting.tiny0" in one.result.figures) is not late
    assert "stageloom_tiny0" not in contest.names


def test_an_agent_that_does_not_start_ends_the_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stageloom.edge_agent.bench.contest.ContestantProcess", NotStarting)
    one = told()
    monkeypatch.setattr(one, "_rivals", lambda: [RivalSetting("naive", Family.NAIVE, RuntimeOptions())])
    with pytest.raises(ContestantError, match="stageloom: out of memory"):
        one.run()


def test_under_a_quota_rivals_are_tuned_for_the_cores_that_it_pays_for_and_a_row_warns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    for module in (one_mix, control_groups):
        monkeypatch.setattr(module, "cpu_quota", lambda *_: 1.5)
    one = told()
    one.best = {"tiny0": (0.004, RuntimeName.ONNXRUNTIME)}
    assert "by_deadline_1x1" in [setting.name for setting in one._rivals()]
    monkeypatch.setattr(one, "_measure", lambda contest: None)
    one.run()
    (warning,) = [row["text"] for row in one.result.rows if row["part"] == "warning"]
    assert warning.startswith("a quota of 1.5 cores on 4")


class AskedContest(SaturatedContest):
    """Notes whose capacities are asked for, in how many windows; Ctrl-C comes when the finalists settle."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[list[str], int]] = []

    def capacities(
        self, found: dict[str, CapacityFound], search: CapacitySearch, *_: float, wanted: object = None
    ) -> None:
        self.asked.append((list(found), search.many))
        found.update({name: FOUND[name] for name in found})

    def settle(self, *_: object) -> None:
        raise KeyboardInterrupt


def test_ablations_have_windows_of_their_own_and_what_is_known_is_told_where_the_rest_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, contest = told(), AskedContest()
    one._effort = MixEffort(900.0)
    rivals = [RivalSetting(name, FAMILIES[name], RuntimeOptions()) for name in ("naive", "quick")]
    patched: dict[str, object] = {
        "_rivals": rivals,
        "_tell_plan": [AgentSetting("stageloom_unpinned")],
    }
    patched |= {"_first_per_s": 10.0, "_until_s": 1.0}
    for name, answer in patched.items():
        monkeypatch.setattr(one, name, lambda *_, answer=answer: answer)
    contest.names = []
    with pytest.raises(KeyboardInterrupt):
        one._measure(contest)  # type: ignore[arg-type]
    assert contest.asked[1] == (["stageloom_unpinned"], 4)
    measured = [row["contestant"] for row in one.result.rows if row["part"] == "capacity"]
    assert measured == ["naive", "quick", "stageloom", "stageloom_unpinned"]


@pytest.mark.parametrize("served", ["", "a plan that was tried before"])
def test_where_another_plan_was_served_a_row_says_so_and_it_has_no_ablations(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = told()
    plan = replace(chains(2, 1).plan, step_choice=StepChoice.DEADLINE)
    monkeypatch.setattr(one, "_plan", lambda **how: plan)
    parts = one._tell_plan(served or plan.digest)
    rows = {row["part"]: row for row in one.result.rows}
    assert rows["plan"]["plan"] == (served or plan.digest)
    assert bool(rows["plan"]["text"]) is bool(parts) is (not served)
    assert ("warning" in rows) is bool(served)


def closely(per_s: float) -> CapacityFound:
    """As `carries`, from four windows at either side of the border."""
    samples = carries(per_s).samples
    return CapacityFound({place: windows * 4 for place, windows in samples.items()})


def test_an_ablation_is_compared_with_the_whole_plan_where_both_have_windows_enough() -> None:
    one = told()
    found = {name: closely(per_s) for name, per_s in (("stageloom", 30.0), ("stageloom_unpinned", 15.0))}
    one._tell(found | {"stageloom_whole": carries(15.0)})
    rows = {row["contestant"]: row for row in one.result.rows if row["part"] == "over_full"}
    assert rows["stageloom_unpinned"]["value"] == pytest.approx(0.5, rel=0.05)
    assert (
        rows["stageloom_unpinned"]["low"] <= 0.5 * 1.05 and rows["stageloom_unpinned"]["high"] >= 0.5 * 0.95
    )
    assert rows["stageloom_whole"]["value"] is None


def test_rows_of_capacities_say_whether_the_search_was_over() -> None:
    one, lowest = told(), QUICK.rough_search.lowest
    found = {
        "quick": carries(10.0),
        "slow": CapacityFound({30: [NONE_IN_TIME]}),
        "naive": CapacityFound({30: [WindowCounts(np.array([9]), np.array([9]))]}),
        "ov_bf16": CapacityFound({lowest: [NONE_IN_TIME]}),
        "stageloom": carries(30.0),
    }
    one._tell(found)
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
    """Carries twice what the rival does; an error comes after that for two of the mixes."""

    def __init__(self, name: str, *_: object, **how: object) -> None:
        self.result = MixResult({"over_best": 2.0}, [{"part": "ratio", "mix": name}])
        self._name = name

    def run(self) -> None:
        if self._name == "ocr":
            raise RuntimeError("the benchmark is wrong")
        if self._name == "urgent":
            raise ContestantError("stageloom has died")


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
    assert ended == "the benchmark is wrong"
    assert report.figures == {"over_best.zoo": 2.0, "over_best.ocr": 2.0}
    assert [row["mix"] for row in report.rows] == ["zoo", "ocr"]


@pytest.mark.parametrize(
    ("mix", "code", "parts"), [("small", NO_REGISTRY, ["absent"]), ("urgent", 1, ["ratio", "absent"])]
)
def test_a_mix_whose_registry_is_away_or_whose_agent_dies_is_a_row_and_the_next_is_measured(
    mix: str, code: int, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, ended = measured(monkeypatch, tmp_path, mix, "zoo")
    assert ended == code
    assert report.figures["over_best.zoo"] == 2.0
    assert [row["part"] for row in report.rows if row["mix"] == mix] == parts
    assert [row["part"] for row in report.rows if row["mix"] == "zoo"] == ["ratio"]


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

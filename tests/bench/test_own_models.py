"""`stageloom-agent bench`: what it takes, what it concludes, and a whole comparison of tiny models."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stageloom.edge_agent.bench import contest, own_models
from stageloom.edge_agent.bench.contest import Contest
from stageloom.edge_agent.bench.contestant import ContestantSetting
from stageloom.edge_agent.bench.load import WindowResult
from stageloom.edge_agent.bench.model_files import prepare
from stageloom.edge_agent.bench.own_models import (
    OwnResult,
    StatedLoad,
    bench,
    result_text,
    settings_for,
)
from stageloom.edge_agent.bench.rival_settings import Family
from stageloom.edge_agent.bench.runtime_options import RuntimeName
from stageloom.edge_agent.bench.stageloom_contestant import AgentSetting, own_plan
from stageloom.edge_agent.bench.times_alone import TimesAlone
from stageloom.edge_agent.cli.bench import by_model, known_precision
from stageloom.shared.errors import ExecutorError, InputError
from stageloom.shared.importer.model_argument import ModelArgument
from stageloom.shared.plan import Plan
from tests.agent.models import write_tiny

pytestmark = pytest.mark.more


PLAN = Plan(models=(), combined=())


def _row(model: str, *, blocks: int = 1, express: bool = False) -> dict[str, Any]:
    row = {"model": model, "deadline_ms": 20.0, "executor": "onnx", "onnxruntime_ms": 1.5}
    return {**row, "blocks": blocks, "express": express}


def result(*, over_best: tuple[float, float, float]) -> OwnResult:
    return OwnResult(
        models=(_row("a"), _row("b", express=True), _row("c", blocks=4)),
        capacities=(
            {"contestant": "naive", "per_s": 10.0, "settled": True, "low": 9.0, "high": 11.0, "windows": 9},
            {
                "contestant": "stageloom",
                "per_s": 40.0,
                "settled": True,
                "low": 38.0,
                "high": 41.0,
                "windows": 9,
            },
        ),
        absent={"ov_2x1": "no such operator"},
        over_naive=(4.0, 3.5, 4.5),
        over_best=over_best,
        best="ort_2x1",
        load_per_s=20.0,
        digest=PLAN.digest,
        plan=PLAN,
    )


@pytest.mark.parametrize(
    ("over_best", "said"),
    [
        (
            (1.4, 1.2, 1.6),
            "use plan {plan} (`stageloom-agent run` makes it): 1.40 times the load of the best",
        ),
        ((1.1, 0.9, 1.3), "no gain over ort_2x1, 1.10 times its load (0.90 to 1.30); it is 4.0 times that"),
        ((0.8, 0.7, 0.9), "no gain: ort_2x1 carries 1.25 times the load; serve them whole with it"),
    ],
)
def test_the_verdict_believes_only_an_interval_that_excludes_one(
    over_best: tuple[float, float, float], said: str
) -> None:
    found = result(over_best=over_best)
    assert found.verdict().startswith(said.format(plan=PLAN.digest[:12]))
    assert result_text(found).endswith(found.verdict())


def test_the_verdict_names_the_precision_that_the_plan_needs() -> None:
    found = replace(result(over_best=(1.4, 1.2, 1.6)), precision="bf16")
    assert "(`stageloom-agent run --precision bf16` makes it)" in found.verdict()


def test_the_verdict_says_why_nothing_is_said_of_a_default_session_per_model() -> None:
    found = replace(result(over_best=(1.4, 1.2, 1.6)), over_naive=None, no_naive="it is absent")
    assert found.verdict().endswith("within the deadlines; it is absent")


def test_what_makes_figures_worth_less_is_told_before_the_verdict() -> None:
    found = replace(result(over_best=(1.4, 1.2, 1.6)), warnings=["windows are short"], window_s=2.5)
    assert result_text(found).splitlines()[-3:] == ["warning: windows are short", "", found.verdict()]
    assert found.document()["warnings"] == ["windows are short"]
    assert found.document()["window_s"] == 2.5


def test_of_a_plan_that_is_not_known_its_digest_is_told() -> None:
    rows = ({"model": "a", "deadline_ms": 20.0, "onnxruntime_ms": 1.5},)
    found = replace(result(over_best=(1.4, 1.2, 1.6)), models=rows, digest="f" * 64, plan=None)
    assert found.document()["plan"] == "f" * 64
    assert found.document()["plan_text"] == []
    assert result_text(found).splitlines()[1].endswith("not known")
    assert found.verdict().startswith("use plan ffffffffffff")


def test_without_a_load_that_is_carried_there_is_no_verdict() -> None:
    found = replace(result(over_best=(1.0, 1.0, 1.0)), over_best=None, over_naive=None)
    assert found.verdict().startswith("no verdict")
    assert found.document()["over_best"] is None


def test_the_text_ranks_who_serves_and_says_who_cannot() -> None:
    text = result_text(result(over_best=(1.4, 1.2, 1.6)))
    assert text.index("stageloom   ") < text.index("naive   ")
    assert "ov_2x1: no such operator" in text
    assert [line.split("ms   ")[-1] for line in text.splitlines()[1:4]] == [
        "onnx",
        "onnx, express",
        "onnx, in 4 blocks",
    ]
    assert "your load is 20 tasks a second; 2.00 times of it is carried" in text


def test_a_number_without_a_name_is_for_all_other_models() -> None:
    assert by_model("--rate", ["5", "b=7"], ["a", "b", "c"]) == {"a": 5.0, "b": 7.0, "c": 5.0}
    assert by_model("--rate", [], ["a"]) == {}


@pytest.mark.parametrize("given", [["x"], ["a=fast"], ["a=1", "a=2"], ["1", "2"]])
def test_what_is_no_number_or_given_twice_is_refused(given: list[str]) -> None:
    with pytest.raises(InputError, match="--rate"):
        by_model("--rate", given, ["a", "b"])


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (StatedLoad(rates_per_s={"z": 1.0}), "--rate names 'z', and there is no such model; use a, b"),
        (StatedLoad(rates_per_s={"a": 1.0}), "--rate is missing for 'b'"),
        (StatedLoad(deadlines_ms={"a": 0.0}), "--deadline of 'a' is 0.0; give more than 0"),
        (StatedLoad(deadlines_ms={"a": float("nan")}), "--deadline of 'a' is nan"),
    ],
)
def test_a_load_that_does_not_fit_the_models_is_refused(load: StatedLoad, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load.check(["a", "b"])
    replace(load, rates_per_s={}, deadlines_ms={}).check(["a", "b"])


@pytest.mark.timeout(200)
def test_two_models_of_a_stranger_are_compared_by_one_command(tmp_path: Path) -> None:
    files = [str(write_tiny(tmp_path / f"net{number}.onnx", number)) for number in range(2)]
    done = subprocess.run(
        [sys.executable, "-m", "stageloom.edge_agent", "bench", *files, "--seconds", "5", "--json"],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {row["model"] for row in found["models"]} == {"net0", "net1"}
    assert {"naive", "stageloom"} <= {row["contestant"] for row in found["capacities"]}
    assert found["over_best"] is None or found["over_best_interval"][0] <= found["over_best_interval"][1]
    assert found["plan_text"][0].startswith(f"plan {found['plan'][:12]}")
    assert found["verdict"]


class Clock:
    """In the place of the module `time`; windows move it on."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


Carried = Mapping[str, tuple[float, float]]
"""By contestant the tasks a second that it carries in the first window at a rate, and in later ones."""

LUCKY: Carried = {
    "stageloom": (200.0, 200.0),
    "naive": (50.0, 50.0),
    "ort_2x1": (400.0, 100.0),
    "ort_1x2": (300.0, 300.0),
}
"""What looks best at first is not."""


class StagedContest(Contest):
    """Contestants without processes. Time is up with the second window at one rate of `last`."""

    def __init__(self, carried: Carried, clock: Clock, last: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._carried, self._clock, self._last = carried, clock, last
        self._here: list[str] = []

    def enter(self, settings: Iterable[ContestantSetting]) -> None:
        self._here = [one.name for one in settings if one.name in self._carried]

    def leave(self, names: Iterable[str]) -> None:
        """Nothing runs."""

    @property
    def names(self) -> list[str]:
        return self._here

    def window(self, name: str, rate_per_s: float, number: int) -> WindowResult:
        self._clock.now_s += math.inf if number and name == self._last else 1.5
        in_time = rate_per_s <= self._carried[name][min(number, 1)]
        return WindowResult(np.zeros(50, np.int64), np.full(50, 0.001), np.full(50, in_time))


ALONE = {RuntimeName.ONNXRUNTIME: 0.01, RuntimeName.OPENVINO: 0.004}
"""Seconds of a run on one thread."""


def staged_bench(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    carried: Carried,
    *,
    last: str = "",
    serves: str = "",
    deadline_ms: float = 50.0,
    told: list[str] | None = None,
) -> OwnResult:
    """`serves`: the digest of the plan that the agent tells."""
    clock = Clock()
    alone = TimesAlone({(runtime, 1, "fp32"): {"net": taken} for runtime, taken in ALONE.items()})

    def staged(*args: Any, **options: Any) -> StagedContest:
        found = StagedContest(carried, clock, last, *args, **options)
        found.plans = {"stageloom": serves} if serves else {}
        return found

    monkeypatch.setattr(TimesAlone, "measure", lambda *args, **options: alone)
    monkeypatch.setattr(own_models, "usable_on_gpu", lambda: ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(own_models, "Contest", staged)
    for module in (contest, own_models):
        monkeypatch.setattr(module, "time", clock)
    model = ModelArgument(str(write_tiny(folder / "net.onnx")), "net", ())
    load = StatedLoad(seconds=10_000.0, deadlines_ms={"net": deadline_ms})
    return bench([model], load, ([] if told is None else told).append)


def test_where_the_best_rivals_figure_falls_the_next_one_is_measured_again_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = staged_bench(monkeypatch, tmp_path, LUCKY)
    assert found.best == "ort_1x2"
    assert found.over_best is not None and found.over_best[0] == pytest.approx(2.0 / 3.0, rel=0.1)
    assert found.over_naive is not None and found.over_naive[0] == pytest.approx(4.0, rel=0.1)


def test_where_time_is_up_before_the_best_rival_was_measured_again_there_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it carried at first is more than ours: a verdict over another one would be a false one."""
    found = staged_bench(monkeypatch, tmp_path, LUCKY, last="ort_1x2")
    assert found.best == "ort_1x2" and found.over_best is None
    assert found.verdict().startswith("no verdict: too few windows")


CLOSE: Carried = {name: (rate, rate) for name, rate in [("stageloom", 220.0), ("naive", 50.0)]} | {
    "ort_1x2": (210.0, 210.0),
    "ort_2x1": (240.0, 240.0),
}
"""Two windows of each, at 248 and 204 tasks a second, do not tell the two tuned settings apart."""


def test_a_setting_whose_search_was_cut_short_is_looked_at_further_where_it_may_be_the_best(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(own_models, "_LOOKING", 0.001)
    found = staged_bench(monkeypatch, tmp_path, CLOSE)
    assert found.best == "ort_2x1"
    assert found.verdict().startswith("no gain: ort_2x1 carries")


def test_no_verdict_leaves_out_a_setting_that_time_was_too_short_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Time is up when `ort_1x2` is measured again: what `ort_2x1` carries is known from two windows."""
    monkeypatch.setattr(own_models, "_LOOKING", 0.001)
    found = staged_bench(monkeypatch, tmp_path, CLOSE, last="ort_1x2")
    assert found.best == "ort_2x1" and found.over_best is None
    assert found.verdict().startswith("no verdict: time was up before the load of ort_2x1 was found")
    assert found.row("naive")["per_s"] is None and not found.row("ort_2x1")["settled"]
    text = result_text(replace(found, load_per_s=100.0))
    assert re.search(r"^ort_2x1 +at least 204$", text, re.MULTILINE)
    assert re.search(r"^naive +not known$", text, re.MULTILINE)


def test_where_one_side_carries_nothing_the_verdict_is_that_the_other_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There is no ratio to nothing, and more time would find none."""
    ours_only = {**dict.fromkeys(LUCKY, (0.0, 0.0)), "stageloom": (200.0, 200.0)}
    found = staged_bench(monkeypatch, tmp_path, ours_only)
    assert found.over_best is None
    assert found.verdict() == (
        f"use plan {found.digest[:12]} (`stageloom-agent run` makes it): "
        "nothing else carries a load within the deadlines"
    )
    found = staged_bench(monkeypatch, tmp_path, {**LUCKY, "stageloom": (0.0, 0.0)})
    assert found.verdict() == (
        "no gain: ort_1x2 carries a load within the deadlines, and the agent's plan none; "
        "serve them whole with it"
    )
    found = staged_bench(monkeypatch, tmp_path, {**LUCKY, "stageloom": (0.0, 0.0)}, last="ort_1x2")
    assert found.verdict().startswith("no verdict: too few windows"), "its load is not sure yet"


def test_no_other_setting_passes_for_a_default_session_per_model_that_is_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    carried = {name: rates for name, rates in LUCKY.items() if name != "naive"}
    found = staged_bench(monkeypatch, tmp_path, carried)
    assert found.over_best is not None and found.over_naive is None
    assert found.no_naive == "a default session per model is absent, and not compared with"


def test_what_meets_no_deadline_carries_nothing_and_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []
    carried = dict.fromkeys(LUCKY, (0.0, 0.0))
    found = staged_bench(monkeypatch, tmp_path, carried, deadline_ms=3.0, told=told)
    assert {row["per_s"] for row in found.capacities} == {0.0}
    assert {row["high"] for row in found.capacities} == {None}
    assert found.verdict().startswith("no verdict: nothing carries a load within the deadlines")
    (warning,) = found.warnings
    assert warning.startswith("the deadline of 'net', 3 ms, is below its shortest run of all")
    assert told.index(f"warning: {warning}") < told.index("starting the agent and what it is compared with")


def test_the_agents_home_goes_with_the_comparison_however_that_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killed contestants remove nothing, so their homes are in a folder that the comparison removes."""
    folders: list[Path] = []

    def interrupted(self: Contest, settings: Iterable[ContestantSetting]) -> None:
        (agent,) = [one for one in settings if isinstance(one, AgentSetting)]
        home = Path(agent.folder, "home")
        home.mkdir()
        folders.append(home)
        raise KeyboardInterrupt

    monkeypatch.setattr(StagedContest, "enter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        staged_bench(monkeypatch, tmp_path, LUCKY)
    assert folders and not folders[0].exists()


def test_windows_are_ten_times_as_long_as_the_longest_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert staged_bench(monkeypatch, tmp_path, LUCKY).window_s == 1.5
    assert staged_bench(monkeypatch, tmp_path, LUCKY, deadline_ms=2000.0).window_s == 20.0


def test_without_anything_to_compare_with_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []
    with pytest.raises(ExecutorError, match="nothing that it could be compared with serves these models"):
        staged_bench(monkeypatch, tmp_path, {"stageloom": (200.0, 200.0)}, told=told)
    assert "looking for the load that each carries within the deadlines" not in told


def test_a_plan_that_the_agent_does_not_serve_is_not_told_as_what_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = staged_bench(monkeypatch, tmp_path, LUCKY)
    assert expected.plan is not None and expected.digest == expected.plan.digest
    assert expected.models[0]["executor"] == "openvino" and not expected.warnings

    found = staged_bench(monkeypatch, tmp_path, LUCKY, serves="f" * 64)
    assert found.plan is None and found.digest == "f" * 64
    assert "executor" not in found.models[0]
    (warning,) = found.warnings
    assert warning.startswith(f"the agent served plan ffffffffffff, not {expected.digest[:12]}")


def test_a_plan_that_was_taken_back_leaves_the_one_before_any_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    model = prepare("net", write_tiny(tmp_path / "net.onnx"), {}, tmp_path / "prepared")
    first = own_plan([model], {"net": {}})
    found = staged_bench(monkeypatch, tmp_path, LUCKY, serves=first.digest)
    assert found.plan == first
    assert found.models[0]["executor"] == "onnx"
    assert len(found.warnings) == 1


@pytest.mark.parametrize(("flags", "said"), [({"avx2", "amx_bf16"}, 1), ({"avx2"}, 0)])
def test_units_for_bfloat16_that_are_not_used_are_told(
    flags: set[str], said: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []
    monkeypatch.setattr(own_models, "cpu_flags", lambda: flags)
    staged_bench(monkeypatch, tmp_path, LUCKY, told=told)
    assert sum("`--precision bf16`" in line for line in told) == said


def test_rivals_in_bfloat16_stand_beside_those_in_float32_where_it_is_allowed() -> None:
    plain = [one.name for one in settings_for("fp32", 2, openvino=True)]
    assert plain == ["naive", "ort_1x2", "ort_2x1", "ov_latency", "ov_2x1", "ov_throughput"]
    allowed = settings_for("bf16", 2, openvino=True)
    assert [one.name for one in allowed if one.family is Family.REDUCED] == [
        "ov_latency_bf16",
        "ov_2x1_bf16",
        "ov_throughput_bf16",
    ]
    assert set(plain) < {one.name for one in allowed}
    assert len(settings_for("bf16", 2, openvino=False)) == 3


def test_a_precision_that_nothing_is_compared_in_is_refused() -> None:
    with pytest.raises(InputError, match="compared in the precision 'int8'"):
        known_precision("int8")


def test_a_precision_of_gpus_is_refused_where_there_is_none(tmp_path: Path) -> None:
    model = ModelArgument(str(write_tiny(tmp_path / "net.onnx", 0)), "net", ())
    with pytest.raises(ExecutorError, match="executors on a GPU compute in tf32"):
        bench([model], StatedLoad(precision="tf32"), lambda line: None)


def test_with_a_gpu_sessions_on_it_are_what_is_compared_with_first() -> None:
    plain = settings_for("fp32", 2, openvino=False, cuda=True)
    assert [one.name for one in plain] == [
        *("cuda_per_model", "cuda_1", "cuda_2", "cuda_4", "naive", "ort_1x2", "ort_2x1")
    ]
    assert all(one.options.float32 for one in plain), "TF32, its default, is not what the models say"
    for precision in ("tf32", "fp16"):
        allowed = settings_for(precision, 2, openvino=False, cuda=True)
        fewer = [one for one in allowed if not one.options.float32]
        assert [one.name for one in fewer] == [f"{one.name}_tf32" for one in plain[:4]]

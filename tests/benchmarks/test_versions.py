"""The benchmark of new versions under load: from rows to figures, and two versions that hardly differ."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from benchmarks import versions
from benchmarks.pays.load import Application
from benchmarks.processes import DemoFailed
from benchmarks.versions import RUNS, VersionedDevice, figures_of, one_run, write_near
from stageloom.edge_agent.bench.load import WindowResult
from stageloom.planner.schema.plan import PlanPushReply, PlanPushRequest, Pushed
from stageloom.shared.ids import DeviceId
from tests.e2e.networks import write_chain


def run(kind: str, pair: int, **changes: Any) -> dict[str, Any]:
    none = {
        "late": 0,
        "late_share": 0.0,
        "lost": 0,
        "refused": 0,
        "p99_ms": 10.0,
        "ended": "",
        "active_s": None,
    }
    return {"run": kind, "pair": pair, "tasks": 100, **none, **changes}


def test_figures_pair_the_runs_of_the_same_arrivals() -> None:
    late = {
        ("still", 0): 1,
        ("push", 0): 3,
        ("compare", 0): 5,
        ("still", 1): 4,
        ("push", 1): 4,
        ("compare", 1): 2,
    }
    rows = [
        run(
            kind,
            pair,
            late=count,
            late_share=count / 100,
            lost=int(kind == "push" and pair == 1),
            p99_ms=10.0 * count,
            ended="rejected" if (kind, pair) == ("compare", 1) else "committed",
            active_s=None if kind == "still" else 6.0 + pair,
        )
        for (kind, pair), count in late.items()
    ]
    figures = figures_of(rows)
    assert [figures[f"late_share.{kind}"] for kind in RUNS] == [0.025, 0.035, 0.035]
    assert figures["late_over_still.push"] == pytest.approx(0.01)
    assert figures["late_over_still.compare"] == pytest.approx(0.01)
    assert (figures["lost.push"], figures["not_committed.compare"], figures["active_s.push"]) == (1, 1, 6.5)
    assert (figures["p99_ms.compare"], figures["refused.still"]) == (35.0, 0)


def test_a_push_that_failed_costs_no_figure_and_only_versions_that_were_committed_are_timed() -> None:
    rows = [
        run("still", 0),
        run("push", 0, ended="committed", active_s=6.0),
        run("push", 1, ended="rejected", active_s=1.0, p99_ms=np.nan),
        run("push", 2, ended="failed: the agent ended"),
        run("compare", 0, ended="failed: the agent ended"),
    ]
    figures = figures_of(rows)
    assert (figures["active_s.push"], figures["not_committed.push"], figures["late_over_still.push"]) == (
        6.0,
        2,
        0,
    )
    assert figures["not_committed.compare"] == 1 and "active_s.compare" not in figures
    assert "p99_ms.push" not in figures and figures["p99_ms.still"] == 10.0
    assert figures_of([]) == {}


def test_a_run_tells_why_its_push_failed_and_what_became_of_its_tasks() -> None:
    class Load:
        deadlines_s = (0.02,)

        def __init__(self) -> None:
            self.outcomes: Counter[str] = Counter()

        def phase(self, *_: object, seed: int) -> WindowResult:
            return WindowResult(np.zeros(2, np.int64), np.array([0.01, np.nan]), np.array([True, False]))

    class Device:
        def push_other(self, *, compare: bool) -> str:
            raise DemoFailed("the agent ended")

    row = one_run(cast(VersionedDevice, Device()), cast(Application, Load()), "push", 1.0, 0.0, 0)
    assert (row["ended"], row["active_s"], row["given_up"]) == ("failed: the agent ended", None, 0.5)
    assert np.isnan(row["p99_ms"])


def test_after_a_push_that_was_refused_or_not_committed_the_same_version_is_pushed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = ["rejected", "committed", "committed"]
    pushed: list[str] = []

    def call(route: object, request: PlanPushRequest) -> PlanPushReply:
        pushed.append(request.plan)
        cause = "it was revoked" if len(pushed) == 1 else ""
        return PlanPushReply(
            pushed=(Pushed(device=DeviceId("bench"), generation=len(pushed) - 1, cause=cause),)
        )

    class Device(VersionedDevice):
        def state(self, generation: int = 0) -> str:
            return ends[generation - 1]

    planner = nullcontext(SimpleNamespace(call=call))
    monkeypatch.setattr(versions, "PlannerClient", lambda data_dir: planner)
    device = Device(tmp_path)
    with pytest.raises(DemoFailed, match="it was revoked"):
        device.push_other(compare=False)
    assert [device.push_other(compare=False) for _ in ends] == ends
    assert pushed == ["second", "second", "second", "first"]


def test_the_second_version_is_another_file_with_almost_the_same_weights(tmp_path: Path) -> None:
    first, second = write_chain(tmp_path / "first.onnx", 1), tmp_path / "second.onnx"
    write_near(first, second)
    weights = [
        [numpy_helper.to_array(one) for one in onnx.load(file).graph.initializer] for file in (first, second)
    ]
    assert first.read_bytes() != second.read_bytes()
    for old, new in zip(*weights, strict=True):
        np.testing.assert_allclose(old, new, rtol=2e-5)

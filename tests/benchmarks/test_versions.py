"""The benchmark of new versions under load: from rows to figures, and two versions that hardly differ."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from benchmarks.versions import RUNS, figures_of, write_near
from tests.e2e.networks import write_chain


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
        {
            "run": kind,
            "pair": pair,
            "tasks": 100,
            "late": count,
            "late_share": count / 100,
            "lost": int(kind == "push" and pair == 1),
            "refused": 0,
            "p99_ms": 10.0 * count,
            "ended": "rejected" if (kind, pair) == ("compare", 1) else "committed",
            "active_s": None if kind == "still" else 6.0 + pair,
        }
        for (kind, pair), count in late.items()
    ]
    figures = figures_of(rows)
    assert [figures[f"late_share.{kind}"] for kind in RUNS] == [0.025, 0.035, 0.035]
    assert figures["late_over_still.push"] == pytest.approx(0.01)
    assert figures["late_over_still.compare"] == pytest.approx(0.01)
    assert (figures["lost.push"], figures["not_committed.compare"], figures["active_s.push"]) == (1, 1, 6.5)
    assert (figures["p99_ms.compare"], figures["refused.still"]) == (35.0, 0)


def test_the_second_version_is_another_file_with_almost_the_same_weights(tmp_path: Path) -> None:
    first, second = write_chain(tmp_path / "first.onnx", 1), tmp_path / "second.onnx"
    write_near(first, second)
    weights = [
        [numpy_helper.to_array(one) for one in onnx.load(file).graph.initializer] for file in (first, second)
    ]
    assert first.read_bytes() != second.read_bytes()
    for old, new in zip(*weights, strict=True):
        np.testing.assert_allclose(old, new, rtol=2e-5)

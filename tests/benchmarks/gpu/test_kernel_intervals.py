"""Kernel intervals, from a trace in the form that torch's profiler writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.kernel_intervals import Kernel, busy_share, concurrency, kernels_of, union_us

TRACE: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data/profiler_trace.json").read_text(encoding="utf-8")
)


def test_kernels_are_read_in_the_order_in_which_they_began() -> None:
    found = kernels_of(TRACE)
    assert [one.name for one in found] == ["sm90_xmma_fprop", "pool", "relu", "outside"]
    assert (found[0].begin_us, found[0].end_us) == (130.0, 150.0)


def test_concurrency_is_the_sum_over_the_union_of_intervals() -> None:
    overlapping = [Kernel(0, 10), Kernel(5, 15), Kernel(5, 8), Kernel(20, 30)]
    assert union_us(overlapping) == 25.0
    assert concurrency(overlapping) == pytest.approx(33 / 25)
    assert busy_share(overlapping) == pytest.approx(25 / 30)
    assert concurrency([Kernel(0, 4), Kernel(4, 9)]) == 1.0
    assert concurrency([]) is None and busy_share([]) is None

"""The benchmark of a trial's verdicts: what results say together."""

import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import cast

from benchmarks.trial import outcomes, try_plan, under_load
from stageloom.shared.engine.trial import TrialResult


def test_medians_of_ratios_are_of_the_trials_that_have_one() -> None:
    decided = replace(try_plan(0, 1.0), ratio=1.5, latency_ratio=2.0, busy_ratio=None)
    results = [replace(decided, ratio=None), replace(decided, ratio=1.0, latency_ratio=None), decided]

    class Pool:
        def map(self, *_: object, chunksize: int) -> list[TrialResult]:
            return results

    found = under_load(3, "same", 0.25, cast(ProcessPoolExecutor, Pool()))
    assert (found["ratio_median"], found["latency_ratio_median"]) == (1.25, 2.0)
    assert math.isnan(found["busy_ratio_median"])
    assert math.isnan(outcomes(results[:1], 1.0)["ratio_median"])

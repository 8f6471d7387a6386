"""Lanes: how long they idle while something could begin, and how near throughput comes to what they allow.

    python -m benchmarks.lanes [--quick] [--json]

The engine core runs alone, on a virtual clock, with steps of equal and of random times; whether an idle lane
could begin something is worked out from what was issued and what ended, by none of the engine's own books
(`benchmarks.lanes.device`).

- `could_idle_max`, and by run-ahead `_run_ahead_1`, `_2`: the largest share of lane time in which a lane was
  idle though something could begin there
- `rate_min`: the least W x rate / lanes over chains with replicas >= lanes <= tasks in the system
- `rate_over_bound`: the least rate over min(L / W, R / max(t_b + t_{b+1})), equal times, saturated
- `most_skips_over_bound`: how often a combined block was passed over, at most, less max_skips + C - 1
- `lane_more_min`: the least throughput with one lane more over that without it

Chains of 1 to 12 blocks on 1 to 4 lanes, 1 to 4 replicas of up to three models, run-ahead 1 and 2. Takes
minutes. The rows are the worst of each figure. Random plans with skips, combined blocks, deadlines and every
rule are tried by `tests/engine/test_lanes.py`.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from benchmarks.lanes.chains import chain_row, figures_of, sweep, worst_of
from benchmarks.runner import Report, progress, run


@dataclass(frozen=True)
class Grid:
    lanes: Sequence[int] = (1, 2, 3, 4)
    replicas: Sequence[int] = (1, 2, 3, 4)
    blocks: Sequence[int] = tuple(range(1, 13))
    several_blocks: Sequence[int] = (1, 2, 5, 12)  # of plans of two and of three models


FULL = Grid()
QUICK = Grid(lanes=(1, 2, 4), replicas=(1, 2, 4), blocks=(1, 2, 5), several_blocks=(3,))


def measure(report: Report, options: argparse.Namespace) -> None:
    grid = QUICK if options.quick else FULL
    cases = [
        *sweep(lanes=grid.lanes, replicas=grid.replicas, blocks=grid.blocks, models=(1,)),
        *sweep(lanes=grid.lanes, replicas=grid.replicas, blocks=grid.several_blocks, models=(2, 3)),
    ]
    progress(f"{len(cases)} cases of chains")
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(chain_row, cases, chunksize=8))
    report.add(figures_of(rows), worst_of(rows))


if __name__ == "__main__":
    sys.exit(run(measure, ["msgspec"]))

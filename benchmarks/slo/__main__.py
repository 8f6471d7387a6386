"""How much load Stageloom carries within deadlines, and what users would run instead.

    python -m benchmarks.slo [--json] [--quick] [--mix NAME]... [--only saturated] [--minutes M]

Without `--mix` all four are measured, with `--quick` the first.

The capacity of a contestant is the largest Poisson rate on a grid of 5 % at which 95 % of *each* model's
tasks meet their deadline: five times its service time on one thread of its best runtime, at least 20 ms.
Contestants take turns in windows of two seconds on the same seeded arrivals. `over_naive.MIX` compares with a
default onnxruntime session and a thread for each model, `over_best_float32.MIX` with the best of those
settings that compute as the models say. `over_best.MIX` is like with like where OpenVINO computes in bfloat16
by default: an agent that may, too, and the best of all settings. `over_by_deadline.MIX` compares with a loop
written by hand that orders by deadline. These ratios are medians of a bootstrap, of capacities between the
rates of the grid; there are none from fewer than four windows at one rate, as with `--quick`. `*_geomean` are
over all mixes that are asked for, and missing where one of them has no such ratio. `p99_*_ms.MIX` are
latencies in float32 at 0.7 of the best rival's capacity, missing where the share of tasks without a result,
`given_up_*.MIX`, exceeds 0.01; `auto_over_best_setting.*` is throughput while eight tasks are always open, of
the mix and of each of its models alone, counted once tasks have turned over, over the best setting, which
other windows chose: the geometric mean of pairs of windows; `auto_over_by_deadline.*` the same over the loop
by deadline. `--only saturated` measures nothing else. Ablations are rows; `over_full` of one is its capacity
over that of the whole plan. There are none where the agent served another plan than its measurements give,
and a row `warning` says so. When a mix's time is over, loads not yet saturated are left out, and rows
`left_out` say which. Under a quota rivals are tuned for the cores that it pays for, as `auto` plans for
these, and a row `warning` tells of it.

A contestant that fails at a task is a row `problem`, and a saturated round with a task that had no result has
no rate. A contestant that dies, and a mix that cannot be measured, is a row `absent`; all others are measured
on. The exit code then is 3 where no registry answered for a mix, 1 where Stageloom failed at one.
"""

import argparse
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.real_models.fetching import CACHE, NoRegistryError
from benchmarks.runner import Report, progress, run
from benchmarks.slo.mixes import MIXES, load_mix
from benchmarks.slo.one_mix import QUICK, MixEffort, MixMeasurement
from stageloom.shared.errors import StageloomError

NO_REGISTRY = 3
_OPTIONS: dict[str, dict[str, Any]] = {
    "--mix": {
        "action": "append",
        "choices": list(MIXES),
        "help": "only this one; repeat for more",
    },
    "--only": {"choices": ["saturated"], "help": "this part alone"},
    "--minutes": {"type": float, "default": 60.0, "metavar": "M", "help": "for all mixes; default 60"},
    "--cache": {"type": Path, "default": CACHE, "metavar": "DIR", "help": "downloads; default %(default)s"},
}


def measure(report: Report, options: argparse.Namespace) -> int:
    """Every mix, one after the other, whatever became of those before."""
    names = options.mix or list(MIXES)[: 1 if options.quick else None]
    options.cache.mkdir(parents=True, exist_ok=True)
    shares, code = Shares(options.minutes * 60.0, len(names)), 0
    for name in names:
        progress(name)
        effort = QUICK if options.quick else MixEffort(shares.next_s(time.monotonic()))
        effort = replace(effort, saturated_only=options.only == "saturated")
        try:
            _measure_mix(report, name, effort, options.cache)
        except (NoRegistryError, StageloomError) as error:
            progress(f"{name}: {error}")
            report.add({}, [{"part": "absent", "mix": name, "reason": str(error)}])
            code = max(code, NO_REGISTRY if isinstance(error, NoRegistryError) else 1)
    report.add(geometric_means(report.figures, names))
    return code


def _measure_mix(report: Report, name: str, effort: MixEffort, cache: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="stageloom-slo-") as folder:
        models = load_mix(name, Path(folder), cache)
        weights = [entry.weight for entry in MIXES[name]]
        one = MixMeasurement(name, models, weights, effort, times_folder=folder)
        try:
            one.run()
        finally:  # of this one what is known
            found = one.result
            report.add(
                {figure_of(figure, name): value for figure, value in found.figures.items()}, found.rows
            )


class Shares:
    """Time for some things, one after the other; what they take beyond it is told by the ones before."""

    def __init__(self, total_s: float, count: int) -> None:
        self._left_s, self._left = total_s, count
        self._given_s, self._beyond_s = 0.0, 0.0
        self._began_s: float | None = None

    def next_s(self, now_s: float) -> float:
        """How long the next one is to last that begins now."""
        if self._began_s is not None:
            taken_s = now_s - self._began_s
            self._left_s -= taken_s
            self._beyond_s = max(self._beyond_s, taken_s - self._given_s)
        self._began_s = now_s
        share_s = self._left_s / self._left
        self._left -= 1
        self._given_s = max(share_s - self._beyond_s, share_s / 2)
        return self._given_s


def figure_of(figure: str, mix: str) -> str:
    """`over_best` of a mix is `over_best.MIX`; of a model alone the mix stands before the model."""
    name, _, load = figure.partition(".")
    return f"{name}.{mix}" if load in ("", "mix") else f"{name}.{mix}.{load}"


def geometric_means(figures: Mapping[str, float], mixes: Collection[str]) -> dict[str, float]:
    """Of what is a ratio of capacities, over the mixes; none of a ratio that one of them lacks."""
    found = defaultdict(list)
    for figure, value in figures.items():
        if figure.startswith("over_"):
            found[figure.partition(".")[0]].append(value)
    return {
        f"{name}_geomean": math.prod(values) ** (1.0 / len(values))
        for name, values in found.items()
        if len(values) == len(mixes)
    }


if __name__ == "__main__":
    sys.exit(run(measure, ("onnxruntime", "openvino", "numpy", "onnx"), options=_OPTIONS))

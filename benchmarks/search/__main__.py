"""Every scheduler on every zoo network: what its schedules take, and how long it searched.

    python -m benchmarks.search [--quick] [--model NAME]... [--measure] [--plot FILE.svg] [--json]

Networks as the importer counts operators, cut as their papers do (else at every base cut); after them
combined blocks of two to four networks: the i-th blocks side by side, where a network has one. Per subject
and scheduler: `predicted_ms`; `over_bound` and `over_optimum`, how much longer than the lower bounds of its
blocks and than the cheapest stages of all (null where that is not known within the budget), as shares;
`search_ms`; stages, the most groups of a stage, the most streams of a block. Isomorphic blocks are searched
once.

Without --measure operators cost their roofline estimate and groups what the given contention says, on a
device of 10 TFLOP/s, 600 GB/s, 3 us a launch and 2 us a barrier: this ranks searches, not devices. With
--measure operators and stages are measured on this machine first, the search uses that, and every schedule
runs in the engine here: see `benchmarks.search.measured`. --plot needs the extra `plot`.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import zoo
from benchmarks.report import Report, arguments, emit, progress
from benchmarks.search.subjects import LIMITS, MIX, of_the_zoo, side_by_side
from stageloom.planner.cli.comparison_plot import save
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.comparison import Measured, Standing, Subject, standing
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import Budget
from stageloom.shared.search.registry import schedulers

QUICK = ("googlenet", "inception_v3", "squeezenet_bypass")
PACKAGES = ("onnx", "onnxruntime", "numpy")


def subjects_of(models: Sequence[str] | None, *, quick: bool, measure: bool) -> list[tuple[str, ...]]:
    """Names of the networks to look at, alone and together."""
    if models:
        return [(name,) for name in models]
    # The largest two take minutes to measure, and their operators are no others.
    alone = QUICK if quick else MIX if measure else tuple(zoo.ZOO)
    return [(name,) for name in alone] + [MIX[:members] for members in range(2, 3 if quick else 5)]


def row(one: Standing, measured: Measured | None) -> Mapping[str, Any]:
    """One scheduler on one subject."""
    shape = one.shape
    found = {
        "network": one.subject,
        "scheduler": one.scheduler,
        "predicted_ms": one.predicted_s * 1e3,
        "over_bound": one.over_bound,
        "over_optimum": one.over_optimum,
        "search_ms": one.search_s * 1e3,
        "stages": shape.stages,
        "groups_max": shape.groups_max,
        "streams_max": shape.streams_max,
    }
    if measured is not None:
        found |= {
            "measured_ms": measured.median_s * 1e3,
            "measured_quartiles_ms": [1e3 * seconds for seconds in measured.quartiles_s or ()],
            "measured_runs": measured.runs,
            "measured_over_sequential": measured.over_sequential,
        }
    return found


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The flat figures: gaps, and where it was measured times over sequential's in the same rounds."""
    wanted = ("over_bound", "measured_over_sequential")
    return {
        f"{one['network']}_{one['scheduler']}_{key}": one[key]
        for one in rows
        for key in wanted
        if one.get(key) is not None
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", action="append", choices=list(zoo.ZOO), help="only this network")
    parser.add_argument("--contention", type=float, default=0.3, help="0: none, 1: as if in turn")
    parser.add_argument("--measure", action="store_true", help="run every schedule in the engine, here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as .svg, .png or .pdf")
    args = parser.parse_args(argv)
    rates = DeviceRates(
        flop_per_s=1e13, bytes_per_s=6e11, launch_s=3e-6, barrier_s=2e-6, contention=args.contention
    )
    budget = Budget(expansions=20_000 if args.quick else Budget().expansions)
    report = Report("search")
    drawn: list[tuple[Standing, Measured | None]] = []
    for names in subjects_of(args.model, quick=args.quick, measure=args.measure):
        progress(", ".join(names))
        if args.measure:
            from benchmarks.search.measured import measured_on_this_machine

            standings = measured_on_this_machine(names, budget, quick=args.quick)
        else:
            of = side_by_side({name: of_the_zoo(name) for name in names}, CostTable(rates=rates), budget)
            standings = [(one, None) for one in estimated(of, budget)]
        rows = [row(one, measured) for one, measured in standings]
        report.add(figures(rows), rows)
        drawn += standings
    if args.plot is not None:
        save(drawn, args.plot)
    emit(report, as_json=args.json, packages=PACKAGES)
    return 0


def estimated(of: Subject, budget: Budget) -> list[Standing]:
    """Every scheduler on a subject."""
    return [standing(of, name, LIMITS, budget, time.perf_counter) for name in schedulers()]


if __name__ == "__main__":
    sys.exit(main())

"""Every scheduler on every zoo network: what its schedules would take, and how long it searched.

    python -m benchmarks.search [--quick] [--model NAME]... [--contention 0.3] [--json]

Networks as the importer counts operators, cut as their papers do (else at every base cut). Operators cost
their roofline estimate, stages and streams what `shared.search.makespan` says under the given contention, on
a device of 10 TFLOP/s, 600 GB/s, 3 us a launch and 2 us a barrier; nothing is measured, so this ranks
searches, not devices. Per network and scheduler: `predicted_ms`; `over_bound` and `over_optimum`, how much
longer than the lower bounds of its blocks and than the cheapest stages of all (null where that is not known
within the budget), as shares; `search_ms`; stages, the most groups of a stage, the most streams of a block.
Isomorphic blocks are searched once. After the networks come combined blocks of two to four of them: the i-th
blocks side by side, where a network has one.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any

from benchmarks import zoo
from benchmarks.allocation import imported
from benchmarks.report import Report, arguments, emit, progress
from shared.blocks import Block, CombinedGraph, combine, split
from shared.graph import Graph
from shared.ids import Digest
from shared.schedule import Schedule, StageSchedule
from shared.search.analytic import DeviceRates
from shared.search.bounds import lower_bounds
from shared.search.costs import CostTable, StageCosts
from shared.search.endings import GroupRule, TooManyError
from shared.search.interface import Budget, Limits
from shared.search.ios import exact
from shared.search.isomorphism import Shared
from shared.search.makespan import schedule_s
from shared.search.registry import schedulers, searches
from shared.search.stages import Stages, Strategy

LIMITS = Limits(r=3, s=8)
NO_ARTIFACT = Digest("0" * 64)  # nothing was measured, so nothing is looked up
MIX = ("squeezenet_bypass", "googlenet", "inception_v3", "resnet50")
QUICK = ("googlenet", "inception_v3", "squeezenet_bypass")


@dataclass(frozen=True)
class Case:
    """The blocks of one network."""

    name: str
    blocks: tuple[tuple[CombinedGraph, StageCosts], ...]
    optimum_s: float | None  # None: not known within the budget


@cache
def cut(name: str) -> tuple[tuple[Graph, Block], ...]:
    """The blocks of a zoo network at full size: only its shapes are used, not its weights."""
    graph = imported(name)
    offered = dict(graph.partitions)
    return tuple((graph, block) for block in split(graph, offered.get("paper", offered["base"])))


def case(names: Sequence[str], rates: DeviceRates, budget: Budget) -> Case:
    """Networks side by side, one or more."""
    table = CostTable(rates=rates)
    blocks = []
    for row in zip_longest(*map(cut, names)):
        members = [member for member in row if member is not None]
        costs = table.for_members([(NO_ARTIFACT, graph, block) for graph, block in members])
        blocks.append((combine(members), costs))
    return Case("+".join(names), tuple(blocks), optimum_s(blocks, budget))


def optimum_s(blocks: Sequence[tuple[CombinedGraph, StageCosts]], budget: Budget) -> float | None:
    """The cheapest stage schedules together, or None."""
    total_s = 0.0
    for graph, costs in blocks:
        stages = Stages(graph, costs, LIMITS, GroupRule.CONNECTED, Strategy.BOTH)
        try:
            total_s += costs.schedule_s(stages.schedule(exact(stages, budget.expansions)))
        except TooManyError:
            return None
    return total_s


def row(found: Case, name: str, budget: Budget) -> Mapping[str, Any]:
    """One scheduler on one network."""
    scheduler = schedulers()[name]
    if searches(name):
        scheduler = Shared(scheduler)
    begun_s = time.perf_counter()
    schedules = [scheduler(graph, costs, LIMITS, budget) for graph, costs in found.blocks]
    search_ms = (time.perf_counter() - begun_s) * 1e3
    both = list(zip(schedules, found.blocks, strict=True))
    predicted_s = sum(schedule_s(schedule, graph, costs) for schedule, (graph, costs) in both)
    bound_s = sum(
        lower_bounds(graph, costs, LIMITS if isinstance(schedule, StageSchedule) else Limits()).seconds
        for schedule, (graph, costs) in both
    )
    return {
        "network": found.name,
        "scheduler": name,
        "predicted_ms": predicted_s * 1e3,
        "over_bound": predicted_s / bound_s - 1.0,
        "over_optimum": found.optimum_s and round(predicted_s / found.optimum_s - 1.0, 9) + 0.0,
        "search_ms": search_ms,
        **_shape(schedules),
    }


def _shape(schedules: Sequence[Schedule]) -> dict[str, int | None]:
    staged = [one for one in schedules if isinstance(one, StageSchedule)]
    if len(staged) == len(schedules):
        stages = [stage for one in staged for stage in one.stages]
        return {
            "stages": len(stages),
            "groups_max": max(len(stage.groups) for stage in stages),
            "streams_max": None,
        }
    streams = [
        len({launch.stream for launch in one.launches})
        for one in schedules
        if not isinstance(one, StageSchedule)
    ]
    return {"stages": None, "groups_max": None, "streams_max": max(streams)}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", action="append", choices=list(zoo.ZOO), help="only this network")
    parser.add_argument("--contention", type=float, default=0.3, help="0: none, 1: as if in turn")
    args = parser.parse_args(argv)
    rates = DeviceRates(
        flop_per_s=1e13, bytes_per_s=6e11, launch_s=3e-6, barrier_s=2e-6, contention=args.contention
    )
    budget = Budget(expansions=20_000 if args.quick else Budget().expansions)
    report = Report("search")
    chosen: list[tuple[str, ...]] = [(name,) for name in args.model or (QUICK if args.quick else zoo.ZOO)]
    if not args.model:
        chosen += [MIX[:members] for members in range(2, 3 if args.quick else 5)]
    for names in chosen:
        progress(", ".join(names))
        found = case(names, rates, budget)
        rows = [row(found, scheduler, budget) for scheduler in schedulers()]
        report.add(
            {f"{found.name}_{one['scheduler']}_over_bound": one["over_bound"] for one in rows},
            rows,
        )
    emit(report, as_json=args.json, packages=["onnx", "onnxruntime"])
    return 0


if __name__ == "__main__":
    sys.exit(main())

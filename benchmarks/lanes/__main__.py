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

Chains of 1 to 12 blocks on 1 to 4 lanes, 1 to 4 replicas, run-ahead 1 and 2; then random plans of up to
three models with skips, combined blocks, deadlines and every rule, under closed and Poisson loads. Takes
minutes. The rows are the worst of each figure.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from random import Random
from typing import Any

from benchmarks.lanes.cases import Chains, random_plan, random_seconds, sweep
from benchmarks.lanes.device import VirtualDevice
from benchmarks.runner import Report, progress, run
from stageloom.shared.plan import Wait

COMPLETIONS = 300
_LOADS = (0.05, 0.2, 1.0)  # tasks/s; a block takes about a second


def chain_row(case: Chains, completions: int = COMPLETIONS) -> dict[str, Any]:
    use = VirtualDevice(case.plan(), case.seconds(), seed=0, tasks=case.tasks, even=True).run(completions)
    row = {"kind": "chains", **asdict(case), "busy": use.busy, "could_idle": use.could_idle}
    row["most_skips_over_bound"] = use.beyond_bound
    row["work_per_s"] = use.busy * case.lanes
    saturated = case.tasks >= 2 * case.replicas * case.models * case.blocks
    if not case.random_times and saturated:
        row["rate_over_bound"] = use.completed / use.seconds / case.bound_tasks_per_s
    return row


def random_row(seed: int, completions: int = COMPLETIONS // 2) -> dict[str, Any]:
    """One random plan under a random load."""
    random = Random(seed)
    bound = random_plan(random)
    seconds = random_seconds(random)
    plan = bound.plan
    deadlines_s = (5.0, 100.0) if plan.wait is Wait.NONE and random.random() < 0.5 else None
    if plan.wait is not Wait.ALL and random.random() < 0.6:  # `all` may wait for a task that never comes
        tasks, rate = random.choice((plan.lanes, 3 * plan.lanes, 40)), 0.0
    else:
        tasks, rate = 0, random.choice(_LOADS)
    device = VirtualDevice(bound, seconds, seed=seed, tasks=tasks, rate=rate, deadlines_s=deadlines_s)
    use = device.run(completions)
    return {
        "kind": "random",
        "seed": seed,
        "lanes": plan.lanes,
        "run_ahead": plan.run_ahead,
        "models": len(plan.models),
        "combined": len(plan.combined),
        "wait": plan.wait.value,
        "step_choice": plan.step_choice.value,
        "deadlines": deadlines_s is not None,
        "tasks": tasks,
        "rate": rate,
        "busy": use.busy,
        "could_idle": use.could_idle,
        "most_skips_over_bound": use.beyond_bound,
    }


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    chains = [row for row in rows if row["kind"] == "chains"]
    fed = [row for row in chains if row["replicas"] >= row["lanes"]]
    return {
        "could_idle_max": max(row["could_idle"] for row in rows),
        **{
            f"could_idle_max_run_ahead_{depth}": max(
                row["could_idle"] for row in rows if row["run_ahead"] == depth
            )
            for depth in (1, 2)
        },
        "rate_min": min(row["busy"] for row in fed),
        "rate_over_bound": min(row["rate_over_bound"] for row in chains if "rate_over_bound" in row),
        "most_skips_over_bound": max(row["most_skips_over_bound"] for row in rows),
        "lane_more_min": min(lane_more(chains)),
        "cases": float(len(rows)),
    }


def worst_of(rows: Sequence[dict[str, Any]], count: int = 10) -> list[dict[str, Any]]:
    """The rows that decide the figures: the worst by each measure."""
    found: dict[int, dict[str, Any]] = {}
    for measure, sign in (
        ("could_idle", -1),
        ("most_skips_over_bound", -1),
        ("busy", 1),
        ("rate_over_bound", 1),
    ):
        fed = measure == "busy"
        ranked = [
            row
            for row in rows
            if measure in row and (not fed or (row["kind"] == "chains" and row["replicas"] >= row["lanes"]))
        ]
        for row in sorted(ranked, key=lambda row: sign * row[measure])[:count]:
            found[id(row)] = row
    return list(found.values())


def lane_more(chains: Iterable[dict[str, Any]]) -> list[float]:
    """Throughput with one lane more over that without it, all else equal; in seconds of steps per second.

    Counting work and not tasks leaves out that random times were drawn anew.
    """
    varied = ("replicas", "blocks", "run_ahead", "models", "tasks", "random_times")
    by_case: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for row in chains:
        by_case.setdefault(tuple(row[name] for name in varied), []).append((row["lanes"], row["work_per_s"]))
    ratios = []
    for found in by_case.values():
        found.sort()
        ratios += [more / fewer for (_, fewer), (_, more) in pairwise(found)]
    return ratios


@dataclass(frozen=True)
class Grid:
    lanes: Sequence[int] = (1, 2, 3, 4)
    replicas: Sequence[int] = (1, 2, 3, 4)
    blocks: Sequence[int] = tuple(range(1, 13))
    several_blocks: Sequence[int] = (1, 2, 5, 12)  # of plans of two and of three models
    random_plans: int = 1200


FULL = Grid()
QUICK = Grid(lanes=(1, 2, 4), replicas=(1, 2, 4), blocks=(1, 2, 5), several_blocks=(3,), random_plans=100)


def swept(grid: Grid, mapped: Callable[..., Iterable[Any]] = map) -> list[dict[str, Any]]:
    """The rows of all cases; `mapped` is `map`, or that of a pool of processes."""
    cases = [
        *sweep(lanes=grid.lanes, replicas=grid.replicas, blocks=grid.blocks, models=(1,)),
        *sweep(lanes=grid.lanes, replicas=grid.replicas, blocks=grid.several_blocks, models=(2, 3)),
    ]
    progress(f"{len(cases)} cases of chains, {grid.random_plans} random plans")
    return [*mapped(chain_row, cases), *mapped(random_row, range(grid.random_plans))]


def measure(report: Report, options: argparse.Namespace) -> None:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        rows = swept(QUICK if options.quick else FULL, partial(pool.map, chunksize=8))
    report.add(figures_of(rows), worst_of(rows))


if __name__ == "__main__":
    sys.exit(run(measure, ["msgspec"]))

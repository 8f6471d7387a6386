"""How searches and trainings scale over workers: measured on this machine, simulated for many nodes.

    python -m benchmarks.scaling [--quick] [--json] [--repeats N]

A contest evaluates all plans that `stageloom plan create --budget` lists for a Jetson Nano's file, and then
the best once more; a training of MADDPG has its episodes and evaluations on workers, and one learner. Each
runs on processes, on a Ray of this machine, and on a Ray cluster of nodes with one processor each on this
machine, with one worker and with as many as there are cores, in turns; a shorter one before it, in which
workers import and load kernels, does not count.

`speed_up.*` is over one worker of the same kind; `per_core.*` is the work's own processor time over wall time
times workers: what is left of a core. `handover_us.*` is what a task without work takes of the pool.

`nodes.*` are simulated: the task graph of each with the times that were measured on one worker of a
cluster, on nodes of 16 workers; all the time in which no task ran there is taken to be the driver's, one task
after another, so the figures are lower bounds. The contest is one of 48 listed plans and goes on with
neighbours of the best, 2,000 of them. `predicted.*` is the same simulation for this machine's cores, to be
compared with `speed_up.*`: where it is above, workers, driver and Ray's own processes share the cores.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import cycle, islice
from statistics import median
from typing import Any, Final

from benchmarks.refined import QUICK_LISTED, listed_for
from benchmarks.runner import Report, progress, run
from benchmarks.scaling.pools import cluster_pool, process_pool, ray_pool
from benchmarks.scaling.task_graph import makespan_s, speed_up
from benchmarks.scaling.work import Spread, contest, handover_s, spread, training, training_problem
from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.tournament.evaluator import EvaluationSettings

DEVICE: Final = "nano"
NODES: Final = (1, 2, 5, 10, 20, 50, 100)
_OF_A_NODE: Final = 16
_LISTED: Final = 48
_NEIGHBOURS: Final = 2_000
_EPISODES: Final = 2_000

Works = Mapping[str, tuple[Callable[[SearchPool], object], Callable[[SearchPool], object]]]
"""By name what warms the workers up, and what is measured."""

Kind = Callable[[int], AbstractContextManager[SearchPool]]

KINDS: Final[Mapping[str, Kind]] = {"processes": process_pool, "ray": ray_pool, "cluster": cluster_pool}


def works_of(*, quick: bool) -> Works:
    """The contest and the training."""
    listed = listed_for(DEVICE, QUICK_LISTED if quick else ())
    seeds = tuple(range(7_000_001, 7_000_002 if quick else 7_000_004))
    problem = training_problem(listed)

    def trained(transitions: int) -> Callable[[SearchPool], object]:
        half = transitions // 2
        settings = MaddpgSettings(transitions=transitions, learn_from=half, validate_every=half)
        return training(problem, settings)

    return {
        "contest": (
            contest(listed, EvaluationSettings(seeds=seeds[:1], windows=3)),
            contest(listed, EvaluationSettings(seeds=seeds, windows=3 if quick else 10)),
        ),
        "training": (trained(20), trained(60 if quick else 200)),
    }


def measured(works: Works, cores: int, repeats: int) -> tuple[list[dict[str, Any]], dict[str, list[Spread]]]:
    """A row per run, and all runs by kind, workers and work; kinds take turns."""
    rows: list[dict[str, Any]] = []
    runs: dict[str, list[Spread]] = {}
    for _ in range(repeats):
        for kind, make in KINDS.items():
            for workers in (1, cores):
                with make(workers) as pool:
                    handed_s = handover_s(pool)
                    for name, (warm_up, work) in works.items():
                        spread(pool, warm_up)  # imports, kernels
                        found = spread(pool, work)
                        runs.setdefault(f"{name}.{kind}.{workers}", []).append(found)
                        row = _row(name, kind, workers, found, handed_s)
                        progress(f"{name} on {kind}, {workers}: {row['wall_s']} s")
                        rows.append(row)
    return rows, runs


def _row(name: str, kind: str, workers: int, found: Spread, handed_s: float) -> dict[str, Any]:
    return {
        "part": "runs",
        "work": name,
        "on": kind,
        "workers": workers,
        "tasks": len(found.taken),
        "wall_s": round(found.wall_s, 2),
        "work_cpu_s": round(found.work_s, 2),
        "task_wall_s": round(sum(one.wall_s for one in found.taken), 2),
        "driver_cpu_s": round(found.driver_s, 2),
        "per_core": round(found.work_s / found.wall_s / workers, 3),
        "handover_us": round(handed_s * 1e6),
    }


def figures_of(runs: Mapping[str, list[Spread]], works: Works, cores: int) -> dict[str, float]:
    """Speed-ups and what is left of a core: medians over repeats."""
    figures = {}
    for name in works:
        for kind in KINDS:
            alone_s, together_s = (
                median(one.wall_s for one in runs[f"{name}.{kind}.{workers}"]) for workers in (1, cores)
            )
            figures[f"speed_up.{name}.{kind}.{cores}"] = alone_s / together_s
            for workers in (1, cores):
                per_core = [one.work_s / one.wall_s / workers for one in runs[f"{name}.{kind}.{workers}"]]
                figures[f"per_core.{name}.{kind}.{workers}"] = median(per_core)
    return figures


def simulated(runs: Mapping[str, list[Spread]], cores: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """What the task graphs say of many nodes, and of this machine."""
    rows, figures = [], {}
    for name, first, more in (("contest", _LISTED, _NEIGHBOURS), ("training", 0, _EPISODES)):
        one = runs[f"{name}.cluster.1"][0]
        own_s = one.between_s
        tasks_s = [taken.wall_s for taken in one.taken]
        figures[f"predicted.{name}.{cores}"] = speed_up([tasks_s], cores, own_s)
        groups = [list(islice(cycle(tasks_s), first + more)), tasks_s[-1:] if name == "contest" else []]
        for nodes in NODES:
            workers = nodes * _OF_A_NODE
            ratio = speed_up(groups, workers, own_s)
            figures[f"nodes.{name}.{nodes}"] = ratio
            rows.append(
                {
                    "part": "nodes",
                    "work": name,
                    "nodes": nodes,
                    "workers": workers,
                    "tasks": sum(map(len, groups)),
                    "seconds": round(makespan_s(groups, workers, own_s), 2),
                    "speed_up": round(ratio, 1),
                    "of_a_worker": round(ratio / workers, 3),
                }
            )
    return rows, figures


def measure(report: Report, options: argparse.Namespace) -> None:
    """Measure, then simulate with what was measured."""
    cores = len(os.sched_getaffinity(0))
    works = works_of(quick=options.quick)
    rows, runs = measured(works, cores, 1 if options.quick else options.repeats)
    handed = {
        kind: median(row["handover_us"] for row in rows if row["on"] == kind and row["workers"] == cores)
        for kind in KINDS
    }
    report.add({f"handover_us.{kind}": taken for kind, taken in handed.items()}, rows)
    report.add(figures_of(runs, works, cores))
    nodes, figures = simulated(runs, cores)
    report.add(figures, nodes)


if __name__ == "__main__":
    own = {"--repeats": {"type": int, "default": 1, "help": "of every run; default 1"}}
    sys.exit(run(measure, ("ray", "torch", "numba"), options=own))

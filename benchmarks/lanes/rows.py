"""What one case of `benchmarks.lanes` gives, and the worst over all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from random import Random
from typing import Any

from benchmarks.lanes.cases import Chains, random_plan, random_seconds
from benchmarks.lanes.device import VirtualDevice
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

"""The shapes of TOP's figures 18, 20 and 24 to 27, on the twin.

    python -m benchmarks.shapes [--quick] [--json] [--figure N]... [--plots DIR]

Each figure's rows stand beside what the paper says of it (`claim`). Everything is simulated from published
ceilings: `twin`. Plans are the best of the combinations that need no learning, under loads that keep every
queue full, so what is seen is the device's capacity.

- 18: tasks/s over H, the most members of a combined block, on the paper's four devices; `gain` over H - 1.
- 20: stages, and groups per stage, of the best plan at the paper's H, per device.
- 24: tasks/s of one model over its replicas on the A100: each on a lane of its own, its operators in turn
  (`instances`), and scheduled together (`together`).
- 25: stages and groups per stage over the batch on the A100.
- 26: images/s and utilisation over the batch on the A100, all three models.
- 27: images/s over the batch: `planned` beside one operator after another, IOS per model, and the joint
  graph that waits for all models (POS), for each model alone and for all three (`mix`).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any

from benchmarks.allocation import imported
from benchmarks.learning.workloads import MEMBERS_MAX, MIX
from benchmarks.report import Report, arguments, emit, progress
from benchmarks.shapes.plots import draw
from benchmarks.shapes.saturated import (
    QUEUE,
    best_combination,
    problem_of,
    shape_of,
    with_batch,
    worth_of_plan,
)
from stageloom.planner.tournament.candidates import plan_candidates
from stageloom.planner.tournament.evaluator import EvaluationSettings
from stageloom.planner.tournament.score import better
from stageloom.planner.twin.device_file import load_device
from stageloom.shared.digest import digest_of
from stageloom.shared.errors import StageloomError
from stageloom.shared.graph import Graph
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.job import run_search

PACKAGES = ("numpy", "numba", "matplotlib")
SERVER = "a100"
SATURATED = 0.02
"""A gain below it is none; where the largest H still gains more, it is given as where gains end."""

CLAIMS = {
    18: "the gain of a larger H saturates by the device's resources, at 2, 2, 3 and 4 (TOP, VI-E)",
    20: "the richer the device, the fewer the stages and the more the groups of each (TOP, VI-E)",
    24: "more concurrency raises the throughput of one model, and scheduled together even more (TOP, VI-G)",
    25: "the larger the batch, the more slender the graph (TOP, VI-G)",
    26: "throughput rises with the batch and saturates at 64, utilisation settles at about 90 % (TOP, VI-G)",
    27: "at every batch TOP serves more than all others (TOP, VI-G)",
}
Rows = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """The figures asked for, one after another."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--figure", action="append", type=int, choices=sorted(CLAIMS), help="default: all")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw each figure there, as SVG")
    options = parser.parse_args(argv)
    course = EvaluationSettings(seeds=(1,), warm_up_s=0.5, window_s=1.0, windows=1 if options.quick else 3)
    graphs = {name: imported(name) for name, _ in MIX}
    report = Report("shapes")
    for figure in options.figure or sorted(CLAIMS):
        progress(f"figure {figure}")
        rows = [{"figure": figure, **row} for row in _FIGURES[figure](graphs, course, options.quick)]
        report.add(_figures(figure, rows), rows)
        if options.plots is not None:
            draw(figure, CLAIMS[figure], rows, options.plots)
    emit(report, as_json=options.json, packages=PACKAGES, device={"twin": True, "claims": CLAIMS})
    return 0


def _choices(graphs: Mapping[str, Graph], names: Sequence[str], **fields: Any) -> list[ModelChoice]:
    chosen: dict[str, Any] = {"partition": "paper", "queue": QUEUE, **fields}
    return [
        ModelChoice(
            name=name,
            artifact=digest_of([name, graphs[name].tensors[0].shape[0]]),
            graph=graphs[name],
            **chosen,
        )
        for name in names
    ]


def _batched(graphs: Mapping[str, Graph], batch: int) -> dict[str, Graph]:
    return {name: with_batch(graph, batch) for name, graph in graphs.items()}


def _figure_18(graphs: Mapping[str, Graph], course: EvaluationSettings, quick: bool) -> Rows:
    rows: Rows = []
    for name in MEMBERS_MAX:
        before: float | None = None
        way = ""
        for members_max in range(1, 4 if quick else 7):
            problem = problem_of(load_device(name), _choices(graphs, list(graphs)), members_max=members_max)
            found, _, worth = best_combination(problem, course)
            served = worth.throughput_per_s
            if before is None or served > before:
                way = f"{found}, {members_max}"
            else:
                served = before  # what fewer members do is allowed, too
            rows.append(
                {
                    "device": name,
                    "members_max": members_max,
                    "tasks_per_s": round(served, 2),
                    "gain": None if before is None else round(served / before - 1.0, 4),
                    "combination": way,
                }
            )
            before = served
    return rows


def _figure_20(graphs: Mapping[str, Graph], course: EvaluationSettings, quick: bool) -> Rows:
    rows: Rows = []
    for name, members_max in MEMBERS_MAX.items():
        problem = problem_of(load_device(name), _choices(graphs, list(graphs)), members_max=members_max)
        way, plan, _ = best_combination(problem, course)
        shape = shape_of(plan)
        rows.append(
            {
                "device": name,
                "members_max": members_max,
                "combination": way,
                "stages": shape.stages,
                "groups_per_stage": shape.groups_per_stage,
                "groups_max": shape.streams,
            }
        )
    return rows


def _figure_24(graphs: Mapping[str, Graph], course: EvaluationSettings, quick: bool) -> Rows:
    rows: Rows = []
    device = load_device(SERVER)
    for name in graphs:
        for replicas in (1, 2) if quick else (1, 2, 3, 4, 6, 8):
            together = problem_of(device, _choices(graphs, [name], replicas=replicas), members_max=replicas)
            whole = _choices(graphs, [name], replicas=replicas, partition="whole")
            apart = problem_of(device, whole, members_max=1, lanes=replicas)
            _, _, joined = best_combination(together, course)
            rows.append(
                {
                    "model": name,
                    "replicas": replicas,
                    "instances_per_s": round(
                        worth_of_plan(apart, apart.template, course).throughput_per_s, 2
                    ),
                    "together_per_s": round(joined.throughput_per_s, 2),
                }
            )
    return rows


def _figure_25(graphs: Mapping[str, Graph], course: EvaluationSettings, quick: bool) -> Rows:
    return [
        {key: row[key] for key in ("batch", "stages", "groups_per_stage", "groups_max")}
        for row in _over_batches(graphs, course, quick)
    ]


def _figure_26(graphs: Mapping[str, Graph], course: EvaluationSettings, quick: bool) -> Rows:
    return [
        {key: row[key] for key in ("batch", "images_per_s", "utilisation")}
        for row in _over_batches(graphs, course, quick)
    ]


def _over_batches(graphs: Mapping[str, Graph], course: EvaluationSettings, quick: bool) -> Rows:
    rows: Rows = []
    for batch in _batches(quick):
        models = _choices(_batched(graphs, batch), list(graphs))
        problem = problem_of(load_device(SERVER), models, members_max=MEMBERS_MAX[SERVER])
        _, plan, worth = best_combination(problem, course)
        shape = shape_of(plan)
        rows.append(
            {
                "batch": batch,
                "stages": shape.stages,
                "groups_per_stage": shape.groups_per_stage,
                "groups_max": shape.streams,
                "images_per_s": round(batch * worth.throughput_per_s, 1),
                "utilisation": round(worth.utilisation, 4),
            }
        )
    return rows


def _figure_27(graphs: Mapping[str, Graph], course: EvaluationSettings, quick: bool) -> Rows:
    rows: Rows = []
    for subject in (*graphs, "mix"):
        names = list(graphs) if subject == "mix" else [subject]
        for batch in _batches(quick):
            models = _choices(_batched(graphs, batch), names)
            rows.append({"subject": subject, "batch": batch, **_compared(models, batch, course)})
    return rows


def _compared(models: Sequence[ModelChoice], batch: int, course: EvaluationSettings) -> dict[str, float]:
    """Images a second of the plan and of its rivals, the best partition of each."""
    problem = problem_of(load_device(SERVER), models, members_max=MEMBERS_MAX[SERVER])
    found = {"planned": best_combination(problem, course)[2]}
    for entrant in plan_candidates(models, problem.costs, policy_names=("sequential", "ios", "synchronised")):
        try:
            worth = worth_of_plan(problem, run_search(entrant.job, lambda: 0.0), course)
        except StageloomError as error:
            progress(f"{entrant.name}: {error}")
            continue
        if entrant.policy not in found or better(worth, found[entrant.policy]):
            found[entrant.policy] = worth
    return {f"{name}_images_per_s": round(batch * one.throughput_per_s, 1) for name, one in found.items()}


def _batches(quick: bool) -> tuple[int, ...]:
    return (1, 8) if quick else (1, 4, 16, 32, 64, 128)


def _figures(figure: int, rows: Rows) -> dict[str, float]:
    """What each claim comes down to."""
    found: dict[str, float] = {}
    if figure == 18:
        for device in MEMBERS_MAX:
            gains = [(row["members_max"], row["gain"]) for row in rows if row["device"] == device]
            gained = [most for most, gain in gains if gain is not None and gain >= SATURATED]
            found[f"figure_18_saturates_at.{device}"] = float(max(gained, default=1))
    if figure == 20:
        for row in rows:
            found[f"figure_20_stages.{row['device']}"] = float(row["stages"])
            found[f"figure_20_groups_per_stage.{row['device']}"] = row["groups_per_stage"]
    if figure == 24:
        for row in rows:
            gain = row["together_per_s"] / row["instances_per_s"]
            found[f"figure_24_together_over_instances.{row['model']}.{row['replicas']}"] = round(gain, 4)
    if figure == 27:
        ratios = [row["planned_images_per_s"] / _best_other(row) for row in rows]
        found["figure_27_planned_over_best_other_min"] = round(min(ratios), 4)
        found["figure_27_planned_over_best_other_mean"] = round(fsum(ratios) / len(ratios), 4)
    return found


def _best_other(row: Mapping[str, Any]) -> float:
    columns = (name for name in row if name.endswith("_images_per_s") and not name.startswith("planned"))
    return max(float(row[name]) for name in columns)


_FIGURES: dict[int, Callable[[Mapping[str, Graph], EvaluationSettings, bool], Rows]] = {
    18: _figure_18,
    20: _figure_20,
    24: _figure_24,
    25: _figure_25,
    26: _figure_26,
    27: _figure_27,
}


if __name__ == "__main__":
    sys.exit(main())

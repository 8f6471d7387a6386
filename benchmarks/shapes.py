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

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import zoo
from benchmarks.learning.pair import MEMBERS_MAX, MIX, judged
from benchmarks.runner import Report, progress, run
from stageloom.planner.learning.maddpg.candidates import seeds
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.work import bound_plan
from stageloom.planner.tournament.candidates import plan_candidates
from stageloom.planner.tournament.evaluator import EvaluationSettings
from stageloom.planner.tournament.score import Score, better
from stageloom.planner.twin.arrivals import Periodic
from stageloom.planner.twin.device_file import DeviceFile, load_device
from stageloom.planner.twin.reference import TwinDevices
from stageloom.shared.digest import digest_of
from stageloom.shared.errors import StageloomError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import OpId
from stageloom.shared.plan import Plan, QueuePlan
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.job import run_search

Rows = list[dict[str, Any]]


class Axes(NamedTuple):
    """What a figure shows: one line per value of `line` (none: per column of `shown`)."""

    across: str
    shown: tuple[str, ...]
    line: str = ""
    logarithmic: bool = False


_AXES: Final[Mapping[int, Axes]] = {
    18: Axes("members_max", ("tasks_per_s",), line="device", logarithmic=True),
    20: Axes("device", ("stages", "groups_per_stage")),
    24: Axes("replicas", ("instances_per_s", "together_per_s"), line="model"),
    25: Axes("batch", ("stages", "groups_per_stage")),
    26: Axes("batch", ("images_per_s", "utilisation")),
    27: Axes(
        "batch",
        ("planned_images_per_s", "ios_images_per_s", "sequential_images_per_s", "synchronised_images_per_s"),
        line="subject",
    ),
}
_STYLES: Final = ("o-", "s--", "^:", "v-.")


def draw(figure: int, claim: str, rows: Rows, folder: Path) -> Path:
    """Write `figure-N.svg`; equal rows give equal bytes.

    Columns of different size have a panel each; lines of one model or device have a panel together.
    """
    import matplotlib
    from matplotlib.figure import Figure

    axes = _AXES[figure]
    panels = _panels(axes, rows)
    picture = Figure(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    for place, (title, lines) in zip(picture.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for style, (label, points) in zip(_STYLES * 4, lines, strict=False):
            place.plot([str(x) for x, _ in points], [y for _, y in points], style, label=label)
        place.set_title(title, fontsize=10)
        place.set_xlabel(axes.across.replace("_", " "))
        place.grid(color="0.9")
        if axes.logarithmic:
            place.set_yscale("log")
        else:
            place.set_ylim(bottom=0.0)
        if len(lines) > 1:
            place.legend(fontsize=8, frameon=False)
    picture.suptitle(f"twin; the paper's figure {figure}: {claim}", fontsize=9, wrap=True)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"figure-{figure}.svg"
    with matplotlib.rc_context({"svg.hashsalt": "stageloom", "svg.fonttype": "none"}):
        picture.savefig(file, metadata={"Date": None})
    return file


def _panels(axes: Axes, rows: Rows) -> list[tuple[str, list[tuple[str, list[tuple[Any, float]]]]]]:
    """Title and lines of each panel."""

    def points(chosen: Rows, column: str) -> list[tuple[Any, float]]:
        return [(row[axes.across], row[column]) for row in chosen if row.get(column) is not None]

    if not axes.line:
        return [(_words(column), [(column, points(rows, column))]) for column in axes.shown]
    names = list(dict.fromkeys(row[axes.line] for row in rows))
    of = {name: [row for row in rows if row[axes.line] == name] for name in names}
    if len(axes.shown) == 1:
        return [(_words(axes.shown[0]), [(name, points(of[name], axes.shown[0])) for name in names])]
    return [
        (name, [(_words(column), found) for column in axes.shown if (found := points(of[name], column))])
        for name in names
    ]


def _words(column: str) -> str:
    return column.replace("_per_s", " per s").replace("_", " ")


OVERLOAD = 3.0
"""Times what the device serves one operator after another."""

QUEUE = QueuePlan(max_tasks=64)
"""Full all the time; what does not fit is refused, which costs nothing."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a plan's schedules look like."""

    stages: int  # of all combined blocks together
    groups_per_stage: float
    streams: int  # the most groups of any stage


def with_batch(graph: Graph, batch: int) -> Graph:
    """The graph of `batch` images at once: weights once, everything else per image."""
    if batch == 1:
        return graph
    return replace(
        graph,
        tensors=tuple(replace(one, shape=(batch * one.shape[0], *one.shape[1:])) for one in graph.tensors),
        operators=tuple(replace(one, flop=batch * one.flop) for one in graph.operators),
    )


def problem_of(
    device: DeviceFile,
    models: Sequence[ModelChoice],
    *,
    members_max: int,
    lanes: int = 1,
) -> Problem:
    """Block combination under a load that no plan can serve whole, every model as often as the others."""
    costs = CostTable(rates=device.rates())
    service_s = fsum(
        costs.operator_s(model.artifact, model.graph, OpId(op))
        for model in models
        for op in range(len(model.graph.operators))
    )
    rate = OVERLOAD / service_s
    arrivals = {
        model.name: Periodic(rate_per_s=rate * model.replicas, jitter_s=0.2 / (rate * model.replicas))
        for model in models
    }
    return Problem.of(
        compose(models, lanes=lanes, costs=costs),
        device_class=f"twin {device.name}",
        graphs={model.artifact: model.graph for model in models},
        costs=costs,
        arrivals_per_s=[rate * model.replicas for model in models],
        make_device=TwinDevices(device, costs, arrivals),
        members_max=members_max,
    )


def best_combination(problem: Problem, course: EvaluationSettings) -> tuple[str, Plan, Score]:
    """The best of the ways to combine blocks that need no learning, each with its schedules searched."""
    table = problem.table()
    best: tuple[str, Plan, Score] | None = None
    for name, actions in seeds(problem.space).items():
        if not name.endswith("fast"):
            continue  # launches are never held back under an overload
        bound = bound_plan(problem, table, actions)
        worth = judged(problem, bound.plan, course)
        if best is None or better(worth, best[2]):
            best = name.partition(",")[0], bound.plan, worth
    assert best is not None
    return best


def shape_of(plan: Plan) -> Shape:
    """Stages and groups over all combined blocks."""
    stages = [
        len(stage.groups)
        for block in plan.combined
        if isinstance(block.schedule, StageSchedule)
        for stage in block.schedule.stages
    ]
    return Shape(
        stages=len(stages),
        groups_per_stage=round(fsum(stages) / len(stages), 3) if stages else 0.0,
        streams=max(stages, default=0),
    )


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


def measure(report: Report, options: argparse.Namespace) -> None:
    course = EvaluationSettings(seeds=(1,), warm_up_s=0.5, window_s=1.0, windows=1 if options.quick else 3)
    graphs = {name: zoo.graph_of(name) for name, _ in MIX}
    report.about = {"twin": True, "claims": CLAIMS}
    for figure in options.figure or sorted(CLAIMS):
        progress(f"figure {figure}")
        rows = [{"figure": figure, **row} for row in _FIGURES[figure](graphs, course, options.quick)]
        report.add(_figures(figure, rows), rows)
        if options.plots is not None:
            draw(figure, CLAIMS[figure], rows, options.plots)


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
                    "instances_per_s": round(judged(apart, apart.template, course).throughput_per_s, 2),
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
            worth = judged(problem, run_search(entrant.job, lambda: 0.0), course)
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
    own: dict[str, dict[str, Any]] = {
        "--figure": {"action": "append", "type": int, "choices": sorted(CLAIMS), "help": "default: all"},
        "--plots": {"type": Path, "metavar": "DIR", "help": "draw each figure there, as SVG"},
    }
    sys.exit(run(measure, ("numpy", "numba", "matplotlib"), options=own))

"""TOP's figures 18, 20 and 24 to 27: what H, the device, replicas and the batch change.

Loads keep every queue full, so what is seen is the device's capacity.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from benchmarks.paper.contestants import (
    COURSE,
    MEMBERS_MAX,
    MIX,
    SERVER,
    SMALL,
    Contestant,
    choices,
    combined,
    judged,
    overload,
    problem_of,
    rivals,
    slenderness,
)
from benchmarks.paper.finding import Finding, Inputs, Line, Panel, PaperClaim, Row, lines_of
from benchmarks.paper.graphs import zoo_graph
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.tournament.evaluator import EvaluationSettings
from stageloom.planner.twin.device_file import load_device
from stageloom.shared.graph import Graph
from stageloom.shared.search.compose import ModelChoice

SATURATED: Final = 0.02
"""A gain below it is none."""

FULL_AT: Final = 1.1
"""Throughput has saturated where the next larger batch brings less than this."""

BATCH_PER_S: Final = 8
"""Images of a task for which a window has a second: a score is a count, and few tasks give a coarse one."""

_NOTE: Final = (
    "Device files of published ceilings; every model as often as the others, at eight times what operators "
    "in turn can serve. Plans are the best combination of blocks that needs no training, their schedules by "
    "a small beam, combined blocks as large as H lets them be. Tasks of all models are added up, so a plan "
    "that serves more of the light ones counts for more; that may be why smaller blocks reach higher sums."
)


@dataclass(frozen=True)
class Saturated:
    """Models on a device whose queues are full."""

    problem: Problem
    models: Sequence[ModelChoice]
    course: EvaluationSettings

    @property
    def best(self) -> Contestant:
        """The best combination of blocks."""
        return combined(self.problem, self.course)


def saturated(
    inputs: Inputs,
    device: str,
    models: Sequence[ModelChoice],
    members_max: int,
    lanes: int = 1,
    batch: int = 1,
) -> Saturated:
    """Models whose every queue is full. `batch`: images of a task; the more, the longer it is observed."""
    where = load_device(device)
    problem = problem_of(
        where,
        models,
        overload(where, models),
        members_max=members_max,
        lanes=lanes,
        compiled=not inputs.small,
    )
    longer = replace(COURSE, window_s=COURSE.window_s * max(1.0, batch / BATCH_PER_S))
    return Saturated(problem, models, SMALL if inputs.small else longer)


def _graphs(inputs: Inputs, batch: int = 1) -> dict[str, Graph]:
    return {name: zoo_graph(inputs, name, batch) for name, _ in MIX}


def figure_18(inputs: Inputs) -> Finding:
    """Throughput and time to optimise over H, the most sub-blocks of a combined block."""
    rows: list[Row] = []
    for device in ("nano", SERVER) if inputs.small else MEMBERS_MAX:
        before: float | None = None
        for members_max in range(1, 3 if inputs.small else 7):
            began_s = time.process_time()
            case = saturated(inputs, device, choices(_graphs(inputs)), members_max)
            best = case.best
            took_s = time.process_time() - began_s
            served = best.score.throughput_per_s
            gain = None if before is None else round(served / before - 1.0, 4)
            rows.append(
                {
                    "device": device,
                    "H": members_max,
                    "tasks/s": round(served, 2),
                    "gain": gain,
                    "optimisation, processor s": round(took_s, 2),
                    "best at this H": best.name,
                }
            )
            before = served
    return Finding(_claims_18(rows), tuple(rows), _panels_18(rows), _NOTE)


def _claims_18(rows: Sequence[Row]) -> tuple[PaperClaim, ...]:
    claims = []
    last: dict[str, int] = {}
    for device in dict.fromkeys(row["device"] for row in rows):
        own = [row for row in rows if row["device"] == device]
        last[device] = max((row["H"] for row in own if (row["gain"] or 0.0) >= SATURATED), default=1)
        claims.append(
            PaperClaim(
                f"{device}: gains end at H = {MEMBERS_MAX[device]}",
                f"the last H that gained {100 * SATURATED:.0f} % is {last[device]}",
                last[device] == MEMBERS_MAX[device],
            )
        )
    growth = [
        later["optimisation, processor s"] / earlier["optimisation, processor s"]
        for earlier, later in pairwise(rows)
        if later["H"] == earlier["H"] + 1
    ]
    claims.append(
        PaperClaim(
            "optimisation takes longer for each H more",
            f"{min(growth):.2f} to {max(growth):.2f} times, each H by itself",
            min(growth) > 1.1,
        )
    )
    return tuple(claims)


def _panels_18(rows: Sequence[Row]) -> tuple[Panel, ...]:
    firsts = {row["device"]: row["tasks/s"] for row in rows if row["H"] == 1}
    relative = [{**row, "over": row["tasks/s"] / firsts[row["device"]]} for row in rows]
    return (
        Panel("throughput", "H", "over H = 1", lines_of(relative, "H", "over", "device")),
        Panel(
            "optimisation",
            "H",
            "processor s",
            lines_of(rows, "H", "optimisation, processor s", "device"),
            True,
        ),
    )


def figure_20(inputs: Inputs) -> Finding:
    """Stages, and groups per stage, of the best plan at the paper's H, per device."""
    rows: list[Row] = []
    one_for_all = max(MEMBERS_MAX.values())
    for device, members_max in MEMBERS_MAX.items():
        for limit, own in (("the paper's", members_max), ("the same", one_for_all)):
            best = saturated(inputs, device, choices(_graphs(inputs)), own).best
            shape = slenderness(best.plan)
            rows.append(
                {
                    "device": device,
                    "limit H": limit,
                    "H": own,
                    "stages": shape.stages,
                    "groups per stage": shape.groups_per_stage,
                    "most groups": shape.groups_max,
                    "combination": best.name,
                }
            )
    paper, same = ([row for row in rows if row["limit H"] == one] for one in ("the paper's", "the same"))
    claims = (
        *_slenderer(paper, ""),
        *_slenderer(same, f"also with H = {one_for_all} on all, so that not the limit decides: "),
    )
    panels = (
        Panel("stages", "", "of all combined blocks", lines_of(rows, "device", "stages", "limit H")),
        Panel("groups", "", "per stage", lines_of(rows, "device", "groups per stage", "limit H")),
    )
    return Finding(claims, tuple(rows), panels, _NOTE)


def _slenderer(rows: Sequence[Row], under: str) -> tuple[PaperClaim, ...]:
    """What the paper says of devices from the poorest to the richest."""
    stages, groups = [row["stages"] for row in rows], [row["groups per stage"] for row in rows]
    return (
        PaperClaim(
            f"{under}richer devices have fewer stages",
            ", ".join(map(str, stages)),
            stages == sorted(stages, reverse=True) and stages[0] > stages[-1],
        ),
        PaperClaim(
            f"{under}richer devices have more groups in each" if under else "and more groups in each",
            ", ".join(map(str, groups)),
            groups == sorted(groups) and groups[-1] > groups[0],
        ),
    )


def figure_24(inputs: Inputs) -> Finding:
    """One model's throughput over its replicas: each on a lane of its own, and scheduled together."""
    rows: list[Row] = []
    for name, graph in _graphs(inputs).items():
        for replicas in (1, 2) if inputs.small else (1, 2, 4, 8):
            together = saturated(inputs, SERVER, choices({name: graph}, replicas=replicas), replicas)
            whole = choices({name: graph}, replicas=replicas, partition=())
            apart = saturated(inputs, SERVER, whole, 1, lanes=replicas)
            alone = judged(apart.problem, apart.problem.template, apart.course)
            rows.append(
                {
                    "model": name,
                    "replicas": replicas,
                    "instances, tasks/s": round(alone.throughput_per_s, 1),
                    "together, tasks/s": round(together.best.score.throughput_per_s, 1),
                }
            )
    return Finding(_claims_24(rows), tuple(rows), _panels_24(rows), _NOTE)


def _claims_24(rows: Sequence[Row]) -> tuple[PaperClaim, ...]:
    claims = []
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        plain = own[-1]["instances, tasks/s"] / own[0]["instances, tasks/s"]
        most = max(row["together, tasks/s"] for row in own) / max(row["instances, tasks/s"] for row in own)
        claims += [
            PaperClaim(
                f"{name}: more instances serve more, without any schedule",
                f"{plain:.2f} times with {own[-1]['replicas']}",
                plain > 1.05,
            ),
            PaperClaim(
                f"{name}: scheduled together they serve more still",
                f"{most:.2f} times the most of instances",
                most > 1.0 + SATURATED,
            ),
        ]
    return tuple(claims)


def _panels_24(rows: Sequence[Row]) -> tuple[Panel, ...]:
    return tuple(
        Panel(
            name,
            "replicas",
            "tasks/s",
            tuple(
                Line(
                    way,
                    tuple((row["replicas"], row[f"{way}, tasks/s"]) for row in rows if row["model"] == name),
                )
                for way in ("instances", "together")
            ),
        )
        for name in dict.fromkeys(row["model"] for row in rows)
    )


def figures_25_26(inputs: Inputs) -> Finding:
    """Stages, groups, throughput and utilisation of all three models over the batch."""
    rows: list[Row] = []
    for batch in _batches(inputs):
        models = choices(_graphs(inputs, batch))
        best = saturated(inputs, SERVER, models, MEMBERS_MAX[SERVER], batch=batch).best
        shape = slenderness(best.plan)
        rows.append(
            {
                "batch": batch,
                "stages": shape.stages,
                "groups per stage": shape.groups_per_stage,
                "images/s": round(batch * best.score.throughput_per_s, 1),
                "utilisation": float(f"{best.score.utilisation:.4g}"),
                "combination": best.name,
            }
        )
    return Finding(_claims_25(rows), tuple(rows), _panels_25(rows), _NOTE)


def _claims_25(rows: Sequence[Row]) -> tuple[PaperClaim, ...]:
    groups, served = [row["groups per stage"] for row in rows], [row["images/s"] for row in rows]
    stages = [row["stages"] for row in rows]
    full = saturates_at(rows, "images/s")
    return (
        PaperClaim(
            "the larger the batch, the more slender the graph: more stages",
            f"{stages[0]} to {stages[-1]}",
            stages[-1] > stages[0],
        ),
        PaperClaim("and fewer groups in each", f"{groups[0]} to {groups[-1]}", groups[-1] < groups[0]),
        PaperClaim(
            "throughput rises with the batch and saturates at 64",
            f"{served[0]:.0f} to {max(served):.0f} images/s; saturates at {full}",
            served[-1] > served[0] and full == 64,
        ),
        PaperClaim(
            "utilisation settles at about 90 %",
            f"{rows[-1]['utilisation']:.2f} at {rows[-1]['batch']}",
            rows[-1]["utilisation"] >= 0.8,
        ),
    )


def saturates_at(rows: Sequence[Row], column: str) -> int:
    """The first batch after which the next one brings less than a tenth."""
    for row, following in pairwise(rows):
        if following[column] < FULL_AT * row[column]:
            return int(row["batch"])
    return int(rows[-1]["batch"])


def _panels_25(rows: Sequence[Row]) -> tuple[Panel, ...]:
    return tuple(
        Panel(column, "batch", up, (Line("", tuple((row["batch"], row[column]) for row in rows)),))
        for column, up in (
            ("stages", "of all combined blocks"),
            ("groups per stage", ""),
            ("images/s", ""),
            ("utilisation", "share"),
        )
    )


def figure_27(inputs: Inputs) -> Finding:
    """Throughput of all contestants over the batch, each model alone and all three."""
    rows: list[Row] = []
    for subject in (*(name for name, _ in MIX), "mix"):
        for batch in _batches(inputs):
            graphs = _graphs(inputs, batch)
            models = choices(graphs if subject == "mix" else {subject: graphs[subject]})
            case = saturated(inputs, SERVER, models, MEMBERS_MAX[SERVER], batch=batch)
            entered = rivals(case.problem, models, ("sequential", "ios", "synchronised"), case.course)
            found = {one.name: one.score.throughput_per_s for one in entered}
            found["top"] = case.best.score.throughput_per_s
            rows += [
                {"models": subject, "batch": batch, "plan": plan, "images/s": round(batch * per_s, 1)}
                for plan, per_s in found.items()
            ]
    return Finding(_claims_27(rows), tuple(rows), _panels_27(rows), _NOTE)


def _claims_27(rows: Sequence[Row]) -> tuple[PaperClaim, ...]:
    claims = []
    for subject in dict.fromkeys(row["models"] for row in rows):
        ratios = {}
        own = [row for row in rows if row["models"] == subject]
        for batch in dict.fromkeys(row["batch"] for row in own):
            at = {row["plan"]: row["images/s"] for row in own if row["batch"] == batch}
            ratios[batch] = at["top"] / max(value for plan, value in at.items() if plan != "top")
        claims.append(
            PaperClaim(
                f"{subject}: TOP serves more than the others at every batch",
                ", ".join(f"{ratio:.2f} at {batch}" for batch, ratio in ratios.items()),
                min(ratios.values()) > 1.005,
            )
        )
        full = saturates_at([row for row in own if row["plan"] == "top"], "images/s")
        where = 64 if subject == "mix" else 128
        claims.append(PaperClaim(f"{subject}: it saturates at batch {where}", f"at {full}", full == where))
    return tuple(claims)


def _panels_27(rows: Sequence[Row]) -> tuple[Panel, ...]:
    return tuple(
        Panel(
            subject,
            "batch",
            "images/s",
            lines_of([row for row in rows if row["models"] == subject], "batch", "images/s", "plan"),
        )
        for subject in dict.fromkeys(row["models"] for row in rows)
    )


def _batches(inputs: Inputs) -> tuple[int, ...]:
    return (1, 8) if inputs.small else (1, 4, 16, 64, 128)

"""Cells of the launcher's experiment: the rows of each, the figures over all, and the page's table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import exp, fsum, log
from typing import Any, Final

from benchmarks.learning.launcher import (
    FIXED,
    REFUSING,
    Contestant,
    LauncherCell,
    Served,
    UnknowingTwin,
    chosen_paces,
    contestants,
    goodput_bound_per_s,
    launcher_alone,
    served,
)
from benchmarks.learning.margin import bootstrap_interval
from benchmarks.learning.pair import MIX, QUEUE, whole_s
from benchmarks.runner import Report, progress
from benchmarks.zoo import graphs_of
from stageloom.planner.learning.maddpg.stored import OTHER_MEMBERS, TOP_MEMBERS
from stageloom.planner.replan.judge import GAIN
from stageloom.planner.replan.levers import by_deadline
from stageloom.planner.twin.arrivals import Poisson
from stageloom.planner.twin.device_file import load_device
from stageloom.planner.twin.reference import TwinDevices
from stageloom.planner.twin.times import StepTimes
from stageloom.planner.twin.window import TargetDevice
from stageloom.shared.digest import digest_of
from stageloom.shared.search.compose import Combination, ModelChoice, compose
from stageloom.shared.search.costs import CostTable

DEVICES: Final = ("xavier_nx", "nano", "i7_7700")
NAMES: Final = {"nano": "Nano", "xavier_nx": "Xavier NX", "i7_7700": "i7-7700"}
LOADS: Final = (0.8, 1.1, 1.5)
STRUCTURES: Final = ("whole", "combined")
DEADLINES: Final = (5.0, 2.0)
"""Times a task's service time. Under the shorter one a small task is late behind one block of a large."""

CHOOSE_S: Final = 20.0
JUDGE_S: Final = 40.0
CHOOSING: Final = (4_000_001, 4_000_002, 4_000_003, 4_000_004, 4_000_005)
"""Arrivals by which the oracle chooses,"""

JUDGING: Final = (5_000_001, 5_000_002, 5_000_003, 5_000_004, 5_000_005)
"""and those by which all are compared."""

LOSS: Final = 0.01
"""Of a model's tasks: a share in time that is surely no further below the fixed rule's is no loss."""

Row = dict[str, Any]


class UnknowingTwins(TwinDevices):
    """Makes twins whose engine gives nothing up before it expires."""

    def __call__(self, seed: int) -> TargetDevice:
        return UnknowingTwin(self._times, self.arrivals, seed=seed, deadlines_s=self.deadlines_s)


def cell_of(
    name: str, structure: str, load: float, deadline: float, models: Sequence[ModelChoice]
) -> LauncherCell:
    """The paper's mix at a share of what the device serves one operator after another.

    `whole`: every model one block, one lane. `combined`: the papers' blocks, the i-th of different models
    together, scheduled by greedy. `deadline`: times the service time.
    """
    device = load_device(name)
    costs = CostTable(rates=device.rates())
    times = StepTimes(device, costs)
    service_s = tuple(whole_s(times, model) for model in models)
    mix = [dict(MIX)[model.name] for model in models]
    capacity = 1.0 / fsum(rate * taken for rate, taken in zip(mix, service_s, strict=True))
    rates = tuple(load * capacity * rate for rate in mix)
    if structure == "whole":
        plan = compose(models, costs=costs)
    else:
        plan = compose(
            [replace(model, partition="paper") for model in models],
            costs=costs,
            scheduler="greedy",
            combination=Combination.ALIGNED,
            members_max=TOP_MEMBERS.get(name, OTHER_MEMBERS),
        )
    names = [model.name for model in models]
    arrivals = {one: Poisson(rate_per_s=rate) for one, rate in zip(names, rates, strict=True)}
    deadlines_s = {one: deadline * taken for one, taken in zip(names, service_s, strict=True)}
    return LauncherCell(
        plan=plan,
        graphs={model.artifact: model.graph for model in models},
        rates_per_s=rates,
        service_s=service_s,
        load=load,
        make_device=TwinDevices(device, costs, arrivals, deadlines_s),
        make_unknowing=UnknowingTwins(device, costs, arrivals, deadlines_s),
        make_patient=TwinDevices(device, costs, arrivals),
    )


def launcher(report: Report, devices: Sequence[str], *, quick: bool = False) -> None:
    """Every cell's rows, and how often anything was ahead of the fixed rule."""
    models = [  # nothing is run, so a name stands for a model's contents
        ModelChoice(name=name, artifact=digest_of(name), graph=graph, queue=QUEUE)
        for name, graph in graphs_of([name for name, _ in MIX]).items()
    ]
    report.about = {"twin": True, "seeds": len(JUDGING), "seconds": JUDGE_S}
    loads, deadlines = (LOADS[-1:], DEADLINES[:1]) if quick else (LOADS, DEADLINES)
    try:
        for deadline, device, structure, load in product(deadlines, devices, STRUCTURES, loads):
            named = {"device": device, "structure": structure, "load": load}
            named |= {"deadline_over_service": deadline}
            found = cell_rows(cell_of(device, structure, load, deadline, models))
            report.add({}, [{"part": row.pop("part"), **named, **row} for row in found])
            progress(f"{', '.join(map(str, named.values()))}: {found[0]}")
    finally:
        if report.rows:
            report.add(figures_over(report.rows))


def cell_rows(cell: LauncherCell, choose_s: float = CHOOSE_S, judge_s: float = JUDGE_S) -> list[Row]:
    """A row per contestant beside the fixed rule, one for the cell, one per way to read agent 0's actions."""
    in_order, asked = chosen_paces(cell, cell.plan, CHOOSING, choose_s)
    deadlines, asked_too = chosen_paces(cell, by_deadline(cell.plan), CHOOSING, choose_s)
    all_of_them = contestants(cell, in_order, deadlines)
    scores = {
        one.name: served(
            cell, one.plan, JUDGING, judge_s, cell.make_unknowing if one.unknowing else cell.make_device
        )
        for one in all_of_them
    }
    fixed = scores[FIXED]
    cells: Row = {"part": "cells", "oracle_plans": asked + asked_too}
    if cell.plan.lanes == 1 and all(model.num_blocks == 1 for model in cell.plan.models):
        bounds = [goodput_bound_per_s(one.arrived, cell.service_s, judge_s) for one in fixed]
        reached = [one.goodput_per_s / bound for one, bound in zip(fixed, bounds, strict=True)]
        cells |= {"bound_per_s": round(fsum(bounds) / len(bounds), 3), **_ratio("fixed_over_bound", reached)}
    alone = launcher_alone(cell, CHOOSING, choose_s)
    return [
        cells,
        *(contestant_row(one, scores[one.name], fixed) for one in all_of_them),
        *(
            {"part": "launcher alone", "how": how, **{key: round(value, 4) for key, value in moved.items()}}
            for how, moved in alone.items()
        ),
    ]


def contestant_row(one: Contestant, rows: Sequence[Served], fixed: Sequence[Served]) -> Row:
    """Means over the seeds; what is over the fixed rule is paired by arrivals, with 95 % intervals."""
    pairs = list(zip(rows, fixed, strict=True))
    shares = list(zip(*(row.shares for row in rows), strict=True))
    kept = ([own - under for own, under in zip(a.shares, b.shares, strict=True)] for a, b in pairs)
    kept_low = [bootstrap_interval(by_seed)[0] for by_seed in zip(*kept, strict=True)]
    return {
        "part": "contestants",
        "contestant": one.name,
        "paces": list(one.paces),
        "goodput_per_s": round(_mean([row.goodput_per_s for row in rows]), 3),
        **_ratio("goodput_over_fixed", [a.goodput_per_s / b.goodput_per_s for a, b in pairs]),
        "shares": [round(_mean(share), 4) for share in shares],
        "shares_less_fixed_low": [round(low, 4) for low in kept_low],
        "least_share": round(_mean([row.least_share for row in rows]), 4),
        **_difference("least_share_less_fixed", [a.least_share - b.least_share for a, b in pairs]),
        "p99_ms": round(1e3 * _mean([row.score.p99_s for row in rows]), 3),
        **_ratio("p99_over_fixed", [a.score.p99_s / b.score.p99_s for a, b in pairs]),
        "queue_variance": float(f"{_mean([row.score.queue_variance for row in rows]):.4g}"),
        "busy": round(_mean([row.busy for row in rows]), 4),
        "arrived": [row.arrived for row in rows],
    }


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def _ratio(name: str, ratios: Sequence[float]) -> dict[str, float]:
    """A geometric mean with its bootstrap interval."""
    logs = [log(max(ratio, 1e-9)) for ratio in ratios]
    found = (_mean(logs), *bootstrap_interval(logs))
    keys = (name, f"{name}_low", f"{name}_high")
    return {key: round(exp(value), 4) for key, value in zip(keys, found, strict=True)}


def _difference(name: str, values: Sequence[float]) -> dict[str, float]:
    found = (_mean(values), *bootstrap_interval(values))
    keys = (name, f"{name}_low", f"{name}_high")
    return {key: round(value, 4) for key, value in zip(keys, found, strict=True)}


def figures_over(rows: Sequence[Row]) -> dict[str, float]:
    """In how many cells strict intervals are ahead of the fixed rule with confidence.

    `gain`: by as much as a re-plan takes for a gain. `without_loss`: and no model may lose more than `LOSS`.
    `over_rules`: over the better of the fixed rule and of refusing whole models.
    """
    found = [row for row in rows if row["part"] == "contestants"]
    strict = [row for row in found if "strict for" in row["contestant"]]
    gain = [row for row in strict if row["goodput_over_fixed_low"] > 1.0 + GAIN]
    named = {
        "cells": found,
        "cells_where_intervals_are_ahead": [row for row in strict if row["goodput_over_fixed_low"] > 1.0],
        "cells_where_intervals_gain": gain,
        "cells_where_they_gain_without_loss": [
            row for row in gain if min(row["shares_less_fixed_low"]) >= -LOSS
        ],
        "cells_where_refusing_gains": [
            row
            for row in found
            if row["contestant"] == REFUSING and row["goodput_over_fixed_low"] > 1.0 + GAIN
        ],
        "cells_where_the_least_share_rises": [row for row in strict if row["least_share_less_fixed_low"] > 0],
    }
    counts = {name: float(len(set(map(_cell, of)))) for name, of in named.items()}
    rules = {
        cell: max(
            row["goodput_per_s"]
            for row in found
            if _cell(row) == cell and row["contestant"] in (FIXED, REFUSING)
        )
        for cell in set(map(_cell, found))
    }
    return counts | {
        "most_goodput_over_fixed": max(row["goodput_over_fixed"] for row in strict),
        "most_goodput_over_rules": max(row["goodput_per_s"] / rules[_cell(row)] for row in strict),
    }


def _cell(row: Mapping[str, Any]) -> tuple[float, str, str, float]:
    return row["deadline_over_service"], row["device"], row["structure"], row["load"]


COLUMNS: Final = (
    *("device", "blocks", "load", "as it is", "strict intervals"),
    *("by deadline", "by deadline, feasible", "and strict intervals", "least share", "for least share"),
)


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown of a kept file's cells with the longer deadlines: tasks in time per second, and the gain of
    strict intervals over the fixed rule with its interval."""
    for cells in (COLUMNS, ("---",) * len(COLUMNS)):
        yield f"| {' | '.join(cells)} |"
    own = [
        row for row in rows if row["part"] == "contestants" and row["deadline_over_service"] == DEADLINES[0]
    ]
    for cell in dict.fromkeys(map(_cell, own)):
        of = {row["contestant"]: row for row in own if _cell(row) == cell}
        fixed, fair = of[FIXED], of["by deadline, strict for least share"]
        cells = (
            *(NAMES[cell[1]], cell[2], f"{cell[3]:g}"),
            f"{of['as it is, u = 0']['goodput_per_s']:.1f}",
            f"{of['in order of arrival, strict for goodput']['goodput_per_s']:.1f}",
            f"{of['by deadline']['goodput_per_s']:.1f}",
            f"**{fixed['goodput_per_s']:.1f}**",
            _interval(of["by deadline, strict for goodput"], "goodput_over_fixed"),
            f"{fixed['least_share']:.2f}",
            f"{fair['least_share']:.2f}, goodput {_interval(fair, 'goodput_over_fixed')}",
        )
        yield f"| {' | '.join(cells)} |"


def _interval(row: Mapping[str, Any], name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:.3f}" if low == high else f"{row[name]:.3f} [{low:.3f}, {high:.3f}]"

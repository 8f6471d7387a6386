"""Predicted seconds of stages that a fit never saw, against what this machine's agent measures.

    python -m benchmarks.costs [--quick] [--json]

Random stages, of one to four groups, of the zoo's blocks and of pairs of blocks of two networks, run on
the agent's onnx executor under its own profile (`stageloom.edge_agent.worker.profiling`): all of them
in turn, again and again, as often as the time allows, every other turn for the first of two passes.
Operators are measured by the agent's operator profile, before, between and behind the turns. A time is
the lower decile of its runs: what else the machine does only adds to it.

Each network is held out in turn: the model is fitted to the stages of the first pass in which the network
has no part (`stageloom.shared.search.costs`), and predicts those in which it has.

- `median_relative_error`: |predicted / measured - 1|, its median over all stages held out.
- `rank_correlation`: Spearman's, of predicted and measured.
- `remeasured_relative_error`: the second pass over the first, of the same stages: the noise.
- `sure_share`, `sure_coverage`: held-out stages whose prediction is sure, and of those the share whose time
  lies within the stated interval; `coverage` is the same over all whose interval is finite.

Rows, on the same held-out stages: the plain formula (contention 1), the line with the contention that suits
the fitted stages best, roofline estimates without any measurement, and the model by number of groups.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import ceil, isfinite
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import zoo
from benchmarks.contract.schedules import bound_of, graph_of, plan_of
from benchmarks.runner import Report, progress, rank_correlation, run
from stageloom.edge_agent.executor.base import TimingRequest
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor, open_session
from stageloom.edge_agent.executor.onnx.timing import operator_runs
from stageloom.edge_agent.executor.timing import IdleTime
from stageloom.edge_agent.worker.messages import WorkerConfig
from stageloom.edge_agent.worker.profiling import StageSamples, joined, profile_stages
from stageloom.shared.artifact import Artifact
from stageloom.shared.blocks import Block, CombinedGraph
from stageloom.shared.bound import BoundPlan
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.launch_list import lower
from stageloom.shared.plan import Member
from stageloom.shared.schedule import Group, Stage, StageSchedule, joint_stage
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.costs import CostTable, MeasuredStage, Members, StageCosts, fitted, samples
from stageloom.shared.search.endings import Endings, GroupRule
from stageloom.shared.search.interface import Limits
from stageloom.shared.search.ranking import RankedEndings
from stageloom.shared.search.stages import Stages, Strategy

SEED = 20_261_121
MOST_GROUPS = 4
TURNS = 4  # every other one belongs to the first pass: what the machine does meanwhile falls on both
LEAST_SHARE_S = 1.0  # of the time, for one turn of one plan
DRAWS = 8  # of endings per stage; the one whose number of groups is nearest to the one wanted is taken


@dataclass(frozen=True)
class Effort:
    networks: tuple[str, ...]
    schedules: int  # per block
    runs: int  # per pass, at most
    limit_s: float  # for all measurements; on a busy machine there are fewer runs
    width: float = 1.0


FULL = Effort(
    ("googlenet", "inception_v3", "squeezenet_bypass", "resnet50"), schedules=2, runs=14, limit_s=240.0
)
QUICK = Effort(
    ("googlenet", "squeezenet_bypass", "inception_v3"), schedules=1, runs=6, limit_s=60.0, width=0.5
)


@dataclass
class Drawn:
    """One stage, where it is, and its runs in seconds, pass by pass."""

    networks: tuple[str, ...]
    members: Members
    groups: tuple[Group, ...]
    runs: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def seconds(self, at: int) -> float:
        """What it took in a pass."""
        return lower_decile(self.runs[at])


def measure(report: Report, options: argparse.Namespace) -> None:
    effort = QUICK if options.quick else FULL
    sys.setswitchinterval(WorkerConfig().switch_interval_s)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stageloom-") as folder:
        progress(f"import {', '.join(effort.networks)}")
        artifacts = zoo.artifacts(effort.networks, Path(folder), width=effort.width)
        drawn, operators_s = measured(artifacts, effort)
    graphs = {artifact.digest: artifact.graph for artifact in artifacts.values()}
    judged(report, drawn, CostTable(measured_s=operators_s), graphs)
    report.add({"stages": len(drawn), "total_s": time.monotonic() - began_s})


# What is measured


def drawn_plans(artifacts: Mapping[str, Artifact], effort: Effort) -> list[tuple[tuple[str, ...], BoundPlan]]:
    """A plan per network and per pair; every replica of a block has a schedule of its own."""
    rng = random.Random(SEED)
    choices: list[tuple[str, ...]] = [*((name,) for name in artifacts), *combinations(artifacts, 2)]
    found = []
    for names in choices:
        models = [artifacts[name] for name in names]
        cuts = [model.graph.partition("paper") for model in models]
        blocks = max(len(one) + 1 for one in cuts)
        rows = [
            [Member(at, replica, block) for at, one in enumerate(cuts) if block <= len(one)]
            for replica in range(effort.schedules)
            for block in range(blocks)
        ]
        schedules = [drawn_schedule(graph_of(models, cuts, row), rng) for row in rows]
        plan = plan_of(models, cuts, rows, schedules, replicas=effort.schedules)
        found.append((names, bound_of(plan, models)))
    return found


def drawn_schedule(graph: CombinedGraph, rng: random.Random) -> StageSchedule:
    """Random endings from the last stage to the first; limits and the number of groups wanted vary."""
    nothing = StageCosts((0.0,) * graph.size)
    stages = Stages(graph, nothing, Limits(), GroupRule.CONNECTED, Strategy.PARALLEL)
    state, chosen = (1 << graph.size) - 1, []
    while state:
        wanted = rng.randint(1, MOST_GROUPS)
        space = Endings(graph, rule=GroupRule.CONNECTED, r=rng.randint(1, 5), s=wanted)
        ranked = RankedEndings(space, state)
        drawn = [ranked.unrank(rng.randrange(ranked.count)) for _ in range(DRAWS)]
        ending = min(drawn, key=lambda one: abs(len(stages.groups(one)) - wanted))
        chosen.append(Stage(stages.groups(ending)))
        state ^= ending
    return StageSchedule(tuple(reversed(chosen)))


def measured(
    artifacts: Mapping[str, Artifact], effort: Effort
) -> tuple[list[Drawn], dict[tuple[Digest, OpId], float]]:
    """Every stage with its runs in two passes, and every operator's seconds."""
    executor = OnnxExecutor()
    plans = drawn_plans(artifacts, effort)
    stages = [_stages(names, bound) for names, bound in plans]
    operators: dict[tuple[Digest, OpId], list[float]] = {}
    left = (TURNS + 1) * len(artifacts) + TURNS * len(plans)  # steps that have not begun
    repeats = ceil(2 * effort.runs / TURNS)
    ends_s = time.monotonic() + effort.limit_s
    for turn in range(TURNS + 1):
        for name, artifact in artifacts.items():
            progress(f"{left} steps left: operators of {name}")
            left -= 1
            request = TimingRequest(repeats=repeats, limit_s=60.0, wall_s=120.0)
            for op, runs in enumerate(operator_runs(artifact, request, lambda: True, open_session)):
                operators.setdefault((artifact.digest, OpId(op)), []).extend(runs)
        if turn == TURNS:
            break
        for (names, bound), drawn in zip(plans, stages, strict=True):
            progress(f"{left} steps left: stages of {' and '.join(names)}, turn {turn + 1}")
            share_s = max((ends_s - time.monotonic()) / left, LEAST_SHARE_S)
            left -= 1
            blocks = _measure(executor, bound, [artifacts[name] for name in names], repeats, share_s)
            for block, of_block in zip(blocks, drawn, strict=True):
                times = [seconds for _, seconds in sorted(block.stage_s.items())]
                for one, seconds in zip(of_block, times, strict=bool(times)):
                    one.runs[turn % 2].extend(seconds)
    executor.close()
    in_both = [one for plan in stages for block in plan for one in block if all(one.runs)]
    return in_both, {operator: lower_decile(runs) for operator, runs in operators.items()}


def _stages(names: tuple[str, ...], bound: BoundPlan) -> list[list[Drawn]]:
    """The runs of every combined block's schedule, in the order in which their times come."""
    blocks = []
    for combined in bound.combined:
        members: Members = tuple(
            (bound.models[m.model].plan.artifact, block.start, block.stop)
            for m in combined.plan.members
            for block in [bound.models[m.model].blocks[m.block]]
        )
        used = tuple(names[m.model] for m in combined.plan.members)
        schedule = combined.plan.schedule
        assert isinstance(schedule, StageSchedule)
        together = joined(lower(schedule, combined.graph, combined.full_mask), schedule)
        at, found = 0, []
        while at < len(schedule.stages):
            count = together.get(at, 1)
            stage = joint_stage(schedule.stages[at : at + count])
            assert stage is not None
            found.append(Drawn(used, members, stage.groups))
            at += count
        blocks.append(found)
    return blocks


def _measure(
    executor: OnnxExecutor, bound: BoundPlan, artifacts: Sequence[Artifact], runs: int, limit_s: float
) -> list[StageSamples]:
    """Blocks that the time was too short for have no runs."""
    moments = IdleTime(lambda: True, own_s=limit_s, wall_s=limit_s)
    held = {artifact.digest: artifact for artifact in artifacts}
    return profile_stages(bound, held, executor, moments, runs)


def lower_decile(runs: Sequence[float]) -> float:
    return quantiles(runs, n=10, method="inclusive")[0] if len(runs) > 1 else runs[0]


# What is predicted


@dataclass(frozen=True)
class Judged:
    stage: Drawn
    predicted_s: float
    doubt: float
    sure: bool
    formula_s: float
    line_s: float
    analytic_s: float

    @property
    def measured_s(self) -> float:
        return self.stage.seconds(0)


def judged(report: Report, drawn: Sequence[Drawn], table: CostTable, graphs: Mapping[Digest, Graph]) -> None:
    """Hold each network out, and add the figures and rows."""
    found: list[Judged] = []
    # A stage of two networks is held out with either; it counts once, with the first.
    for name in dict.fromkeys(one.networks[0] for one in drawn):
        taught = [one for one in drawn if name not in one.networks]
        held_out = [one for one in drawn if one.networks[0] == name]
        found += _held_out(taught, held_out, table, graphs)
    truth = [one.measured_s for one in found]
    finite = [one for one in found if isfinite(one.doubt)]
    sure = [one for one in found if one.sure]
    figures = {
        "median_relative_error": _error([one.predicted_s for one in found], truth),
        "rank_correlation": rank_correlation([one.predicted_s for one in found], truth),
        "remeasured_relative_error": _error([one.stage.seconds(1) for one in found], truth),
        "coverage": _covered(finite),
        "sure_share": len(sure) / len(found),
        "sure_coverage": _covered(sure) if sure else 0.0,
        "sure_median_relative_error": (
            _error([one.predicted_s for one in sure], [one.measured_s for one in sure]) if sure else 0.0
        ),
    }
    report.add(figures, [*_by_source(found), *_by_groups(found), *_by_network(found)])


def _held_out(
    taught: Sequence[Drawn], held_out: Sequence[Drawn], table: CostTable, graphs: Mapping[Digest, Graph]
) -> list[Judged]:
    stages = tuple(MeasuredStage(one.members, 1, one.groups, one.seconds(0)) for one in taught)
    lessons = samples(replace(table, stages=stages), graphs)
    _, learned = fitted(lessons, table.rates)
    beside = [one for one in lessons if one.terms.rest > 0.0]
    contention = median((one.seconds - one.terms.longest) / one.terms.rest for one in beside)
    line = DeviceRates(contention=max(contention, 0.0))
    found = []
    for one in held_out:
        members = [
            (artifact, graphs[artifact], Block(0, start, stop, (), (), (), ()))
            for artifact, start, stop in one.members
        ]
        known = replace(table, interference=learned).for_members(members)
        terms = known.terms(one.groups)
        found.append(
            Judged(
                stage=one,
                predicted_s=known.stage_s(one.groups),
                doubt=learned.doubt(terms),
                sure=learned.sure(terms),
                formula_s=known.formula_s(one.groups),
                line_s=replace(table, rates=line).for_members(members).formula_s(one.groups),
                analytic_s=CostTable(rates=table.rates).for_members(members).formula_s(one.groups),
            )
        )
    return found


def _by_source(found: Sequence[Judged]) -> list[dict[str, Any]]:
    truth = [one.measured_s for one in found]
    sources = {
        "model": [one.predicted_s for one in found],
        "formula": [one.formula_s for one in found],
        "line": [one.line_s for one in found],
        "analytic": [one.analytic_s for one in found],
        "remeasured": [one.stage.seconds(1) for one in found],
    }
    return [
        {
            "source": name,
            "stages": len(found),
            "median_relative_error": _error(values, truth),
            "q3_relative_error": _error(values, truth, at=2),
            "rank_correlation": rank_correlation(values, truth),
        }
        for name, values in sources.items()
    ]


def _by_groups(found: Sequence[Judged]) -> list[dict[str, Any]]:
    return [
        {"groups": groups, **_row([one for one in found if len(one.stage.groups) == groups])}
        for groups in sorted({len(one.stage.groups) for one in found})
    ]


def _by_network(found: Sequence[Judged]) -> list[dict[str, Any]]:
    return [
        {"held_out": name, **_row([one for one in found if one.stage.networks[0] == name])}
        for name in dict.fromkeys(one.stage.networks[0] for one in found)
    ]


def _row(part: Sequence[Judged]) -> dict[str, Any]:
    truth = [one.measured_s for one in part]
    return {
        "stages": len(part),
        "median_us": 1e6 * median(truth),
        "model_relative_error": _error([one.predicted_s for one in part], truth),
        "formula_relative_error": _error([one.formula_s for one in part], truth),
        "remeasured_relative_error": _error([one.stage.seconds(1) for one in part], truth),
        "sure_share": sum(one.sure for one in part) / len(part),
        "median_doubt": median(one.doubt for one in part),
    }


def _error(values: Sequence[float], truth: Sequence[float], at: int = 1) -> float:
    """A quartile of the relative errors; the second by default."""
    errors = [abs(value / true - 1.0) for value, true in zip(values, truth, strict=True)]
    return quantiles(errors, n=4, method="inclusive")[at] if len(errors) > 1 else errors[0]


def _covered(part: Sequence[Judged]) -> float:
    inside = [abs(one.measured_s - one.predicted_s) <= one.doubt * one.predicted_s for one in part]
    return sum(inside) / len(inside)


if __name__ == "__main__":
    sys.exit(run(measure, ("onnxruntime", "numpy", "msgspec", "msgpack")))

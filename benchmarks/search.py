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
--measure:

1. Every operator is timed alone, and the stages of `greedy`'s schedule, which puts side by side whatever may
   be. The costs that searches read are these, with an interference model fitted to those stages: what
   `stageloom plan create --measure` has a device do.
2. Every scheduler searches under them. Equal schedules are run once and share their figures.
3. All plans are loaded into one engine, one instance per network, on one lane. A *run* is one task for each
   network, in steps that wait for all: from the first step's begin to the last one's end, as the engine
   tells it. In each round every plan gets one run to warm up and two that count, in an order drawn anew, so
   that what else happens on the machine meets all of them.

`over_sequential` is the median over rounds of a schedule's seconds over those of `sequential` in the same
round. --plot needs the extra `plot`. The tables of docs/schedulers/README.md are of kept runs:
`tools/scheduler_tables.py` prints them.
"""

import argparse
import random
import sys
import tempfile
import time
from atexit import register
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import zoo
from benchmarks.ratios import Inputs
from benchmarks.runner import Report, progress, run, spread
from stageloom.edge_agent.executor.base import TimingRequest
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.executor.timing import IdleTime
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.edge_agent.worker.profiling import profile_stages
from stageloom.planner.cli.comparison_plot import save
from stageloom.shared.artifact import Artifact
from stageloom.shared.blocks import Block, combine, split
from stageloom.shared.bound import bind
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.plan import CombinedBlock, Member, ModelPlan, Plan, Wait
from stageloom.shared.schedule import Schedule, StageSchedule, joint_stage
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.comparison import Measured, Standing, Subject, standing, subject
from stageloom.shared.search.costs import CostTable, MeasuredStage, fitted, samples
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.registry import schedulers

LIMITS = Limits(r=3, s=8)
MIX = ("squeezenet_bypass", "googlenet", "inception_v3", "resnet50")
_NO_ARTIFACT = Digest("0" * 64)  # nothing was measured, so nothing is looked up


@dataclass(frozen=True)
class Network:
    """A network's operators, and where it is cut: as its paper does, else at every base cut."""

    artifact: Digest
    graph: Graph

    @property
    def cuts(self) -> tuple[int, ...]:
        offered = dict(self.graph.partitions)
        return offered.get("paper", offered["base"])

    @property
    def blocks(self) -> tuple[Block, ...]:
        return split(self.graph, self.cuts)


@cache
def of_the_zoo(name: str) -> Network:
    """A network at full size of which only the shapes are used, not the weights."""
    return Network(_NO_ARTIFACT, zoo.graph_of(name))


def rows_of(networks: Sequence[Network]) -> list[list[tuple[int, int]]]:
    """Per combined block its members, as (network, block): the i-th blocks side by side."""
    numbered = [[(at, block) for block in range(len(one.blocks))] for at, one in enumerate(networks)]
    return [[member for member in row if member is not None] for row in zip_longest(*numbered)]


def side_by_side(networks: Mapping[str, Network], table: CostTable, budget: Budget) -> Subject:
    """The combined blocks of networks, one or more."""
    known = list(networks.values())
    blocks = []
    for row in rows_of(known):
        members = [(known[at].artifact, known[at].graph, known[at].blocks[block]) for at, block in row]
        graph = combine([(graph, block) for _, graph, block in members])
        blocks.append((graph, table.for_members(members)))
    return subject("+".join(networks), blocks, LIMITS, budget)


RUNS = 2
"""That count, per plan and round."""


@dataclass(frozen=True)
class Effort:
    """How much is measured of one subject."""

    rounds: int  # at most
    least_rounds: int
    limit_s: float  # no round begins later
    stage_repeats: int


FULL = Effort(rounds=15, least_rounds=5, limit_s=25.0, stage_repeats=5)
QUICK = Effort(rounds=3, least_rounds=2, limit_s=4.0, stage_repeats=2)


def measured_on_this_machine(
    names: Sequence[str], budget: Budget, *, quick: bool, width: float = 1.0
) -> list[tuple[Standing, Measured | None]]:
    """Every scheduler on zoo networks side by side, searched under this machine's costs and run on it.

    `width` multiplies the networks' channels.

    Raises:
        ExecutorError, TaskFailed: the executor cannot load or run a schedule.
    """
    effort = QUICK if quick else FULL
    artifacts = {name: _artifact(name, width) for name in names}
    networks = {name: Network(one.digest, one.graph) for name, one in artifacts.items()}
    operators = CostTable(
        measured_s={key: s for name in names for key, s in _operators_s(name, width).items()}
    )
    stages = _stages(networks, artifacts, operators, budget, effort)
    known = replace(operators, stages=stages)
    taught = samples(known, {one.digest: one.graph for one in artifacts.values()})
    rates, interference = fitted(taught, known.rates)
    costs = replace(known, rates=rates, interference=interference)
    of = side_by_side(networks, costs, budget)
    standings = every_standing(of, budget)
    plans = {one.scheduler: plan_of(networks, one.schedules) for one in standings}
    progress(f"{of.name}: {len({plan.digest for plan in plans.values()})} plans in turn")
    times = run_in_turn({plan.digest: plan for plan in plans.values()}, artifacts, effort)
    base = times[plans["sequential"].digest]
    return [(one, _summary(times[plans[one.scheduler].digest], base)) for one in standings]


def plan_of(networks: Mapping[str, Network], schedules: Sequence[Schedule]) -> Plan:
    """A plan whose combined blocks are the i-th blocks side by side, under these schedules."""
    rows = rows_of(list(networks.values()))
    return Plan(
        models=tuple(
            ModelPlan(name=name, artifact=network.artifact, cuts=network.cuts)
            for name, network in networks.items()
        ),
        combined=tuple(
            CombinedBlock(tuple(Member(at, 0, block) for at, block in row), schedule)
            for row, schedule in zip(rows, schedules, strict=True)
        ),
        wait=Wait.ALL if len(networks) > 1 else Wait.NONE,
        run_ahead=1,
    )


def run_in_turn(
    plans: Mapping[Digest, Plan], artifacts: Mapping[str, Artifact], effort: Effort
) -> dict[Digest, list[list[float]]]:
    """Per plan, per round, the seconds of its runs.

    Raises:
        ExecutorError, TaskFailed: a plan cannot be loaded, or a run of it fails.
    """
    rng = random.Random(0)
    inputs = {name: zoo.noise_for(artifact) for name, artifact in artifacts.items()}
    found: dict[Digest, list[list[float]]] = {digest: [] for digest in plans}
    with InProcessEngine(OnnxExecutor()) as shell:
        held = {artifact.digest: artifact for artifact in artifacts.values()}
        keys = {digest: shell.load(plan, held) for digest, plan in plans.items()}
        ends_s = time.monotonic() + effort.limit_s
        for number in range(effort.rounds):
            if number >= effort.least_rounds and time.monotonic() > ends_s:
                break
            for digest in rng.sample(list(plans), len(plans)):
                found[digest].append(_runs(shell, keys[digest], inputs))
    return found


def _runs(shell: InProcessEngine, key: PlanKey, inputs: Mapping[str, Inputs]) -> list[float]:
    """One run that does not count and those that do, under a loaded plan; nothing else runs."""
    shell.activate(key, keep=True)
    return [_run_s(shell, inputs) for _ in range(1 + RUNS)][1:]


def _run_s(shell: InProcessEngine, inputs: Mapping[str, Inputs]) -> float:
    ends: list[TaskDone] = []
    futures = [shell.submit(name, feeds, on_end=ends.append) for name, feeds in inputs.items()]
    for future in futures:
        future.result()
    while len(ends) < len(futures):  # told right after the future
        time.sleep(0)
    began_s = [end.started_s for end in ends if end.started_s is not None]
    if len(began_s) < len(ends) or any(end.outcome is not Outcome.COMPLETED for end in ends):
        raise RuntimeError("a task of a run did not complete")
    return max(end.ended_s for end in ends) - min(began_s)


def _summary(rounds: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> Measured:
    of = spread([seconds for runs in rounds for seconds in runs])
    ratios = [median(own) / median(other) for own, other in zip(rounds, base, strict=True)]
    return Measured(
        median_s=of["median"],
        quartiles_s=(of["q1"], of["q3"]),
        runs=sum(map(len, rounds)),
        over_sequential=median(ratios),
    )


def _stages(
    networks: Mapping[str, Network],
    artifacts: Mapping[str, Artifact],
    operators: CostTable,
    budget: Budget,
    effort: Effort,
) -> tuple[MeasuredStage, ...]:
    """The stages of `greedy`, each combined block run alone."""
    of = side_by_side(networks, operators, budget)
    progress(f"{of.name}: the stages of greedy")
    plan = plan_of(networks, standing(of, "greedy", LIMITS, budget, time.perf_counter).schedules)
    held = {artifact.digest: artifact for artifact in artifacts.values()}
    bound = bind(plan, {digest: artifact.graph for digest, artifact in held.items()})
    moments = IdleTime(lambda: True, own_s=effort.limit_s, wall_s=2.0 * effort.limit_s)
    with closing(OnnxExecutor()) as executor:
        times = profile_stages(bound, held, executor, moments, effort.stage_repeats)
    found = []
    for combined, taken in zip(bound.combined, times, strict=True):
        schedule = combined.plan.schedule
        assert isinstance(schedule, StageSchedule)
        blocks = [(bound.models[m.model], m.block) for m in combined.members]
        members = tuple((m.plan.artifact, m.blocks[b].start, m.blocks[b].stop) for m, b in blocks)
        for first, seconds in taken.stage_s.items():
            stage = joint_stage(schedule.stages[first : first + taken.stages.get(first, 1)])
            if stage is not None:
                found.append(MeasuredStage(members, 1, stage.groups, median(seconds)))
    return tuple(found)


def every_standing(subject: Subject, budget: Budget) -> list[Standing]:
    return [standing(subject, name, LIMITS, budget, time.perf_counter) for name in schedulers()]


@cache
def _artifact(name: str, width: float) -> Artifact:
    progress(f"import {name}")
    return zoo.artifacts([name], _folder(), width=width)[name]


@cache
def _folder() -> Path:
    """Where artifacts lie as long as this process lives: they are read when they are needed."""
    made = tempfile.TemporaryDirectory(prefix="stageloom-search-")
    register(made.cleanup)
    return Path(made.name)


@cache
def _operators_s(name: str, width: float) -> Mapping[tuple[Digest, OpId], float]:
    """Seconds of every operator alone; one that the time limit left out keeps its estimate."""
    artifact = _artifact(name, width)
    progress(f"time the operators of {name}")
    with closing(OnnxExecutor()) as executor:
        timed = executor.time_operators(artifact, TimingRequest(), lambda: True)
    return {(artifact.digest, OpId(op)): one.median_us / 1e6 for op, one in enumerate(timed) if one.runs}


QUICK_MODELS = ("googlenet", "inception_v3", "squeezenet_bypass")


def subjects_of(models: Sequence[str] | None, *, quick: bool, measure: bool) -> list[tuple[str, ...]]:
    """Names of the networks to look at, alone and together."""
    if models:
        return [(name,) for name in models]
    # The largest two take minutes to measure, and their operators are no others.
    alone = QUICK_MODELS if quick else MIX if measure else tuple(zoo.ZOO)
    return [(name,) for name in alone] + [MIX[:members] for members in range(2, 3 if quick else 5)]


def row(one: Standing, measured: Measured | None) -> Mapping[str, Any]:
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


def measure(report: Report, options: argparse.Namespace) -> None:
    rates = DeviceRates(
        flop_per_s=1e13, bytes_per_s=6e11, launch_s=3e-6, barrier_s=2e-6, contention=options.contention
    )
    budget = Budget(expansions=20_000 if options.quick else Budget().expansions)
    drawn: list[tuple[Standing, Measured | None]] = []
    for names in subjects_of(options.model, quick=options.quick, measure=options.measure):
        progress(", ".join(names))
        if options.measure:
            standings = measured_on_this_machine(names, budget, quick=options.quick)
        else:
            subject = side_by_side({name: of_the_zoo(name) for name in names}, CostTable(rates=rates), budget)
            standings = [(found, None) for found in every_standing(subject, budget)]
        rows = [row(found, measured) for found, measured in standings]
        report.add(figures(rows), rows)
        drawn += standings
    if options.plot is not None:
        save(drawn, options.plot)


if __name__ == "__main__":
    own: dict[str, dict[str, Any]] = {
        "--model": {"action": "append", "choices": list(zoo.ZOO), "help": "only this network"},
        "--contention": {"type": float, "default": 0.3, "help": "0: none, 1: as if in turn"},
        "--measure": {"action": "store_true", "help": "run every schedule in the engine, here"},
        "--plot": {"type": Path, "metavar": "FILE", "help": "draw it, as .svg, .png or .pdf"},
    }
    sys.exit(run(measure, ("onnx", "onnxruntime", "numpy"), options=own))

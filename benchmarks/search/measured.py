"""Schedules in the engine of this process: first what operators and stages cost here, then who is quicker.

1. Every operator is timed alone, and the stages of `greedy`'s schedule, which puts side by side whatever may
   be. The costs that searches read are these, with an interference model fitted to those stages: what
   `stageloom plan create --measure` has a device do.
2. Every scheduler searches under them. Equal schedules are run once and share their figures.
3. All plans are loaded into one engine, one instance per network, on one lane. A *run* is one task for each
   network, in steps that wait for all: from the first step's begin to the last one's end, as the engine
   tells it. In each round every plan gets one run to warm up and two that count, in an order drawn anew, so
   that what else happens on the machine meets all of them.

Seconds say what this machine did; `over_sequential` is the median over rounds of a schedule's seconds over
those of `sequential` in the same round.
"""

import random
import tempfile
import time
from atexit import register
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

from benchmarks import zoo
from benchmarks.ratios import zoo_inputs
from benchmarks.report import progress, spread
from benchmarks.saturated import Inputs
from benchmarks.search.subjects import LIMITS, Network, rows_of, side_by_side
from stageloom.edge_agent.executor.base import TimingRequest
from stageloom.edge_agent.executor.onnx import OnnxExecutor
from stageloom.edge_agent.executor.timing import IdleTime
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.edge_agent.worker.profiling import OwnExecutor, profile_stages
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.bound import bind
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.importer.api import artifact_path, import_model
from stageloom.shared.plan import CombinedBlock, Member, ModelPlan, Plan, Wait
from stageloom.shared.schedule import Schedule, StageSchedule, joint_stage
from stageloom.shared.search.comparison import Measured, Standing, standing
from stageloom.shared.search.costs import CostTable, MeasuredStage, fitted, samples
from stageloom.shared.search.interface import Budget
from stageloom.shared.search.registry import schedulers

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
    known = replace(operators, stages=tuple(stages))
    taught = samples(known, {one.digest: one.graph for one in artifacts.values()})
    rates, interference = fitted(taught, known.rates)
    costs = replace(known, rates=rates, interference=interference)
    of = side_by_side(networks, costs, budget)
    standings = [standing(of, name, LIMITS, budget, time.perf_counter) for name in schedulers()]
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
    inputs = {name: zoo_inputs(artifact) for name, artifact in artifacts.items()}
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
) -> list[MeasuredStage]:
    """The stages of `greedy`, each combined block run alone."""
    of = side_by_side(networks, operators, budget)
    plan = plan_of(networks, standing(of, "greedy", LIMITS, budget, time.perf_counter).schedules)
    progress(f"{of.name}: the stages of greedy")
    bound = bind(plan, {one.digest: one.graph for one in artifacts.values()})
    executor = OnnxExecutor()
    try:
        moments = IdleTime(lambda: True, own_s=effort.limit_s, wall_s=2.0 * effort.limit_s)
        held = {one.digest: one for one in artifacts.values()}
        times = profile_stages(bound, held, executor, OwnExecutor(executor), moments, effort.stage_repeats)
    finally:
        executor.close()
    known = list(networks.values())
    found = []
    for row, block, taken in zip(rows_of(known), plan.combined, times, strict=True):
        assert isinstance(block.schedule, StageSchedule)
        members = tuple(
            (known[at].artifact, known[at].blocks[one].start, known[at].blocks[one].stop) for at, one in row
        )
        for first, seconds in taken.stage_s.items():
            stage = joint_stage(block.schedule.stages[first : first + taken.stages.get(first, 1)])
            if stage is not None:
                found.append(MeasuredStage(members, 1, stage.groups, median(seconds)))
    return found


@cache
def _artifact(name: str, width: float) -> Artifact:
    progress(f"import {name}")
    folder = _folder()
    zoo.write(name, folder / f"{name}.onnx", width=width)
    found = import_model(folder / f"{name}.onnx", shapes={}, out_dir=folder)
    return open_artifact(artifact_path(folder, found.digest))


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
    executor = OnnxExecutor()
    try:
        timed = executor.time_operators(artifact, TimingRequest(), lambda: True)
    finally:
        executor.close()
    return {(artifact.digest, OpId(op)): one.median_us / 1e6 for op, one in enumerate(timed) if one.runs}

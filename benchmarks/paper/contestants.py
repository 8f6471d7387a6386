"""Plans of rivals and of TOP's kind on a twin, under the same arrivals.

*top* is the best of the ways to combine blocks under H (`stageloom.planner.learning.maddpg.candidates`), its
schedules searched for: what TOP's plan space offers without a training. A training chooses in the same space
(`benchmarks.learning`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Any, Final

from stageloom.planner.learning.maddpg.candidates import seeds
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.work import bound_plan
from stageloom.planner.tournament.candidates import plan_candidates
from stageloom.planner.tournament.evaluator import EvaluationSettings, evaluate
from stageloom.planner.tournament.score import Score, best_of
from stageloom.planner.twin.arrivals import Periodic, Process
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.reference import TwinDevices
from stageloom.shared.blocks import split
from stageloom.shared.bound import bind
from stageloom.shared.digest import digest_of
from stageloom.shared.errors import StageloomError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.plan import CombinedBlock, Member, Plan, QueuePlan
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.job import run_search

MEMBERS_MAX: Final = {"nano": 2, "tx2": 2, "xavier_nx": 3, "a100": 4}
"""Devices with TOP's H (section VI-B)."""

MIX: Final = (("inception_v3", 30.0), ("resnet50", 60.0), ("squeezenet_bypass", 120.0))
SERVER: Final = "a100"
FASTER: Final = 2.0
"""TOP doubles the rates of table II on its server."""

JITTER: Final = 0.2
"""Of the period: sensors that sample at a fixed frequency, but not with one clock."""

OVERLOAD: Final = 8.0
"""Times what the device serves one operator after another: more than a device full of work serves, too."""

FULL: Final = QueuePlan(max_tasks=64)
DEEP: Final = QueuePlan(max_tasks=8_192, max_bytes=1 << 40)
"""Deep enough that nothing is refused within half a minute: a queue that grows is seen to grow."""

COURSE: Final = EvaluationSettings(seeds=(1,), warm_up_s=0.5, window_s=1.0, windows=2)
SMALL: Final = EvaluationSettings(seeds=(1,), warm_up_s=0.1, window_s=0.2, windows=1)


@dataclass(frozen=True)
class Contestant:
    """A plan by the name of what made it, with its score under the arrivals that it was chosen by."""

    name: str
    plan: Plan
    score: Score


def choices(graphs: Mapping[str, Graph], queue: QueuePlan = FULL, **fields: Any) -> list[ModelChoice]:
    """Models as plans name them, cut as the papers do where a field says nothing else."""
    return [
        ModelChoice(
            name=name,
            artifact=digest_of([name, list(graph.tensors[0].shape)]),
            graph=graph,
            queue=queue,
            **{"partition": "paper" if "paper" in dict(graph.partitions) else "base", **fields},
        )
        for name, graph in graphs.items()
    ]


def overload(device: DeviceFile, models: Sequence[ModelChoice]) -> dict[str, float]:
    """Tasks per second of each model, as many of one as of another, that no plan serves whole."""
    costs = CostTable(rates=device.rates())
    in_turn_s = fsum(
        costs.operator_s(model.artifact, model.graph, OpId(op))
        for model in models
        for op in range(len(model.graph.operators))
    )
    return {model.name: OVERLOAD / in_turn_s * model.replicas for model in models}


def problem_of(
    device: DeviceFile,
    models: Sequence[ModelChoice],
    rates_per_s: Mapping[str, float],
    *,
    members_max: int,
    lanes: int = 1,
    compiled: bool = True,
) -> Problem:
    """Models on a device's twin under periodic arrivals."""
    costs = CostTable(rates=device.rates())
    arrivals: dict[str, Process] = {
        name: Periodic(rate_per_s=rate, jitter_s=JITTER / rate) for name, rate in rates_per_s.items()
    }
    return Problem.of(
        compose(models, lanes=lanes, costs=costs),
        device_class=f"twin {device.name}",
        graphs={model.artifact: model.graph for model in models},
        costs=costs,
        arrivals_per_s=[rates_per_s[model.name] for model in models],
        make_device=TwinDevices(device, costs, arrivals, compiled=compiled),
        members_max=members_max,
    )


def judged(problem: Problem, plan: Plan, course: EvaluationSettings) -> Score:
    """The score of a plan under the problem's arrivals."""
    return evaluate(bind(plan, problem.graphs), problem.make_device, course, problem.service_s)


def combined(problem: Problem, course: EvaluationSettings, paces: Sequence[str] = ("fast",)) -> Contestant:
    """The best way to combine up to H blocks; the name says which. Under an overload launches are never held
    back."""
    found = [
        Contestant(name, plan, judged(problem, plan, course))
        for name, plan in combinations(problem, paces).items()
    ]
    return found[best_of([one.score for one in found])]


def combinations(problem: Problem, paces: Sequence[str] = ("fast", "paced")) -> dict[str, Plan]:
    """Ways to combine up to H blocks, by name."""
    table = problem.table()
    ways: dict[tuple[float, ...], str] = {}
    most = problem.space.members_max
    for size in range(most, 0, -1):
        for name, actions in seeds(replace(problem.space, members_max=size)).items():
            if name.endswith(tuple(paces)):
                ways.setdefault(actions, name if size == most else f"{name}, {size} at most")
    return {name: bound_plan(problem, table, actions).plan for actions, name in ways.items()}


def rivals(
    problem: Problem, models: Sequence[ModelChoice], policies: Sequence[str], course: EvaluationSettings
) -> list[Contestant]:
    """Each policy's best plan."""
    chosen = []
    for policy, plans in rival_plans(problem, models, policies).items():
        scores = [judged(problem, plan, course) for plan in plans]
        best = best_of(scores)
        chosen.append(Contestant(policy, plans[best], scores[best]))
    return chosen


def rival_plans(
    problem: Problem, models: Sequence[ModelChoice], policies: Sequence[str]
) -> dict[str, list[Plan]]:
    """Each policy's plans, under whole models and the models' own partition.

    IOS schedules block by block and runs its schedules as one graph: its whole model is the blocks' schedules
    one after another, not a search over all operators. A policy without a plan for these models is left out.
    """
    found: dict[str, list[Plan]] = {}
    for candidate in plan_candidates(models, problem.costs, policy_names=policies):
        if candidate.policy == "ios" and candidate.partition == "whole":
            continue
        try:
            plan = run_search(candidate.job, time.monotonic)
        except StageloomError:
            continue
        own = (plan, in_one_step(plan, problem.graphs)) if candidate.policy == "ios" else (plan,)
        found.setdefault(candidate.policy, []).extend(own)
    return found


def in_one_step(plan: Plan, graphs: Mapping[Digest, Graph]) -> Plan:
    """The same schedules with models uncut: a step is a task, its stages those of all blocks in turn.

    `plan` has stages, and every block is a combined block of its own.
    """
    stages: dict[tuple[int, int], list[Stage]] = {}
    for block in plan.combined:
        (member,) = block.members
        model = plan.models[member.model]
        first = split(graphs[model.artifact], model.cuts)[member.block].start
        assert isinstance(block.schedule, StageSchedule)
        stages.setdefault((member.model, member.replica), []).extend(
            Stage(tuple(tuple(op + first for op in group) for group in stage.groups), merge=stage.merge)
            for stage in block.schedule.stages
        )
    return replace(
        plan,
        models=tuple(replace(model, cuts=()) for model in plan.models),
        combined=tuple(
            CombinedBlock((Member(model, replica, 0),), StageSchedule(tuple(own)))
            for (model, replica), own in stages.items()
        ),
    )


def everyone(
    problem: Problem, models: Sequence[ModelChoice], policies: Sequence[str], course: EvaluationSettings
) -> list[Contestant]:
    """The rivals, and `top`, whose launches may be held back to the arrivals' pace."""
    own = replace(combined(problem, course, ("fast", "paced")), name="top")
    return [*rivals(problem, models, policies, course), own]


@dataclass(frozen=True, kw_only=True)
class Slenderness:
    """What a plan's schedules look like, over all combined blocks."""

    stages: int
    groups_per_stage: float
    groups_max: int


def slenderness(plan: Plan) -> Slenderness:
    """Stages, and their groups."""
    groups = [
        len(stage.groups)
        for block in plan.combined
        if isinstance(block.schedule, StageSchedule)
        for stage in block.schedule.stages
    ]
    mean = fsum(groups) / len(groups) if groups else 0.0
    return Slenderness(stages=len(groups), groups_per_stage=round(mean, 3), groups_max=max(groups, default=0))

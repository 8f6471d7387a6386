"""What a plan does on a twin whose queues never run empty, and what its schedules look like."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum

from stageloom.planner.learning.maddpg.candidates import seeds
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.work import bound_plan
from stageloom.planner.tournament.evaluator import EvaluationSettings, evaluate
from stageloom.planner.tournament.score import Score, better
from stageloom.planner.twin.arrivals import Periodic
from stageloom.planner.twin.device_file import DeviceFile
from stageloom.planner.twin.reference import TwinDevices
from stageloom.shared.bound import bind
from stageloom.shared.graph import Graph
from stageloom.shared.ids import OpId
from stageloom.shared.plan import Plan, QueuePlan
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.costs import CostTable

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
        worth = evaluate(bound, problem.make_device, course, problem.service_s)
        if best is None or better(worth, best[2]):
            best = name.partition(",")[0], bound.plan, worth
    assert best is not None
    return best


def worth_of_plan(problem: Problem, plan: Plan, course: EvaluationSettings) -> Score:
    """Of a plan that stays."""
    return evaluate(bind(plan, problem.graphs), problem.make_device, course, problem.service_s)


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

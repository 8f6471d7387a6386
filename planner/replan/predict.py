"""What a plan costs under a load (predicted busy device seconds per second), and the record of it.

The same figure that a trial measures (busy device seconds at the same mix), from measured stages where there
are some and from the cost formula else. Members of a combined block are taken to run together as often as
their rates allow: at the rates a >= b >= c all three run c times a second, the first two b - c times more,
the first alone a - b times more. That is what happens under a backlog, when re-plans are made. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stageloom.planner.schema.explanation import EvaluationVerdict, PlanEvaluation
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.digest import digest_of, digest_to_raw
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Plan
from stageloom.shared.policy.plain import Load
from stageloom.shared.schedule import Schedule, StageSchedule
from stageloom.shared.search.costs import CostTable, StageCosts
from stageloom.shared.search.makespan import streams_s
from stageloom.shared.search.split_costs import split_costs


@dataclass(frozen=True, slots=True)
class CostPrediction:
    """`busy` device seconds per second; `measured` where every stage in it was measured."""

    busy: float
    measured: bool


def predict(
    plan: Plan, graphs: Mapping[Digest, Graph], costs: CostTable, loads: Sequence[Load]
) -> CostPrediction:
    """The cost of a legal plan. Models without arrivals count as if each had one task a second.

    Raises:
        PlanError: the plan is not legal for these graphs.
    """
    bound = bound_plan(plan, graphs)
    rates = _instances_per_s(plan, loads)
    busy, measured = 0.0, True
    for index in range(len(plan.combined)):
        seconds, known = _block_busy(bound, index, costs, rates)
        busy += seconds
        measured = measured and known
    return CostPrediction(busy, measured)


_MOST_BOUND: Final = 64
_bound_plans: dict[Digest, BoundPlan] = {}
"""By structure, which names the graphs by digest and decides all that a cost depends on."""


def bound_plan(plan: Plan, graphs: Mapping[Digest, Graph]) -> BoundPlan:
    """As `bind`, but for launch intervals, which may be those of another plan of this structure."""
    found = _bound_plans.get(plan.structure)
    if found is None or any(model.artifact not in graphs for model in plan.models):
        found = bind(plan, graphs)
        if len(_bound_plans) >= _MOST_BOUND:
            _bound_plans.clear()
        _bound_plans[plan.structure] = found
    return found


def block_costs(bound: BoundPlan, index: int, costs: CostTable) -> StageCosts:
    """The costs of one combined block of a plan, on the executor that runs it."""
    members = bound.plan.combined[index].members
    parts = [
        (
            bound.models[m.model].graph_key,
            bound.models[m.model].graph,
            bound.models[m.model].blocks[m.block],
        )
        for m in members
    ]
    under = split_costs(costs, bound).under(bound.executor_of(index))
    return under.for_members(parts, batches=[bound.plan.models[m.model].batch for m in members])


def step_s(costs: StageCosts, graph: CombinedGraph, schedule: Schedule, mask: int) -> float:
    """Seconds of one step with the members of `mask` active; empty stages are dropped."""
    if not isinstance(schedule, StageSchedule):
        return streams_s(schedule, graph, costs, mask)
    active = graph.active_ops(mask)
    stages = (stage.active(active) for stage in schedule.stages)
    return costs.stages_s(stage for stage in stages if stage.groups)


def keeps_up(plan: Plan, loads: Sequence[Load]) -> bool:
    """Whether no launch interval sets a model's capacity below its arrivals, of late or usual."""
    arrivals = {load.model: load.expected_per_s for load in loads}
    return all(
        model.launch_interval_us * arrivals.get(model.name, 0.0) <= 1e6
        for model in plan.models
        if model.launch_interval_us
    )


def _instances_per_s(plan: Plan, loads: Sequence[Load]) -> list[float]:
    """Per model the instances a second of one of its replicas. [num_models]"""
    arrivals = {load.model: load.arrivals_per_s for load in loads if load.arrivals_per_s > 0.0}
    idle = not any(model.name in arrivals for model in plan.models)
    return [
        (1.0 if idle else arrivals.get(model.name, 0.0)) / (model.replicas * model.batch)
        for model in plan.models
    ]


def _block_busy(bound: BoundPlan, index: int, costs: CostTable, rates: Sequence[float]) -> tuple[float, bool]:
    block = bound.combined[index]
    known = block_costs(bound, index, costs)
    schedule = block.plan.schedule
    order = sorted(range(len(block.members)), key=lambda at: -rates[block.members[at].model])
    busy, mask = 0.0, 0
    for position, at in enumerate(order):
        mask |= 1 << at
        rate = rates[block.members[at].model]
        following = rates[block.members[order[position + 1]].model] if position + 1 < len(order) else 0.0
        if rate > following:
            busy += (rate - following) * step_s(known, block.graph, schedule, mask)
    measured = isinstance(schedule, StageSchedule) and all(
        known.is_measured(stage) for stage in known.runs(schedule.stages)
    )
    return busy, measured


def evaluation_of(
    plan: Plan,
    verdict: EvaluationVerdict,
    *,
    scheduler: str,
    how: str,
    prediction: CostPrediction | None = None,
    predicted: float | None = None,
    search_s: float | None = None,
    figures: Mapping[str, float] | None = None,
) -> PlanEvaluation:
    """The row of a plan; `figures`: further ones of it, by name."""
    return PlanEvaluation(
        plan=plan.digest,
        serves=serves(plan),
        scheduler=scheduler,
        how=how,
        verdict=verdict,
        blocks=len(plan.combined),
        members_max=max(len(block.members) for block in plan.combined),
        busy=None if prediction is None else prediction.busy,
        predicted=predicted,
        measured=prediction is not None and prediction.measured,
        search_s=search_s,
        **(figures or {}),
    )


def stands_in(plan: Plan, other: Plan) -> bool:
    """Whether two plans run the same models, of the same versions."""
    mine, theirs = ({(model.name, model.artifact) for model in one.models} for one in (plan, other))
    return mine == theirs


def serves(plan: Plan) -> Digest:
    """Digest over the models that a plan runs: plans that can stand in for each other have the same."""
    models = sorted((model.name, digest_to_raw(model.artifact)) for model in plan.models)
    return digest_of([list(model) for model in models])

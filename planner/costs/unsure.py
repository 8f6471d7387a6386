"""Which parts of a plan are worth measuring: those with stages that nobody is sure of. Pure."""

from stageloom.planner.replan.predict import block_costs
from stageloom.shared.bound import BoundPlan
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.costs import CostTable


def unsure_blocks(bound: BoundPlan, costs: CostTable) -> tuple[int, ...]:
    """Combined blocks with a stage that was not measured, or too long ago, and whose prediction is not sure.

    Of blocks that compute the same by the same schedule, as replicas do, the first. A block of streams has no
    stages.
    """
    found: dict[object, int] = {}
    for index, combined in enumerate(bound.combined):
        schedule = combined.plan.schedule
        if not isinstance(schedule, StageSchedule):
            continue
        known = block_costs(bound, index, costs)
        if not all(known.is_sure(stage) for stage in known.runs(schedule.stages)):
            found.setdefault((combined.graph.predecessors, combined.graph.offsets, known, schedule), index)
    return tuple(found.values())

"""What the planner expected of the plans' steps, beside what the device measured while it served."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stageloom.planner.costs.measured import cost_table
from stageloom.planner.costs.records import OperatorCost
from stageloom.shared.bound import BoundPlan
from stageloom.shared.ids import Digest
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.costs import CostTable


def measured_costs(rows: Iterable[Mapping[str, Any]]) -> CostTable:
    """The operator times that the run's profiles brought."""
    operators: dict[Digest, dict[int, OperatorCost]] = {}
    measured_at: dict[Digest, int] = {}
    for row in rows:
        if row["kind"] == "profile_result":
            artifact = Digest(row["artifact"])
            measured_at[artifact] = row["batch"]
            operators.setdefault(artifact, {}).update(
                {one["operator"]: OperatorCost(**one, measured_at_us=0) for one in row["timings"]}
            )
    return cost_table(operators, measured_at)


def predicted(
    rows: Sequence[Mapping[str, Any]], plans: Mapping[str, BoundPlan], costs: CostTable
) -> list[dict[str, Any]]:
    """One entry per combined block of `plans` (by digest) that ran with all its members active.

    Predicted is the schedule's cost from operators timed alone; measured is the mean of its steps under load,
    beside whatever the other lanes ran.
    """
    ran: dict[tuple[str, int], tuple[int, int]] = {}
    for row in rows:
        if row["kind"] != "step_timings":
            continue
        digest = next((one for one in plans if one.startswith(row["plan"])), None)
        if digest is None or row["mask"] != plans[digest].combined[row["combined_block"]].full_mask:
            continue
        count, sum_us = ran.get((digest, row["combined_block"]), (0, 0))
        ran[digest, row["combined_block"]] = count + row["count"], sum_us + row["sum_us"]
    return [
        entry
        for (digest, combined), (count, sum_us) in sorted(ran.items())
        if count and (entry := _entry(plans[digest], digest, combined, costs, sum_us / count, count))
    ]


def _entry(
    bound: BoundPlan, digest: str, combined: int, costs: CostTable, mean_us: float, steps: int
) -> dict[str, Any] | None:
    block = bound.combined[combined]
    if not isinstance(block.plan.schedule, StageSchedule):
        return None
    parts, batches = [], []
    for member in block.members:
        model = bound.models[member.model]
        parts.append((model.plan.artifact, model.graph, model.blocks[member.block]))
        batches.append(model.plan.batch)
    return {
        "plan": digest,
        "block": " + ".join(
            f"{bound.models[m.model].plan.name}#{m.replica}.{m.block}" for m in block.members
        ),
        "steps": steps,
        "predicted_ms": 1000 * costs.for_members(parts, batches=batches).schedule_s(block.plan.schedule),
        "measured_ms": mean_us / 1000,
    }

"""What the store keeps of costs: measured operators, calibrations, schedules of combined blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import CombinedBlock, ModelPlan, Plan
from stageloom.shared.schedule import names_resources
from stageloom.shared.search.costs import combined_digest
from stageloom.shared.stage_string import to_string


class OperatorCost(NamedTuple):
    """One operator on a device class: median and spread of so many runs, and when (wall clock)."""

    operator: int
    median_us: float
    spread_us: float
    runs: int
    measured_at_us: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """`costs_key` is what costs and schedules are kept under: the device class, or the device's own key.

    Steps that the device served before `steps_since_us`, by its own clock, say nothing of these costs.
    `ratio`: what steps took over what they should have, when that was found at `at_us`; 1, at 0, where
    nothing was ever found.
    """

    device_class: str
    costs_key: str
    steps_since_us: int = 0
    ratio: float = 1.0
    at_us: int = 0

    @property
    def own(self) -> bool:
        """Whether the device has costs of its own."""
        return self.costs_key != self.device_class

    @property
    def taught_by(self) -> tuple[str, ...]:
        """Whose stages teach beside its own how groups hinder each other: that outlasts a drift."""
        return (self.device_class,) if self.own else ()


def combined_block_digest(
    block: CombinedBlock, models: Sequence[ModelPlan], graphs: Mapping[Digest, Graph]
) -> Digest:
    """Digest over what the members compute: artifact, first and last operator; no names, no replicas."""
    parts = []
    for member in block.members:
        model = models[member.model]
        borders = (0, *model.cuts, len(graphs[model.artifact].operators))
        parts.append((model.artifact, borders[member.block], borders[member.block + 1]))
    return combined_digest(parts)


def found_schedules(plan: Plan, graphs: Mapping[Digest, Graph]) -> dict[tuple[Digest, int], str]:
    """The stage strings of a plan by (combined block, largest batch of its members).

    Schedules of models that are split are of other operators than their artifacts', and those that name
    resources are for plans that have them: both are left out.
    """
    found: dict[tuple[Digest, int], str] = {}
    for block in plan.combined:
        split = any(plan.models[member.model].splits for member in block.members)
        if split or names_resources(block.schedule):
            continue
        key = combined_block_digest(block, plan.models, graphs)
        batch = max(plan.models[member.model].batch for member in block.members)
        if (key, batch) not in found:
            found[key, batch] = to_string(block.schedule)
    return found

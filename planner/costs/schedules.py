"""The key under which a device class shares the schedule of a combined block (TOP's stage_dict)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import CombinedBlock, ModelPlan, Plan
from stageloom.shared.search.costs import combined_digest
from stageloom.shared.stage_string import to_string


@dataclass(frozen=True, slots=True)
class FoundSchedule:
    """One combined block's schedule; `batch` is the largest of its members'."""

    combined_block: Digest
    batch: int
    stage_string: str


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


def found_schedules(plan: Plan, graphs: Mapping[Digest, Graph]) -> Iterator[FoundSchedule]:
    """The schedules of a plan, each once: replicas share theirs."""
    seen: set[tuple[Digest, int]] = set()
    for block in plan.combined:
        key = combined_block_digest(block, plan.models, graphs)
        batch = max(plan.models[member.model].batch for member in block.members)
        if (key, batch) not in seen:
            seen.add((key, batch))
            yield FoundSchedule(key, batch, to_string(block.schedule))

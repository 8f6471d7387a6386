"""The search for one combined block's schedule as plain data, as a worker process is sent it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.ids import Digest
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.beam import beam
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Limits
from stageloom.shared.search.job import growing


@dataclass(frozen=True, kw_only=True)
class BlockJob:
    """A combined block that is scheduled already, and may be scheduled better given so much time."""

    combined_block: Digest
    batch: int  # the largest of its members
    graph: CombinedGraph
    costs: StageCosts
    first: StageSchedule
    limits: Limits = field(default_factory=Limits)
    budget_s: float


def run_block_search(job: BlockJob, now: Callable[[], float]) -> StageSchedule:
    """The cheapest of the schedule that there is and what beams of growing size find."""
    found = growing(lambda budget: beam(job.graph, job.costs, job.limits, budget), job.budget_s, now)
    return min((job.first, *found), key=job.costs.schedule_s)

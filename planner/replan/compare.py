"""Control and candidate of a trial side by side: stage strings, predictions, what was measured. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stageloom.planner.costs.drift import traced_stages
from stageloom.planner.replan.predict import block_costs
from stageloom.shared.bound import bind
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.messages.telemetry import StepTrace
from stageloom.shared.plan import Plan
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.costs import CostTable
from stageloom.shared.stage_string import to_string


@dataclass(frozen=True, slots=True)
class BlockPair:
    """What one set of members runs as in both plans; an empty text where a plan combines them otherwise."""

    members: str
    control: str
    candidate: str

    @property
    def same(self) -> bool:
        """Whether both plans run it alike."""
        return self.control == self.candidate


@dataclass(frozen=True, slots=True)
class StageDrift:
    """A stage's planned seconds against what sampled steps of it took; `measured_s` None: not sampled."""

    combined_block: int
    stage: int
    planned_s: float
    measured_s: float | None
    samples: int

    @property
    def drift(self) -> float | None:
        """Measured over planned."""
        if self.measured_s is None or self.planned_s <= 0.0:
            return None
        return self.measured_s / self.planned_s


def block_pairs(control: Plan, candidate: Plan) -> list[BlockPair]:
    """Every combined block of either plan, the control's order first."""
    left, right = _texts(control), _texts(candidate)
    return [
        BlockPair(name, left.get(name, ""), right.get(name, "")) for name in dict.fromkeys([*left, *right])
    ]


def drift(
    plan: Plan, graphs: Mapping[Digest, Graph], costs: CostTable, traces: Sequence[StepTrace]
) -> list[StageDrift]:
    """Per stage of a plan, from sampled whole steps; stages that run as one are numbered by the first."""
    bound = bind(plan, graphs)
    found = []
    for index, block in enumerate(plan.combined):
        if not isinstance(block.schedule, StageSchedule):
            continue
        known = block_costs(bound, index, costs)
        seen = traced_stages(bound, index, traces)
        found += [
            StageDrift(index, stage.first, known.one_stage_s(stage.stage), stage.seconds, stage.samples)
            for stage in seen
        ]
        if not seen:
            stages = enumerate(block.schedule.stages)
            found += [StageDrift(index, at, known.one_stage_s(stage), None, 0) for at, stage in stages]
    return found


def _texts(plan: Plan) -> dict[str, str]:
    """Stage strings by the members' names."""
    return {
        " ".join(f"{plan.models[m.model].name}#{m.replica}.{m.block}" for m in block.members): to_string(
            block.schedule
        )
        for block in plan.combined
    }

"""Control and candidate of a trial side by side: stage strings, predictions, what was measured. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from planner.replan.predict import Prediction, block_costs, predict
from shared.bound import bind
from shared.graph import Graph
from shared.ids import Digest
from shared.messages.telemetry import StepTrace
from shared.plan import Plan
from shared.policy.plain import Load
from shared.schedule import Stage, StageSchedule
from shared.search.costs import CostTable
from shared.stage_string import to_string


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


def predicted_ratio(
    control: Plan,
    candidate: Plan,
    graphs: Mapping[Digest, Graph],
    costs: CostTable,
    loads: Sequence[Load] = (),
) -> tuple[Prediction, Prediction]:
    """The predicted busy device seconds per second of both, as `planner.replan.predict`."""
    return predict(control, graphs, costs, loads), predict(candidate, graphs, costs, loads)


def drift(
    plan: Plan, graphs: Mapping[Digest, Graph], costs: CostTable, traces: Sequence[StepTrace]
) -> list[StageDrift]:
    """Per stage of a plan, from sampled steps with all members active.

    An item of a launch list is a run of operators on one stream, so a stage's time is that from its first
    item's begin to its last item's end. Stages that share an item cannot be told apart: they are left out.
    """
    bound = bind(plan, graphs)
    found = []
    for index, block in enumerate(plan.combined):
        if not isinstance(block.schedule, StageSchedule):
            continue
        spans = _spans(plan, bound.combined[index].full_mask, index, traces, block.schedule)
        known = block_costs(bound, index, costs)
        for stage, one in enumerate(block.schedule.stages):
            times = spans.get(stage, [])
            measured = median(times) if times else None
            found.append(StageDrift(index, stage, known.one_stage_s(one), measured, len(times)))
    return found


def _spans(
    plan: Plan, full: int, index: int, traces: Sequence[StepTrace], schedule: StageSchedule
) -> dict[int, list[float]]:
    """Seconds per stage of the steps that ran whole; streams of a stage begin at 0 in each."""
    spans: dict[int, list[float]] = {}
    items = sum(_items(stage) for stage in schedule.stages)
    for trace in traces:
        if (trace.plan, trace.combined_block, trace.mask) != (plan.digest[:16], index, full):
            continue
        if len(trace.groups) != items:
            continue  # stages were joined into longer items
        at = 0
        for stage, one in enumerate(schedule.stages):
            groups = trace.groups[at : at + _items(one)]
            at += _items(one)
            begin_us, end_us = min(g.begin_us for g in groups), max(g.end_us for g in groups)
            spans.setdefault(stage, []).append((end_us - begin_us) / 1e6)
    return spans


def _items(stage: Stage) -> int:
    return 1 if stage.merge else len(stage.groups)


def _texts(plan: Plan) -> dict[str, str]:
    """Stage strings by the members' names."""
    return {
        " ".join(f"{plan.models[m.model].name}#{m.replica}.{m.block}" for m in block.members): to_string(
            block.schedule
        )
        for block in plan.combined
    }

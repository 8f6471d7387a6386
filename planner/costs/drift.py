"""Planned against measured: whether a device drifted from its costs, its new ones, and what to measure. Pure.

Two comparisons, each of like with like:

- *Stages*: what sampled whole steps took in them (`StepTrace.whole`) against the same stages as they were
  measured before. Both are spans of a traced step, so they mean the same.
- *Steps*: mean seconds of whole steps (`StepTimings`) against those of the same combined block of the same
  plan when the costs began to hold: from a profile, else from the first steps served since. The sum of a
  block's stages is no measure for them, since a step has costs of its own.

A block whose stages can be compared is, by stages; another one by steps. Only plans with one lane are looked
at: what lanes cost each other is load, not drift.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from stageloom.planner.replan.predict import block_costs
from stageloom.shared.bound import BoundPlan
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.messages.telemetry import PLAN_CHARS, StepTimings, StepTrace
from stageloom.shared.schedule import Stage, StageSchedule, joint_stage
from stageloom.shared.search.costs import CostTable, MeasuredStage, stage_batch
from stageloom.shared.search.stage_costs import StageCosts
from stageloom.shared.stage_times import stage_spans

THRESHOLD: Final = 1.25
"""Measured over planned, or planned over measured, above which costs are renewed. The device's trigger has
the same (`stageloom.shared.policy.trigger.TriggerConfig.drift`)."""

BACK: Final = THRESHOLD**0.5
"""Within this a device that had drifted is back where its class is: nearer than what took it away."""

LEAST_STEPS: Final = 20
LEAST_TRACES: Final = 5
LEAST_SHARE: Final = 0.1
"""Of the time: a combined block that takes less does not make a device drift."""

Operator = tuple[Digest, OpId]


@dataclass(frozen=True, slots=True)
class TracedStage:
    """A stage, or stages that run as one, as sampled whole steps showed it; `first` numbers it."""

    first: int
    stage: Stage
    seconds: float  # median
    samples: int


@dataclass(frozen=True, slots=True)
class BlockDrift:
    """One combined block: mean seconds of a whole step, planned and measured."""

    combined_block: int
    steps: int
    planned_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """Measured over planned."""
        return self.measured_s / self.planned_s


@dataclass(frozen=True)
class Drift:
    """The blocks of a plan that can be compared; none where nothing can."""

    blocks: tuple[BlockDrift, ...] = ()

    @property
    def ratio(self) -> float:
        """Measured over planned seconds of all their steps; 1 without any."""
        planned_s = sum(block.steps * block.planned_s for block in self.blocks)
        return sum(block.steps * block.measured_s for block in self.blocks) / planned_s if planned_s else 1.0

    def beyond(self, threshold: float = THRESHOLD) -> bool:
        """Whether all steps together, or those of a block that counts, are off by more."""
        busy_s = sum(block.steps * block.measured_s for block in self.blocks)
        counting = [block for block in self.blocks if block.steps * block.measured_s >= LEAST_SHARE * busy_s]
        return any(off(ratio) > threshold for ratio in (self.ratio, *(one.ratio for one in counting)))


def off(ratio: float) -> float:
    """How far a ratio is from 1, either way, as one of at least 1."""
    return max(ratio, 1.0 / ratio) if ratio > 0.0 else float("inf")


@dataclass(frozen=True, kw_only=True)
class Renewal:
    """What costs have become. `others`: the factor of operators that the plan does not run.

    `unseen`: combined blocks of which no traces tell the stages; they should be profiled.
    """

    factors: Mapping[Operator, float]
    others: float
    stages: tuple[MeasuredStage, ...]
    unseen: tuple[int, ...]

    def is_back(self, drift: Drift, held: CostTable, of_class: CostTable) -> bool:
        """Whether the device takes again what its class does: by `drift` from the class's costs, where the
        plan's blocks can be compared with those; else over all operators that both know."""
        if drift.blocks:
            return not drift.beyond(BACK)
        both = held.measured_s.keys() & of_class.measured_s.keys()
        class_s = sum(of_class.measured_s[key] for key in both)
        now_s = sum(held.measured_s[key] * self.factor(*key) for key in both)
        return class_s > 0.0 and off(now_s / class_s) <= BACK

    def factor(self, artifact: Digest, op: OpId) -> float:
        """What an operator's seconds are to be multiplied by."""
        return self.factors.get((artifact, op), self.others)


def steps_of(bound: BoundPlan, rows: Iterable[StepTimings]) -> dict[int, tuple[int, float]]:
    """Per combined block its whole steps: how many, and their mean seconds."""
    sums: dict[int, tuple[int, int]] = {}
    for row in rows:
        block = row.combined_block
        if row.plan != bound.plan.digest[:PLAN_CHARS] or block >= len(bound.combined):
            continue
        if row.mask == bound.combined[block].full_mask:
            count, us = sums.get(block, (0, 0))
            sums[block] = count + row.count, us + row.sum_us
    return {block: (count, us / count * 1e-6) for block, (count, us) in sums.items() if count}


def first_steps(bound: BoundPlan, rows: Iterable[StepTimings]) -> dict[int, float]:
    """Per combined block the mean seconds of its first whole steps, LEAST_STEPS or a few more; `rows` come
    oldest first."""
    found: dict[int, tuple[int, float]] = {}
    for row in rows:
        for block, (count, mean_s) in steps_of(bound, [row]).items():
            known, before_s = found.get(block, (0, 0.0))
            if known < LEAST_STEPS:
                found[block] = known + count, (known * before_s + count * mean_s) / (known + count)
    return {block: mean_s for block, (count, mean_s) in found.items() if count >= LEAST_STEPS}


def traced_stages(bound: BoundPlan, index: int, traces: Iterable[StepTrace]) -> list[TracedStage]:
    """The stages of one combined block as whole steps showed them; none of a schedule of streams."""
    block = bound.combined[index]
    schedule = block.plan.schedule
    if not isinstance(schedule, StageSchedule):
        return []
    items = bound.launches(index, block.full_mask)
    times: dict[int, list[float]] = {}
    for trace in traces:
        if trace.whole and (trace.plan, trace.combined_block) == (bound.plan.digest[:PLAN_CHARS], index):
            spans = stage_spans(items, [(group.item, group.begin_us, group.end_us) for group in trace.groups])
            for first, (begin_us, end_us) in (spans or {}).items():
                times.setdefault(first, []).append((end_us - begin_us) * 1e-6)
    found = []
    for first, following in pairwise([*sorted(times), len(schedule.stages)]):
        stage = joint_stage(schedule.stages[first:following])
        if stage is not None:
            found.append(TracedStage(first, stage, median(times[first]), len(times[first])))
    return found


def drift_of(
    bound: BoundPlan,
    costs: CostTable,
    now: Sequence[StepTimings],
    traces: Sequence[StepTrace],
    expected_s: Mapping[int, float],
) -> Drift:
    """A running plan against the costs that it would be made with today.

    `now`, `traces`: what was served lately. `expected_s`: per combined block what whole steps took when these
    costs began to hold.
    """
    if bound.plan.lanes != 1:
        return Drift()
    found = []
    for block, (steps, measured_s) in sorted(steps_of(bound, now).items()):
        if steps < LEAST_STEPS:
            continue
        staged = _staged(block_costs(bound, block, costs), _enough(traced_stages(bound, block, traces)))
        if staged is not None:
            found.append(BlockDrift(block, steps, *staged))
        elif expected_s.get(block, 0.0) > 0.0:
            found.append(BlockDrift(block, steps, expected_s[block], measured_s))
    return Drift(tuple(found))


def renewal(
    bound: BoundPlan, costs: CostTable, drift: Drift, traces: Sequence[StepTrace], now_us: int
) -> Renewal:
    """The costs of a device that drifted.

    An operator is taken to have changed as its stage has, where that was measured before and is seen now;
    else as its block; else as everything together. `stages` are of the plan's first executor; those of the
    others are `unseen`, and a profile that is asked for keeps them under theirs. Stages with groups on other
    resources, or of members with different batches, are nobody's costs.
    """
    ratios = {block.combined_block: block.ratio for block in drift.blocks}
    weights = {block.combined_block: float(block.steps) for block in drift.blocks}
    told: dict[Operator, list[tuple[float, float]]] = {}
    stages: list[MeasuredStage] = []
    unseen = []
    for block, combined in enumerate(bound.combined):
        whole = ratios.get(block, drift.ratio)
        known = block_costs(bound, block, costs)
        seen = _enough(traced_stages(bound, block, traces))
        members = tuple(
            (bound.models[m.model].plan.artifact, *_span(bound, m.model, m.block)) for m in combined.members
        )
        batch = stage_batch(bound.models[m.model].plan.batch for m in combined.members)
        factors = {
            op: stage.seconds / known.one_stage_s(stage.stage)
            for stage in seen
            if known.is_measured(stage.stage) and known.one_stage_s(stage.stage) > 0.0 and stage.seconds > 0.0
            for op in stage.stage.operators
        }
        for op in range(combined.graph.size):
            model = bound.models[combined.members[combined.graph.member_of[op]].model]
            entry = (weights.get(block, 1.0), factors.get(op, whole))
            for own in model.origin(combined.graph.model_op(op)).ops:
                told.setdefault((model.plan.artifact, own), []).append(entry)
        split = any(bound.models[m.model].origins for m in combined.members)
        stages += [
            MeasuredStage(
                members, batch, stage.stage.groups, stage.seconds, stage.stage.merge, stage.samples, now_us
            )
            for stage in seen
            if batch is not None and not combined.plan.executor and not split and not stage.stage.resources
        ]
        if (not seen or combined.plan.executor) and isinstance(combined.plan.schedule, StageSchedule):
            unseen.append(block)
    return Renewal(
        factors={key: _mean(entries) for key, entries in told.items()},
        others=drift.ratio,
        stages=tuple(stages),
        unseen=tuple(unseen),
    )


def _staged(known: StageCosts, seen: Sequence[TracedStage]) -> tuple[float, float] | None:
    """(planned, measured) seconds of all stages; None unless each was measured before and is seen now."""
    if not seen or not all(known.is_measured(stage.stage) for stage in seen):
        return None
    planned_s = sum(known.one_stage_s(stage.stage) for stage in seen)
    return (planned_s, sum(stage.seconds for stage in seen)) if planned_s > 0.0 else None


def _enough(seen: Sequence[TracedStage]) -> Sequence[TracedStage]:
    return seen if all(stage.samples >= LEAST_TRACES for stage in seen) else ()


def _span(bound: BoundPlan, model: int, block: int) -> tuple[int, int]:
    found = bound.models[model].blocks[block]
    return found.start, found.stop


def _mean(entries: Sequence[tuple[float, float]]) -> float:
    """Of factors, by weight."""
    return sum(weight * factor for weight, factor in entries) / sum(weight for weight, _ in entries)


def unsure_blocks(bound: BoundPlan, costs: CostTable) -> tuple[int, ...]:
    """Combined blocks with a stage that was not measured, or too long ago, and whose prediction is not sure.

    Of blocks that compute the same by the same schedule, as replicas do, the first. A block of streams has no
    stages; of stages with groups on other resources, or of members with different batches, no time would be
    kept.
    """
    found: dict[object, int] = {}
    for index, combined in enumerate(bound.combined):
        schedule = combined.plan.schedule
        batch = stage_batch(bound.models[m.model].plan.batch for m in combined.members)
        if batch is None or not isinstance(schedule, StageSchedule):
            continue
        known = block_costs(bound, index, costs)
        if not all(known.is_sure(stage) for stage in known.runs(schedule.stages)):
            found.setdefault((combined.graph.predecessors, combined.graph.offsets, known, schedule), index)
    return tuple(found.values())

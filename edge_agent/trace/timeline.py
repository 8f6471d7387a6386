"""What a recording says, joined with the plans that ran: spans on lanes and streams, measured and planned.

The planned timeline lays out each step's launch list by the plan's costs: an item takes the sum of its
operators' costs and begins when its stream is free and all that it waits for has ended, as if nothing slowed
anything down. A planned step begins when the measured one did, or when the planned step before it in the lane
ends, whichever is later. So what is longer beside the plan is waiting and contention, or a wrong cost.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stageloom.edge_agent.worker.recorder import (
    QueueEntry,
    RecordingBatch,
    RecordingSummary,
    StepEntry,
    SwapEntry,
    TaskEntry,
)
from stageloom.shared.bound import BoundPlan
from stageloom.shared.launch_list import LaunchList
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.split_costs import split_costs


@dataclass(frozen=True, slots=True)
class Run:
    """One item of a launch list as it ran, or as it was planned."""

    step: int
    lane: int
    stream: int
    model: str
    replica: int
    block: int
    operators: tuple[int, ...]  # of the model, in run order
    stage: int
    began_s: float
    ended_s: float

    @property
    def text(self) -> str:
        first, last = self.operators[0], self.operators[-1]
        return str(first) if len(self.operators) == 1 else f"{first}-{last}"


@dataclass(frozen=True, slots=True)
class StepRun:
    """One step of a combined block, with the names that its plan has for what it ran, and where it did.

    `resource`: the lane's, None where the plan names none; `cores`: empty where the system chose.
    """

    entry: StepEntry
    plan: str  # digest
    members: tuple[str, ...]  # MODEL#REPLICA.BLOCK
    executor: str = ""
    resource: int | None = None
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """Everything of one recording, in order of time. Seconds on the device's monotonic clock."""

    recorded: RecordingSummary
    steps: tuple[StepRun, ...]
    runs: tuple[Run, ...]  # the groups, measured
    planned: tuple[Run, ...]
    queues: tuple[QueueEntry, ...]
    swaps: tuple[tuple[float, str], ...]  # and the digest of the plan that was switched to; empty: none
    tasks: tuple[TaskEntry, ...]
    unnamed: int  # steps of plans that are not known, which are left out


class PlanLaunches:
    """One plan with its costs."""

    def __init__(self, bound: BoundPlan, costs: CostTable) -> None:
        self.bound = bound
        self._costs = split_costs(costs, bound)
        self._costs_s: dict[int, tuple[float, ...]] = {}

    def costs_s(self, combined: int) -> tuple[float, ...]:
        """Per operator of a combined block. [num_ops]"""
        if combined not in self._costs_s:
            members = self.bound.combined[combined].members
            models = [self.bound.models[member.model] for member in members]
            parts = [
                (model.graph_key, model.graph, model.blocks[member.block])
                for member, model in zip(members, models, strict=True)
            ]
            costs = self._costs.for_members(parts, batches=[model.plan.batch for model in models])
            self._costs_s[combined] = costs.operators_s
        return self._costs_s[combined]

    def parts(self, step: StepEntry) -> list[LaunchList]:
        """The launch lists that a step ran, one after another: one, or in a fallback one per member."""
        masks = [1 << position for position in step.positions] if step.fallback else [step.mask]
        return [self.bound.launches(step.combined, mask, step.variant) for mask in masks]

    def run(
        self, step: StepEntry, launches: LaunchList, item: int, stream: int, span_s: tuple[float, float]
    ) -> Run:
        block, entry = self.bound.combined[step.combined], launches[item]
        member = block.members[entry.member]
        model = self.bound.models[member.model]
        operators = tuple(int(block.graph.model_op(op)) for op in entry.ops)
        return Run(
            step.step,
            step.lane,
            stream,
            model.plan.name,
            member.replica,
            member.block,
            operators,
            entry.stage,
            *span_s,
        )

    def measured(self, step: StepEntry) -> Iterator[Run]:
        """The items of a step as they ran."""
        at = 0
        for launches in self.parts(step):
            for item, stream, began_s, ended_s in step.groups[at : at + len(launches)]:
                yield self.run(step, launches, item, stream, (began_s, ended_s))
            at += len(launches)

    def planned(self, step: StepEntry, began_s: float) -> Iterator[Run]:
        """The items of a step as its costs say, the first at `began_s`."""
        costs_s = self.costs_s(step.combined)
        for launches in self.parts(step):
            ends_s: list[float] = []
            free_s: dict[int, float] = {}
            for item, entry in enumerate(launches):
                stream = 0 if step.fallback else entry.stream
                earliest = [began_s, free_s.get(stream, began_s), *(ends_s[wait] for wait in entry.waits)]
                start_s = max(earliest)
                end_s = free_s[stream] = start_s + sum(costs_s[op] for op in entry.ops)
                ends_s.append(end_s)
                yield self.run(step, launches, item, stream, (start_s, end_s))
            began_s = max(ends_s, default=began_s)

    def step(self, step: StepEntry) -> StepRun:
        """The step as a whole."""
        members = [self.bound.combined[step.combined].members[position] for position in step.positions]
        names = [f"{self.bound.models[m.model].plan.name}#{m.replica}.{m.block}" for m in members]
        plan = self.bound.plan
        placed = step.lane < len(plan.lane_resources)
        return StepRun(
            step,
            plan.digest,
            tuple(names),
            self.bound.executor_of(step.combined, step.variant).name,
            plan.lane_resources[step.lane] if placed else None,
            plan.cores_of(step.lane) if placed else (),
        )


def timeline(
    batch: RecordingBatch, recorded: RecordingSummary, plans: Mapping[int, BoundPlan], costs: CostTable
) -> Timeline:
    """Join a recording with the plans that it names by key."""
    joined = {key: PlanLaunches(bound, costs) for key, bound in plans.items()}
    # A step that had begun before was not traced from its begin on.
    whole = [step for step in batch.steps if step.began_s >= recorded.began_s]
    known = [step for step in whole if step.key in joined]
    entries = sorted(known, key=lambda step: (step.began_s, step.step))
    planned: list[Run] = []
    free_s: dict[int, float] = {}  # per lane
    for step in entries:
        begin_s = max(step.began_s, free_s.get(step.lane, step.began_s))
        runs = list(joined[step.key].planned(step, begin_s))
        free_s[step.lane] = max((run.ended_s for run in runs), default=begin_s)
        planned += runs
    return Timeline(
        recorded=recorded,
        steps=tuple(joined[step.key].step(step) for step in entries),
        runs=tuple(run for step in entries for run in joined[step.key].measured(step)),
        planned=tuple(planned),
        queues=tuple(sorted(batch.queues, key=lambda entry: entry.at_s)),
        swaps=_swaps(batch.swaps, plans),
        tasks=tuple(sorted(batch.tasks, key=lambda entry: entry.queued_s)),
        unnamed=len(whole) - len(known),
    )


def _swaps(entries: Sequence[SwapEntry], plans: Mapping[int, BoundPlan]) -> tuple[tuple[float, str], ...]:
    """A plan that never ran a step while it was recorded is named by its key."""
    found = []
    for entry in entries:
        key = entry.key
        name = "" if key is None else plans[key].plan.digest if key in plans else f"key {key}"
        found.append((entry.at_s, name))
    return tuple(found)

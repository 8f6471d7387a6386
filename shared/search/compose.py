"""Make a legal plan from models and the name of a scheduler."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum

from stageloom.shared.blocks import Block, combine, split
from stageloom.shared.bound import bind
from stageloom.shared.errors import PlanError, SettingError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.launch_list import Barrier
from stageloom.shared.plan import (
    CombinedBlock,
    ExecutorOptions,
    Member,
    ModelPlan,
    Plan,
    QueuePlan,
    StepChoice,
    Wait,
)
from stageloom.shared.schedule import Schedule
from stageloom.shared.search.assignment import Assignment
from stageloom.shared.search.costs import CostTable, StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.isomorphism import Shared
from stageloom.shared.search.registry import scheduler as find_scheduler
from stageloom.shared.search.registry import searches


class Combination(Enum):
    """Which blocks are scheduled together."""

    ALONE = "alone"  # every block is a combined block of its own
    ALIGNED = "aligned"  # the i-th blocks of different models, in the models' order, up to H of them
    REPLICAS = "replicas"  # the i-th blocks of a model's replicas, up to H of them
    ABREAST = "abreast"  # blocks as far through their models as each other, up to H of them
    PIPELINED = "pipelined"  # neighbouring blocks of one replica, up to H of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """One model and how it is to be cut, repeated, batched and served; see
    `stageloom.shared.plan.ModelPlan`."""

    name: str
    artifact: Digest
    graph: Graph
    partition: str | tuple[int, ...] = "whole"  # a partition of the graph, or cuts among its base cuts
    replicas: int = 1
    batch: int = 1
    batch_max_delay_us: int = 0
    launch_interval_us: int = 0
    work_conserving: bool = True
    weight: int = 1
    queue: QueuePlan = field(default_factory=QueuePlan)

    def cuts(self) -> tuple[int, ...]:
        """The chosen cuts.

        Raises:
            PlanError: the graph offers no partition of that name; the error lists those it has.
        """
        if not isinstance(self.partition, str):
            return self.partition
        offered = dict(self.graph.partitions)
        if self.partition not in offered:
            raise PlanError(
                f"model {self.name!r} has no partition {self.partition!r}",
                remedy=f"choose one of {', '.join(offered) or 'its base cuts'}",
            )
        return offered[self.partition]

    def plan(self) -> ModelPlan:
        """Return the model's part of a plan."""
        return ModelPlan(
            name=self.name,
            artifact=self.artifact,
            cuts=self.cuts(),
            replicas=self.replicas,
            batch=self.batch,
            batch_max_delay_us=self.batch_max_delay_us,
            launch_interval_us=self.launch_interval_us,
            work_conserving=self.work_conserving,
            weight=self.weight,
            queue=self.queue,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the engine chooses and overlaps steps: fields of `stageloom.shared.plan.Plan`."""

    run_ahead: int = 2
    step_choice: StepChoice = StepChoice.RATIO
    wait: Wait = Wait.NONE
    wait_timeout_us: int = 0
    max_skips: int = 8
    barrier: Barrier = Barrier.FULL

    @classmethod
    def of(cls, plan: Plan) -> "Rules":
        """Those of a plan."""
        return cls(**{name: getattr(plan, name) for name in cls.__slots__})


def compose(
    models: Sequence[ModelChoice],
    *,
    scheduler: str = "sequential",
    combination: Combination = Combination.ALONE,
    members_max: int = 2,
    costs: CostTable | None = None,
    limits: Limits | None = None,
    budget: Budget | None = None,
    lanes: int = 1,
    executor: ExecutorOptions | None = None,
    rules: Rules | None = None,
    checkpoint: bytes = b"",
    assignment: Assignment | None = None,
) -> Plan:
    """A legal plan. `members_max` is H; `checkpoint` a trained policy for the scheduler that takes one.
    `assignment`: what blocks use, where that is not `executor` on any core.

    Raises:
        SettingError: there is no scheduler of that name, or H is below one.
        PlanError: a partition is unknown, or the plan would not be legal.
        DecodeError: the checkpoint is none that this version can use.
    """
    if members_max < 1:
        raise SettingError(f"a combined block of {members_max} members is none", remedy="use 1 or more")
    plans = tuple(choice.plan() for choice in models)
    blocks = [split(choice.graph, plan.cuts) for choice, plan in zip(models, plans, strict=True)]
    chosen = find_scheduler(scheduler, checkpoint)
    if searches(scheduler):  # the others are quicker than looking for what could be shared
        chosen = Shared(chosen)
    table = costs or CostTable()
    first, used = executor or ExecutorOptions(), assignment or Assignment()
    executors = (first, *used.further_executors)
    found: dict[tuple[tuple[int, ...], tuple[int, ...], StageCosts], Schedule] = {}

    def schedule(members: Sequence[Member], run_by: int) -> Schedule:
        parts: list[tuple[Digest, Graph, Block]] = [
            (models[m.model].artifact, models[m.model].graph, blocks[m.model][m.block]) for m in members
        ]
        graph = combine([(graph, block) for _, graph, block in parts])
        under = table.under(executors[run_by]) if run_by < len(executors) else table
        stage_costs = under.for_members(parts, batches=[models[m.model].batch for m in members])
        key = graph.offsets, graph.predecessors, stage_costs  # replicas and repeated cells share a search
        if key not in found:
            found[key] = chosen(graph, stage_costs, limits or Limits(), budget or Budget())
        return found[key]

    combined = []
    for members in combined_members(plans, combination, members_max):
        run_by, resources = used.used_by(members)
        combined.append(CombinedBlock(members, schedule(members, run_by), run_by, resources))
    plan = Plan(
        models=plans,
        combined=tuple(combined),
        lanes=lanes,
        executor=first,
        further_executors=used.further_executors,
        resources=used.resources,
        lane_resources=used.lane_resources,
        placement=used.placement,
        **asdict(rules or Rules()),
    )
    bind(plan, {choice.artifact: choice.graph for choice in models})
    return plan


def combined_members(
    plans: Sequence[ModelPlan], combination: Combination, members_max: int
) -> list[tuple[Member, ...]]:
    """The members of every combined block, in the order of a plan."""
    if combination is Combination.ALONE:
        return [
            (Member(model, replica, block),)
            for model, plan in enumerate(plans)
            for replica in range(plan.replicas)
            for block in range(plan.num_blocks)
        ]
    if combination is Combination.REPLICAS:
        rows = [
            [Member(model, replica, block) for replica in range(plan.replicas)]
            for model, plan in enumerate(plans)
            for block in range(plan.num_blocks)
        ]
        return [tuple(row[i : i + members_max]) for row in rows for i in range(0, len(row), members_max)]
    if combination is Combination.ABREAST:
        every = [row[0] for row in combined_members(plans, Combination.ALONE, 1)]
        every.sort(key=lambda member: ((member.block + 0.5) / plans[member.model].num_blocks, member))
        return [tuple(sorted(every[i : i + members_max])) for i in range(0, len(every), members_max)]
    if combination is Combination.PIPELINED:
        return [
            tuple(
                Member(model, replica, block)
                for block in range(first, min(first + members_max, plan.num_blocks))
            )
            for model, plan in enumerate(plans)
            for replica in range(plan.replicas)
            for first in range(0, plan.num_blocks, members_max)
        ]
    together = []
    for block in range(max((plan.num_blocks for plan in plans), default=0)):
        for replica in range(max(plan.replicas for plan in plans)):
            row = [
                Member(model, replica, block)
                for model, plan in enumerate(plans)
                if replica < plan.replicas and block < plan.num_blocks
            ]
            together += [tuple(row[i : i + members_max]) for i in range(0, len(row), members_max)]
    return together

"""Settings of a re-plan, the observation, and the plain policy, which others extend. Pure.

A policy proposes plans; it neither ranks nor tries them. `stageloom.planner.replan.decide` ranks the
proposals by predicted cost, and a trial on the device decides, so a wrong policy does no harm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from stageloom.planner.replan.levers import by_deadline, levers, may_go_by_deadline
from stageloom.planner.replan.predict import keeps_up
from stageloom.planner.replan.scene import LoadScene, WayTimes
from stageloom.planner.schema.replan import Proposer
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import AlarmSample
from stageloom.shared.plan import ModelPlan, Plan
from stageloom.shared.policy.plain import Load, plain_replan
from stageloom.shared.search.assignment import Assignment
from stageloom.shared.search.compose import Combination, ModelChoice, Rules
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.job import BlockJob, SearchJob


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanSettings:
    """On by default: a re-plan can do no harm, since its plan must win a trial before it is believed."""

    enabled: bool = True
    scheduler: str = "ios"
    members_max: int = 2  # H: blocks per combined block at most
    budget_s: float = 10.0  # for the searches of one re-plan: the best found so far is proposed
    proposer: Proposer = Proposer.ALL
    attach: bool = True  # send the trained policy that fits a pushed plan along, where the device may use it

    def fields(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One device at the moment of an alarm.

    `proven`: plans that committed on this device in this environment, over the incumbent's models, newest
    first. `barred`: (plan, structure) of those that did not gain here lately.
    """

    device: DeviceId
    cause: str
    incumbent: Plan
    desired: tuple[int, int]  # (epoch, generation) that was newest at that moment
    loads: tuple[Load, ...]
    samples: tuple[AlarmSample, ...]
    graphs: Mapping[Digest, Graph]
    costs: CostTable
    proven: tuple[Plan, ...] = ()
    barred: tuple[tuple[Digest, Digest], ...] = ()
    settings: ReplanSettings = field(default_factory=ReplanSettings)
    environment: str = ""  # the device class that all of this is of
    costs_since_us: int = 0  # what was found out by trials before then holds no longer
    costs_key: str = ""  # what costs and schedules are kept under: the device class, or the device's own key
    checkpoint: bytes = b""  # a trained policy, for the scheduler that takes one
    learned: bytes = b""  # one that proposes plans itself (maddpg), and may
    withheld: str = ""  # where none may: why the newest that is for these models has no say
    schedules: Mapping[tuple[Digest, int], tuple[str, ...]] = field(default_factory=dict)
    """Where such a policy is: stage strings that were found for combined blocks of so large a batch."""
    cores: tuple[int, ...] = ()
    """Those of the device, where the plan that runs uses executors on them alone."""
    times: Mapping[Digest, WayTimes] = field(default_factory=dict)
    """By artifact what the device measured of whole models."""

    def scene(self, tasks: int) -> LoadScene | None:
        """What candidates are judged in; None where too little is known for it. `tasks`: of each stream."""
        if not self.cores:
            return None
        return LoadScene.of(
            self.incumbent,
            self.graphs,
            self.costs,
            self.times,
            self.loads,
            cores=len(self.cores),
            tasks=tasks,
        )


class How(str, Enum):
    """Where a proposal comes from."""

    REGIME = "regime"  # it won here before under such arrivals
    RETURNING = "returning"  # it ran here until other arrivals came, which are gone
    PROVEN = "proven"  # it won here before
    EXPECTED = "expected"  # found ahead for such arrivals, and not tried yet
    ARRANGED = "arranged"  # another way to share the cores
    INTERVALS = "intervals"  # the incumbent with other launch intervals
    SEARCH = "search"
    LEARNED = "learned"  # what a trained policy says


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan to consider."""

    plan: Plan
    how: How
    scheduler: str = ""  # for `How.SEARCH` and `How.LEARNED`: what found it


class PlainPolicy:
    """Proposes plans for an observation. Pure: searches run elsewhere and come back as `found`.

    Launch intervals from measured loads, blocks combined by rule, schedules by search.

    Searched are the partitions that the models offer, each with every block alone and with the models' i-th
    blocks together, up to H of them; replicas, batches, lanes and rules stay the incumbent's there. What
    moves those is `arranged`.
    """

    def at_once(self, seen: Observation) -> Sequence[Proposal]:
        """Proposals that need no search, within a millisecond or so.

        Proven plans and the incumbent, with launch intervals for the loads: those need no proof.
        """
        others = {plan.structure: plan for plan in reversed(seen.proven)}
        others.pop(seen.incumbent.structure, None)
        paced_others = [plain_replan(plan, seen.loads) for plan in reversed(others.values())]
        proposals = [Proposal(plan, How.PROVEN) for plan in paced_others if keeps_up(plan, seen.loads)]
        other_pace = plain_replan(seen.incumbent, seen.loads)
        if other_pace is not seen.incumbent:
            proposals.append(Proposal(other_pace, How.INTERVALS))
        return proposals

    def arranged(self, seen: Observation) -> Sequence[Proposal]:
        """Other ways to share the cores of the device, where it told of them; no search is needed either.

        Elsewhere the earliest deadline first, where tasks have deadlines.
        """
        scene = seen.scene(1)
        if scene is None:
            ordered = ordered_by_deadline(seen)
            return () if ordered is None else [Proposal(ordered, How.ARRANGED, "arranged")]
        models = [_choice(seen, model, model.cuts) for model in seen.incumbent.models]
        times = [scene.times.get(model.artifact, {}) for model in models]
        plans = levers(seen.incumbent, models, times, scene.demand, seen.cores)
        return [Proposal(plan, How.ARRANGED, "arranged") for plan in plans]

    def searches(self, seen: Observation) -> Sequence[SearchJob]:
        """One search per partition and way to combine; none where the proposals at once are all there is."""
        plan = seen.incumbent
        combinations = [Combination.ALONE]
        if seen.settings.members_max > 1 and _may_combine(plan):
            combinations.append(Combination.ALIGNED)
        jobs = [
            SearchJob(
                models=choices,
                scheduler=seen.settings.scheduler,
                combination=combination,
                members_max=seen.settings.members_max,
                costs=seen.costs,
                lanes=plan.lanes,
                executor=plan.executor,
                rules=Rules.of(plan),
                assignment=_assignment(plan),
                budget_s=seen.settings.budget_s,
                checkpoint=seen.checkpoint,
            )
            for choices in _partitions(seen)
            for combination in combinations
        ]
        return [replace(job, budget_s=seen.settings.budget_s / len(jobs)) for job in jobs]

    def after(self, seen: Observation, found: Sequence[tuple[SearchJob, Plan]]) -> Sequence[Proposal]:
        """Proposals from what the searches found: those plans, with launch intervals for the loads."""
        return [Proposal(plain_replan(plan, seen.loads), How.SEARCH, job.scheduler) for job, plan in found]

    def missing(self, seen: Observation) -> Sequence[BlockJob]:
        """Combined blocks that a better schedule should be looked for, in time for the next re-plan."""
        return ()

    def fitting(self, seen: Observation, plan: Plan) -> Digest | None:
        """The trained policy with which the device could plan alone once it runs this plan."""
        return None

    def remark(self, seen: Observation) -> str:
        """A remark on the proposals for the re-plan's record; mostly empty."""
        return ""


def ordered_by_deadline(seen: Observation) -> Plan | None:
    """The incumbent by deadline, where its tasks have deadlines and its order is another; else None."""
    if not any(load.deadline_s > 0.0 for load in seen.loads) or not may_go_by_deadline(seen.incumbent):
        return None
    return by_deadline(seen.incumbent)


def _assignment(plan: Plan) -> Assignment:
    """What its blocks use, where that is the same for all blocks of a model."""
    if plan.places:
        return Assignment()
    used = _used_by_models(plan)
    if len(used) != len(plan.models):
        if any(block.resources for block in plan.combined):
            return Assignment()
        return Assignment(resources=plan.resources, lane_resources=plan.lane_resources)
    return Assignment(
        further_executors=plan.further_executors,
        resources=plan.resources,
        lane_resources=plan.lane_resources,
        executors_of=tuple((executor,) for _, executor, _ in used),
        resources_of=tuple((resources,) for _, _, resources in used),
    )


def _used_by_models(plan: Plan) -> list[tuple[int, int, tuple[int, ...]]]:
    """(model, executor, resources) of all blocks, each once, by model."""
    return sorted(
        {
            (member.model, block.executor, block.resources)
            for block in plan.combined
            for member in block.members
        }
    )


def _may_combine(plan: Plan) -> bool:
    """Whether blocks of several models, or of several replicas, may share a step: they use the same."""
    if sum(model.replicas for model in plan.models) < 2:
        return False
    return len({used[1:] for used in _used_by_models(plan)}) == 1


def _partitions(seen: Observation) -> list[tuple[ModelChoice, ...]]:
    """The incumbent's cuts, then each named partition for all models that offer it; equal ones once."""
    names = dict.fromkeys(
        name for model in seen.incumbent.models for name, _ in seen.graphs[model.artifact].partitions
    )
    rows = [tuple(model.cuts for model in seen.incumbent.models)]
    rows += [
        tuple(
            dict(seen.graphs[model.artifact].partitions).get(name, model.cuts)
            for model in seen.incumbent.models
        )
        for name in names
    ]
    return [
        tuple(_choice(seen, model, cuts) for model, cuts in zip(seen.incumbent.models, row, strict=True))
        for row in dict.fromkeys(rows)
    ]


def _choice(seen: Observation, model: ModelPlan, cuts: tuple[int, ...]) -> ModelChoice:
    return ModelChoice(
        name=model.name,
        artifact=model.artifact,
        graph=seen.graphs[model.artifact],
        partition=cuts,
        replicas=model.replicas,
        batch=model.batch,
        batch_max_delay_us=model.batch_max_delay_us,
        launch_interval_us=model.launch_interval_us,
        work_conserving=model.work_conserving,
        weight=model.weight,
        queue=model.queue,
    )

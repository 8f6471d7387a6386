"""What to run instead: the interface of policies, and the plain one that needs no learning. Pure.

A policy proposes plans; it neither ranks nor tries them. `stageloom.planner.replan.decide` ranks what is
proposed by predicted cost, and a trial on the device has the last word, so a policy may be wrong and do no
harm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from stageloom.planner.replan.observation import Observation
from stageloom.planner.replan.predict import keeps_up
from stageloom.shared.ids import Digest
from stageloom.shared.plan import ModelPlan, Plan
from stageloom.shared.policy.plain import plain_replan
from stageloom.shared.search.compose import Combination, ModelChoice, Rules
from stageloom.shared.search.job import BlockJob, SearchJob


class How(str, Enum):
    """Where a proposal comes from."""

    PROVEN = "proven"  # it won here before
    INTERVALS = "intervals"  # the incumbent with other launch intervals
    SEARCH = "search"
    LEARNED = "learned"  # what a trained policy says


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan to consider."""

    plan: Plan
    how: How
    scheduler: str = ""  # for `How.SEARCH` and `How.LEARNED`: what found it


class Policy(Protocol):
    """Proposes plans for an observation. Pure: searches run elsewhere and come back as `found`."""

    def at_once(self, seen: Observation) -> Sequence[Proposal]:
        """Proposals that need no search, within a millisecond or so."""
        ...

    def searches(self, seen: Observation) -> Sequence[SearchJob]:
        """What to search for; none where the proposals at once are all there is."""
        ...

    def after(self, seen: Observation, found: Sequence[tuple[SearchJob, Plan]]) -> Sequence[Proposal]:
        """Proposals from what the searches found."""
        ...

    def missing(self, seen: Observation) -> Sequence[BlockJob]:
        """Combined blocks that a better schedule should be looked for, in time for the next re-plan."""
        ...

    def fitting(self, seen: Observation, plan: Plan) -> Digest | None:
        """The trained policy with which the device could plan alone once it runs this plan."""
        ...

    def remark(self, seen: Observation) -> str:
        """What the re-plan's record should say of the proposals besides; mostly empty."""
        ...


class PlainPolicy:
    """Launch intervals from measured loads, blocks combined by rule, schedules by search.

    Searched are the partitions that the models offer, each with every block alone and with the models' i-th
    blocks together, up to H of them. Replicas, batches, lanes, rules and the executor stay the incumbent's.
    """

    def at_once(self, seen: Observation) -> Sequence[Proposal]:
        """Proven plans and the incumbent, with launch intervals for the loads: those need no proof."""
        others = {plan.structure: plan for plan in reversed(seen.proven)}
        others.pop(seen.incumbent.structure, None)
        paced_others = [plain_replan(plan, seen.loads) for plan in reversed(others.values())]
        proposals = [Proposal(plan, How.PROVEN) for plan in paced_others if keeps_up(plan, seen.loads)]
        paced = plain_replan(seen.incumbent, seen.loads)
        if paced is not seen.incumbent:
            proposals.append(Proposal(paced, How.INTERVALS))
        return proposals

    def searches(self, seen: Observation) -> Sequence[SearchJob]:
        """One search per partition and way to combine."""
        plan = seen.incumbent
        combinations = [Combination.ALONE]
        if seen.settings.members_max > 1 and sum(model.replicas for model in plan.models) > 1:
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
                rules=Rules(
                    run_ahead=plan.run_ahead,
                    step_choice=plan.step_choice,
                    wait=plan.wait,
                    wait_timeout_us=plan.wait_timeout_us,
                    max_skips=plan.max_skips,
                    barrier=plan.barrier,
                ),
                budget_s=seen.settings.budget_s,
                checkpoint=seen.checkpoint,
            )
            for choices in _partitions(seen)
            for combination in combinations
        ]
        return [replace(job, budget_s=seen.settings.budget_s / len(jobs)) for job in jobs]

    def after(self, seen: Observation, found: Sequence[tuple[SearchJob, Plan]]) -> Sequence[Proposal]:
        """The plans found, with launch intervals for the loads."""
        return [Proposal(plain_replan(plan, seen.loads), How.SEARCH, job.scheduler) for job, plan in found]

    def missing(self, seen: Observation) -> Sequence[BlockJob]:
        """None."""
        return ()

    def fitting(self, seen: Observation, plan: Plan) -> Digest | None:
        """None."""
        return None

    def remark(self, seen: Observation) -> str:
        """Nothing."""
        return ""


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

"""The candidates of a tournament: policies and per-model schedulers, each as the search for its plan. Pure.

The policies are those of `stageloom.shared.search.rivals`. Per-model schedulers (IOS, Opara, Nimble and the
rest) run every block alone under TOP's limits. Each takes part once per partition that all its models offer,
since a plan chooses where its models are cut: the score of a policy is that of its best partition. On request
our own searches over the blocks of several models take part, which no rival has, and plans that a training
begins with: every way to combine blocks, of one instance of each model and of several on lanes of their own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from stageloom.shared.plan import MAX_MEMBERS, ExecutorOptions, Plan, StepChoice
from stageloom.shared.search.compose import Combination, ModelChoice, Rules
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import TOP_LIMITS, Budget, Limits
from stageloom.shared.search.job import SearchJob
from stageloom.shared.search.neighbours import Move
from stageloom.shared.search.rivals import policies

PER_MODEL: Final = ("ios", "opara", "nimble")
"""Schedulers of one model's operators that the papers compare with."""

SEARCHES: Final[Mapping[str, tuple[str, Combination]]] = MappingProxyType(
    {
        "beam": ("beam", Combination.ALONE),
        "aligned-ios": ("ios", Combination.ALIGNED),
        "aligned-beam": ("beam", Combination.ALIGNED),
    }
)
"""Scheduler and combination of our own searches, by name; the joint ones never wait for a model."""

SEEDS: Final[Mapping[str, tuple[str, Combination]]] = MappingProxyType(
    {
        "abreast": ("sequential", Combination.ABREAST),
        "pipelined": ("sequential", Combination.PIPELINED),
        "instances-aligned": ("instances", Combination.ALIGNED),
        "instances-abreast": ("instances", Combination.ABREAST),
        "instances-pipelined": ("instances", Combination.PIPELINED),
        "instances-replicas": ("instances", Combination.REPLICAS),
    }
)
"""The policy whose instances and lanes a plan has, and how its blocks are combined, by name."""

SEED_BUDGET: Final = Budget(expansions=200)
"""Of the beams that schedule their combined blocks, as in a training: seconds, also for whole models."""

_JOINT: Final = frozenset({"synchronised", "shared_input", "aligned-ios", "aligned-beam", "abreast"})
_OF_BLOCKS: Final = _JOINT | {"pipelined", "instances-pipelined"}  # whole models have none to combine
_OF_MODELS: Final = _JOINT | {"instances-aligned"}
_SLOW: Final = _JOINT | {"self_acceleration"}  # to search for: many operators at once
_WHOLE: Final = "whole"

REFINED: Final = "refined"
"""The policy of a neighbour of a plan that was the best so far."""


@dataclass(frozen=True, kw_only=True)
class PlanCandidate:
    """One policy under one partition, or a neighbour of another candidate's plan.

    A neighbour's `partition` and the rules of its `job` are those of the listed candidate that it comes from.
    """

    policy: str
    partition: str
    job: SearchJob
    ready: Plan | None = None
    """The plan where it was found before, so that it is evaluated alone."""
    parent: "PlanCandidate | None" = None
    """Whose plan it is a neighbour of,"""
    move: Move | None = None
    """by which change,"""
    number: int = 0
    """and the how manyth neighbour of the tournament it is."""

    @property
    def listed(self) -> "PlanCandidate":
        """The candidate that is no neighbour: itself, or the one that its parents come from."""
        return self if self.parent is None else self.parent.listed

    @property
    def name(self) -> str:
        """The policy, and where the models are cut, for people."""
        listed = self.listed
        if listed is not self:
            return f"{REFINED} {self.number} of {listed.name}"
        return f"{self.policy}, {self.partition}"

    def neighbour(self, move: Move, number: int) -> "PlanCandidate":
        """A neighbour of its plan."""
        job = replace(self.job, scheduler="beam", budget=SEED_BUDGET)
        return replace(self, policy=REFINED, job=job, ready=None, parent=self, move=move, number=number)


def plan_candidates(
    models: Sequence[ModelChoice],
    costs: CostTable,
    *,
    executor: ExecutorOptions | None = None,
    limits: Limits = TOP_LIMITS,
    policy_names: Sequence[str] = (),
    rules: Rules | None = None,
    searches: bool = False,
) -> tuple[PlanCandidate, ...]:
    """All candidates, or those of `policy_names`.

    `sequential` comes first, so that there is a valid plan at once. Searches that take seconds come last, so
    that a short tournament is not spent on one of them. Joint policies need two models, and take part only
    under partitions other than `whole`: a joint graph of whole models is too large for a search over stages,
    but for the short ones of `SEEDS`.

    `rules` hold where a policy decides nothing about them, and weights where blocks take turns by them.
    `searches` adds `SEARCHES` and `SEEDS`.
    """
    names = ["sequential", *sorted(set(policies()) - {"sequential"}), *PER_MODEL]
    names += (*SEARCHES, *SEEDS) if searches else ()
    wanted = [name for name in names if not policy_names or name in policy_names]
    wanted.sort(key=_SLOW.__contains__)
    basis = SearchJob(
        models=tuple(models),
        costs=costs,
        limits=limits,
        executor=executor or ExecutorOptions(),
        rules=rules or Rules(),
    )
    candidates = []
    for name in wanted:
        for partition in _partitions(models):
            if (name in _OF_BLOCKS and partition == _WHOLE) or (name in _OF_MODELS and len(models) < 2):
                continue
            chosen = tuple(replace(model, partition=partition) for model in models)
            job = _weighed(_job(replace(basis, models=chosen), name))
            candidates.append(PlanCandidate(policy=name, partition=partition, job=job))
    return tuple(candidates)


def _job(basis: SearchJob, name: str) -> SearchJob:
    """The search for the plan of a policy or of a per-model scheduler."""
    if name in PER_MODEL:
        return replace(basis, scheduler=name, combination=Combination.ALONE)
    if name in SEARCHES:
        scheduler, combination = SEARCHES[name]
        most = len(basis.models) if combination is Combination.ALIGNED else basis.members_max
        return replace(
            basis, scheduler=scheduler, combination=combination, members_max=min(most, MAX_MEMBERS)
        )
    if name in SEEDS:
        structure, combination = SEEDS[name]
        placed = policies()[structure].plan(basis)
        return replace(placed, scheduler="beam", combination=combination, budget=SEED_BUDGET)
    policy = policies()[name]
    return policy.plan(replace(basis, scheduler=policy.scheduler))


def _weighed(job: SearchJob) -> SearchJob:
    """Weights only where blocks take turns by them: no request could make a plan with others again."""
    if job.rules.step_choice is StepChoice.WEIGHTED:
        return job
    return replace(job, models=tuple(replace(model, weight=1) for model in job.models))


def _partitions(models: Sequence[ModelChoice]) -> Iterator[str]:
    """Names that every model offers, whole models first; `base` only where there is no better one."""
    offered = [[name for name, _ in model.graph.partitions] for model in models]
    common = [name for name in offered[0] if all(name in row for row in offered)]
    yield from (name for name in (_WHOLE, "paper") if name in common)
    if "paper" not in common:
        yield from (name for name in common if name != _WHOLE)

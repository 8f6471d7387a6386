"""Who takes part: rival policies and per-model schedulers, each as the search for its plan. Pure.

The policies are those of `stageloom.shared.search.rivals`. Per-model schedulers (IOS, Opara, Nimble and the
rest) run every block alone under TOP's limits. Each enters once per partition that all its models offer,
because where a model is cut is the plan's to choose: a policy is worth what its best partition is worth.
Searches of ours over several models' blocks together, which no rival does, take part where they are asked
for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.compose import Combination, ModelChoice, Rules
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import TOP_LIMITS, Limits
from stageloom.shared.search.job import SearchJob
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

_JOINT: Final = frozenset({"synchronised", "shared_input", "aligned-ios", "aligned-beam"})
_SLOW: Final = _JOINT | {"self_acceleration"}  # to search for: many operators at once
_WHOLE: Final = "whole"


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """One policy under one partition."""

    policy: str
    partition: str
    job: SearchJob

    @property
    def name(self) -> str:
        """For people: the policy, and where the models are cut."""
        return f"{self.policy}, {self.partition}"


def entrants(
    models: Sequence[ModelChoice],
    costs: CostTable,
    *,
    executor: ExecutorOptions | None = None,
    limits: Limits = TOP_LIMITS,
    policy_names: Sequence[str] = (),
    rules: Rules | None = None,
    searches: bool = False,
) -> tuple[Entrant, ...]:
    """All, or those of some policies; `sequential` first, so that there is a valid plan at once, and those
    last whose searches take seconds, so that a short contest is not spent on one of them.

    A joint graph of one model is that model alone, so joint policies need two; one of whole models is more
    than a search over stages can look at, so they take part under the other partitions.

    `rules` hold where a policy decides nothing about them. With `searches` ours take part, too (`SEARCHES`).
    """
    names = ["sequential", *sorted(set(policies()) - {"sequential"}), *PER_MODEL]
    names += SEARCHES if searches else ()
    wanted = [name for name in names if not policy_names or name in policy_names]
    wanted.sort(key=_SLOW.__contains__)
    basis = SearchJob(
        models=tuple(models),
        costs=costs,
        limits=limits,
        executor=executor or ExecutorOptions(),
        rules=rules or Rules(),
    )
    found = []
    for name in wanted:
        for partition in _partitions(models):
            if name in _JOINT and (len(models) < 2 or partition == _WHOLE):
                continue
            chosen = tuple(replace(model, partition=partition) for model in models)
            job = _job(replace(basis, models=chosen), name)
            found.append(Entrant(policy=name, partition=partition, job=job))
    return tuple(found)


def _job(basis: SearchJob, name: str) -> SearchJob:
    """The search for the plan of a policy or of a per-model scheduler."""
    if name in PER_MODEL:
        return replace(basis, scheduler=name, combination=Combination.ALONE)
    if name in SEARCHES:
        scheduler, combination = SEARCHES[name]
        members_max = len(basis.models) if combination is Combination.ALIGNED else basis.members_max
        return replace(basis, scheduler=scheduler, combination=combination, members_max=members_max)
    policy = policies()[name]
    return policy.plan(replace(basis, scheduler=policy.scheduler))


def _partitions(models: Sequence[ModelChoice]) -> Iterator[str]:
    """Names that every model offers, whole models first; `base` only where there is no better one."""
    offered = [[name for name, _ in model.graph.partitions] for model in models]
    common = [name for name in offered[0] if all(name in row for row in offered)]
    yield from (name for name in (_WHOLE, "paper") if name in common)
    if "paper" not in common:
        yield from (name for name in common if name != _WHOLE)

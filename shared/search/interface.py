"""The interface of schedulers: limits, budget, call."""

from dataclasses import dataclass
from typing import Final, Protocol

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.errors import SettingError
from stageloom.shared.schedule import Schedule
from stageloom.shared.search.costs import StageCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a stage (IOS, section 4.3); None: no limit. TOP uses r = 3 and s = 8."""

    r: int | None = None  # operators per group
    s: int | None = None  # groups per stage

    def __post_init__(self) -> None:
        for name, value in (("r", self.r), ("s", self.s)):
            if value is not None and value < 1:
                raise SettingError(f"the limit {name} = {value} allows no stage", remedy="use 1 or more")


TOP_LIMITS: Final = Limits(r=3, s=8)
"""TOP's limits (section VI-B), for the training of policies and the searches for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much a scheduler may try before it answers with the best it has.

    Counted in partial schedules looked at, not in seconds: equal arguments give equal schedules.
    """

    expansions: int = 100_000


class Scheduler(Protocol):
    """A pure function: the same arguments give the same schedule, legal for `graph` within `limits`."""

    def __call__(
        self, graph: CombinedGraph, costs: StageCosts, limits: Limits, budget: Budget
    ) -> Schedule: ...

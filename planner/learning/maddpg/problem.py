"""What is to be learned, as one picklable value, and stage_dict (TOP, algorithm 1 line 11).

stage_dict holds schedules of combined blocks by digest, found when first needed. A step of training meets a
dozen new combined blocks, so what is not known is scheduled quickly at first: the cheaper of `sequential` and
`greedy`. Once a block is asked for again and again, or its plan is evaluated, it is searched for: by a small
`beam`, or by `gpg`, as TOP has it, whose trained policy chooses the stages and beam what is too large for it.
A longer search may better an entry at any time; an entry only ever gets cheaper.

Seconds are the cost model's, of the whole combined block. A step with fewer active members runs the schedule
restricted to them: plans carry one schedule per combined block.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import fsum
from typing import Any, Final

from stageloom.planner.twin.window import MakeDevice
from stageloom.shared.bound import BoundCombined, BoundModel, bind
from stageloom.shared.errors import InputError, PlanError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.legality import violations
from stageloom.shared.plan import CombinedBlock, Member, Plan
from stageloom.shared.policy.maddpg.decide import BlockKey, Blocks, Book
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.plain import Load
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.baselines import greedy, sequential
from stageloom.shared.search.beam import beam
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import TOP_LIMITS, Budget, Limits, Scheduler
from stageloom.shared.stage_string import parse, to_string

SEARCH: Final = Budget(expansions=200)
SEARCHED_AFTER: Final = 3
"""Times that a block is asked for."""

_BOUND: Final = 10_000  # combined blocks that are kept ready


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    """One schedule."""

    schedule: StageSchedule
    seconds: float  # by the cost model, all members active
    searched: bool = True  # or made quickly


@dataclass
class ScheduleTable:
    """The entries of one device class, precision and partition of the models."""

    blocks: Blocks
    costs: CostTable
    limits: Limits = TOP_LIMITS
    scheduler: Scheduler = beam
    entries: dict[BlockKey, ScheduleEntry] = field(default_factory=dict)
    _bound: dict[tuple[Member, ...], BoundCombined] = field(default_factory=dict)
    _used: Counter[tuple[Member, ...]] = field(default_factory=Counter)
    _new: dict[BlockKey, ScheduleEntry] = field(default_factory=dict)
    _told: Counter[tuple[Member, ...]] = field(default_factory=Counter)

    def find(self, members: tuple[Member, ...], *, thorough: bool = False) -> ScheduleEntry:
        """The entry of these members; where there is none, made quickly unless `thorough` asks for more."""
        self._used[members] += 1
        key = self.blocks.key(members)
        found = self.entries.get(key)
        if found is None and not thorough:
            quick = self.searched(members, (sequential, greedy), SEARCH)
            found = self.entries[key] = self._new[key] = replace(quick, searched=False)
        elif found is None or (not found.searched and (thorough or self._used[members] >= SEARCHED_AFTER)):
            found = self.entries[key] = self._new[key] = self.searched(members, (self.scheduler,), SEARCH)
        return found

    def bound(self, members: tuple[Member, ...], *, thorough: bool = False) -> BoundCombined:
        """The combined block of these members, checked once.

        Raises:
            PlanError: the entry's schedule is not legal, which is a scheduler's mistake.
        """
        schedule = self.find(members, thorough=thorough).schedule
        found = self._bound.get(members)
        if found is None or found.plan.schedule is not schedule:
            found = BoundCombined(CombinedBlock(members, schedule), self.blocks.graph(members))
            if problems := violations(schedule, found.graph):
                raise PlanError(f"the schedule of {members} is not legal: {problems[0].detail}")
            if len(self._bound) >= _BOUND:
                self._bound.clear()
            self._bound[members] = found
        return found

    def searched(
        self, members: tuple[Member, ...], how: Sequence[Scheduler], budget: Budget
    ) -> ScheduleEntry:
        """The cheapest that these schedulers find; changes nothing.

        Raises:
            TypeError: a scheduler gives streams, which have no stages.
        """
        graph = self.blocks.graph(members)
        parts, batches = self.blocks.parts(members), self.blocks.batches(members)
        costs = self.costs.for_members(parts, batches=batches)
        found = []
        for scheduler in how:
            schedule = scheduler(graph, costs, self.limits, budget)
            if not isinstance(schedule, StageSchedule):
                raise TypeError(f"{scheduler} gives no stages")
            found.append(ScheduleEntry(schedule, costs.schedule_s(schedule)))
        return min(found, key=lambda entry: entry.seconds)

    def put(self, entries: Mapping[BlockKey, ScheduleEntry]) -> bool:
        """Adopt entries found elsewhere that are cheaper; whether there was one."""
        better = {
            key: entry
            for key, entry in entries.items()
            if key not in self.entries or _better(entry, self.entries[key])
        }
        self.entries.update(better)
        return bool(better)

    def taken_new(self) -> dict[BlockKey, ScheduleEntry]:
        """What was found here since the last call: a worker sends it along with its results."""
        found, self._new = self._new, {}
        return found

    def taken_asked(self) -> dict[tuple[Member, ...], int]:
        """How often combined blocks were asked for here since the last call."""
        found = self._used - self._told
        self._told = self._used.copy()
        return dict(found)

    def asked_elsewhere(self, asked: Mapping[tuple[Member, ...], int]) -> None:
        """Add another table's counts of how often blocks were asked for."""
        self._used.update(asked)

    def most_used(self, count: int) -> list[tuple[Member, ...]]:
        """Combined blocks that were asked for most often: those that a longer search should look at first."""
        return [members for members, _ in self._used.most_common(count)]

    def book(self, combined: Sequence[tuple[Member, ...]] | None = None) -> Book:
        """What a policy takes along: all entries, or those of some combined blocks."""
        keys = self.entries if combined is None else {self.blocks.key(members) for members in combined}
        return {key: self.entries[key].schedule for key in keys}

    def saved(self) -> dict[str, Any]:
        """A JSON value; does not mark what is new since `taken_new`."""
        return {
            "entries": [
                [digest, batch, to_string(entry.schedule), entry.seconds, entry.searched]
                for (digest, batch), entry in self.entries.items()
            ],
            "used": [[[list(member) for member in members], count] for members, count in self._used.items()],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on where `saved` was.

        Raises:
            PlanError: a schedule that is none.
            TypeError: one of streams.
        """
        for digest, batch, text, seconds, searched in saved["entries"]:
            schedule = parse(text)
            if not isinstance(schedule, StageSchedule):
                raise TypeError(f"{text[:40]} has no stages")
            self.entries[digest, batch] = ScheduleEntry(schedule, seconds, searched)
        for members, count in saved["used"]:
            self._used[tuple(Member(*member) for member in members)] = count


def _better(one: ScheduleEntry, other: ScheduleEntry) -> bool:
    return (one.seconds, not one.searched) < (other.seconds, not other.searched)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Models on a device under arrivals.

    `template` gives all that is not learned: names, cuts, replicas, batches, queues, lanes, rules, executor.

    Raises:
        InputError: the template is not of this space, waits for its models, or gives blocks an executor or
            resources of their own.
    """

    space: Space
    template: Plan
    graphs: Mapping[Digest, Graph]
    costs: CostTable
    arrivals_per_s: tuple[float, ...]  # mean per model [W]
    make_device: MakeDevice
    limits: Limits = TOP_LIMITS  # of schedules
    scheduler: Scheduler = beam  # that finds them; picklable

    def __post_init__(self) -> None:
        if why := self.space.refusal(self.template, self.space.device_class):
            raise InputError(
                f"there is nothing to learn on this plan: {why}",
                remedy="name the models with --model, or push a plan that has none of that",
            )
        assert len(self.arrivals_per_s) == self.space.num_models

    @classmethod
    def of(
        cls,
        template: Plan,
        *,
        device_class: str,
        graphs: Mapping[Digest, Graph],
        costs: CostTable,
        arrivals_per_s: Sequence[float],
        make_device: MakeDevice,
        members_max: int = 2,
        samples: int = 10,
        limits: Limits = TOP_LIMITS,
        scheduler: Scheduler = beam,
    ) -> "Problem":
        """The problem of finding combined blocks and launch intervals for this plan's models."""
        return cls(
            space=Space.of(template, device_class, members_max=members_max, samples=samples),
            template=template,
            graphs=graphs,
            costs=costs,
            arrivals_per_s=tuple(arrivals_per_s),
            make_device=make_device,
            limits=limits,
            scheduler=scheduler,
        )

    @cached_property
    def service_s(self) -> tuple[float, ...]:
        """Device seconds of one task, its operators one after another, per model. [W]

        Fixed weights: what a plan gains must not make its queues count less.
        """
        return tuple(
            fsum(
                self.costs.operator_s(model.artifact, self.graphs[model.artifact], OpId(op))
                for op in range(len(self.graphs[model.artifact].operators))
            )
            for model in self.template.models
        )

    @cached_property
    def bound_models(self) -> tuple[BoundModel, ...]:
        """The models with their graphs and blocks, as `stageloom.shared.bound.bind` has them. [W]"""
        return bind(self.template, self.graphs).models

    def table(self) -> ScheduleTable:
        """An empty stage_dict; every worker fills its own."""
        return ScheduleTable(
            Blocks(self.template.models, self.graphs), self.costs, self.limits, self.scheduler
        )

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """The mean load, in the models' order. [W]"""
        rows = zip(self.template.models, self.arrivals_per_s, self.service_s, strict=True)
        return tuple(
            Load(model=model.name, arrivals_per_s=rate, service_s=service_s, queued=0)
            for model, rate, service_s in rows
        )

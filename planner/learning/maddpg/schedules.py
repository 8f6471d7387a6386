"""stage_dict (TOP, algorithm 1 line 11): schedules of combined blocks by digest, found when first needed.

A step of training meets a dozen new combined blocks, so what is not known is scheduled quickly: the cheapest
of `sequential`, `greedy` and a small `beam`. Any time later a longer search may better an entry (`searched`,
in another process where there is one); an entry only ever gets cheaper.

Seconds are the cost model's, of the whole combined block. A step with fewer active members runs the schedule
restricted to them: plans carry one schedule per combined block.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shared.plan import Member
from shared.policy.maddpg.book import BlockKey, Blocks, Book
from shared.schedule import StageSchedule
from shared.search.beam import beam
from shared.search.costs import CostTable
from shared.search.greedy import greedy
from shared.search.interface import Budget, Limits, Scheduler
from shared.search.sequential import sequential

QUICK: Final = Budget(expansions=200)
TOP_LIMITS: Final = Limits(r=3, s=8)


@dataclass(frozen=True, slots=True)
class Entry:
    """One schedule."""

    schedule: StageSchedule
    seconds: float  # by the cost model, all members active


@dataclass
class ScheduleTable:
    """The entries of one device class, precision and partition of the models."""

    blocks: Blocks
    costs: CostTable
    limits: Limits = TOP_LIMITS
    entries: dict[BlockKey, Entry] = field(default_factory=dict)
    _used: Counter[tuple[Member, ...]] = field(default_factory=Counter)
    _new: dict[BlockKey, Entry] = field(default_factory=dict)

    def find(self, members: tuple[Member, ...]) -> Entry:
        """The entry of these members, made quickly where there is none."""
        self._used[members] += 1
        key = self.blocks.key(members)
        found = self.entries.get(key)
        if found is None:
            found = self.searched(members, (sequential, greedy, beam), QUICK)
            self.entries[key] = self._new[key] = found
        return found

    def schedule_of(self, members: tuple[Member, ...]) -> StageSchedule:
        """The schedule of these members."""
        return self.find(members).schedule

    def searched(self, members: tuple[Member, ...], how: Sequence[Scheduler], budget: Budget) -> Entry:
        """The cheapest that these schedulers find; changes nothing.

        Raises:
            TypeError: a scheduler gives streams, which have no stages.
        """
        graph = self.blocks.graph(members)
        costs = self.costs.for_members(self.blocks.parts(members), batch=self.blocks.batch(members))
        found = []
        for scheduler in how:
            schedule = scheduler(graph, costs, self.limits, budget)
            if not isinstance(schedule, StageSchedule):
                raise TypeError(f"{scheduler} gives no stages")
            found.append(Entry(schedule, costs.schedule_s(schedule)))
        return min(found, key=lambda entry: entry.seconds)

    def put(self, entries: Mapping[BlockKey, Entry]) -> bool:
        """Take in what was found elsewhere, where it is cheaper; whether any was."""
        better = {
            key: entry
            for key, entry in entries.items()
            if key not in self.entries or entry.seconds < self.entries[key].seconds
        }
        self.entries.update(better)
        return bool(better)

    def taken_new(self) -> dict[BlockKey, Entry]:
        """What was found here since the last call: a worker sends it along with its results."""
        found, self._new = self._new, {}
        return found

    def most_used(self, count: int) -> list[tuple[Member, ...]]:
        """Combined blocks that were asked for most often: those that a longer search should look at first."""
        return [members for members, _ in self._used.most_common(count)]

    def book(self, combined: Sequence[tuple[Member, ...]] | None = None) -> Book:
        """What a policy takes along: all entries, or those of some combined blocks."""
        keys = self.entries if combined is None else {self.blocks.key(members) for members in combined}
        return Book({key: self.entries[key].schedule for key in keys})

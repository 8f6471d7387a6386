"""Which combined block runs next in a lane.

Overdue ones come first. Those passed over `max_skips` times go in the order in which they reached that bound:
in one lane that is "most passed over first", and with several lanes it keeps the guarantee, since an overdue
block can then be overtaken only by blocks that were overdue before it, each once. So none is passed over more
than max_skips + C - 1 times, C being the number of combined blocks. Then come those whose oldest instance is
past half the time it had left when it became ready there, most passed over first. The rest follow `rank`.

Nothing here looks at every candidate in every choice: who stands in line with whom is kept (`Rivals`), with a
heap of ranks and one count of turns for all of them.
"""

from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TypeAlias

from shared.engine.slots import NO_LANE, CombinedState, PlanState
from shared.plan import StepChoice

_NEVER = float("inf")
_RATIO, _WEIGHTED = StepChoice.RATIO, StepChoice.WEIGHTED
_SLACK = 64  # ranks that no longer hold which a heap may keep beyond the valid ones before it is swept

Rank: TypeAlias = tuple[float, float, int, int, CombinedState]
"""Smallest first. No two combined blocks of a plan agree in the fourth, nor two plans in the first."""


class Rivals:
    """The combined blocks of one plan that could run in the same lanes: in any, or in the one they are in.

    A choice in such a lane takes one of them or passes over all of them, so that one count of turns says how
    often each was passed over.
    """

    __slots__ = ("count", "heap", "lane", "lanes", "line", "max_skips", "run_ahead", "turns")

    def __init__(self, plan: PlanState, lane: int) -> None:
        self.lane = lane
        self.lanes = plan.lanes
        self.run_ahead = plan.run_ahead
        self.max_skips = plan.max_skips
        self.turns = 0  # choices in which they took part
        self.count = 0
        self.line: dict[CombinedState, None] = {}  # those that are not overdue, by the turn when they will be
        self.heap: list[Rank] = []  # a rank that is not its combined block's own any more is void

    def first(self) -> Rank | None:
        """The best rank."""
        heap = self.heap
        while heap:
            rank = heap[0]
            if rank[4].rank is rank:
                return rank
            heappop(heap)
        return None

    def push(self, combined: CombinedState, rank: Rank) -> None:
        """One of them has this rank from now on."""
        heap = self.heap
        if len(heap) > 2 * self.count + _SLACK:
            heap[:] = [one for one in heap if one[4].rank is one]
            heapify(heap)
        combined.rank = rank
        heappush(heap, rank)

    def enter(self, combined: CombinedState, skips: int = 0) -> None:
        """One more stands in line, passed over `skips` times before."""
        combined.rivals = self
        combined.since_turn = self.turns - skips
        self.count += 1
        if not combined.overdue_seq:
            self.line[combined] = None
            if skips:
                self.line = dict.fromkeys(sorted(self.line, key=attrgetter("since_turn")))

    def leave(self, combined: CombinedState) -> None:
        """It stands there no more."""
        combined.rivals = combined.rank = None
        self.count -= 1
        self.line.pop(combined, None)

    def take_turn(self) -> list[CombinedState] | None:
        """All of them were passed over; who is overdue now."""
        turns = self.turns = self.turns + 1
        found = None
        for combined in self.line:
            if turns - combined.since_turn < self.max_skips:
                break
            found = [combined] if found is None else [*found, combined]
        for combined in found or ():
            del self.line[combined]
        return found


class Chooser:
    """Step choice and its counts, over the combined blocks of all loaded plans."""

    __slots__ = ("_by_lane", "_choices", "_late_s", "_passes", "_timed", "_urgent")

    def __init__(self) -> None:
        self._by_lane: list[list[Rivals]] = [[]]  # those that a lane may take from
        self._choices = 0
        self._passes = 0.0  # of the last one chosen under WEIGHTED
        self._urgent: dict[CombinedState, None] = {}  # overdue, or late
        self._timed: dict[CombinedState, None] = {}  # those that will be late at some time
        self._late_s = _NEVER  # none of them is late before that

    def add(self, plan: PlanState) -> None:
        """A plan was loaded."""
        while len(self._by_lane) < plan.lanes:
            self._by_lane.append([])
        anywhere = Rivals(plan, NO_LANE)
        # With one lane only it makes no difference whether a block is in it.
        bound = [Rivals(plan, lane) for lane in range(plan.lanes)] if plan.lanes > 1 else [anywhere]
        plan.rivals = [*bound, anywhere]
        for lane in range(plan.lanes):
            self._by_lane[lane] += dict.fromkeys((bound[lane], anywhere))

    def remove(self, plan: PlanState) -> None:
        """It is released: none of its combined blocks can run."""
        for lane in self._by_lane:
            lane[:] = [rivals for rivals in lane if rivals not in plan.rivals]

    def admit(self, combined: CombinedState) -> None:
        """It can run, or what it would run changed: work out its rank. A superseded plan goes first."""
        plan = combined.plan
        oldest = combined.oldest()
        rivals = combined.rivals
        if rivals is None:
            rivals = plan.rivals[combined.lane]
            rivals.enter(combined)
            if plan.step_choice is _WEIGHTED and combined.passes < self._passes:
                combined.passes = self._passes  # an idle combined block does not save up its share
        if plan.step_choice is _RATIO:
            ratio = (combined.moves & combined.ready).bit_count() / combined.size
            rank = plan.precedence, -ratio, oldest.id, combined.index, combined
        elif plan.step_choice is _WEIGHTED:
            rank = plan.precedence, combined.passes, oldest.id, combined.index, combined
        else:
            rank = plan.precedence, combined.last_choice, 0, combined.index, combined
        rivals.push(combined, rank)
        deadline_s = oldest.deadline_s
        if deadline_s != _NEVER or combined.late_s != _NEVER:
            self._set_late(combined, (oldest.ready_s + deadline_s) * 0.5)

    def _set_late(self, combined: CombinedState, late_s: float) -> None:
        """From `late_s` on its oldest instance is past half its time; infinity for never."""
        combined.late_s = late_s
        if combined.overdue_seq:
            return
        self._urgent.pop(combined, None)
        if late_s != _NEVER:
            self._timed[combined] = None
            self._late_s = min(self._late_s, late_s)
        else:
            self._timed.pop(combined, None)

    def dismiss(self, combined: CombinedState) -> None:
        """It can no longer run: what it was passed over for is gone."""
        rivals = combined.rivals
        if rivals is None:
            return
        rivals.leave(combined)
        if combined.overdue_seq or combined.late_s != _NEVER:
            combined.overdue_seq = 0
            combined.late_s = _NEVER
            self._urgent.pop(combined, None)
            self._timed.pop(combined, None)

    def unbind(self, combined: CombinedState) -> None:
        """Nothing of it is in flight any more: it could run in any lane."""
        before, after = combined.rivals, combined.plan.rivals[NO_LANE]
        if before is None or before is after:
            return
        skips, rank = combined.skips, combined.rank
        assert rank is not None
        before.leave(combined)
        after.enter(combined, skips)
        after.push(combined, (*rank,))

    def choose(self, lane: int, load: int, now: float) -> CombinedState | None:
        """Take out the next combined block for a lane with `load` steps in flight; counts it as chosen.

        It has to be admitted again, or dismissed, before the next choice.
        """
        if now >= self._late_s:
            self._find_late(now)
        standing = self._by_lane[lane]
        chosen = self._most_urgent(lane, load) if self._urgent else None
        if chosen is None:
            best: Rank | None = None
            for rivals in standing:
                if rivals.run_ahead > load:
                    rank = rivals.first()
                    if rank is not None and (best is None or rank < best):
                        best = rank
            if best is None:
                return None
            chosen = best[4]
        choices = self._choices = self._choices + 1
        self._take(chosen, choices)
        for rivals in standing:
            if rivals.run_ahead > load:
                overdue = rivals.take_turn()
                if overdue is not None:
                    for combined in overdue:
                        combined.overdue_seq = choices
                        self._timed.pop(combined, None)
                        self._urgent[combined] = None
        return chosen

    def _find_late(self, now: float) -> None:
        late = [combined for combined in self._timed if combined.late_s <= now]
        for combined in late:
            del self._timed[combined]
            self._urgent[combined] = None
        self._late_s = min((combined.late_s for combined in self._timed), default=_NEVER)

    def _most_urgent(self, lane: int, load: int) -> CombinedState | None:
        """The most urgent one that can run in the lane."""
        fits = []
        for combined in self._urgent:
            rivals = combined.rivals
            assert rivals is not None
            own = rivals.lane
            if (own == lane or own == NO_LANE) and rivals.run_ahead > load and rivals.lanes > lane:
                fits.append(combined)
        if len(fits) < 2:
            return fits[0] if fits else None
        return min(fits, key=_urgency)

    def _take(self, chosen: CombinedState, choice: int) -> None:
        skips = chosen.skips
        if skips:
            chosen.total_skips += skips
            if skips > chosen.most_skips:
                chosen.most_skips = skips
        self.dismiss(chosen)
        chosen.last_choice = choice
        self._passes = chosen.passes
        chosen.passes += chosen.stride


def _urgency(combined: CombinedState) -> tuple[float, ...]:
    rank = combined.rank
    assert rank is not None
    return (combined.overdue_seq or _NEVER, -combined.skips, *rank[:4])

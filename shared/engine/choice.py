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
_ABSENT = object()
_RATIO, _WEIGHTED = StepChoice.RATIO, StepChoice.WEIGHTED
_SLACK = 64  # ranks that no longer hold which a heap may keep beyond the valid ones before it is swept

Rank: TypeAlias = tuple[float, float, int, int, CombinedState]
"""Smallest first. No two combined blocks of a plan agree in the fourth, nor two plans in the first."""


class Rivals:
    """The combined blocks of one plan that could run in the same lanes: in any, or in the one they are in.

    A choice in such a lane takes one of them or passes over all of them, so that one count of turns says how
    often each was passed over.
    """

    __slots__ = ("heap", "lane", "lanes", "line", "max_skips", "run_ahead", "sweep_at", "turns")

    def __init__(self, plan: PlanState, lane: int) -> None:
        self.lane = lane
        self.lanes = plan.lanes
        self.run_ahead = plan.run_ahead
        self.max_skips = plan.max_skips
        self.turns = 0  # choices in which they took part
        self.line: dict[CombinedState, None] = {}  # those that are not overdue, by the turn when they will be
        self.heap: list[Rank] = []  # a rank that is not its combined block's own any more is void
        self.sweep_at = _SLACK

    def first(self) -> Rank | None:
        """The best rank."""
        heap = self.heap
        while heap:
            rank = heap[0]
            if rank[4].rank is rank:
                return rank
            heappop(heap)
        return None

    def push(self, rank: Rank) -> None:
        """One of them has this rank from now on."""
        rank[4].rank = rank
        heap = self.heap
        heappush(heap, rank)
        if len(heap) > self.sweep_at:
            heap[:] = [one for one in heap if one[4].rank is one]
            heapify(heap)
            self.sweep_at = 2 * len(heap) + _SLACK

    def take_turn(self) -> list[CombinedState] | None:
        """All of them were passed over; who is overdue now."""
        turns = self.turns = self.turns + 1
        line, found = self.line, None
        for combined in line:
            if turns - combined.since_turn < self.max_skips:
                break
            if found is None:
                found = []
            found.append(combined)
        if found is not None:
            for combined in found:
                del line[combined]
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
        oldest = (combined.size == 1 and combined.slots[0].instance) or combined.oldest()
        rivals = combined.rivals
        if rivals is None:
            rivals = combined.rivals = plan.rivals[combined.lane]
            combined.since_turn = rivals.turns
            rivals.line[combined] = None
            if plan.step_choice is _WEIGHTED and combined.passes < self._passes:
                combined.passes = self._passes  # an idle combined block does not save up its share
        if plan.step_choice is _RATIO:
            ratio = 1.0 if combined.size == 1 else combined.input_ratio
            rivals.push((plan.precedence, -ratio, oldest.id, combined.index, combined))
        elif plan.step_choice is _WEIGHTED:
            rivals.push((plan.precedence, combined.passes, oldest.id, combined.index, combined))
        else:
            rivals.push((plan.precedence, combined.last_choice, 0, combined.index, combined))
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
        if rivals is not None:
            rivals.line.pop(combined, None)
            combined.rivals = combined.rank = None
            if combined.overdue_seq or combined.late_s != _NEVER:
                combined.overdue_seq = 0
                combined.late_s = _NEVER
                self._urgent.pop(combined, None)
                self._timed.pop(combined, None)

    @staticmethod
    def unbind(combined: CombinedState) -> None:
        """Nothing of it is in flight any more: it could run in any lane."""
        before, after, rank = combined.rivals, combined.plan.rivals[NO_LANE], combined.rank
        if before is None or rank is None or before is after:
            return
        combined.since_turn = after.turns - combined.skips
        combined.rivals = after
        if before.line.pop(combined, _ABSENT) is None:
            after.line[combined] = None
            after.line = dict.fromkeys(sorted(after.line, key=attrgetter("since_turn")))
        after.push((*rank,))

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
        own = chosen.rivals
        assert own is not None
        skips = own.turns - chosen.since_turn
        if skips:
            chosen.total_skips += skips
            if skips > chosen.most_skips:
                chosen.most_skips = skips
        self.dismiss(chosen)
        chosen.last_choice = choices
        self._passes = chosen.passes
        chosen.passes += chosen.stride
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
            stands = rivals.lane
            if (stands == lane or stands == NO_LANE) and rivals.run_ahead > load and rivals.lanes > lane:
                fits.append(combined)
        if len(fits) < 2:
            return fits[0] if fits else None
        return min(fits, key=_urgency)


def _urgency(combined: CombinedState) -> tuple[float, ...]:
    rank = combined.rank
    assert rank is not None
    return (combined.overdue_seq or _NEVER, -combined.skips, *rank[:4])

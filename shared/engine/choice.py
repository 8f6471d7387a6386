"""Which combined block runs next in a lane.

Only those compete that could begin there (`CombinedState.place`): in an idle lane, those that nothing in
flight holds up; in a busy one, those that come after a step in flight in that very lane. A plan of one lane
knows no such difference.

Overdue ones come first. Those passed over `max_skips` times go in the order in which they reached that bound:
in one lane that is "most passed over first", and with several lanes it keeps the guarantee, since an overdue
block can then be overtaken only by blocks that were overdue before it, each once. So none is passed over more
than max_skips + C - 1 times, C being the number of combined blocks. Then come those whose oldest instance is
past half the time it had left when it became ready there, most passed over first; under `deadline` the rank
itself says what is urgent. The rest follow `rank`.

Nothing here looks at every candidate in every choice: who stands in line with whom is kept (`Rivals`), with a
heap of ranks and one count of turns for all of them.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TypeAlias

from stageloom.shared.bitmask import bits
from stageloom.shared.engine.slots import NO_LANE, CombinedState, PlanState
from stageloom.shared.plan import StepChoice

_NEVER = float("inf")
_ABSENT = object()
_RATIO, _WEIGHTED, _DEADLINE = StepChoice.RATIO, StepChoice.WEIGHTED, StepChoice.DEADLINE
_SLACK = 64  # ranks that no longer hold which a heap may keep beyond the valid ones before it is swept

Rank: TypeAlias = tuple[float, float, int, int, CombinedState]
"""Smallest first. No two combined blocks of a plan agree in the fourth, nor two plans in the first."""


class Rivals:
    """The combined blocks of one plan that could begin in any idle lane, or behind the steps of a busy one.

    Those that may run in the same lanes are rivals; a plan whose blocks are bound to resources has several
    such lines for a lane.

    A choice in such a lane takes one of them or passes over all of them, so that one count of turns says how
    often each was passed over.
    """

    __slots__ = ("heap", "line", "max_skips", "run_ahead", "sweep_at", "turns")

    def __init__(self, plan: PlanState) -> None:
        self.run_ahead = plan.run_ahead
        self.max_skips = plan.max_skips
        self.turns = 0  # choices in which they took part
        self.line: dict[CombinedState, None] = {}  # those that are not overdue, by the turn when they will be
        self.heap: list[Rank] = []  # a rank that is not its combined block's own any more is void
        self.sweep_at = _SLACK

    def first(self) -> Rank | None:
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

    __slots__ = ("_busy", "_choices", "_idle", "_late_s", "_passes", "_timed", "_urgent", "candidates")

    def __init__(self) -> None:
        self._idle: list[list[Rivals]] = [[]]  # those that a lane may take from while nothing is in it,
        self._busy: list[list[Rivals]] = [[]]  # and those while something is
        self.candidates = 0  # admitted and not dismissed
        self._choices = 0
        self._passes = 0.0  # of the last one chosen under WEIGHTED
        self._urgent: dict[CombinedState, None] = {}  # overdue, or late
        self._timed: dict[CombinedState, None] = {}  # those that will be late at some time
        self._late_s = _NEVER  # none of them is late before that

    def add(self, plan: PlanState) -> None:
        while len(self._idle) < plan.lanes:
            self._idle.append([])
            self._busy.append([])
        for lanes in dict.fromkeys(plan.lines()):
            anywhere = Rivals(plan)
            # With one lane only it makes no difference what is in it.
            behind = [Rivals(plan) for _ in range(plan.lanes)] if plan.lanes > 1 else [anywhere]
            plan.rivals[lanes] = [*behind, anywhere]
            for lane in bits(lanes):
                self._idle[lane].append(anywhere)
                self._busy[lane].append(behind[lane])
        if not plan.bound.plan.places:
            for combined in plan.combined:
                combined.stands = plan.rivals[combined.lanes]

    def remove(self, plan: PlanState) -> None:
        """It is released: none of its combined blocks can run."""
        gone = [rivals for stands in plan.rivals.values() for rivals in stands]
        for lane in (*self._idle, *self._busy):
            lane[:] = [rivals for rivals in lane if rivals not in gone]

    def admit(self, combined: CombinedState, stand: int) -> None:
        """It can run in lane `stand`, behind what is in flight there, or in any idle lane (`NO_LANE`).

        Works out its rank; what it would run may have changed. A superseded plan goes first.
        """
        plan = combined.plan
        oldest = (combined.size == 1 and combined.slots[0].instance) or combined.oldest()
        rivals, before = combined.stands[stand], combined.rivals
        if before is not rivals:
            if before is not None:
                self._change(combined, before, rivals)
            else:
                self.candidates += 1
                combined.since_turn = rivals.turns
                rivals.line[combined] = None
                if plan.step_choice is _WEIGHTED and combined.passes < self._passes:
                    combined.passes = self._passes  # an idle combined block does not save up its share
            combined.rivals = rivals
        if plan.step_choice is _RATIO:
            ratio = 1.0 if combined.size == 1 else combined.input_ratio
            rivals.push((plan.precedence, -ratio, oldest.id, combined.index, combined))
        elif plan.step_choice is _DEADLINE:
            rivals.push((plan.precedence, combined.earliest_wanted_s(), oldest.id, combined.index, combined))
            return
        elif plan.step_choice is _WEIGHTED:
            rivals.push((plan.precedence, combined.passes, oldest.id, combined.index, combined))
        else:
            rivals.push((plan.precedence, combined.last_choice, 0, combined.index, combined))
        deadline_s = oldest.deadline_s
        if deadline_s != _NEVER or combined.late_s != _NEVER:
            self._set_late(combined, (oldest.ready_s + deadline_s) * 0.5)

    @staticmethod
    def _change(combined: CombinedState, before: Rivals, rivals: Rivals) -> None:
        """It could begin elsewhere than before: how often it was passed over goes with it."""
        combined.since_turn = rivals.turns - (before.turns - combined.since_turn)
        if before.line.pop(combined, _ABSENT) is None:
            rivals.line[combined] = None
            rivals.line = dict.fromkeys(sorted(rivals.line, key=attrgetter("since_turn")))

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
            self.candidates -= 1
            rivals.line.pop(combined, None)
            combined.rivals = combined.rank = None
            if combined.overdue_seq or combined.late_s != _NEVER:
                combined.overdue_seq = 0
                combined.late_s = _NEVER
                self._urgent.pop(combined, None)
                self._timed.pop(combined, None)

    def choose(self, lane: int, load: int, now: float) -> CombinedState | None:
        """Take out the next combined block for a lane with `load` steps in flight; counts it as chosen.

        It has to be admitted again, or dismissed, before the next choice.
        """
        if now >= self._late_s:
            self._find_late(now)
        standing = (self._busy if load else self._idle)[lane]
        chosen = self._most_urgent(standing, load) if self._urgent else None
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

    def _most_urgent(self, standing: list[Rivals], load: int) -> CombinedState | None:
        """The most urgent one of those that a lane may take."""
        fits = [c for c in self._urgent if c.rivals in standing and c.rivals.run_ahead > load]
        if len(fits) < 2:
            return fits[0] if fits else None
        return min(fits, key=_urgency)

    @staticmethod
    def first(plan: PlanState, idle: int) -> Rank | None:
        """The first rank of what could begin in one of these idle lanes, None without such."""
        found: Rank | None = None
        for lanes, stands in plan.rivals.items():
            if lanes & idle:
                rank = stands[NO_LANE].first()
                if rank is not None and (found is None or rank < found):
                    found = rank
        return found

    @staticmethod
    def runnable(plan: PlanState, idle: int) -> Iterator[CombinedState]:
        """What could begin in one of these idle lanes, in no order."""
        for lanes, stands in plan.rivals.items():
            if lanes & idle:
                yield from (rank[4] for rank in stands[NO_LANE].heap if rank[4].rank is rank)


def _urgency(combined: CombinedState) -> tuple[float, ...]:
    rank = combined.rank
    assert rank is not None
    return (combined.overdue_seq or _NEVER, -combined.skips, *rank[:4])

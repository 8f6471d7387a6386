"""Which combined block runs next in a lane.

Overdue ones come first. Those passed over `max_skips` times go in the order in which they reached that bound:
in one lane that is "most passed over first", and with several lanes it keeps the guarantee, since an overdue
block can then be overtaken only by blocks that were overdue before it, each once. So none is passed over more
than max_skips + C - 1 times, C being the number of combined blocks. Then come those whose oldest instance is
past half the time it had left when it became ready there, most passed over first. The rest follow `rank`.
"""

from operator import attrgetter

from shared.engine.slots import NO_LANE, CombinedState
from shared.plan import StepChoice

_NEVER = float("inf")
_rank = attrgetter("rank")


class Chooser:
    """Step choice and its counts, over the combined blocks of all loaded plans."""

    __slots__ = ("_choices", "_passes", "runnable")

    def __init__(self) -> None:
        self.runnable: dict[CombinedState, None] = {}  # those that could run if a lane took them
        self._choices = 0
        self._passes = 0.0  # of the last one chosen under WEIGHTED

    def admit(self, combined: CombinedState) -> None:
        """It can run, or what it would run changed: work out its rank. A superseded plan goes first."""
        oldest = combined.oldest()
        deadline_s = oldest.deadline_s
        if not combined.overdue_seq:
            combined.urgent_s = (oldest.ready_s + deadline_s) * 0.5 if deadline_s != _NEVER else _NEVER
        plan = combined.plan
        choice, first = plan.step_choice, plan.precedence
        if choice is StepChoice.RATIO:
            active = (combined.moves & combined.ready).bit_count()
            combined.rank = (first, -active / combined.size, oldest.id)
        elif choice is StepChoice.ROUND_ROBIN:
            combined.rank = (first, combined.last_choice, combined.index)
        else:
            if combined not in self.runnable:
                # An idle combined block does not save up its share.
                combined.passes = max(combined.passes, self._passes)
            combined.rank = (first, combined.passes, oldest.id)
        self.runnable[combined] = None

    def dismiss(self, combined: CombinedState) -> None:
        """It can no longer run: what it was passed over for is gone."""
        if combined in self.runnable:
            del self.runnable[combined]
            combined.skips = 0
            combined.overdue_seq = 0

    def choose(self, lane: int, load: int, now: float) -> CombinedState | None:
        """The next combined block for a lane with `load` steps in flight; counts it as chosen."""
        homes = (lane, NO_LANE)
        candidates = [
            combined
            for combined in self.runnable
            if combined.lane in homes and combined.run_ahead > load and combined.lanes > lane
        ]
        if not candidates:
            return None
        self._choices += 1
        chosen = candidates[0]
        if len(candidates) > 1:
            urgent = [combined for combined in candidates if combined.urgent_s <= now]
            chosen = min(urgent, key=_urgency) if urgent else min(candidates, key=_rank)
            self._pass_over(candidates, chosen)
        self._count(chosen)
        return chosen

    def _pass_over(self, candidates: list[CombinedState], chosen: CombinedState) -> None:
        for combined in candidates:
            if combined is not chosen:
                combined.skips = skips = combined.skips + 1
                if skips == combined.max_skips:
                    combined.overdue_seq = self._choices
                    combined.urgent_s = -_NEVER

    def _count(self, chosen: CombinedState) -> None:
        if chosen.skips:
            chosen.total_skips += chosen.skips
            chosen.most_skips = max(chosen.most_skips, chosen.skips)
            chosen.skips = 0
            chosen.overdue_seq = 0
        chosen.last_choice = self._choices
        self._passes = chosen.passes
        chosen.passes += chosen.stride


def _urgency(combined: CombinedState) -> tuple[float, ...]:
    return (combined.overdue_seq or _NEVER, -combined.skips, *combined.rank)

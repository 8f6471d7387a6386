"""Which combined block runs next in a lane.

Overdue ones come first. Those passed over `max_skips` times go in the order in which they reached that bound:
in one lane that is "most passed over first", and with several lanes it keeps the guarantee, since an overdue
block can then be overtaken only by blocks that were overdue before it, each once. So none is passed over more
than max_skips + C - 1 times, C being the number of combined blocks. Then come those whose oldest instance is
past half the time it had left when it became ready there, most passed over first. The rest follow `rank`.
"""

from shared.engine.slots import CombinedState
from shared.plan import StepChoice

_NEVER = float("inf")


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
        combined.late_s = (
            (oldest.ready_s + oldest.deadline_s) * 0.5 if oldest.deadline_s != _NEVER else _NEVER
        )
        choice = combined.plan.bound.plan.step_choice
        key = float(combined.plan.key)
        if choice is StepChoice.RATIO:
            active = (combined.moves & combined.ready).bit_count()
            combined.rank = (key, -active / combined.size, oldest.id)
        elif choice is StepChoice.ROUND_ROBIN:
            combined.rank = (key, combined.last_choice, combined.index)
        else:
            if combined not in self.runnable:
                # An idle combined block does not save up its share.
                combined.passes = max(combined.passes, self._passes)
            combined.rank = (key, combined.passes, oldest.id)
        self.runnable[combined] = None

    def dismiss(self, combined: CombinedState) -> None:
        """It can no longer run: what it was passed over for is gone."""
        if combined in self.runnable:
            del self.runnable[combined]
            combined.skips = 0
            combined.overdue_seq = 0

    def choose(self, lane: int, load: int, now: float) -> CombinedState | None:
        """The next combined block for a lane with `load` steps in flight; counts it as chosen."""
        candidates = [
            combined
            for combined in self.runnable
            if (not combined.in_flight or combined.lane == lane)
            and load < combined.plan.run_ahead
            and lane < combined.plan.lanes
        ]
        if not candidates:
            return None
        self._choices += 1
        chosen = candidates[0]
        if len(candidates) > 1:
            urgent = [c for c in candidates if c.overdue_seq or now >= c.late_s]
            chosen = min(urgent, key=_urgency) if urgent else min(candidates, key=_rank)
            self._pass_over(candidates, chosen)
        self._count(chosen)
        return chosen

    def _pass_over(self, candidates: list[CombinedState], chosen: CombinedState) -> None:
        for combined in candidates:
            if combined is not chosen:
                combined.skips += 1
                if combined.skips == combined.plan.max_skips:
                    combined.overdue_seq = self._choices

    def _count(self, chosen: CombinedState) -> None:
        chosen.total_skips += chosen.skips
        chosen.most_skips = max(chosen.most_skips, chosen.skips)
        chosen.skips = 0
        chosen.overdue_seq = 0
        chosen.last_choice = self._choices
        self._passes = chosen.passes
        chosen.passes += chosen.stride


def _rank(combined: CombinedState) -> tuple[float, ...]:
    return combined.rank


def _urgency(combined: CombinedState) -> tuple[float, ...]:
    return (combined.overdue_seq or _NEVER, -combined.skips, *combined.rank)
